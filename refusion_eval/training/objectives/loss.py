"""The losses: weighted cross-entropy at the labelled rows, next-token (AR) plus masked (MDM), Eq. 1-3.

Shapes: R labelled rows, N rows of a chunk, D hidden, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from refusion_eval.errors import ConfigError
from refusion_eval.training.data.collate import PackedBatch
from refusion_eval.training.data.packed import computing_dtype, hidden_states

# Logits that exist at a time: on a GPU 256 MiB in float32, some 440 rows of Qwen3's vocabulary, enough to keep it busy.
# A CPU is as fast with less.
CHUNK_LOGITS, CHUNK_LOGITS_ON_CPU = 1 << 26, 1 << 22


class Losses(NamedTuple):
    """The hybrid loss and its two terms; either term is 0 when nothing is labelled for it.

    Attributes:
        total: AR + lambda MDM, to be differentiated.
        ar, mdm: the terms, without lambda, to be read only.
    """

    total: torch.Tensor
    ar: torch.Tensor
    mdm: torch.Tensor


class CrossEntropies(NamedTuple):
    """Cross-entropies of some rows.

    Attributes:
        total: sum of weight times cross-entropy, to be differentiated.
        each_R: cross-entropy of each row, to be read only.
    """

    total: torch.Tensor
    each_R: torch.Tensor


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Gradients are computed with the losses, chunk by chunk, so that no chunk's logits are kept or made twice."""

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
        each_R = torch.empty(len(labels_R), dtype=torch.float32, device=hidden_RD.device)
        hidden_gradient_RD = torch.empty_like(hidden_RD) if for_hidden else None
        head_gradient_VD = torch.zeros_like(head_VD) if for_head else None
        # Autocast would keep a copy of the head that knows no gradient, and hand it to later users.
        with torch.autocast(hidden_RD.device.type, enabled=False):
            cast_head_VD = head_VD.to(dtype)
            for start in range(0, len(labels_R), rows_per_chunk):
                rows = slice(start, start + rows_per_chunk)
                chunk_ND, weights_N1 = hidden_RD[rows].to(dtype), weights_R[rows, None]
                # Logits, their exponentials and their gradients in turn, in the same memory.
                chunk_NV = functional.linear(chunk_ND, cast_head_VD).float()
                largest_N1, labels_N1 = chunk_NV.amax(dim=1, keepdim=True), labels_R[rows, None]
                of_labels_N1 = chunk_NV.gather(1, labels_N1)
                sums_N1 = chunk_NV.sub_(largest_N1).exp_().sum(dim=1, keepdim=True)
                each_R[rows] = (sums_N1.log() + largest_N1 - of_labels_N1)[:, 0]
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
        ctx.mark_non_differentiable(each_R)
        return (each_R * weights_R).sum(), each_R

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_total: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scales the gradients in place, so that they serve once."""
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the loss was differentiated twice; compute it anew"
        scaled = (gradient if gradient is None else gradient.mul_(of_total) for gradient in gradients)
        return (*scaled, None, None, None, None, None)


def weighted_cross_entropy(
    head: torch.nn.Module | None,
    hidden_RD: torch.Tensor,
    labels_R: torch.Tensor,
    weights_R: torch.Tensor,
    *,
    chunk_logits: int | None = None,
) -> CrossEntropies:
    """Weighted cross-entropies in float32, without ever holding the logits of all rows; exact, gradients included.

    Args:
        head: the layer from hidden states to logits; its matrix may be that of the embeddings.
        hidden_RD: states of the labelled rows; without rows the total is 0 and has zero gradients.
        labels_R: token ids.
        weights_R: float32 factors; they get no gradient.
        chunk_logits: how many logits there may be at a time, at least those of one row; None is what suits the device.

    Raises:
        ConfigError: the head is no plain matrix, or works in float16, in which gradients before scaling vanish.
    """
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        raise ConfigError(
            f"the model's output layer is {head}; the loss knows a linear layer without bias, so keep adapters off it"
        )
    dtype = computing_dtype(head.weight)
    if dtype == torch.float16:
        raise ConfigError(
            "the loss is computed in float16, in which its gradients vanish; train in bfloat16 or float32"
        )
    chunk_logits = chunk_logits or (CHUNK_LOGITS_ON_CPU if hidden_RD.device.type == "cpu" else CHUNK_LOGITS)
    rows_per_chunk = max(chunk_logits // head.weight.shape[0], 1)
    total, each_R = _ChunkedCrossEntropy.apply(
        hidden_RD, head.weight, labels_R, weights_R, dtype, rows_per_chunk, torch.is_grad_enabled()
    )
    return CrossEntropies(total, each_R)


def hybrid_loss(model: PreTrainedModel, batch: PackedBatch, *, mdm_weight: float = 1.0) -> Losses:
    """One forward of the batch; only labelled rows are projected to the vocabulary.

    With AR targets alone this is AR pre-training or fine-tuning, with both it is ReFusion's objective, and with MDM
    targets alone that of a masked diffusion model, as the batch's divisors and sights have it.

    Args:
        model: see `hidden_states`.
        batch: on the model's device.
        mdm_weight: lambda of Eq. 3.
    """
    ar, mdm = batch.ar, batch.mdm
    hidden_RD = hidden_states(model, batch).index_select(0, torch.cat([ar.rows_R, mdm.rows_R]))
    weights_R = torch.cat([ar.weights_R, mdm_weight * mdm.weights_R])
    labels_R = torch.cat([ar.labels_R, mdm.labels_R])
    losses = weighted_cross_entropy(model.get_output_embeddings(), hidden_RD, labels_R, weights_R)
    of_ar, of_mdm = losses.each_R.split([len(ar.rows_R), len(mdm.rows_R)])
    return Losses(losses.total, (of_ar * ar.weights_R).sum(), (of_mdm * mdm.weights_R).sum())
