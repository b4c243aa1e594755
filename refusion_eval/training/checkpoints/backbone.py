"""The model that a training starts from: checked without its weights, then loaded, or made at random.

A backbone is a causal language model of transformers (Qwen3, Qwen2 or 2.5, Llama) with a mask token. It has a row of
embeddings for every id of its tokenizer. Spare rows, which Qwen's checkpoints have, stay: new tokens take them, and
the matrices keep a size that devices like. ReFusion's release cuts them off; `convert` goes from one to the other.
"""

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from refusion_eval.errors import CheckpointError
from refusion_eval.models.checkpoint import fetch_weights, locate
from refusion_eval.models.config import read_json
from refusion_eval.models.files import CheckpointFiles
from refusion_eval.training.checkpoints.backbone_check import CLASSES, check_backbone, check_class, random_config
from refusion_eval.training.checkpoints.lora import add_adapters
from refusion_eval.training.checkpoints.save import save_backbone
from refusion_eval.training.checkpoints.special_tokens import load_tokenizer, num_ids, own_tokenizer, special_ids
from refusion_eval.training.config import BackboneConfig, LoraSettings

__all__ = ["BackboneConfig", "LoraSettings", "check_backbone", "load_backbone", "load_tokenizer", "save_backbone"]


def load_backbone(config: BackboneConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The model on the CPU, in training mode; with adapters (a model of peft) if `config.lora` is set.

    Tokens that the model does not know yet get the mean of the rows of all that it knows, computed in float32, in the
    embedding and, where it is another matrix, in the output layer. Rows beyond the tokenizer's ids stay as they are.
    Weights made at random are random for every token.

    Args:
        config: what is asked for; see `check_backbone` for what can be.
        tokenizer: as `load_tokenizer` makes it.

    Raises:
        ConfigError: settings that cannot be met.
        CheckpointError: weights that are missing, pickled, or do not fit config.json.
    """
    if config.shape is not None:
        model, new_ids = _random(config, tokenizer), []
    else:
        model = _load(config)
        new_ids = _new_ids(config, tokenizer)
        grow_vocabulary(model, num_ids(tokenizer), new_ids)
    ids = special_ids(tokenizer)
    model.config.update(ids)
    if model.generation_config is not None:
        model.generation_config.update(**{name: number for name, number in ids.items() if name != "mask_token_id"})
    if config.lora is not None:
        model = add_adapters(model, config.lora, new_ids, config.seed)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


@torch.no_grad()
def grow_vocabulary(model: PreTrainedModel, num_rows: int, new_ids: list[int]) -> None:
    """Makes room for `num_rows` ids, never less than there is, and gives new ones the mean of the known rows.

    Args:
        model: its embedding and output layer change.
        num_rows: rows that are needed.
        new_ids: ids that the model was not trained with; every other id below `num_rows` is known, so that spare rows
            do not count.
    """
    embedding = model.get_input_embeddings()
    if num_rows > embedding.num_embeddings:
        model.resize_token_embeddings(num_rows, mean_resizing=False)
    if not new_ids:
        return
    known = torch.ones(num_rows, dtype=torch.bool)
    known[new_ids] = False
    # A tied output layer is the same parameter.
    layers: tuple[Any, Any] = model.get_input_embeddings(), model.get_output_embeddings()
    for weight in {id(layer.weight): layer.weight for layer in layers}.values():
        weight[new_ids] = weight[:num_rows][known].float().mean(dim=0).to(weight.dtype)


def _new_ids(config: BackboneConfig, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids of the tokenizer for which the checkpoint's own has no token."""
    directory = locate(str(config.model), config.revision).directory
    has_own = (directory / "tokenizer.json").is_file() or (directory / "vocab.json").is_file()
    own = own_tokenizer(BackboneConfig(model=config.model, revision=config.revision) if has_own else config)
    return sorted(set(tokenizer.get_vocab().values()) - set(own.get_vocab().values()))


def _load(config: BackboneConfig) -> PreTrainedModel:
    location = locate(str(config.model), config.revision)
    path = location.directory / "config.json"
    raw = read_json(path)
    check_class(raw, path)
    fetch_weights(location)
    CheckpointFiles(location.directory)
    model, report = CLASSES[raw["model_type"]].from_pretrained(
        location.directory,
        dtype=getattr(torch, config.dtype),
        use_safetensors=True,
        local_files_only=True,
        attn_implementation="sdpa",
        output_loading_info=True,
    )
    wrong = {kind: sorted(map(str, report[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    wrong["unexpected_keys"] = [name for name in wrong["unexpected_keys"] if not name.endswith("rotary_emb.inv_freq")]
    for kind, names in wrong.items():
        if names:
            raise CheckpointError(
                f"{location.directory} has {len(names)} {kind.replace('_', ' ')} ({', '.join(names[:3])}); the weights "
                "do not fit config.json, so take both from the same checkpoint"
            )
    return model


def _random(config: BackboneConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Random weights that depend on shape and seed alone; torch's own generator stays where it was."""
    assert config.shape is not None
    made = random_config(config.shape, num_ids(tokenizer), special_ids(tokenizer))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = CLASSES[made.model_type]._from_config(made, attn_implementation="sdpa", dtype=torch.float32)
    return model.to(getattr(torch, config.dtype))
