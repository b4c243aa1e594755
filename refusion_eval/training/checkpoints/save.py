"""Writes a model as a Hugging Face checkpoint directory, completely or not at all."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from refusion_eval.models.weights import INDEX_FILE
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

    `model` does not change. The directory is built beside `target` and renamed at the end, so that a crash leaves the
    previous checkpoint.

    Args:
        model: a model of transformers, or a model of peft around one, which takes the memory of a merged copy.
        decoders: decoders that the model was trained for, the main one first, for config.json
            (`refusion_eval.models.checkpoint`); without any, readers choose.
    """
    plain = merged_copy(model) if is_adapted(model) else model
    state = plain.state_dict()
    if plain.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    with replacing(target) as part:
        write_shards(part, shapes, plain.dtype, state.__getitem__)
        plain.config.save_pretrained(part)
        if plain.generation_config is not None:
            plain.generation_config.save_pretrained(part)
        tokenizer.save_pretrained(part)
        _make_portable(part, type(plain).__name__, plain.dtype, decoders)
        if is_adapted(model):
            save_adapter(model, part / ADAPTER_FOLDER)


def write_shards(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, read: Callable[[str], Tensor]
) -> None:
    """Writes model.safetensors, or shards of at most `SHARD_BYTES` (or one tensor) and their index.

    Only the tensors of one shard are read at a time; `huggingface_hub.save_torch_state_dict` would need all of them.

    Args:
        shapes: shape of every tensor, by name, in the order in which the tensors fill the shards.
    """
    sizes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=SHARD_BYTES)
    for file_name, names in split.filename_to_tensors.items():
        tensors = {name: read(name).detach().to("cpu").contiguous() for name in names}
        save_file(tensors, directory / file_name, metadata={"format": "pt"})
    if split.is_sharded:
        write_json(directory / INDEX_FILE, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


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


def _make_portable(directory: Path, architecture: str, dtype: torch.dtype, decoders: Sequence[str]) -> None:
    config_path, tokenizer_path = directory / "config.json", directory / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config |= {"architectures": [architecture], "dtype": str(dtype).removeprefix("torch.")}
    config.pop("decoders", None)  # those of the checkpoint that the training started from
    config |= {"decoders": list(decoders)} if decoders else {}
    tokenizer = json.loads(tokenizer_path.read_text(encoding="utf-8"))
    tokenizer = {key: value for key, value in tokenizer.items() if key not in _SESSION_KEYS}
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(config_path, with_both_spellings(config))
    write_json(tokenizer_path, tokenizer)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file with sorted keys."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
