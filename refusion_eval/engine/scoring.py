"""Log-probabilities of given texts under the causal reading of a model: in log space, float32, without a cache."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from refusion_eval.engine.readout import MAX_LOGITS
from refusion_eval.models.attention import SideBySide
from refusion_eval.models.transformer import Transformer

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


@torch.inference_mode()
def _score_batch(model: Transformer, pairs: Sequence[TokenPair]) -> list[TokenScore]:
    texts = [[*prefix, *continuation] for prefix, continuation in pairs]
    # The last token is only a target, so it is not fed.
    widths = [len(text) - 1 for text in texts]
    tokens = [token for text in texts for token in text[:-1]]
    positions = [position for width in widths for position in range(width)]
    tokens_T, positions_T = torch.from_numpy(np.array([tokens, positions], dtype=np.int64)).to(model.device)
    hidden_TC = model.hidden(tokens_T, positions_T, max(positions), SideBySide(widths))

    starts = np.cumsum([0, *widths[:-1]])
    rows = [
        start + row
        for start, (prefix, _), width in zip(starts, pairs, widths, strict=True)
        for row in range(len(prefix) - 1, width)
    ]
    targets = [token for _, continuation in pairs for token in continuation]
    rows_N, targets_N = torch.from_numpy(np.array([rows, targets], dtype=np.int64)).to(model.device)
    found = []
    for rows_part, targets_part in zip(*(part.split(_chunk(model)) for part in (rows_N, targets_N)), strict=True):
        logits_NV = model.logits(hidden_TC[rows_part])
        target_logit_N = logits_NV.gather(1, targets_part[:, None])[:, 0]
        is_greedy_N = logits_NV.argmax(dim=-1) == targets_part
        found.append(torch.stack((target_logit_N - logits_NV.logsumexp(dim=-1), is_greedy_N.float())))
    log_probs, is_greedy = torch.cat(found, dim=1).cpu().tolist()

    scores, start = [], 0
    for _, continuation in pairs:
        part = slice(start, start := start + len(continuation))
        scores.append(TokenScore(math.fsum(log_probs[part]), all(is_greedy[part])))
    return scores


def _chunk(model: Transformer) -> int:
    return max(1, MAX_LOGITS // model.config.vocab_size)
