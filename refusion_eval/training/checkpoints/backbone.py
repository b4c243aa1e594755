"""The model that a training run starts from: checked without its weights, then loaded or initialised at random.

A backbone is a causal language model of transformers (Qwen3, Qwen2, Qwen2.5, Llama) with a mask token. Its embedding
has a row for every id of its tokenizer. The spare rows of Qwen's checkpoints stay: new tokens take them, and the sizes
of the matrices suit GPUs. The release of ReFusion has no spare rows; `convert` translates between the two layouts.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AddedToken, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from refusion_eval.config import check_keys
from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.models import checkpoint
from refusion_eval.models.checkpoint import ModelConfig, parse_model_config, read_json
from refusion_eval.models.location import fetch_weights, locate
from refusion_eval.models.stock import check_loaded
from refusion_eval.models.tokenizer import Tokenizer
from refusion_eval.models.weights import CheckpointFiles
from refusion_eval.training.config import BackboneConfig, LoraSettings

# The names in Qwen3 and in the published checkpoint of ReFusion.
START, MASK = "<|beginoftext|>", "<|mask|>"
# Keys are values of model_type in config.json.
CLASSES: Mapping[str, type[PreTrainedModel]] = {
    "qwen3": transformers.Qwen3ForCausalLM,
    "qwen2": transformers.Qwen2ForCausalLM,
    "llama": transformers.LlamaForCausalLM,
}
# Entries of `BackboneConfig.shape`, named as in config.json; the derived ones follow from others.
_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
_DERIVED = ("vocab_size", "num_key_value_heads", "head_dim")


def load_tokenizer(config: BackboneConfig) -> PreTrainedTokenizerFast:
    """Loads the tokenizer and adds a mask token and a beginning token if it has none."""
    tokenizer = _original_tokenizer(config)
    for name in ("eos_token", "chat_template"):
        if not getattr(tokenizer, name):
            raise ConfigError(f"{tokenizer.name_or_path or 'the tokenizer'} has no {name}; use that of a chat model")
    mask_id = None
    if config.model is not None:
        mask_id = read_json(locate(config.model, config.revision).directory / "config.json").get("mask_token_id")
    if config.mask_token is not None:
        _check_mask_token(tokenizer, config.mask_token, mask_id)
        mask_id = tokenizer.get_vocab()[config.mask_token]
    set_mask_token(tokenizer, mask_id)
    # New tokens take the first free ids, the beginning token before the mask: 151669 and 151670 for Qwen3 as in the
    # release of ReFusion, mask 151666 for Qwen2.5 as in Dream, mask 128256 for Llama 3.
    for name, token in (("bos_token", START), ("mask_token", MASK)):
        if getattr(tokenizer, name) is None:
            tokenizer.add_tokens([AddedToken(token, special=True, normalized=False)], special_tokens=True)
            setattr(tokenizer, name, token)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def _original_tokenizer(config: BackboneConfig) -> PreTrainedTokenizerFast:
    """The tokenizer of the files, without the tokens that `load_tokenizer` adds."""
    is_own = config.tokenizer is not None
    location = locate(str(config.tokenizer if is_own else config.model), None if is_own else config.revision)
    if not (location.directory / "tokenizer.json").is_file() and not (location.directory / "vocab.json").is_file():
        raise CheckpointError(
            f"{location.name} has no tokenizer (tokenizer.json, or vocab.json with merges.txt); name one"
        )
    tokenizer = Tokenizer(location.directory).inner
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise CheckpointError(f"{location.name}: {type(tokenizer).__name__} has no fast form; give a tokenizer.json")
    return tokenizer


def num_ids(tokenizer: PreTrainedTokenizerFast) -> int:
    return max(tokenizer.get_vocab().values()) + 1


def special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Entries of config.json about special tokens; as in the release there is one end token."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id")
    ids: dict[str, Any] = {name: getattr(tokenizer, name) for name in names}
    return {name: number for name, number in ids.items() if number is not None}


def set_mask_token(tokenizer: PreTrainedTokenizerFast, mask_id: int | None) -> None:
    """Makes the token that config.json names the mask token; None keeps the tokenizer's own, or takes "<|mask|>"."""
    if mask_id is not None:
        token = tokenizer.convert_ids_to_tokens(int(mask_id))
        if token is None:
            raise ConfigError(
                f"config.json has mask_token_id={mask_id}, for which {tokenizer.name_or_path or 'the tokenizer'} has "
                "no token; take both from the same checkpoint"
            )
        tokenizer.mask_token = token
    elif tokenizer.mask_token is None and MASK in tokenizer.get_vocab():
        tokenizer.mask_token = MASK


def _check_mask_token(tokenizer: PreTrainedTokenizerFast, token: str, mask_id: int | None) -> None:
    """Refuses a name that is no free special token, for a checkpoint whose config.json may have a mask already."""
    special = {entry.content: number for number, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    used = {str(name) for key, name in tokenizer.special_tokens_map.items() if key != "mask_token"}
    free = [name for name in special if name not in used and name not in str(tokenizer.chat_template)]
    if token not in special:
        problem = "is no special token of the tokenizer"
    elif token not in free:
        problem = "begins, ends or fills texts, or stands in the chat template"
    elif mask_id not in (None, special[token]):
        problem = f"is not the mask that the checkpoint was trained with (mask_token_id={mask_id})"
    else:
        return
    choice = f"choose a token that no text has: {', '.join(free)}" if free else "the tokenizer has no free one"
    raise ConfigError(f"backbone.mask_token={token} {problem}; {choice}")


def check_backbone(config: BackboneConfig, *, max_length: int) -> ModelConfig:
    """The shapes of a backbone, after a check of config.json, tokenizer files and headers of local weights."""
    if config.shape is not None:
        tokenizer = load_tokenizer(config)
        model = random_config(config.shape, num_ids(tokenizer), special_ids(tokenizer))
        shapes = parse_model_config(model.to_dict(), Path("shape"))
    else:
        location = locate(str(config.model), config.revision)
        _model_class(location.directory / "config.json")
        shapes = checkpoint.model_config(location.directory)
        if location.revision is None:  # weights of the hub are checked when they are downloaded
            CheckpointFiles(location.directory)
        load_tokenizer(config)
    if max_length > shapes.max_positions:
        sizes = f"samples of {max_length} tokens do not fit into the model's {shapes.max_positions} positions"
        raise ConfigError(f"{sizes}; lower the length")
    return shapes


def _model_class(path: Path) -> type[PreTrainedModel]:
    """The class of transformers that computes the model of a config.json, without code of the checkpoint."""
    raw = read_json(path)
    model_type = str(raw.get("model_type"))
    family = checkpoint.FAMILIES.get(model_type)
    if family is not None and family.router is not None:
        kind = f"{model_type} is a mixture of experts, which is not trained here"
        raise CheckpointError(f"{path}: {kind}: the auxiliary loss of its router is missing; take a dense checkpoint")
    if checkpoint.is_diffusion_gemma(raw):
        raise CheckpointError(f"{path}: {model_type} is not trained here: no objective here has its canvases")
    if model_type not in CLASSES:
        code = " and brings code of its own, which is never run" if "auto_map" in raw else ""
        raise CheckpointError(f"{path}: model_type is {model_type!r}{code}; supported are {', '.join(CLASSES)}")
    expected = CLASSES[model_type]
    architectures = raw.get("architectures") or [expected.__name__]
    if expected.__name__ not in architectures:
        raise CheckpointError(
            f"{path}: architectures is {architectures}, not {expected.__name__}; code that comes with a checkpoint is "
            "never run; if its tensors are those of a plain model, `refusion-eval convert` makes it one"
        )
    return expected


def random_config(shape: Mapping[str, Any], num_rows: int, ids: Mapping[str, int]) -> PretrainedConfig:
    """Config of a model with random weights; raises ConfigError if an entry is unknown, missing or impossible."""
    model_type = shape.get("model_type")
    if model_type not in CLASSES:
        raise ConfigError(f"shape: model_type is {model_type!r}; choose {', '.join(CLASSES)}")
    check_keys(shape, ("model_type", *_REQUIRED, *_DERIVED, *_DEFAULTS), "shape", what="entry")
    if missing := [key for key in _REQUIRED if key not in shape]:
        raise ConfigError(f"shape: {', '.join(missing)} not given; state {', '.join(_REQUIRED)}")
    entries = {**_DEFAULTS, **{key: value for key, value in shape.items() if key != "model_type"}}
    try:
        # This checks that sizes are positive before anything is divided by them.
        raw = {"model_type": model_type, "vocab_size": num_rows, **entries, "hidden_act": "silu"}
        sizes = parse_model_config(raw, Path("shape"))
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    if sizes.vocab_size < num_rows:
        raise ConfigError(f"shape: vocab_size is {sizes.vocab_size}, but the tokenizer has {num_rows} ids")
    entries |= {"vocab_size": sizes.vocab_size, "num_key_value_heads": sizes.num_kv_heads, "head_dim": sizes.head_dim}
    return CLASSES[str(model_type)].config_class(**entries, **ids)


def load_backbone(config: BackboneConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Loads the model on the CPU, in training mode; with adapters (a model of peft) if `config.lora` is set."""
    ids = special_ids(tokenizer)
    new_ids: list[int] = []
    if config.shape is not None:
        random = random_config(config.shape, num_ids(tokenizer), ids)
        # The weights depend on shape and seed alone; the global generator of torch does not advance.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = CLASSES[random.model_type]._from_config(random, attn_implementation="sdpa", dtype=torch.float32)
        model = model.to(getattr(torch, config.dtype))
    else:
        model = _load(config)
        new_ids = _new_ids(config, tokenizer)
        grow_vocabulary(model, num_ids(tokenizer), new_ids, keep_spare=config.new_rows == "spare")
    model.config.update(ids)
    if model.generation_config is not None:
        model.generation_config.update(**{name: number for name, number in ids.items() if name != "mask_token_id"})
    if config.lora is not None:
        model = _add_adapters(model, config.lora, new_ids, config.seed)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def without_weights(config: BackboneConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The model on the device "meta": shapes, and which weights are trained, without the adapters themselves."""
    if config.shape is not None:
        shapes = random_config(config.shape, num_ids(tokenizer), special_ids(tokenizer))
        model_class = CLASSES[shapes.model_type]
    else:
        directory = locate(str(config.model), config.revision).directory
        model_class = _model_class(directory / "config.json")
        shapes = model_class.config_class.from_pretrained(directory, local_files_only=True)
    with torch.device("meta"):
        model = model_class._from_config(shapes)
    return model.requires_grad_(config.lora is None)


@torch.no_grad()
def grow_vocabulary(model: PreTrainedModel, num_rows: int, new_ids: list[int], *, keep_spare: bool) -> None:
    """Grows embedding and output layer to `num_rows` rows or more; new rows are the mean of the trained rows."""
    # The model was not trained with `new_ids`, but with every other id below `num_rows`. Rows from there on are spare.
    embedding = model.get_input_embeddings()
    filled_ids = [number for number in new_ids if number >= embedding.num_embeddings] if keep_spare else new_ids
    if num_rows > embedding.num_embeddings:
        model.resize_token_embeddings(num_rows, mean_resizing=False)
    if not filled_ids:
        return
    was_trained = torch.ones(num_rows, dtype=torch.bool)
    was_trained[new_ids] = False
    # A tied output layer is the same parameter.
    layers: tuple[Any, Any] = model.get_input_embeddings(), model.get_output_embeddings()
    for weight in {id(layer.weight): layer.weight for layer in layers}.values():
        weight[filled_ids] = weight[:num_rows][was_trained].float().mean(dim=0).to(weight.dtype)


def _new_ids(config: BackboneConfig, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids of `tokenizer` whose rows are not trained: those unknown to the checkpoint's, and a named mask token."""
    directory = locate(str(config.model), config.revision).directory
    is_trained = config.mask_token is None or "mask_token_id" in read_json(directory / "config.json")
    named = [] if is_trained else [tokenizer.mask_token_id]
    if (directory / "tokenizer.json").is_file() or (directory / "vocab.json").is_file():
        config = BackboneConfig(model=config.model, revision=config.revision)
    known = set(_original_tokenizer(config).get_vocab().values()).difference(named)
    return sorted(set(tokenizer.get_vocab().values()) - known)


def _load(config: BackboneConfig) -> PreTrainedModel:
    location = locate(str(config.model), config.revision)
    model_class = _model_class(location.directory / "config.json")
    fetch_weights(location)
    CheckpointFiles(location.directory)
    model, report = model_class.from_pretrained(
        location.directory,
        dtype=getattr(torch, config.dtype),
        use_safetensors=True,
        local_files_only=True,
        attn_implementation="sdpa",
        output_loading_info=True,
    )
    check_loaded(location.directory, report, refuses_others=True)
    return model


class _TiedHead(torch.nn.Linear):
    """Output layer of a tied model, whose matrix is the embedding with its trained rows."""

    # peft has a wrapper for this purpose, but the loss needs a plain linear layer.

    def __init__(self, embedding: torch.nn.Module) -> None:
        torch.nn.Module.__init__(self)
        self.register_parameter("bias", None)
        self._embedding: tuple[Any] = (embedding,)  # in a tuple, so that its parameters are not counted here too
        self.out_features, self.in_features = self.weight.shape

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # [out, in], computed at each access
        weight: Tensor = self._embedding[0].weight
        return weight


def _add_adapters(model: PreTrainedModel, lora: LoraSettings, new_ids: Sequence[int], seed: int) -> PreTrainedModel:
    """Freezes a model and adds adapters, which change nothing yet; the embeddings of `new_ids` are trained too."""
    # The output layer is not trained, as no label is a new token. A tied one has the trained rows of the embedding.
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
        bias="none",
        task_type="CAUSAL_LM",
        trainable_token_indices={"embed_tokens": list(new_ids)} if new_ids else None,
    )
    tied = model.config.tie_word_embeddings
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, settings)
    if tied and new_ids:
        model.set_output_embeddings(_TiedHead(model.get_input_embeddings()))
    return adapted
