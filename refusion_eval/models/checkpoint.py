"""A checkpoint: its shapes and its family, and what it was trained for."""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from refusion_eval.errors import CheckpointError
from refusion_eval.types import CheckpointKind
from refusion_eval.untrusted import names_code, parse_json, read_plain

# The dtype that the training precision stands for in a config.json without a dtype.
DTYPE_OF_PRECISION = {"amp_bf16": "bfloat16", "amp_fp16": "float16"}


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """Names of the modules in a checkpoint; a tensor's name is that of its module and ".weight" or ".bias"."""

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}."
    input_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    out: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"


@dataclass(frozen=True, kw_only=True)
class ConfigKeys:
    """Names of the sizes in config.json; the attributes are those of `ModelConfig`."""

    vocab_size: str = "vocab_size"
    hidden_size: str = "hidden_size"
    intermediate_size: str = "intermediate_size"
    num_layers: str = "num_hidden_layers"
    num_heads: str = "num_attention_heads"
    num_kv_heads: str = "num_key_value_heads"
    max_positions: str = "max_position_embeddings"
    tied_head: str = "tie_word_embeddings"


@dataclass(frozen=True, kw_only=True)
class Family:
    qkv_bias: bool = False
    qk_norm: bool = False
    tensors: TensorNames = TensorNames()
    keys: ConfigKeys = ConfigKeys()
    must_be: Mapping[str, object] = field(default_factory=dict)  # must be present, because the default is another value
    may_be: Mapping[str, tuple[object, ...]]  # the first value is the default
    # Attributes of this class that config.json states, and their names there; the value here is the default.
    stated: Mapping[str, str] = field(default_factory=dict)
    kind: CheckpointKind | None = None
    decoders: tuple[str, ...] = ()  # for which checkpoints of this architecture were trained; the main one first


_OFF = (False, None)
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_SILU: dict[str, tuple[object, ...]] = {"hidden_act": ("silu",)}
_QWEN2 = Family(qkv_bias=True, may_be=_SILU | {"use_sliding_window": _OFF, "use_mrope": _OFF})
_QWEN3 = Family(qk_norm=True, may_be=_SILU | {"attention_bias": _OFF, "use_sliding_window": _OFF})
_LLAMA = Family(may_be=_SILU | {"attention_bias": _OFF, "mlp_bias": _OFF})

# By model_type of config.json.
FAMILIES: Mapping[str, Family] = {
    "qwen3": _QWEN3,
    "qwen2": _QWEN2,
    "llama": _LLAMA,
    # iLLaDA, which was trained as LLaDA. With `layer_norm_eps` its code computes another norm.
    "illada": replace(_LLAMA, kind="llada", may_be={**_LLAMA.may_be, "layer_norm_eps": (None,)}),
    # Qwen2.5 or Qwen3, as its config.json says.
    "wedlm": Family(
        qkv_bias=True,
        may_be=_SILU | {"use_sliding_window": _OFF},
        stated={"qkv_bias": "attention_bias", "qk_norm": "qk_norm"},
        decoders=("wedlm",),
    ),
    # Qwen2, but trained for bidirectional attention with logits one position ahead.
    "Dream": replace(_QWEN2, kind="dream"),
    # The checkpoints of SDAR and of I-DLM say the same of themselves.
    "sdar": replace(_QWEN3, decoders=("sdar", "idlm", "autoregressive")),
    "Fast_dLLM_Qwen": replace(_QWEN2, decoders=("fast_dllm_v2",)),
    "llada2": replace(_QWEN3, decoders=("llada2",)),  # the public ones have layers of experts and another model_type
    # Conversions by dllm, trained as LLaDA (MDLM) or as BD3-LM, which config.json does not tell.
    "a2d-qwen2": replace(_QWEN2, decoders=("llada", "bd3lm")),
    "a2d-qwen3": replace(_QWEN3, decoders=("llada", "bd3lm")),
    "llada": Family(
        tensors=TensorNames(
            embedding="model.transformer.wte",
            final_norm="model.transformer.ln_f",
            head="model.transformer.ff_out",
            layer="model.transformer.blocks.{}.",
            input_norm="attn_norm",
            q="q_proj",
            k="k_proj",
            v="v_proj",
            out="attn_out",
            mlp_norm="ff_norm",
            gate="ff_proj",
            up="up_proj",
            down="ff_out",
        ),
        keys=ConfigKeys(
            vocab_size="embedding_size",
            hidden_size="d_model",
            intermediate_size="mlp_hidden_size",
            num_layers="n_layers",
            num_heads="n_heads",
            num_kv_heads="n_kv_heads",
            max_positions="max_sequence_length",
            tied_head="weight_tying",
        ),
        # The config class serves several research models: its defaults are not those of LLaDA.
        must_be={
            "activation_type": "silu",
            "block_type": "llama",
            "layer_norm_type": "rms",
            "rope": True,
        },
        may_be={
            **dict.fromkeys(("alibi", "attention_layer_norm", "bias_for_layer_norm", "include_bias"), _OFF),
            **dict.fromkeys(("include_qkv_bias", "input_emb_norm", "multi_query_attention", "scale_logits"), _OFF),
            **dict.fromkeys(("layer_norm_with_affine", "rope_full_precision"), (True,)),
            "block_group_size": (1,),
            "clip_qkv": (None,),
        },
        kind="llada",
    ),
}


# A file beside config.json that says where another architecture differs from one of the families.
LAYOUT_FILE = "refusion_layout.json"


def read_family(directory: Path, model_type: str) -> Family | None:
    # The file names the family that the architecture is "like", and its own `qkv_bias`, `qk_norm`, `kind`, and entries
    # of `tensors` and `keys`.
    path = directory / LAYOUT_FILE
    if not path.is_file():
        return FAMILIES.get(model_type)
    given, kinds = read_json(path), get_args(CheckpointKind)
    like = given.pop("like", None)
    if like not in FAMILIES:
        raise CheckpointError(f"{path}: like is {like!r}; name one of {', '.join(FAMILIES)}")
    if given.get("kind") not in (None, *kinds):
        raise CheckpointError(f"{path}: kind is {given['kind']!r}; choose one of {', '.join(kinds)}")
    family = FAMILIES[like]
    try:
        for part in ("tensors", "keys"):
            given[part] = replace(getattr(family, part), **given.get(part, {}))
        return replace(family, **given)
    except TypeError as error:
        raise CheckpointError(
            f"{path} has an entry that is none of like, qkv_bias, qk_norm, kind, tensors and keys, or of their own "
            f"({error}); correct it"
        ) from error


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rotary scaling of Llama 3.1: low frequencies are divided, high frequencies kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float  # wavelengths below original_max_positions / high_freq_factor are kept
    original_max_positions: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    tied_head: bool
    dtype: str
    rope_scaling: RopeScaling | None = None
    layout: Family | None = None  # where the checkpoint says it itself; None for `FAMILIES[family]`

    @property
    def family_layout(self) -> Family:
        return self.layout or FAMILIES[self.family]


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_plain(path))
    except FileNotFoundError:
        advice = "give a directory in Hugging Face layout (config.json, *.safetensors, tokenizer files)"
        raise CheckpointError(f"{path.parent} has no {path.name}; {advice}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}, not an object; download the file again")
    return content


def model_config(directory: Path) -> ModelConfig:
    path = directory / "config.json"
    return parse_model_config(read_json(path), path)


def parse_model_config(raw: Mapping[str, Any], path: Path) -> ModelConfig:
    """The sizes that a config.json states; refuses a model that the forward pass does not compute."""
    name = str(raw.get("model_type"))
    family = read_family(path.parent, name)
    for key in _EXPERTS:
        if isinstance(raw.get(key), int) and raw[key] > 1:
            missing = f"layers of experts ({key} {raw[key]}), and this version computes dense layers only"
            raise CheckpointError(f"{path}: model_type {name!r} has {missing}; take a dense checkpoint")
    if family is None:
        others = "any other that transformers has, slowly, with backend=transformers"
        raise CheckpointError(
            f"{path}: model_type is {name!r} (architectures {raw.get('architectures')}); "
            f"this version computes {', '.join(FAMILIES)}, and {others}"
        )
    if family.stated:
        told: dict[str, Any] = {key: raw.get(name, getattr(family, key)) for key, name in family.stated.items()}
        family = replace(family, **told)
    _refuse_variants(path, raw, family)
    keys = family.keys
    hidden_size, num_heads = _size(path, raw, keys.hidden_size), _size(path, raw, keys.num_heads)
    rope_theta, rope_scaling = _rope(path, raw)
    config = ModelConfig(
        family=name,
        vocab_size=_size(path, raw, keys.vocab_size),
        hidden_size=hidden_size,
        intermediate_size=_size(path, raw, keys.intermediate_size),
        num_layers=_size(path, raw, keys.num_layers),
        num_heads=num_heads,
        num_kv_heads=_size(path, raw, keys.num_kv_heads, default=num_heads),
        head_dim=_size(path, raw, "head_dim", default=hidden_size // num_heads),
        rms_norm_eps=_number(path, "rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        rope_theta=rope_theta,
        max_positions=_size(path, raw, keys.max_positions),
        tied_head=bool(raw.get(keys.tied_head, False)),
        dtype=str(
            raw.get("dtype") or raw.get("torch_dtype") or DTYPE_OF_PRECISION.get(str(raw.get("precision")), "float32")
        ),
        rope_scaling=rope_scaling,
        layout=None if family is FAMILIES.get(name) else family,
    )
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        heads = f"{config.num_heads} query heads must be a multiple of {config.num_kv_heads} key-value heads"
        raise CheckpointError(f"{path}: {heads}, and head_dim {config.head_dim} must be even")
    return config


def _size(path: Path, raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{path}: {key} is {value!r}; it must be a positive whole number")
    return value


def _number(path: Path, key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise CheckpointError(f"{path}: {key} is {value!r}; it must be a number above 0")
    return float(value)


def _rope(path: Path, raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    # transformers 5 writes all of it inside rope_parameters, version 4 only the scaling (rope_scaling).
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"{path}: rope_parameters (or rope_scaling) is {rope!r}; it must be an object")
    theta = _number(path, "rope_theta", rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if any(isinstance(value, Mapping) for value in rope.values()):
        kind = "one kind of layer, another for the next"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(f"{path}: rotary scaling {kind!r} is not computed; only 'default' and 'llama3' are")
    try:
        factors = {name: float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")}
        return theta, RopeScaling(**factors, original_max_positions=int(rope["original_max_position_embeddings"]))
    except (KeyError, TypeError, ValueError) as error:
        numbers = "factor, low_freq_factor, high_freq_factor and original_max_position_embeddings"
        raise CheckpointError(f"{path}: rotary scaling 'llama3' lacks a number ({error!r}) of {numbers}") from error


def _refuse_variants(path: Path, raw: Mapping[str, Any], family: Family) -> None:
    for key, needed in family.must_be.items():
        if raw.get(key) != needed:
            raise CheckpointError(f"{path}: {key} is {raw.get(key)!r}; only {needed!r} is computed")
    for key, allowed in family.may_be.items():
        if raw.get(key, allowed[0]) not in allowed:
            raise CheckpointError(f"{path}: {key} is {raw[key]!r}; only {allowed[0]!r} is computed")
    if raw.get("partial_rotary_factor") not in (None, 1):
        raise CheckpointError(f"{path}: only part of each head is rotated; only rotating all of it is computed")
    if "quantization_config" in raw:
        raise CheckpointError(f"{path}: quantised weights are not read; give an unquantised checkpoint")


@dataclass(frozen=True)
class Card:
    name: str
    backbone: str
    mask_id: int | None
    eos_ids: tuple[int, ...]
    kind: CheckpointKind
    decoders: tuple[str, ...] = ()
    shape: Mapping[str, object] = field(default_factory=dict)  # entries of config.json that tell a local copy
    display_name: str | None = None  # what tables call the model, if its config.json says it

    @property
    def mask_is_in_files(self) -> bool:
        return self.mask_id is None and self.kind != "causal"


def _shape(model_type: str, vocab_size: int, width: int, num_layers: int, **more: object) -> dict[str, object]:
    sizes = {"vocab_size": vocab_size, "hidden_size": width, "num_hidden_layers": num_layers}
    return {"model_type": model_type, **sizes, **more}


LLADA_SHAPE: dict[str, object] = {"model_type": "llada", "embedding_size": 126464, "d_model": 4096, "n_layers": 32}
LLADA_EOS = (126081, 126348)  # <|endoftext|>, <|eot_id|>
QWEN_EOS = (151645, 151643)  # <|im_end|>, <|endoftext|>
DREAM_EOS = QWEN_EOS[::-1]
LLAMA_EOS = (128001, 128009)
SEED_EOS = (2,)  # of Seed-Coder's tokenizer and of iLLaDA's, which both have the mask as token 5
SDAR_MASK = 151669
# Llama 3.1 has the same sizes and another end token; the context length distinguishes it.
LLAMA_SHAPE = _shape("llama", 128256, 4096, 32, max_position_embeddings=8192)
CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        # The release stops at <|im_end|> alone; its vocabulary ends with <|beginoftext|> and <|mask|>.
        Card("GSAI-ML/ReFusion", "Qwen3-8B", 151670, (151645,), "refusion", shape=_shape("qwen3", 151671, 4096, 36)),
        Card("Qwen/Qwen3-8B", "Qwen3-8B", None, QWEN_EOS, "causal", shape=_shape("qwen3", 151936, 4096, 36)),
        Card("Qwen/Qwen3-0.6B", "Qwen3-0.6B", None, QWEN_EOS, "causal", shape=_shape("qwen3", 151936, 1024, 28)),
        Card("meta-llama/Meta-Llama-3-8B-Instruct", "Llama-3-8B", None, LLAMA_EOS, "causal", shape=LLAMA_SHAPE),
        # No shape: nothing in config.json distinguishes it from Qwen2-7B-Instruct.
        Card("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B", None, QWEN_EOS, "causal"),
        # These differ in training data, but not in the facts of a card.
        *(
            Card(name, "LLaDA-8B", 126336, LLADA_EOS, "llada", shape=LLADA_SHAPE)
            for name in (
                *("GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-1.5"),
                *("Zigeng/dParallel-LLaDA-8B-instruct", "d3LLM/d3LLM_LLaDA"),
            )
        ),
        # Neither its config.json nor its tokenizer says which token the mask is.
        *(
            Card(f"GSAI-ML/iLLaDA-8B-{name}", "iLLaDA-8B", 5, SEED_EOS, "llada", (), _shape("illada", 155136, 4096, 32))
            for name in ("Base", "Instruct")
        ),
        *(
            Card(name, "Qwen2.5-7B", 151666, DREAM_EOS, "dream", shape=_shape("Dream", 152064, 3584, 28))
            for name in (
                *("Dream-org/Dream-v0-Instruct-7B", "Dream-org/Dream-v0-Base-7B"),
                *("Dream-org/Dream-Coder-v0-Instruct-7B", "Dream-org/Dream-Coder-v0-Base-7B"),
                *("apple/DiffuCoder-7B-Base", "apple/DiffuCoder-7B-Instruct", "apple/DiffuCoder-7B-cpGRPO"),
                *("Zigeng/dParallel_Dream_7B_Instruct", "d3LLM/d3LLM_Dream"),
            )
        ),
        # Its code has the ids of the mask and of <|im_end|>, at which it stops; its config.json has no mask.
        *(
            Card(f"Efficient-Large-Model/{name}", backbone, 151665, (151645,), "masked", ("fast_dllm_v2",), shape)
            for name, backbone, shape in (
                ("Fast_dLLM_v2_7B", "Qwen2.5-7B", _shape("Fast_dLLM_Qwen", 152064, 3584, 28)),
                ("Fast_dLLM_v2_1.5B", "Qwen2.5-1.5B", _shape("Fast_dLLM_Qwen", 151936, 1536, 28)),
            )
        ),
        # No shape: SDAR's and I-DLM's config.json say the same.
        *(
            Card(name, backbone, SDAR_MASK, DREAM_EOS, "masked", ("sdar",))
            for name, backbone in (
                ("JetLM/SDAR-1.7B-Chat", "Qwen3-1.7B"),
                ("JetLM/SDAR-4B-Chat", "Qwen3-4B"),
                ("JetLM/SDAR-8B-Chat", "Qwen3-8B"),
                ("Gen-Verse/TraDo-4B-Instruct", "Qwen3-4B"),
                ("Gen-Verse/TraDo-8B-Instruct", "Qwen3-8B"),
                ("Gen-Verse/TraDo-8B-Thinking", "Qwen3-8B"),
            )
        ),
        *(
            Card(f"yifanyu/I-DLM-{size}", f"Qwen3-{size}", SDAR_MASK, (151645,), "masked", ("idlm", "autoregressive"))
            for size in ("8B", "32B")
        ),
        # Its architecture tells it from Seed-Coder, which reads from left to right.
        *(
            Card(f"ByteDance-Seed/Stable-DiffCoder-8B-{name}", "Seed-Coder-8B", 5, SEED_EOS, "masked", ("sdar",), shape)
            for shape in [_shape("llama", 155136, 4096, 32, architectures=["StableDiffcoderForCausalLM"])]
            for name in ("Base", "Instruct")
        ),
        # Its config.json has the mask, but one stop token of two.
        *(
            Card(f"tencent/WeDLM-{name}", backbone, None, QWEN_EOS, "masked", ("wedlm",), shape)
            for size, backbone, shape in (
                ("7B", "Qwen2.5-7B", _shape("wedlm", 152064, 3584, 28)),
                ("8B", "Qwen3-8B", _shape("wedlm", 151936, 4096, 36)),
            )
            for name in (f"{size}-Base", f"{size}-Instruct")
        ),
        # The name alone tells what they were trained as; the mask is in the tokenizer.
        *(
            Card(f"dllm-hub/{backbone}-diffusion-{way}-v0.1", backbone, None, QWEN_EOS, "masked", (decoder,))
            for backbone in ("Qwen3-0.6B", "Qwen2.5-Coder-0.5B-Instruct")
            for way, decoder in (("mdlm", "llada"), ("bd3lm", "bd3lm"))
        ),
    )
}


def checkpoint_card(name: str, directory: Path) -> Card:
    # A copy or a fine-tune is recognised by its shape, unless its config.json has a backbone, decoders or a mask token
    # of its own. For all others: mask_token_id of config.json before the tokenizer's mask token before its token
    # "<|mask|>"; eos_token_id of generation_config.json before that of config.json.
    path = directory / "config.json"
    config = read_json(path)
    known = CARDS.get(name) or next((card for card in CARDS.values() if _is_copy(config, card)), None)
    if known is not None:
        mask_id = _mask_id(config, directory) if known.mask_is_in_files else known.mask_id
        return replace(known, name=name, mask_id=mask_id)
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    family = read_family(directory, str(config.get("model_type")))
    decoders = config.get("decoders", list(family.decoders) if family else [])
    if not isinstance(decoders, list) or not all(isinstance(decoder, str) and decoder for decoder in decoders):
        raise CheckpointError(f"{path}: decoders is {reprlib.repr(decoders)}; it must be a list of decoder names")
    if places := [decoder for decoder in decoders if names_code(decoder)]:
        raise CheckpointError(
            f"{path}: decoders names code, {reprlib.repr(places[0])}, which a checkpoint must not choose; write names "
            "of installed decoders there, and give your own with --decoder"
        )
    display_name = config.get("display_name")
    if not isinstance(display_name, str | None):
        raise CheckpointError(f"{path}: display_name is {reprlib.repr(display_name)}; it must be a text")
    mask_id = _mask_id(config, directory)
    # The row of a mask predicts it, from the whole text, where transformers computes a masked language model.
    stock_kind: CheckpointKind | None = "llada" if is_masked_model(config) else None
    kind = stock_kind if family is None else family.kind
    return Card(
        name=name,
        backbone=str(config.get("backbone", config.get("model_type", "unknown"))),
        mask_id=mask_id,
        eos_ids=_ids(generation_path, "eos_token_id", generation.get("eos_token_id"))
        or _ids(path, "eos_token_id", config.get("eos_token_id")),
        kind=kind or ("causal" if mask_id is None else "masked"),
        decoders=tuple(decoders),
        display_name=display_name,
    )


def is_masked_model(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a masked language model, which fills masks from the whole text around them."""
    return any(str(name).endswith("ForMaskedLM") for name in config.get("architectures") or [])


def _is_copy(config: Mapping[str, Any], card: Card) -> bool:
    if not card.shape or "backbone" in config or "decoders" in config:
        return False
    same_mask = card.mask_is_in_files or config.get("mask_token_id", card.mask_id) == card.mask_id
    return same_mask and all(config.get(key) == value for key, value in card.shape.items())


def _mask_id(config: Mapping[str, Any], directory: Path) -> int | None:
    mask_id = config.get("mask_token_id")
    mask_id = _tokenizer_mask_id(directory) if mask_id is None else mask_id
    ids = _ids(directory / "config.json", "mask_token_id", [] if mask_id is None else [mask_id])  # never a list
    return next(iter(ids), None)


def _ids(path: Path, key: str, value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise CheckpointError(f"{path}: {key} is {value!r}; it must be a token id or a list of token ids")
    return tuple(ids)


def _tokenizer_mask_id(directory: Path) -> int | None:
    path, tokenizer_path = directory / "tokenizer_config.json", directory / "tokenizer.json"
    if not path.is_file():
        return None
    raw = read_json(path)
    try:
        mask_token = raw.get("mask_token") or "<|mask|>"
        if isinstance(mask_token, Mapping):
            mask_token = mask_token.get("content")
        for token_id, token in raw.get("added_tokens_decoder", {}).items():
            if token.get("content") == mask_token:
                return int(token_id)
        added = read_json(tokenizer_path).get("added_tokens", []) if tokenizer_path.is_file() else []
        return next((token["id"] for token in added if token.get("content") == mask_token), None)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        form = f"lists its added tokens in an unknown form ({error!r})"
        raise CheckpointError(f"{path} or tokenizer.json beside it {form}; download both files again") from error
