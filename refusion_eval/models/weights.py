"""Checkpoint tensors to our weights: streamed from safetensors, one tensor in memory beside the model itself."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path

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


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    adapter: LoraAdapter | None = None,
) -> Weights:
    """Loads a checkpoint, cast to `dtype` on the way.

    Args:
        directory: as `CheckpointFiles` takes it.
        config: its shapes.
        dtype: of all weights.
        device: where they go.
        adapter: merged into them, before they are cast.

    Raises:
        CheckpointError: as `CheckpointFiles`; or a weight is NaN or infinite.
    """
    files = CheckpointFiles(directory)

    def load(shape: tuple[int, ...], parts: Mapping[str, int]) -> Tensor:
        """Tensors stacked along their first axis, each with its number of rows, straight into their final place."""
        return fill(torch.empty(shape, dtype=dtype, device=device), parts)

    def load_matrix(shape: tuple[int, ...], parts: Mapping[str, int]) -> Tensor:
        """Likewise, laid out for products."""
        if dense_along_first(math.prod(shape), dtype, device):
            return fill(torch.empty(shape[::-1], dtype=dtype).t(), parts)
        return load(shape, parts)

    def fill(target: Tensor, parts: Mapping[str, int]) -> Tensor:
        start = 0
        for name, num_rows in parts.items():
            tensor = files.read(name, (num_rows, *target.shape[1:]))
            rows = target[start : start + num_rows]
            rows.copy_(tensor if adapter is None else adapter.merge(name, tensor))
            if not _is_finite(rows):  # where they end up: there a GPU looks through them at the speed of its memory
                raise _not_finite(files.place_of(name), tensor, dtype)
            start += num_rows
        return target

    names = FAMILIES[config.family].tensors
    width, head_dim, mlp = config.hidden_size, config.head_dim, config.intermediate_size
    num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
    q_rows, kv_rows = num_heads * head_dim, num_kv_heads * head_dim

    def layer(index: int) -> LayerWeights:
        prefix = names.layer.format(index)
        qkv_rows = {prefix + names.q: q_rows, prefix + names.k: kv_rows, prefix + names.v: kv_rows}
        num_qkv = q_rows + 2 * kv_rows
        qkv_bias = qk_norm = None
        if config.qkv_bias:
            qkv_bias = load((num_qkv,), {f"{module}.bias": rows for module, rows in qkv_rows.items()})
        if config.qk_norm:
            q_norm = load((head_dim,), {f"{prefix}{names.q_norm}.weight": head_dim})
            k_norm = load((head_dim,), {f"{prefix}{names.k_norm}.weight": head_dim})
            qk_norm = torch.cat((q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1)))
        return LayerWeights(
            input_norm=load((width,), {f"{prefix}{names.input_norm}.weight": width}),
            qkv=load_matrix((num_qkv, width), {f"{module}.weight": rows for module, rows in qkv_rows.items()}),
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            out=load_matrix((width, q_rows), {f"{prefix}{names.out}.weight": width}),
            mlp_norm=load((width,), {f"{prefix}{names.mlp_norm}.weight": width}),
            gate_up=load_matrix(
                (2 * mlp, width), {f"{prefix}{names.gate}.weight": mlp, f"{prefix}{names.up}.weight": mlp}
            ),
            down=load_matrix((width, mlp), {f"{prefix}{names.down}.weight": width}),
        )

    vocab_shape = (config.vocab_size, width)
    embedding = load(vocab_shape, {f"{names.embedding}.weight": config.vocab_size})
    weights = Weights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=load((width,), {f"{names.final_norm}.weight": width}),
        head=embedding if config.tied_head else load(vocab_shape, {f"{names.head}.weight": config.vocab_size}),
    )
    unread = [name for name in files.unread if not (config.tied_head and name == f"{names.head}.weight")]
    if unread:
        log.warning("%s: %d tensors are not used: %s", directory, len(unread), ", ".join(unread[:3]))
    return weights


def _is_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite, without a copy: both show in the extremes."""
    return tensor.numel() == 0 or all(math.isfinite(extreme) for extreme in torch.aminmax(tensor))


def _not_finite(place: str, saved: Tensor, dtype: torch.dtype) -> CheckpointError:
    """The error for a weight that is not a number: saved so, or made so on the way."""
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
