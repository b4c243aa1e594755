"""The approximate caches of single papers: dLLM-Cache (arXiv 2506.06295) and Sparse-dLLM (arXiv 2508.02558).

Shapes: T rows of the forward, P computed rows, R rows of the response, Q query rows that are averaged, K key rows that
are scored, C residual width, H query heads, G key-value heads, D head width.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, max_pool1d

from refusion_eval.errors import DecodeError
from refusion_eval.models.attention import Attend, grouped_attention, sees_everything
from refusion_eval.models.cache import Features, KVCache, ScoredRows
from refusion_eval.models.transformer import Transformer
from refusion_eval.types import FeatureReuse, Forward, RowScores

# By how much rounding moves the cosine of two equal vectors from 1, also of vectors in bfloat16.
ROUNDING = 1e-5


def check_scores(forward: Forward, scores: RowScores) -> None:
    num_rows, is_odd = len(forward.tokens), scores.pooling > 0 and scores.pooling % 2 == 1
    has_rows = scores.queries and all(0 <= row < num_rows for row in (*scores.queries, *scores.keys))
    if not (has_rows and is_odd and 0 <= scores.best <= len(scores.keys)):
        rule = "it takes at least one query, an odd number to pool, and at least as many keys as are best"
        raise DecodeError(f"{forward.kind}: {scores} of {num_rows} rows; {rule}")


def check_reuse(forward: Forward, reuse: FeatureReuse, cache: KVCache, sequence: int) -> None:
    if cache.lengths[sequence] or not sees_everything(forward.attention):
        rule = "features are reused only by a whole text with full attention and an empty cache"
        rows = f"{cache.lengths[sequence]} cached rows, attention {forward.attention}"
        raise DecodeError(f"{forward.kind}: {rows}; {rule}")
    if not 0 <= reuse.num_prompt <= len(forward.tokens) or not 0 <= reuse.transfer_ratio <= 1:
        raise DecodeError(f"{forward.kind}: {reuse} does not fit a forward of {len(forward.tokens)} rows")
    if _stored(cache, sequence, forward) is None and not (reuse.refresh_prompt and reuse.refresh_response):
        rule = "no forward of these rows has been computed before; refresh prompt and response first"
        raise DecodeError(f"{forward.kind}: {reuse} leaves rows out, and {rule}")


def _stored(cache: KVCache, sequence: int, forward: Forward) -> Features | None:
    features = cache.states[sequence]
    if isinstance(features, Features) and features.positions == list(forward.positions):
        return features
    return None


def hidden_with_reuse(
    model: Transformer, cache: KVCache, sequence: int, forward: Forward, reuse: FeatureReuse
) -> Tensor:
    """The residual stream of all rows of a forward before the final norm, [T, C]; updates the sequence's features."""
    features = _stored(cache, sequence, forward)
    if features is None:
        features = Features(model.config, forward.positions, model.dtype, model.device)
        cache.states[sequence] = features
    numbers = np.array([forward.tokens, forward.positions], dtype=np.int64)
    tokens_T, positions_T = torch.from_numpy(numbers).to(model.device)
    cos_T1D, sin_T1D = model.rotary.lookup(positions_T, max(forward.positions))
    num_prompt, num_rows = reuse.num_prompt, len(forward.tokens)
    refreshed = range(0 if reuse.refresh_prompt else num_prompt, num_rows if reuse.refresh_response else num_prompt)
    refreshed_P = torch.arange(refreshed.start, refreshed.stop, device=model.device)
    num_adapted = 0 if reuse.refresh_response else int((num_rows - num_prompt) * reuse.transfer_ratio)

    x_TC = model.embed(tokens_T)
    for index, layer in enumerate(model.weights.layers):
        keys_GTD, values_GTD = features.keys[index], features.values[index]
        rows_P = refreshed_P
        if not reuse.refresh_response and reuse.transfer_ratio > 0:
            # Values of the whole response are cheap, and how much they changed shows which rows are worth the rest.
            new_RGD, old_GRD = model.values(layer, x_TC[num_prompt:]), values_GTD[:, num_prompt:]
            adapted_P = least_alike(new_RGD, old_GRD.transpose(0, 1), num_adapted)
            rows_P = torch.cat((refreshed_P, adapted_P + num_prompt))
            old_GRD.copy_(new_RGD.transpose(0, 1))
        if len(rows_P):
            q_PHD, k_PGD, v_PGD = model.project(layer, x_TC[rows_P], cos_T1D[rows_P], sin_T1D[rows_P])
            keys_GTD[:, rows_P], values_GTD[:, rows_P] = k_PGD.transpose(0, 1), v_PGD.transpose(0, 1)
            attended_PHD = grouped_attention(q_PHD, keys_GTD, values_GTD, None, is_causal=False)
            features.attended[index, rows_P] = model.merge_heads(layer, attended_PHD)
        # A row that is not computed goes on from its new embedding with the sums of the last time.
        x_TC = x_TC + features.attended[index]
        if len(rows_P):
            features.mlp[index, rows_P] = model.mlp(layer, x_TC[rows_P])
        x_TC = x_TC + features.mlp[index]
    return x_TC


def least_alike(new_RGD: Tensor, old_RGD: Tensor, count: int) -> Tensor:
    """The rows whose vectors changed most, [count]: lowest cosine over all heads, the first rows among equals."""
    alike_R = cosine_similarity(new_RGD.flatten(1).float(), old_RGD.flatten(1).float(), dim=-1)
    # Most rows did not change at all. Rounding, which differs between processors, must not choose among them.
    return alike_R.where(alike_R < 1 - ROUNDING, 1).sort(stable=True).indices[:count]


def row_scores(q_QHD: Tensor, k_KGD: Tensor, pooling: int) -> Tensor:
    """Scores of key rows in one layer, [K], in the dtype of the queries as Sparse-dLLM computes them."""
    # The mean of the products with all queries is the product with their mean.
    query_GRD = q_QHD.mean(dim=0).unflatten(0, (k_KGD.shape[1], -1))
    scores_K = (query_GRD @ k_KGD.permute(1, 2, 0)).flatten(0, 1).mean(dim=0)
    if pooling == 1 or not len(scores_K):
        return scores_K
    return max_pool1d(scores_K[None], pooling, stride=1, padding=pooling // 2)[0]


class ScoringAttend:
    """Attention that scores key rows by query rows before it attends, for Sparse-dLLM."""

    def __init__(self, attend: Attend, forwards: Sequence[tuple[int, Forward]], device: torch.device) -> None:
        self._attend = attend
        # Sequence, what is scored, its query and key rows among all packed rows, and the scores of the layers so far.
        self._scored: list[tuple[int, RowScores, Tensor, Tensor, list[Tensor]]] = []
        first_row = 0
        for sequence, forward in forwards:
            if isinstance(scores := forward.approximation, RowScores):
                rows = (torch.tensor(list(rows), dtype=torch.int64) for rows in (scores.queries, scores.keys))
                queries_Q, keys_K = (first_row + part.to(device) for part in rows)
                self._scored.append((sequence, scores, queries_Q, keys_K, []))
            first_row += len(forward.tokens)

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        for _, scores, queries_Q, keys_K, layers in self._scored:
            layers.append(row_scores(q_THD[queries_Q], k_TGD[keys_K], scores.pooling))
        return self._attend(layer, q_THD, k_TGD, v_TGD)

    def store(self, cache: KVCache) -> None:
        for sequence, scores, _, _, layers in self._scored:
            cache.states[sequence] = ScoredRows(scores.keys, scores.best, torch.stack(layers))
