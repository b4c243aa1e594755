"""Reads the safetensors files of a checkpoint, one tensor at a time, and arranges them for a `Transformer`."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from refusion_eval.errors import CheckpointError
from refusion_eval.models.config import ModelConfig, read_json
from refusion_eval.models.layers import LayerWeights, Weights, dense_along_first

log = logging.getLogger(__name__)

_BASE = "model."  # the prefix of the base model inside a language model
INDEX_FILE = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SAFETENSORS = ".safetensors"
UNQUANTISED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CheckpointFiles:
    """The tensors of a checkpoint directory, in one file or in shards.

    Files and tensors are chosen as transformers chooses them: one file before an index, of a tensor that is in several
    shards the last, and names with or without the prefix of the base model. What is passed over is said.

    Raises:
        CheckpointError: no weights, only pickled weights, a missing shard, or a file that is not safetensors.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._shard_of: dict[str, Path] = {}
        doubled = {}
        for path in _shard_paths(directory):
            for name in open_tensors(path).keys():  # noqa: SIM118 - a file, not a mapping
                if name in self._shard_of:
                    doubled[name] = f"{name} of {path.name}, not of {self._shard_of[name].name}"
                self._shard_of[name] = path
        if doubled:
            log.warning(
                "%s: %d tensors are in several files, and the last one counts: %s",
                *(directory, len(doubled), ", ".join(list(doubled.values())[:3])),
            )
        self._unread = set(self._shard_of)

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        """One tensor, in the dtype of the file; refuses one that is missing, quantised or of another shape."""
        tensor = self.find(name)
        if tensor is None:
            raise CheckpointError(
                f"{self._directory} has no tensor {name} (of {len(self._shard_of)} tensors); "
                "the checkpoint is incomplete or does not fit its config.json"
            )
        self.pass_over(name)
        path = self._shard_of[self._stored(name)]
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

    def find(self, name: str) -> Tensor | None:
        """One tensor whatever its shape and dtype, without taking note that it was read; None if it is not there."""
        stored = self._stored(name)
        path = self._shard_of.get(stored)
        # A file is opened again for each tensor: the pages of an open one would stay in memory beside the model.
        return None if path is None else open_tensors(path).get_tensor(stored)

    def pass_over(self, name: str) -> None:
        """Takes note that a tensor was read, or need not be."""
        self._unread.discard(self._stored(name))

    def _stored(self, name: str) -> str:
        """The name under which a tensor is saved, which may lack the prefix of the base model, or have it besides."""
        candidates = (name, name.removeprefix(_BASE), f"{_BASE}{name}")
        return next((candidate for candidate in candidates if candidate in self._shard_of), name)

    def place_of(self, name: str) -> str:
        """File and name of a tensor that exists, for messages."""
        return f"{self._shard_of[self._stored(name)]}: {name}"

    @property
    def unread(self) -> list[str]:
        """Names of the tensors that were not read, without tables that this project computes."""
        return sorted(name for name in self._unread if not name.endswith("rotary_emb.inv_freq"))


def _shard_paths(directory: Path) -> list[Path]:
    index_path, single_path = directory / INDEX_FILE, directory / "model.safetensors"
    if single_path.is_file():
        if index_path.is_file():
            log.warning("%s: %s is read, and not the shards of %s", directory, single_path.name, INDEX_FILE)
        return [single_path]
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
    raise no_weights(directory, f"neither model.safetensors nor {INDEX_FILE}")


def _shard_name(index_path: Path, value: object) -> str:
    # An index leads neither out of its folder nor to a pickle.
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
    """Opens a safetensors file, reading its header only."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is truncated or not safetensors ({error}); download the file again"
        ) from error


class Stack(Protocol):
    """Stacks tensors of a checkpoint (name -> rows) along their first axis."""

    def __call__(self, shape: tuple[int, ...], parts: Mapping[str, int], *, matrix: bool = False) -> Tensor:
        """Returns the stacked tensor; `matrix` says that rows are multiplied with it, so its layout is for speed."""
        ...


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    merge: Callable[[str, Tensor], Tensor] | None = None,
) -> Weights:
    """Loads a checkpoint, one tensor in memory at a time besides the model itself, and casts it to `dtype`."""
    files = CheckpointFiles(directory)

    def stack(shape: tuple[int, ...], parts: Mapping[str, int], *, matrix: bool = False) -> Tensor:
        # Stacked at once into the final tensor, so that the parts never lie beside the whole.
        if matrix and dense_along_first(math.prod(shape), dtype, device):
            target = torch.empty(shape[::-1], dtype=dtype).t()
        else:
            target = torch.empty(shape, dtype=dtype, device=device)
        start = 0
        for name, num_rows in parts.items():
            tensor = files.read(name, (num_rows, *shape[1:]))
            rows = target[start : start + num_rows]
            rows.copy_(tensor if merge is None else merge(name, tensor))
            # Checked at the destination: a GPU reads its own memory fastest.
            if not _is_finite(rows):
                raise _not_finite(files.place_of(name), tensor, dtype)
            start += num_rows
        return target

    as_saved = with_saved_head(config, files.find, str(directory))
    if as_saved.tied_head:
        files.pass_over(head_name(as_saved))
    weights = arrange_weights(as_saved, stack)
    if files.unread:
        log.warning("%s: %d tensors are not used: %s", directory, len(files.unread), ", ".join(files.unread[:3]))
    return weights


def with_saved_head(config: ModelConfig, find: Callable[[str], Tensor | None], place: str) -> ModelConfig:
    """The config with the embedding and the output head that transformers loads where config.json ties them.

    Args:
        find: returns a tensor of the checkpoint by its name; None if it has no such tensor.
    """
    # They are one matrix where the checkpoint has one of them, or both with equal values. Otherwise each is its own.
    if not config.tied_head:
        return config
    head = find(head_name(config))
    if head is None:
        return config
    embedding = find(f"{config.tensors.embedding}.weight")
    if embedding is None:
        family = config.family_layout
        return replace(config, layout=replace(family, tensors=replace(family.tensors, embedding=family.tensors.head)))
    both = torch.promote_types(head.dtype, embedding.dtype)
    if head is embedding or torch.equal(head.to(both), embedding.to(both)):
        return config
    log.warning(
        "%s: config.json ties the output head to the embedding (tie_word_embeddings), but %s has values of its own, "
        "which are used, as transformers uses them",
        *(place, head_name(config)),
    )
    return replace(config, tied_head=False)


def head_name(config: ModelConfig) -> str:
    """Name of the output head's tensor in checkpoints of this family."""
    return f"{config.tensors.head}.weight"


def arrange_weights(config: ModelConfig, stack: Stack) -> Weights:
    """Arranges the tensors of a checkpoint of any family as the weights of a `Transformer`."""
    names = config.tensors
    width, head_dim, mlp = config.hidden_size, config.head_dim, config.intermediate_size
    num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
    q_rows, kv_rows = num_heads * head_dim, num_kv_heads * head_dim
    num_qkv = q_rows + 2 * kv_rows

    def layer(index: int) -> LayerWeights:
        prefix = names.layer.format(index)
        qkv_rows = {prefix + names.q: q_rows, prefix + names.k: kv_rows, prefix + names.v: kv_rows}
        qkv_bias = qk_norm = None
        if config.qkv_bias:
            qkv_bias = stack((num_qkv,), {f"{module}.bias": rows for module, rows in qkv_rows.items()})
        if config.qk_norm:
            q_norm = stack((head_dim,), {f"{prefix}{names.q_norm}.weight": head_dim})
            k_norm = stack((head_dim,), {f"{prefix}{names.k_norm}.weight": head_dim})
            # One scale for all heads of a kind; a row for each head lets one call norm queries and keys.
            qk_norm = torch.cat((q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1)))

        def matrix(num_columns: int, rows_of: Mapping[str, int]) -> Tensor:
            rows = {f"{module}.weight": num_rows for module, num_rows in rows_of.items()}
            return stack((sum(rows.values()), num_columns), rows, matrix=True)

        return LayerWeights(
            input_norm=stack((width,), {f"{prefix}{names.input_norm}.weight": width}),
            qkv=matrix(width, qkv_rows),
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            out=matrix(q_rows, {prefix + names.out: width}),
            mlp_norm=stack((width,), {f"{prefix}{names.mlp_norm}.weight": width}),
            gate_up=matrix(width, {prefix + names.gate: mlp, prefix + names.up: mlp}),
            down=matrix(mlp, {prefix + names.down: width}),
        )

    vocab_shape = (config.vocab_size, width)
    embedding = stack(vocab_shape, {f"{names.embedding}.weight": config.vocab_size})
    return Weights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=stack((width,), {f"{names.final_norm}.weight": width}),
        head=embedding if config.tied_head else stack(vocab_shape, {head_name(config): config.vocab_size}),
    )


def _is_finite(tensor: Tensor) -> bool:
    # The extremes are NaN or infinite if any entry is, and finding them needs no copy.
    return tensor.numel() == 0 or all(math.isfinite(extreme) for extreme in torch.aminmax(tensor))


def _not_finite(place: str, saved: Tensor, dtype: torch.dtype) -> CheckpointError:
    """The error for a weight that is NaN or infinite in the file, or became so when it was merged or cast."""
    if _is_finite(saved):
        return CheckpointError(
            f"{place} is beyond the range of {dtype}, or the adapter makes it so; load it with dtype=bfloat16 or "
            "float32, without or with another adapter"
        )
    what = "NaN" if bool(saved.isnan().any()) else "infinite"
    return CheckpointError(
        f"{place} holds {what} values; the checkpoint is damaged or its training diverged: download the file again, "
        "or take an earlier checkpoint"
    )
