"""Writes a model as a Hugging Face checkpoint directory, whole or not at all."""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from refusion_eval.training.checkpoints.config_layout import with_both_spellings
from refusion_eval.training.checkpoints.lora import PlainTensors, is_adapted, save_adapter
from refusion_eval.training.checkpoints.shards import write_shards

ADAPTER_FOLDER = "adapter"

# What transformers writes about its own session, of no use to a reader of the checkpoint.
_SESSION_KEYS = ("is_local", "local_files_only")


def save_checkpoint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, target: Path, *, decoders: Sequence[str] = ()
) -> None:
    """As `save_backbone`, with weights rounded to bfloat16; `model` itself stays as it is."""
    save_backbone(model, tokenizer, target, decoders=decoders, dtype=torch.bfloat16)


def save_backbone(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    target: Path,
    *,
    decoders: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes weights, config and tokenizer; adapters are merged into the weights, and lie beside them in `adapter/`.

    The directory is built beside `target` and then takes its place, so that a crash leaves the previous one. Large
    weights are written in shards, one in memory at a time.

    Args:
        model: what to write; it stays as it is.
        tokenizer: with its chat template.
        target: the directory.
        decoders: those that the model was trained for, the main one first; config.json gets them
            (`refusion_eval.models.cards`). Empty leaves it to the reader.
        dtype: of the weights in the file; None is the model's.
        state: the model's tensors by name where `model` itself does not hold them, as under FSDP; None asks it.
    """
    tensors = PlainTensors(model, model.state_dict() if state is None else state)
    plain: Any = model.get_base_model() if is_adapted(model) else model
    dtype = dtype or plain.dtype
    tied = plain.config.tie_word_embeddings
    sizes = {
        name: math.prod(shape) * dtype.itemsize
        for name, shape in tensors.shapes().items()
        if not (tied and name == "lm_head.weight")
    }
    with replacing(target) as part:
        write_shards(part, sizes, lambda name: tensors.read(name).to(dtype))
        plain.config.save_pretrained(part)
        if plain.generation_config is not None:
            plain.generation_config.save_pretrained(part)
        tokenizer.save_pretrained(part)
        _make_portable(part, type(plain).__name__, dtype, decoders)
        if is_adapted(model):
            save_adapter(model, tensors.state, part / ADAPTER_FOLDER)


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """An empty directory that takes the place of `target` when the block ends well, and vanishes when it does not."""
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


def _make_portable(directory: Path, architecture: str, dtype: torch.dtype, decoders: Sequence[str]) -> None:
    """Adds the decoders, and the names that transformers 4 reads beside those of 5."""
    config_path, tokenizer_path = directory / "config.json", directory / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config |= {"architectures": [architecture], "dtype": str(dtype).removeprefix("torch.")}
    config |= {"decoders": list(decoders)} if decoders else {}
    tokenizer = json.loads(tokenizer_path.read_text(encoding="utf-8"))
    tokenizer = {key: value for key, value in tokenizer.items() if key not in _SESSION_KEYS}
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(config_path, with_both_spellings(config))
    write_json(tokenizer_path, tokenizer)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file of a checkpoint, keys in order."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
