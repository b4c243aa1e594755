"""The two spellings of config.json and tokenizer_config.json: that of transformers 4 (and of the release), and of 5.

transformers 4 keeps the rotary base in "rope_theta", its scaling in "rope_scaling" and the dtype in "torch_dtype";
transformers 5 has "rope_parameters" for both and "dtype".
"""

from collections.abc import Mapping
from typing import Any

# What would have a reader run code.
_CODE = ("auto_map", "custom_generate")


def with_both_spellings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that transformers 4 and 5 read alike."""
    rope, dtype = _rope(config), _dtype(config)
    both = {key: value for key, value in config.items() if key not in (*_CODE, "rope_scaling")}
    both |= {"rope_theta": rope["rope_theta"], "rope_parameters": rope, "dtype": dtype, "torch_dtype": dtype}
    return both | ({} if _is_default(rope) else {"rope_scaling": _scaling(rope)})


def as_released(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as transformers 4.52, which the release was made with, writes it."""
    rope = _rope(config)
    dropped = (*_CODE, "rope_parameters", "dtype", "layer_types", "transformers_version")
    released = {key: value for key, value in config.items() if key not in dropped}
    scaling = None if _is_default(rope) else _scaling(rope)
    return released | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling, "torch_dtype": _dtype(config)}


def tokenizer_as_released(config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer_config.json as transformers 4 reads it.

    Args:
        config: tokenizer_config.json.
        tokenizer: tokenizer.json.
    """
    released = {key: value for key, value in config.items() if key not in ("backend", "extra_special_tokens")}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, list):
        released["additional_special_tokens"] = extra
    elif extra:
        released["extra_special_tokens"] = extra
    if "added_tokens_decoder" not in released:
        added = tokenizer.get("added_tokens", [])
        released["added_tokens_decoder"] = {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in added
        }
    return released


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters as transformers 5 spells them."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    return rope


def _is_default(rope: Mapping[str, Any]) -> bool:
    return rope["rope_type"] == "default"


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in rope.items() if key != "rope_theta"}


def _dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")
