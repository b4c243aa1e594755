"""Checkpoint tensors to the weights of a `Transformer`: one arrangement for files and for modules of transformers."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from refusion_eval.errors import CheckpointError
from refusion_eval.models.adapter import LoraAdapter
from refusion_eval.models.config import ModelConfig
from refusion_eval.models.families import FAMILIES
from refusion_eval.models.files import CheckpointFiles
from refusion_eval.models.layers import dense_along_first
from refusion_eval.models.transformer import LayerWeights, Weights

log = logging.getLogger(__name__)


class Stack(Protocol):
    """Stacks tensors of a checkpoint along their first axis."""

    def __call__(self, shape: tuple[int, ...], parts: Mapping[str, int], *, matrix: bool = False) -> Tensor:
        """Returns the stacked tensor.

        Args:
            shape: shape of the result.
            parts: name of each tensor -> its number of rows.
            matrix: whether rows are multiplied with the result, so that its layout is chosen for speed.
        """
        ...


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    adapter: LoraAdapter | None = None,
) -> Weights:
    """Loads a checkpoint, one tensor in memory at a time besides the model itself, and casts it to `dtype`.

    Args:
        directory: as `CheckpointFiles` takes it.
        config: shapes of the checkpoint.
        dtype: dtype of all weights.
        device: device of all weights.
        adapter: merged into the weights before they are cast.

    Raises:
        CheckpointError: as `CheckpointFiles`; or a weight is NaN or infinite.
    """
    files = CheckpointFiles(directory)

    def stack(shape: tuple[int, ...], parts: Mapping[str, int], *, matrix: bool = False) -> Tensor:
        if matrix and dense_along_first(math.prod(shape), dtype, device):
            target = torch.empty(shape[::-1], dtype=dtype).t()
        else:
            target = torch.empty(shape, dtype=dtype, device=device)
        start = 0
        for name, num_rows in parts.items():
            tensor = files.read(name, (num_rows, *shape[1:]))
            rows = target[start : start + num_rows]
            rows.copy_(tensor if adapter is None else adapter.merge(name, tensor))
            # Checked at the destination: a GPU reads its own memory fastest.
            if not _is_finite(rows):
                raise _not_finite(files.place_of(name), tensor, dtype)
            start += num_rows
        return target

    weights = arrange_weights(config, stack)
    unread = [name for name in files.unread if not (config.tied_head and name == head_name(config))]
    if unread:
        log.warning("%s: %d tensors are not used: %s", directory, len(unread), ", ".join(unread[:3]))
    return weights


def head_name(config: ModelConfig) -> str:
    """Name of the output head's tensor in checkpoints of this family."""
    return f"{FAMILIES[config.family].tensors.head}.weight"


def arrange_weights(config: ModelConfig, stack: Stack) -> Weights:
    """Arranges the tensors of a checkpoint of any family as the weights of a `Transformer`.

    Args:
        config: shapes and family of the checkpoint.
        stack: gives its tensors.
    """
    names = FAMILIES[config.family].tensors
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
    """Whether no entry is NaN or infinite; checks the extremes, which needs no copy."""
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
