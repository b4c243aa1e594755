"""Reads tensors of a checkpoint directory from its safetensors files, one at a time."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from refusion_eval.errors import CheckpointError
from refusion_eval.models.config import read_json

INDEX_FILE = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SAFETENSORS = ".safetensors"
UNQUANTISED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CheckpointFiles:
    """The tensors of a checkpoint directory, in one file or in shards.

    A file is opened again for each tensor. An open file is mapped into memory, and its pages would stay there, in
    addition to the model that they are copied to, until the file is closed.

    Args:
        directory: holds one model.safetensors, or shards and their index.

    Raises:
        CheckpointError: no weights, only pickled weights, a missing shard, or a file that is not safetensors.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._shard_of = {name: path for path in _shard_paths(directory) for name in _names(path)}
        self._unread = set(self._shard_of)

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        """One tensor, in the dtype of the file.

        Raises:
            CheckpointError: the tensor is missing, quantised, or has another shape than the config says.
        """
        path = self._shard_of.get(name)
        if path is None:
            raise CheckpointError(
                f"{self._directory} has no tensor {name} (of {len(self._shard_of)} tensors); "
                "the checkpoint is incomplete or does not fit its config.json"
            )
        self._unread.discard(name)
        tensor: Tensor = open_tensors(path).get_tensor(name)
        if tuple(tensor.shape) != tuple(shape):
            raise CheckpointError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, but config.json means {tuple(shape)}; "
                "take weights and config.json from the same checkpoint"
            )
        if tensor.dtype not in UNQUANTISED:
            raise CheckpointError(
                f"{path}: {name} is {tensor.dtype}; quantised weights are not read, give an unquantised checkpoint"
            )
        return tensor

    def place_of(self, name: str) -> str:
        """File and name of a tensor that exists, for messages."""
        return f"{self._shard_of[name]}: {name}"

    @property
    def unread(self) -> list[str]:
        """Names of the tensors that were not read, without tables that this project computes."""
        return sorted(name for name in self._unread if not name.endswith("rotary_emb.inv_freq"))


def _shard_paths(directory: Path) -> list[Path]:
    index_path, single_path = directory / INDEX_FILE, directory / "model.safetensors"
    if index_path.is_file():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index_path} has no weight_map; download the file again")
        names = sorted({_shard_name(index_path, value) for value in weight_map.values()})
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{directory} lacks {len(missing)} of {len(names)} weight files: {', '.join(missing)}; download them"
            )
        return [directory / name for name in names]
    if single_path.is_file():
        return [single_path]
    raise no_weights(directory, f"neither model.safetensors nor {INDEX_FILE}")


def _shard_name(index_path: Path, value: object) -> str:
    """A file name of an index. Anything else is refused: an index leads neither out of its folder nor to a pickle."""
    if not isinstance(value, str) or Path(value).name != value or not value.endswith(SAFETENSORS):
        raise CheckpointError(
            f"{index_path} names the weight file {value!r}; only {SAFETENSORS} files beside it are read: correct the "
            "index or download it again"
        )
    return value


def no_weights(directory: Path, absent: str) -> CheckpointError:
    """The error for a directory without readable weights; `absent` says which files it lacks."""
    pickled = sorted(path.name for pattern in PICKLED for path in directory.glob(pattern))
    if pickled:
        return CheckpointError(
            f"{directory} has only pickled weights ({', '.join(pickled)}), which can run code when they are opened; "
            "convert them to safetensors first"
        )
    return CheckpointError(f"{directory} has no weights: {absent}; download them")


def open_tensors(path: Path) -> safe_open:
    """Opens a safetensors file, reading its header only.

    Raises:
        CheckpointError: it is truncated or something else.
    """
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is truncated or not safetensors ({error}); download the file again"
        ) from error


def _names(path: Path) -> list[str]:
    return list(open_tensors(path).keys())
