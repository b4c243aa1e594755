"""The losses: weighted cross-entropy at the labelled places, next-token (AR) plus masked (MDM), Eq. 1-3."""

from typing import NamedTuple

import torch
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from refusion_eval.training.collate import Batch, Targets


class Losses(NamedTuple):
    """The two terms of the hybrid loss; either is 0 when nothing is labelled for it."""

    ar: torch.Tensor
    mdm: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        """AR + MDM (lambda = 1)."""
        return self.ar + self.mdm


def weighted_cross_entropy(logits_RV: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Sum over places of weight times cross-entropy, in float32; 0 (with zero gradients) without places."""
    losses_R = functional.cross_entropy(logits_RV.float(), targets.labels_R, reduction="none")
    return (losses_R * targets.weights_R).sum()


def hybrid_loss(model: Qwen3ForCausalLM, batch: Batch) -> Losses:
    """One forward of the batch; only labelled places are projected to the vocabulary.

    With AR targets alone this is AR pre-training or fine-tuning, with both it is ReFusion's objective, and with MDM
    targets alone that of a masked diffusion model, as the batch's divisors and visibility have it.
    """
    hidden_BTD = model.model(
        input_ids=batch.tokens_BT,
        position_ids=batch.positions_BT,
        attention_mask=_attention_mask(batch, model.dtype),
        use_cache=False,
    ).last_hidden_state
    hidden_ND = hidden_BTD.flatten(0, 1)
    logits_RV = model.lm_head(hidden_ND[torch.cat([batch.ar.rows_R, batch.mdm.rows_R])])
    ar_logits, mdm_logits = logits_RV.split([len(batch.ar.rows_R), len(batch.mdm.rows_R)])
    return Losses(weighted_cross_entropy(ar_logits, batch.ar), weighted_cross_entropy(mdm_logits, batch.mdm))


def _attention_mask(batch: Batch, dtype: torch.dtype) -> torch.Tensor:
    """[B, T] of ones for causal attention, else [B, 1, T, T] to be added to the scores."""
    if batch.visibility is None:
        # It says "one sequence a row": without it transformers takes jumps in the position ids for the borders of
        # packed sequences and cuts attention at every reordered slot.
        return torch.ones_like(batch.tokens_BT)
    visible_BTT = batch.visibility.mask()
    mask_BTT = torch.zeros(visible_BTT.shape, dtype=dtype, device=visible_BTT.device)
    return mask_BTT.masked_fill(~visible_BTT, float("-inf"))[:, None]
