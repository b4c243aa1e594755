"""Weights as safetensors shards of bounded size, each tensor made when its shard is written."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from refusion_eval.models.files import INDEX_FILE

SHARD_BYTES = 5 * 10**9


def write_shards(directory: Path, sizes: Mapping[str, int], read: Callable[[str], Tensor]) -> None:
    """Writes model.safetensors, or shards of at most `SHARD_BYTES` (or one tensor) and their index.

    No more than one shard is in memory, beside what `read` holds.

    Args:
        directory: is there already.
        sizes: bytes of every tensor, in the order in which they fill the shards.
        read: the tensor of a name, on any device.
    """
    shards = _shards(sizes)
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, start=1):
        several = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file_name = several if len(shards) > 1 else "model.safetensors"
        tensors = {name: read(name).detach().to("cpu").contiguous() for name in names}
        save_file(tensors, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file_name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _shards(sizes: Mapping[str, int]) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards
