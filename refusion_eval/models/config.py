"""Shapes of a checkpoint as its config.json states them."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refusion_eval.errors import CheckpointError
from refusion_eval.models.families import FAMILIES, Family

DEFAULT_ROPE_THETA = 10_000.0
DEFAULT_RMS_NORM_EPS = 1e-6
# The dtype that the training precision stands for in a config.json without a dtype.
DTYPE_OF_PRECISION = {"amp_bf16": "bfloat16", "amp_fp16": "float16"}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rotary scaling of Llama 3.1: low frequencies are divided, high ones kept, those between blended.

    Attributes:
        factor: divides the frequencies whose wavelength exceeds original_max_positions / low_freq_factor.
        low_freq_factor, high_freq_factor: bound the blended range; the frequencies whose wavelength is below
            original_max_positions / high_freq_factor are kept.
        original_max_positions: the context before scaling.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and constants that the forward pass needs.

    Attributes:
        family: model_type of config.json, a key of `refusion_eval.models.families.FAMILIES`.
        vocab_size: rows of the embedding and of the output head.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_layers: transformer layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides num_heads.
        head_dim: width of one head, even.
        rms_norm_eps: epsilon of every RMSNorm.
        rope_theta: base of the rotary frequencies.
        max_positions: longest text (prompt and response) that the checkpoint supports.
        tied_head: whether the output head is the embedding.
        dtype: dtype of the saved weights, as config.json names it.
        rope_scaling: scaling of the rotary frequencies; None for none.
    """

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

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return FAMILIES[self.family].qkv_bias

    @property
    def qk_norm(self) -> bool:
        """Whether each head of queries and keys is normed."""
        return FAMILIES[self.family].qk_norm


def read_json(path: Path) -> dict[str, Any]:
    """Reads one JSON object of a checkpoint.

    Raises:
        CheckpointError: the file is missing or holds no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}; give a directory in Hugging Face layout "
            "(config.json, *.safetensors, tokenizer files)"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}, not an object; download the file again")
    return content


def model_config(directory: Path) -> ModelConfig:
    """Reads config.json of a checkpoint directory.

    Raises:
        CheckpointError: the file is missing or malformed, or describes a model that the forward pass does not compute.
    """
    path = directory / "config.json"
    return parse_model_config(read_json(path), path)


def parse_model_config(raw: Mapping[str, Any], path: Path) -> ModelConfig:
    """Parses the content of a config.json; error messages name `path`.

    Raises:
        CheckpointError: as `model_config`.
    """
    name = str(raw.get("model_type"))
    if name not in FAMILIES:
        raise CheckpointError(
            f"{path}: model_type is {name!r} (architectures {raw.get('architectures')}); "
            f"this version computes {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
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
        rms_norm_eps=_number(path, "rms_norm_eps", raw.get("rms_norm_eps", DEFAULT_RMS_NORM_EPS)),
        rope_theta=rope_theta,
        max_positions=_size(path, raw, keys.max_positions),
        tied_head=bool(raw.get(keys.tied_head, False)),
        dtype=str(
            raw.get("dtype") or raw.get("torch_dtype") or DTYPE_OF_PRECISION.get(str(raw.get("precision")), "float32")
        ),
        rope_scaling=rope_scaling,
    )
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise CheckpointError(
            f"{path}: {config.num_heads} query heads must be a multiple of {config.num_kv_heads} key-value heads, "
            f"and head_dim {config.head_dim} must be even"
        )
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
    """Base and scaling of the rotary frequencies: inside rope_parameters as newer configs write it, or beside it."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"{path}: rope_parameters (or rope_scaling) is {rope!r}; it must be an object")
    theta = _number(path, "rope_theta", rope.get("rope_theta") or raw.get("rope_theta") or DEFAULT_ROPE_THETA)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if any(isinstance(value, Mapping) for value in rope.values()):
        kind = "one kind of layer, another for the next"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(f"{path}: rotary scaling {kind!r} is not computed; only 'default' and 'llama3' are")
    try:
        return theta, RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: rotary scaling 'llama3' lacks a number ({error!r}); it needs factor, low_freq_factor, "
            "high_freq_factor and original_max_position_embeddings"
        ) from error


def _refuse_variants(path: Path, raw: Mapping[str, Any], family: Family) -> None:
    """Refuses switches of the family that would change the function computed."""
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
