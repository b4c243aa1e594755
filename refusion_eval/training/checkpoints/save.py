"""Writes a model as a Hugging Face checkpoint directory, completely or not at all."""

import contextlib
import copy
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from refusion_eval.models.checkpoint import read_json, write_json

ADAPTER_FOLDER = "adapter"
SHARD_BYTES = 5 * 10**9
# Keys that make a reader run code of the checkpoint.
_CODE = ("auto_map", "custom_generate")
# Keys with which transformers describes its own session; they do not belong to the checkpoint.
_SESSION_KEYS = ("is_local", "local_files_only")


def save_backbone(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, target: Path, *, decoders: Sequence[str] = ()
) -> None:
    """Writes weights, config and tokenizer. Adapters are merged into the weights and also written to `adapter/`.

    `decoders` are those that the model was trained for, the main one first (`refusion_eval.models.checkpoint`).
    """
    is_adapted = hasattr(model, "peft_config")
    plain = _merged_copy(model) if is_adapted else model
    with replacing(target) as part:
        plain.save_pretrained(part, max_shard_size=SHARD_BYTES)
        tokenizer.save_pretrained(part)
        config = read_json(part / "config.json")
        config.pop("decoders", None)  # those of the checkpoint that the training started from
        config |= {"architectures": [type(plain).__name__], "dtype": str(plain.dtype).removeprefix("torch.")}
        config |= {"decoders": list(decoders)} if decoders else {}
        write_json(part / "config.json", with_both_spellings(config))
        written = read_json(part / "tokenizer_config.json") | {"tokenizer_class": "PreTrainedTokenizerFast"}
        kept = {key: value for key, value in written.items() if key not in _SESSION_KEYS}
        write_json(part / "tokenizer_config.json", kept)
        if is_adapted:
            model.save_pretrained(part / ADAPTER_FOLDER, save_embedding_layers=False)
            (part / ADAPTER_FOLDER / "README.md").unlink(missing_ok=True)  # an empty form


def _merged_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy without adapters, whose weights contain them; `model` does not change."""
    adapted: Any = copy.deepcopy(model)
    with warnings.catch_warnings():
        # peft declares the model untied. The rows are merged into the embedding, which stays the output layer as well.
        warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")
        merged: PreTrainedModel = adapted.merge_and_unload()
    merged.config.tie_word_embeddings = model.config.tie_word_embeddings
    return merged


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """An empty directory that replaces `target` when the block succeeds and is removed when the block fails."""
    part, old = target.with_name(target.name + ".part"), target.with_name(target.name + ".old")
    for path in (part, old):
        shutil.rmtree(path, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    for path in part.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    if target.exists():
        os.replace(target, old)
    os.replace(part, target)
    shutil.rmtree(old, ignore_errors=True)


# Two layouts of config.json and tokenizer_config.json: transformers 4 (the release of ReFusion) and transformers 5.
#
# | setting        | transformers 4 | transformers 5    |
# | rotary base    | `rope_theta`   | `rope_parameters` |
# | rotary scaling | `rope_scaling` | `rope_parameters` |
# | data type      | `torch_dtype`  | `dtype`           |


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
