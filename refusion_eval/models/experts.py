"""Mixtures of experts: each row chooses a few of the small MLPs of a layer, whose weighted sum it adds.

Shapes: T rows, C residual width, E experts, I width of an expert, J experts that a row chooses, P = T J pairs of a row
and an expert.
"""

import torch
from torch import Tensor
from torch.library import custom_op

from refusion_eval.models.checkpoint import Experts
from refusion_eval.models.layers import linear, swiglu
from refusion_eval.models.weights import ExpertWeights


def route(normed_TC: Tensor, weights: ExpertWeights, experts: Experts) -> tuple[Tensor, Tensor]:
    """The experts that each row chooses, and their shares of its sum, both [T, J]; on the device."""
    if experts.score == "softmax":  # Qwen3-MoE
        shares_TJ, ids_TJ = linear(normed_TC, weights.router).float().softmax(dim=-1).topk(experts.num_chosen, dim=-1)
        if experts.normalised:
            shares_TJ = shares_TJ / shares_TJ.sum(dim=-1, keepdim=True)
        return ids_TJ, shares_TJ.to(normed_TC.dtype)
    # LLaDA2 computes in float32, chooses by scores with a bias, and takes the shares without it, which stay float32.
    scores_TE = linear(normed_TC.float(), weights.router).sigmoid()
    ranked_TE = scores_TE if weights.bias is None else scores_TE + weights.bias
    if experts.num_groups > 1:
        by_group = ranked_TE.unflatten(1, (experts.num_groups, -1))
        best_TG = by_group.topk(2, dim=-1).values.sum(dim=-1)
        kept = best_TG.topk(experts.num_kept_groups, dim=-1).indices
        is_out_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(1, kept, False)
        ranked_TE = by_group.masked_fill(is_out_TG[:, :, None], float("-inf")).flatten(1)
    ids_TJ = ranked_TE.topk(experts.num_chosen, dim=-1).indices
    shares_TJ = scores_TE.gather(1, ids_TJ)
    if experts.num_chosen > 1:
        shares_TJ = shares_TJ / (shares_TJ.sum(dim=-1, keepdim=True) + 1e-20)
    return ids_TJ, shares_TJ * experts.scale


@custom_op("refusion_eval::mix_experts", mutates_args=("num_read",))
def mix_experts(
    x_TC: Tensor, ids_TJ: Tensor, shares_TJ: Tensor, gate_up_EIC: Tensor, down_ECI: Tensor, num_read: Tensor
) -> Tensor:
    """The weighted sum of the experts that each row chose, [T, C]; an expert that no row chose is not read.

    Args:
        ids_TJ: experts of each row; E for none, as in rows of padding, whose sum is 0.
        shares_TJ: shares of the sum, which is computed in the wider dtype of theirs and that of the rows.
        gate_up_EIC: gate and up projection of each expert in one matrix, [E, 2 I, C].
        num_read: a number to which the number of experts that were read is added, int64.
    """
    # Rows sorted by expert: one product for each expert that was chosen, over all of its rows.
    sorted_P, order_P = ids_TJ.flatten().sort(stable=True)
    rows_P = order_P // ids_TJ.shape[1]
    chosen, counts = sorted_P.unique_consecutive(return_counts=True)
    sum_TC, first = torch.zeros_like(x_TC, dtype=torch.promote_types(x_TC.dtype, shares_TJ.dtype)), 0
    for expert, count in zip(chosen.tolist(), counts.tolist(), strict=True):
        if expert == len(gate_up_EIC):  # the last ones
            break
        rows = rows_P[first : first + count]
        result = linear(swiglu(linear(x_TC[rows], gate_up_EIC[expert])), down_ECI[expert])
        shares = shares_TJ.flatten()[order_P[first : first + count]]
        sum_TC.index_add_(0, rows, result * shares[:, None])
        num_read += 1
        first += count
    return sum_TC.to(x_TC.dtype)
