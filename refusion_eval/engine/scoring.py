"""Log-probabilities of given texts under the causal reading of a model: in log space, float32, without a cache."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from refusion_eval.engine.readout import MAX_LOGITS
from refusion_eval.models.attention import SideBySide
from refusion_eval.models.transformer import Transformer
from refusion_eval.types import TokenArray

TokenPair = tuple[Sequence[int], Sequence[int]]


class TokenScore(NamedTuple):
    """Score of one continuation: its log-probability in nats, and whether greedy decoding would give it."""

    log_prob: float
    is_greedy: bool


def score_many(model: Transformer, pairs: Sequence[TokenPair], batch_size: int) -> list[TokenScore]:
    """Scores continuations, `batch_size` in one forward.

    Args:
        model: the transformer.
        pairs: (prefix, continuation) token ids, none of them empty.
        batch_size: pairs in one forward, >= 1.

    Returns:
        One score for each pair, in their order.
    """
    scores: list[TokenScore] = []
    for start in range(0, len(pairs), batch_size):
        scores += _score_batch(model, pairs[start : start + batch_size])
    return scores


def _score_batch(model: Transformer, pairs: Sequence[TokenPair]) -> list[TokenScore]:
    # The last token is only a target, so it is not fed.
    texts = [np.array([*prefix, *continuation][:-1], dtype=np.int64) for prefix, continuation in pairs]
    hidden_TC, starts = run_side_by_side(model, texts, is_causal=True)
    rows = [
        start + row
        for start, text, (prefix, _) in zip(starts, texts, pairs, strict=True)
        for row in range(len(prefix) - 1, len(text))
    ]
    targets = [token for _, continuation in pairs for token in continuation]
    log_probs, is_greedy = score_targets(model, hidden_TC, rows, targets)

    scores, start = [], 0
    for _, continuation in pairs:
        part = slice(start, start := start + len(continuation))
        scores.append(TokenScore(math.fsum(log_probs[part]), all(is_greedy[part])))
    return scores


def run_side_by_side(
    model: Transformer,
    texts: Sequence[TokenArray],
    is_causal: bool,
    positions: Sequence[TokenArray] | None = None,
) -> tuple[Tensor, list[int]]:
    """Runs whole texts in one forward; no text sees another.

    Args:
        model: the transformer.
        texts: token ids of each text, at least one.
        is_causal: whether a row sees only the rows of its text up to itself, else all of them.
        positions: position ids of each text's tokens; None is 0, 1, ... .

    Returns:
        The residual stream of all rows, [T, C], and the row at which each text begins.
    """
    widths = [len(text) for text in texts]
    where = np.concatenate([np.arange(width) for width in widths] if positions is None else positions)
    tokens_T, positions_T = torch.from_numpy(np.stack([np.concatenate(texts), where])).to(model.device)
    hidden_TC = model.hidden(tokens_T, positions_T, int(where.max()), SideBySide(widths, is_causal))
    return hidden_TC, np.cumsum([0, *widths[:-1]]).tolist()


@torch.inference_mode()
def score_targets(
    model: Transformer, hidden_TC: Tensor, rows: Sequence[int], targets: Sequence[int]
) -> tuple[list[float], list[bool]]:
    """Returns the log-probability of one token a row, and whether it has the largest logit.

    Args:
        model: the transformer.
        hidden_TC: residual stream of a forward.
        rows: rows of the residual stream, at least one.
        targets: token ids, one a row.
    """
    rows_N, targets_N = torch.from_numpy(np.array([rows, targets], dtype=np.int64)).to(model.device)
    chunk = max(1, MAX_LOGITS // model.config.vocab_size)
    parts = []
    for rows_part, targets_part in zip(rows_N.split(chunk), targets_N.split(chunk), strict=True):
        logits_NV = model.logits(hidden_TC[rows_part])
        target_logit_N = logits_NV.gather(1, targets_part[:, None])[:, 0]
        is_greedy_N = logits_NV.argmax(dim=-1) == targets_part
        parts.append(torch.stack((target_logit_N - logits_NV.logsumexp(dim=-1), is_greedy_N.float())))
    log_probs, is_greedy = torch.cat(parts, dim=1).cpu().tolist()
    return log_probs, [flag == 1 for flag in is_greedy]
