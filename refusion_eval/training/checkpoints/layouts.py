"""Two layouts of config.json and tokenizer_config.json: transformers 4 (the release of ReFusion) and transformers 5.

| setting       | transformers 4 | transformers 5    |
|---------------|----------------|-------------------|
| rotary base   | `rope_theta`   | `rope_parameters` |
| rotary scaling| `rope_scaling` | `rope_parameters` |
| data type     | `torch_dtype`  | `dtype`           |
"""

from collections.abc import Mapping
from typing import Any

# Keys that make a reader run code of the checkpoint.
_CODE = ("auto_map", "custom_generate")


def with_both_spellings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that transformers 4 and 5 read alike."""
    rope, scaling, dtype = _rope_and_dtype(config)
    both = {key: value for key, value in config.items() if key not in (*_CODE, "rope_scaling")}
    both |= {"rope_theta": rope["rope_theta"], "rope_parameters": rope, "dtype": dtype, "torch_dtype": dtype}
    return both | ({} if scaling is None else {"rope_scaling": scaling})


def as_released(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as transformers 4.52 writes it, with which the release was made."""
    rope, scaling, dtype = _rope_and_dtype(config)
    dropped = (*_CODE, "rope_parameters", "dtype", "layer_types", "transformers_version")
    released = {key: value for key, value in config.items() if key not in dropped}
    return released | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling, "torch_dtype": dtype}


def tokenizer_as_released(config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer_config.json as transformers 4 reads it."""
    released = {key: value for key, value in config.items() if key not in ("backend", "extra_special_tokens")}
    extra = config.get("extra_special_tokens")
    if extra:
        released["additional_special_tokens" if isinstance(extra, list) else "extra_special_tokens"] = extra
    added = {str(token["id"]): token for token in tokenizer.get("added_tokens", [])}
    without_ids = {key: {name: token[name] for name in token if name != "id"} for key, token in added.items()}
    return {"added_tokens_decoder": without_ids} | released


def _rope_and_dtype(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None, str]:
    """Rotary parameters of transformers 5, rotary scaling of transformers 4 (None without scaling), and data type."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return rope, None if rope["rope_type"] == "default" else scaling, dtype
