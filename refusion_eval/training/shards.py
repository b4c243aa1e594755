"""Weights as safetensors shards of bounded size, each tensor made when its shard is written."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from refusion_eval.models.files import INDEX_FILE

SHARD_BYTES = 5 * 10**9


class Entry(NamedTuple):
    """A tensor to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_shards(
    directory: Path, entries: Mapping[str, Entry], read: Callable[[str], Tensor], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes model.safetensors, or shards and their index where one file would exceed `shard_bytes`.

    No more than one shard is in memory, beside what `read` holds.

    Args:
        directory: is there already.
        entries: all tensors, in the order in which they fill the shards.
        read: the tensor of a name, on any device, as its entry says.
        shard_bytes: of one file at most, or of one tensor if that is larger.
    """
    shards = _shards(entries, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        several = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file_name = several if len(shards) > 1 else "model.safetensors"
        tensors = {name: read(name).detach().to("cpu").contiguous() for name in names}
        for name, tensor in tensors.items():
            assert Entry(tuple(tensor.shape), tensor.dtype) == entries[name], name
        save_file(tensors, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file_name)
    if len(shards) > 1:
        total = sum(entry.num_bytes for entry in entries.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _shards(entries: Mapping[str, Entry], shard_bytes: int) -> Sequence[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, entry in entries.items():
        if shards[-1] and filled + entry.num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += entry.num_bytes
    return shards
