"""A checkpoint: its shapes and its family, and what it was trained for."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

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
    qkv: str | None = None  # where queries, keys and values are one matrix, instead of `q`, `k` and `v`
    router: str = "mlp.gate"
    experts: str = "mlp.experts"  # which have gate_proj, up_proj and down_proj each, or gate_up_proj and down_proj
    shared: str = "mlp.shared_experts"


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


Router = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class Family:
    qkv_bias: bool = False
    qk_norm: bool = False
    partial_rotary: bool = False  # whether config.json may let a part of each head turn
    router: Router | None = None  # how rows choose experts; None for families without
    tensors: TensorNames = TensorNames()
    keys: ConfigKeys = ConfigKeys()
    must_be: Mapping[str, object] = field(default_factory=dict)  # must be present, because the default is another value
    needed: tuple[str, ...] = ()  # must be present, whatever the value: the public code has other defaults
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
        decoders=("wedlm", "autoregressive"),  # trained with an autoregressive loss, too
    ),
    # Qwen2, but trained for bidirectional attention with logits one position ahead.
    "Dream": replace(_QWEN2, kind="dream"),
    # Qwen3, trained as SDAR; it calls itself Dream (`family_name`).
    "DreamReasoner": replace(_QWEN3, decoders=("sdar",)),
    # The checkpoints of SDAR and of I-DLM say the same of themselves.
    "sdar": replace(_QWEN3, decoders=("sdar", "idlm", "autoregressive")),
    "Fast_dLLM_Qwen": replace(_QWEN2, decoders=("fast_dllm_v2",)),
    "llada2": replace(_QWEN3, decoders=("llada2",)),  # a plain model; the published ones are of the next family
    "llada2_moe": Family(
        qk_norm=True,
        partial_rotary=True,
        router="sigmoid",
        tensors=TensorNames(
            embedding="model.word_embeddings",
            qkv="attention.query_key_value",
            out="attention.dense",
            q_norm="attention.query_layernorm",
            k_norm="attention.key_layernorm",
        ),
        must_be={"use_bias": False},
        needed=("n_group", "topk_group", "rms_norm_eps"),
        may_be=_SILU | {"use_sliding_window": _OFF},
        stated={"qkv_bias": "use_qkv_bias", "qk_norm": "use_qk_norm"},
        decoders=("llada2",),
    ),
    "qwen3_moe": replace(_QWEN3, router="softmax"),
    "sdar_moe": replace(_QWEN3, router="softmax", decoders=("sdar", "autoregressive")),
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


def family_name(config: Mapping[str, Any]) -> str:
    """The key in `FAMILIES` of a config.json; its model_type where there is none."""
    name = str(config.get("model_type"))
    return "DreamReasoner" if name == "Dream" and config.get("block_size") is not None else name


def is_diffusion_gemma(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of DiffusionGemma, which transformers computes."""
    return config.get("model_type") == "diffusion_gemma"


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
class Experts:
    """Mixtures of experts, which some layers have instead of an MLP.

    Attributes:
        num_experts, num_chosen: experts of a layer, and how many a row chooses.
        width: inner width of the MLP that is an expert.
        layers: numbers of the layers that have experts, from 0.
        score: what the router makes of its logits.
        normalised: whether the shares of the chosen experts add up to `scale`; always so for "sigmoid".
        num_groups, num_kept_groups: groups of neighbouring experts, and how many of them a row chooses from.
        shared_width: inner width of the MLP that every row has besides; 0 for none.
        packed: whether one tensor of the checkpoint holds the matrices of all experts of a layer.
    """

    num_experts: int
    num_chosen: int
    width: int
    layers: frozenset[int]
    score: Router
    normalised: bool = True
    scale: float = 1.0
    num_groups: int = 1
    num_kept_groups: int = 1
    shared_width: int = 0
    packed: bool = False

    def num_read(self, num_rows: int) -> float:
        """Experts of a layer that so many rows choose if they choose at random; exact for one row."""
        return self.num_experts * (1 - (1 - self.num_chosen / self.num_experts) ** num_rows)


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
    rotary_dim: int | None = None  # entries of a head that turn; None for all
    experts: Experts | None = None
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


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def model_config(directory: Path) -> ModelConfig:
    path = directory / "config.json"
    return parse_model_config(read_json(path), path)


def parse_model_config(raw: Mapping[str, Any], path: Path) -> ModelConfig:
    """The sizes that a config.json states; refuses a model that the forward pass does not compute."""
    name = family_name(raw)
    family = read_family(path.parent, name)
    for key in _EXPERTS if family is None or family.router is None else ():
        if isinstance(raw.get(key), int) and raw[key] > 1:
            computed = ", ".join(kind for kind, known in FAMILIES.items() if known.router is not None)
            missing = f"layers of experts ({key} {raw[key]}), and this version computes those of {computed} only"
            raise CheckpointError(f"{path}: model_type {name!r} has {missing}; take a dense checkpoint")
    if is_diffusion_gemma(raw):
        only = "it can be decoded, with decoder=diffusion_gemma, and nothing else"
        raise CheckpointError(f"{path}: model_type is {name!r}, which transformers computes; {only}")
    if family is None:
        others = "any other that transformers has, slowly, with backend=transformers"
        raise CheckpointError(
            f"{path}: model_type is {name!r} (architectures {raw.get('architectures')}); "
            f"this version computes {', '.join(FAMILIES)}, and {others}"
        )
    if family.stated:
        told: dict[str, Any] = {key: raw.get(name, getattr(family, key)) for key, name in family.stated.items()}
        for key, value in told.items():
            if not isinstance(value, bool | None):
                raise CheckpointError(f"{path}: {family.stated[key]} is {value!r}; it must be true or false")
        family = replace(family, **told)
    _refuse_variants(path, raw, family)
    keys = family.keys
    hidden_size, num_heads = _size(path, raw, keys.hidden_size), _size(path, raw, keys.num_heads)
    rope_theta, rope_scaling = _rope(path, raw)
    num_layers = _size(path, raw, keys.num_layers)
    head_dim = _size(path, raw, "head_dim", default=hidden_size // num_heads)
    config = ModelConfig(
        family=name,
        vocab_size=_size(path, raw, keys.vocab_size),
        hidden_size=hidden_size,
        intermediate_size=_size(path, raw, keys.intermediate_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_size(path, raw, keys.num_kv_heads, default=num_heads),
        head_dim=head_dim,
        rms_norm_eps=_number(path, "rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        rope_theta=rope_theta,
        max_positions=_size(path, raw, keys.max_positions),
        tied_head=bool(raw.get(keys.tied_head, False)),
        dtype=str(
            raw.get("dtype") or raw.get("torch_dtype") or DTYPE_OF_PRECISION.get(str(raw.get("precision")), "float32")
        ),
        rope_scaling=rope_scaling,
        rotary_dim=_rotary_dim(path, raw, head_dim) if family.partial_rotary else None,
        experts=None if family.router is None else _experts(path, raw, family.router, num_layers),
        layout=None if family is FAMILIES.get(name) else family,
    )
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        heads = f"{config.num_heads} query heads must be a multiple of {config.num_kv_heads} key-value heads"
        raise CheckpointError(f"{path}: {heads}, and head_dim {config.head_dim} must be even")
    return config


def _size(path: Path, raw: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        kind = "a positive whole number" if least else "a whole number, 0 or more"
        raise CheckpointError(f"{path}: {key} is {value!r}; it must be {kind}")
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


def _rotary_dim(path: Path, raw: Mapping[str, Any], head_dim: int) -> int | None:
    rope = raw.get("rope_parameters")
    factor = raw.get("partial_rotary_factor") or (rope if isinstance(rope, Mapping) else {}).get(
        "partial_rotary_factor"
    )
    size = int(head_dim * _number(path, "partial_rotary_factor", factor))
    if not 0 < size <= head_dim or size % 2:
        raise CheckpointError(f"{path}: {size} of the {head_dim} entries of a head would turn; it must be an even part")
    return None if size == head_dim else size


def _experts(path: Path, raw: Mapping[str, Any], score: Router, num_layers: int) -> Experts | None:
    number = next((raw[key] for key in _EXPERTS if raw.get(key) is not None), None)
    if number == 0 and not isinstance(number, bool):
        return None
    common: dict[str, Any] = {
        "num_experts": _size(path, {_EXPERTS[0]: number}, _EXPERTS[0]),
        "num_chosen": _size(path, raw, "num_experts_per_tok"),
        "width": _size(path, raw, "moe_intermediate_size"),
        "score": score,
    }
    if score == "softmax":
        dense, step = raw.get("mlp_only_layers") or [], _size(path, raw, "decoder_sparse_step", default=1)
        if not isinstance(dense, list):
            raise CheckpointError(f"{path}: mlp_only_layers is {dense!r}; it must be a list of numbers of layers")
        layers = frozenset(index for index in range(num_layers) if index not in dense and (index + 1) % step == 0)
        experts = Experts(**common, layers=layers, normalised=bool(raw.get("norm_topk_prob", False)))
    else:
        experts = Experts(
            **common,
            layers=frozenset(range(_size(path, raw, "first_k_dense_replace", default=0, least=0), num_layers)),
            scale=_number(path, "routed_scaling_factor", raw.get("routed_scaling_factor")),
            num_groups=_size(path, raw, "n_group"),
            num_kept_groups=_size(path, raw, "topk_group"),
            shared_width=common["width"] * _size(path, raw, "num_shared_experts", default=0, least=0),
        )
    size, rest = divmod(experts.num_experts, experts.num_groups)
    most = size * min(experts.num_kept_groups, experts.num_groups)
    if rest or (experts.num_groups > 1 and size < 2) or not experts.num_chosen <= most:
        groups = f"{experts.num_kept_groups} of {experts.num_groups} groups"
        raise CheckpointError(
            f"{path}: {experts.num_chosen} of {number} experts in {groups} cannot be chosen; download the file again"
        )
    return experts if experts.layers else None


def _refuse_variants(path: Path, raw: Mapping[str, Any], family: Family) -> None:
    for key, needed in family.must_be.items():
        if raw.get(key) != needed:
            raise CheckpointError(f"{path}: {key} is {raw.get(key)!r}; only {needed!r} is computed")
    for key in family.needed:
        if raw.get(key) is None:
            raise CheckpointError(f"{path}: {key} is missing, and nothing can be computed without it; add it")
    for key, allowed in family.may_be.items():
        if raw.get(key, allowed[0]) not in allowed:
            raise CheckpointError(f"{path}: {key} is {raw[key]!r}; only {allowed[0]!r} is computed")
    if not family.partial_rotary and raw.get("partial_rotary_factor") not in (None, 1):
        raise CheckpointError(f"{path}: only part of each head is rotated; only rotating all of it is computed")
    if "quantization_config" in raw:
        raise CheckpointError(f"{path}: quantised weights are not read; give an unquantised checkpoint")
