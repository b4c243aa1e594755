"""Shapes of a checkpoint as its config.json states them, and the visible table of known checkpoints."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from refusion_eval.errors import CheckpointError

DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the forward pass needs to know of a checkpoint.

    Attributes:
        family: model_type of config.json.
        vocab_size: rows of the embedding and of the output head.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_layers: transformer layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides num_heads.
        head_dim: width of one head, even.
        rms_norm_eps: epsilon of every RMSNorm.
        rope_theta: base of the rotary frequencies.
        max_positions: longest text (prompt and response) that the checkpoint was made for.
        tied_head: whether the output head is the embedding.
        dtype: what the weights were saved in, as config.json names it.
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


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a checkpoint was trained for, beyond its shapes.

    Attributes:
        name: hub id or directory name.
        backbone: the model that it was trained from.
        mask_id: id of the mask token; None if it has none.
        eos_ids: ids that end a response.
        decoders: names of the decoders that it was trained for, the main one first.
        shape: entries of config.json by which a local copy is recognised; empty for none.
    """

    name: str
    backbone: str
    mask_id: int | None
    eos_ids: tuple[int, ...]
    decoders: tuple[str, ...]
    shape: Mapping[str, int | str] = field(default_factory=dict)


CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        # The release stops at <|im_end|> alone; its vocabulary ends with <|beginoftext|> and <|mask|>.
        Card(
            name="GSAI-ML/ReFusion",
            backbone="Qwen3-8B",
            mask_id=151670,
            eos_ids=(151645,),
            decoders=("refusion", "autoregressive"),
            shape={"model_type": "qwen3", "vocab_size": 151671, "hidden_size": 4096, "num_hidden_layers": 36},
        ),
        Card(
            name="Qwen/Qwen3-8B",
            backbone="Qwen3-8B",
            mask_id=None,
            eos_ids=(151645, 151643),
            decoders=("autoregressive",),
            shape={"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 36},
        ),
    )
}


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
    raw = read_json(path)
    family = raw.get("model_type")
    if family != "qwen3":
        raise CheckpointError(
            f"{path}: model_type is {family!r} (architectures {raw.get('architectures')}); "
            "this version computes 'qwen3' only"
        )
    _refuse_variants(path, raw)
    hidden_size, num_heads = _size(path, raw, "hidden_size"), _size(path, raw, "num_attention_heads")
    config = ModelConfig(
        family=family,
        vocab_size=_size(path, raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(path, raw, "intermediate_size"),
        num_layers=_size(path, raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_size(path, raw, "num_key_value_heads", default=num_heads),
        head_dim=_size(path, raw, "head_dim", default=hidden_size // num_heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(path, raw),
        max_positions=_size(path, raw, "max_position_embeddings"),
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise CheckpointError(
            f"{path}: {config.num_heads} query heads must be a multiple of {config.num_kv_heads} key-value heads, "
            f"and head_dim {config.head_dim} must be even"
        )
    return config


def checkpoint_card(name: str, directory: Path) -> Card:
    """The card of a known checkpoint or of a local copy of it, else one read from the directory's own files.

    A copy, or a fine-tune, is recognised by its shape, unless its config.json names a backbone of its own. Else the
    mask id is config.json's mask_token_id, else the tokenizer's mask token, else its token "<|mask|>", and the EOS ids
    are generation_config.json's, else config.json's; either may be one id or a list.

    Args:
        name: hub id, or the path that the user gave.
        directory: where the checkpoint's files lie.

    Raises:
        CheckpointError: a file is malformed.
    """
    if name in CARDS:
        return CARDS[name]
    config = read_json(directory / "config.json")
    for card in CARDS.values():
        if "backbone" not in config and all(config.get(key) == value for key, value in card.shape.items()):
            return replace(card, name=name)
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    mask_id = config.get("mask_token_id")
    if mask_id is None:
        mask_id = _tokenizer_mask_id(directory)
    masked = ("refusion", "autoregressive")
    return Card(
        name=name,
        backbone=str(config.get("backbone", config.get("model_type", "unknown"))),
        mask_id=mask_id,
        eos_ids=_ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id")),
        decoders=masked if mask_id is not None else masked[1:],
    )


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _tokenizer_mask_id(directory: Path) -> int | None:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return None
    raw = read_json(path)
    mask_token = raw.get("mask_token") or "<|mask|>"
    if isinstance(mask_token, Mapping):
        mask_token = mask_token.get("content")
    for token_id, token in raw.get("added_tokens_decoder", {}).items():
        if token.get("content") == mask_token:
            return int(token_id)
    path = directory / "tokenizer.json"
    added = read_json(path).get("added_tokens", []) if path.is_file() else []
    return next((token["id"] for token in added if token.get("content") == mask_token), None)


def _size(path: Path, raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{path}: {key} is {value!r}; it must be a positive whole number")
    return value


def _rope_theta(path: Path, raw: Mapping[str, Any]) -> float:
    """The base of the rotary frequencies: at top level, or inside rope_parameters as newer configs write it."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise CheckpointError(f"{path}: rotary scaling {kind!r} is not computed; only unscaled rotary positions are")
    return float(rope.get("rope_theta") or raw.get("rope_theta") or DEFAULT_ROPE_THETA)


def _refuse_variants(path: Path, raw: Mapping[str, Any]) -> None:
    """Refuses switches of the family that would change the function computed."""
    for key, allowed in (("attention_bias", False), ("use_sliding_window", False), ("hidden_act", "silu")):
        if raw.get(key, allowed) != allowed:
            raise CheckpointError(f"{path}: {key} is {raw[key]!r}; only {allowed!r} is computed")
    if "quantization_config" in raw:
        raise CheckpointError(f"{path}: quantised weights are not read; give an unquantised checkpoint")
