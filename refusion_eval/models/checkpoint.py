"""A checkpoint: its shapes and its family, and what it was trained for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from refusion_eval.errors import CheckpointError
from refusion_eval.types import CheckpointKind
from refusion_eval.untrusted import parse_json, read_plain

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
