"""Scores of key rows by query rows, computed in each layer during a forward (`refusion_eval.types.RowScores`).

Shapes: T packed rows, Q query rows that are averaged, K key rows that are scored, H query heads, G key-value heads,
D head width, L layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from refusion_eval.models.cache import KVCache, ScoredRows
from refusion_eval.models.transformer import Attend
from refusion_eval.types import Forward, RowScores


def row_scores(q_QHD: Tensor, k_KGD: Tensor, pooling: int) -> Tensor:
    """Scores of key rows in one layer, [K], in the dtype of the queries as Sparse-dLLM computes them.

    Args:
        q_QHD: rotated queries.
        k_KGD: rotated keys; consecutive ones are neighbours.
        pooling: size of the neighbourhood whose largest score counts, odd.
    """
    query_GRD = q_QHD.mean(dim=0).unflatten(0, (k_KGD.shape[1], -1))
    scores_K = (query_GRD @ k_KGD.permute(1, 2, 0)).flatten(0, 1).mean(dim=0)
    if pooling == 1 or not len(scores_K):
        return scores_K
    return max_pool1d(scores_K[None], pooling, stride=1, padding=pooling // 2)[0]


class _Request:
    """The rows of one sequence that are scored, and their scores in the layers so far."""

    def __init__(self, sequence: int, scores: RowScores, first_row: int, device: torch.device) -> None:
        self.sequence, self.scores = sequence, scores
        self.queries_Q, self.keys_K = (
            torch.tensor([first_row + row for row in rows], dtype=torch.int64, device=device)
            for rows in (scores.queries, scores.keys)
        )
        self.layers: list[Tensor] = []


class ScoringAttend:
    """Attention that scores rows before it attends.

    Args:
        attend: the attention itself.
        forwards: indices of the sequences and their forwards, in the order of their packed rows.
        device: device of the rows.
    """

    def __init__(self, attend: Attend, forwards: Sequence[tuple[int, Forward]], device: torch.device) -> None:
        self._attend = attend
        self._requested: list[_Request] = []
        first_row = 0
        for sequence, forward in forwards:
            if forward.scores is not None:
                self._requested.append(_Request(sequence, forward.scores, first_row, device))
            first_row += len(forward.tokens)

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Scores the rows of one layer, stores keys and values and attends; returns [T, H, D]."""
        for request in self._requested:
            scores = row_scores(q_THD[request.queries_Q], k_TGD[request.keys_K], request.scores.pooling)
            request.layers.append(scores)
        return self._attend(layer, q_THD, k_TGD, v_TGD)

    def store(self, cache: KVCache) -> None:
        """Stores the scores of all layers in the cache, for the next commit of each sequence."""
        for request in self._requested:
            cache.scores[request.sequence] = ScoredRows(request.scores.keys, torch.stack(request.layers))
