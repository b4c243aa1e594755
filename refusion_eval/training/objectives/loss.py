"""The loss: weighted cross-entropy of the labelled rows, next-token (AR) plus masked (MDM), Eq. 1-3.

Shapes: R labelled rows, N rows of a chunk, D hidden, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from refusion_eval.errors import ConfigError
from refusion_eval.training.data.collate import PackedBatch
from refusion_eval.training.data.packed import computing_dtype, hidden_states

# Number of logits in memory at a time. On a GPU they take 256 MiB in float32, or about 440 rows of Qwen3's vocabulary,
# which is enough to keep the GPU busy. A CPU is as fast with fewer.
CHUNK_LOGITS, CHUNK_LOGITS_ON_CPU = 1 << 26, 1 << 22


class Losses(NamedTuple):
    """The hybrid loss and its two terms, each 0 when nothing is labelled for it."""

    total: torch.Tensor  # AR + lambda MDM, differentiable
    ar: torch.Tensor  # without gradient
    mdm: torch.Tensor  # without lambda and without gradient


class CrossEntropies(NamedTuple):
    total: torch.Tensor  # sum of weight times cross-entropy, differentiable
    row_losses_R: torch.Tensor  # without weights and without gradient


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes gradients with the losses, chunk by chunk, so that logits are neither kept nor computed twice."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: torch.Tensor,
        head_VD: torch.Tensor,
        labels_R: torch.Tensor,
        weights_R: torch.Tensor,
        dtype: torch.dtype,
        rows_per_chunk: int,
        with_gradients: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for_hidden, for_head = (with_gradients and needed for needed in ctx.needs_input_grad[:2])
        row_losses_R = torch.empty(len(labels_R), dtype=torch.float32, device=hidden_RD.device)
        hidden_gradient_RD = torch.empty_like(hidden_RD) if for_hidden else None
        head_gradient_VD = torch.zeros_like(head_VD) if for_head else None
        # Autocast would cache a copy of the head without gradient and return it to later users.
        with torch.autocast(hidden_RD.device.type, enabled=False):
            cast_head_VD = head_VD.to(dtype)
            for start in range(0, len(labels_R), rows_per_chunk):
                rows = slice(start, start + rows_per_chunk)
                chunk_ND, weights_N1 = hidden_RD[rows].to(dtype), weights_R[rows, None]
                # The same memory holds the logits, then their exponentials, then their gradients.
                chunk_NV = functional.linear(chunk_ND, cast_head_VD).float()
                largest_N1, labels_N1 = chunk_NV.amax(dim=1, keepdim=True), labels_R[rows, None]
                label_logits_N1 = chunk_NV.gather(1, labels_N1)
                sums_N1 = chunk_NV.sub_(largest_N1).exp_().sum(dim=1, keepdim=True)
                row_losses_R[rows] = (sums_N1.log() + largest_N1 - label_logits_N1)[:, 0]
                if not (for_hidden or for_head):
                    continue
                gradient_NV = chunk_NV.mul_(weights_N1 / sums_N1).scatter_add_(1, labels_N1, -weights_N1).to(dtype)
                if hidden_gradient_RD is not None:
                    hidden_gradient_RD[rows] = gradient_NV @ cast_head_VD
                if head_gradient_VD is not None and head_gradient_VD.dtype == dtype:
                    head_gradient_VD.addmm_(gradient_NV.T, chunk_ND)
                elif head_gradient_VD is not None:
                    head_gradient_VD += gradient_NV.T @ chunk_ND
        ctx.gradients = (hidden_gradient_RD, head_gradient_VD)
        ctx.mark_non_differentiable(row_losses_R)
        return (row_losses_R * weights_R).sum(), row_losses_R

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, total_gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scales the gradients in place, so that they can be used only once."""
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the loss was differentiated twice; compute it again"
        scaled = (gradient if gradient is None else gradient.mul_(total_gradient) for gradient in gradients)
        return (*scaled, None, None, None, None, None)


def weighted_cross_entropy(
    head: torch.nn.Module | None, hidden_RD: torch.Tensor, labels_R: torch.Tensor, weights_R: torch.Tensor
) -> CrossEntropies:
    """Weighted cross-entropies in float32, in chunks of at most `CHUNK_LOGITS` logits, with exact gradients."""
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        raise ConfigError(f"the loss needs a linear output layer without bias, not {head}; keep adapters off it")
    dtype = computing_dtype(head.weight)
    if dtype == torch.float16:
        raise ConfigError("the gradients of the loss vanish in float16; train in bfloat16 or float32")
    chunk_logits = CHUNK_LOGITS_ON_CPU if hidden_RD.device.type == "cpu" else CHUNK_LOGITS
    rows_per_chunk = max(chunk_logits // head.weight.shape[0], 1)
    total, row_losses_R = _ChunkedCrossEntropy.apply(
        hidden_RD, head.weight, labels_R, weights_R, dtype, rows_per_chunk, torch.is_grad_enabled()
    )
    return CrossEntropies(total, row_losses_R)


def hybrid_loss(model: PreTrainedModel, batch: PackedBatch, *, mdm_weight: float = 1.0) -> Losses:
    """Loss of one forward; only labelled rows go through the last MLP and to the vocabulary."""
    ar, mdm = batch.ar, batch.mdm
    hidden_RD = hidden_states(model, batch, torch.cat([ar.rows_R, mdm.rows_R]))
    weights_R = torch.cat([ar.weights_R, mdm_weight * mdm.weights_R])
    labels_R = torch.cat([ar.labels_R, mdm.labels_R])
    losses = weighted_cross_entropy(model.get_output_embeddings(), hidden_RD, labels_R, weights_R)
    ar_R, mdm_R = losses.row_losses_R.split([len(ar.rows_R), len(mdm.rows_R)])
    return Losses(losses.total, (ar_R * ar.weights_R).sum(), (mdm_R * mdm.weights_R).sum())
