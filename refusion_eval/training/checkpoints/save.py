"""Writes a model as a Hugging Face checkpoint directory, completely or not at all."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from refusion_eval.models.config import read_json
from refusion_eval.training.checkpoints.layouts import with_both_spellings
from refusion_eval.training.checkpoints.lora import is_adapted, merged_copy, save_adapter

ADAPTER_FOLDER = "adapter"
SHARD_BYTES = 5 * 10**9
# Keys with which transformers describes its own session; they do not belong to the checkpoint.
_SESSION_KEYS = ("is_local", "local_files_only")


def save_backbone(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, target: Path, *, decoders: Sequence[str] = ()
) -> None:
    """Writes weights, config and tokenizer. Adapters are merged into the weights and also written to `adapter/`.

    `decoders` are those that the model was trained for, the main one first (`refusion_eval.models.checkpoint`).
    """
    plain = merged_copy(model) if is_adapted(model) else model
    with replacing(target) as part:
        plain.save_pretrained(part, max_shard_size=SHARD_BYTES)
        tokenizer.save_pretrained(part)
        config = read_json(part / "config.json")
        config.pop("decoders", None)  # those of the checkpoint that the training started from
        config |= {"architectures": [type(plain).__name__], "dtype": str(plain.dtype).removeprefix("torch.")}
        config |= {"decoders": list(decoders)} if decoders else {}
        write_json(part / "config.json", with_both_spellings(config))
        tokenizer_config = read_json(part / "tokenizer_config.json") | {"tokenizer_class": "PreTrainedTokenizerFast"}
        for name in _SESSION_KEYS:
            tokenizer_config.pop(name, None)
        write_json(part / "tokenizer_config.json", tokenizer_config)
        if is_adapted(model):
            save_adapter(model, part / ADAPTER_FOLDER)


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


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
