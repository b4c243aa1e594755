"""Log-likelihoods of given texts, in nats, without a cache: exact for causal models, estimated for masked models.

A model with full attention that fills masks has no exact log-likelihood, but a lower bound (LLaDA, arXiv 2502.09992,
Eq. 6 and Algorithm 3). For a continuation of L tokens, draw a number l from 1 .. L, mask a random subset of that size,
add the log-probabilities of the masked tokens given all other tokens, and multiply by L / l. The mean over draws is a
lower bound of log p(continuation | prefix), in nats. For L = 1 it is the log-probability itself.

Unlike the release, l is rounded down: halves rounded to even make even l more likely. Equal copies are computed once,
and all of them, without noise, where they are few. Dream's harness masks every token independently, which adds noise,
and appends an unmasked end token; here Dream uses LLaDA's estimator, without that token.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from refusion_eval.engine.readout import MAX_LOGITS, ReadPlan, read_out
from refusion_eval.models.attention import side_by_side
from refusion_eval.models.transformer import Transformer
from refusion_eval.types import Read, TokenArray, draw_key

# Rows of one forward (one text may have more): enough to keep a GPU busy, and little memory next to an 8B model.
MAX_ROWS = 4096

TokenPair = tuple[Sequence[int], Sequence[int]]


class TokenScore(NamedTuple):
    log_prob: float  # in nats
    is_greedy: bool  # whether greedy decoding would give it


def score_many(model: Transformer, pairs: Sequence[TokenPair], batch_size: int) -> list[TokenScore]:
    batches = (pairs[start : start + batch_size] for start in range(0, len(pairs), batch_size))
    return [score for batch in batches for score in _score_batch(model, batch)]


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
    model: Transformer, texts: Sequence[TokenArray], is_causal: bool, positions: Sequence[TokenArray] | None = None
) -> tuple[Tensor, list[int]]:
    """Runs whole texts in one forward: the residual stream, [T, C], and the row at which each text begins."""
    widths = [len(text) for text in texts]
    where = np.concatenate([np.arange(width) for width in widths] if positions is None else positions)
    tokens_T, positions_T = torch.from_numpy(np.stack([np.concatenate(texts), where])).to(model.device)
    hidden_TC = model.hidden(tokens_T, positions_T, int(where.max()), side_by_side(widths, is_causal))
    return hidden_TC, np.cumsum([0, *widths[:-1]]).tolist()


@torch.inference_mode()
def score_targets(
    model: Transformer, hidden_TC: Tensor, rows: npt.ArrayLike, targets: npt.ArrayLike
) -> tuple[list[float], list[bool]]:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedReading:
    mask_id: int
    shift: int  # rows between a masked position and the row that predicts it
    num_samples: int
    seed: int  # of the noise, >= 0; the noise of a pair depends on its tokens and the seed only


class _Text(NamedTuple):
    tokens: TokenArray  # of a prefix and a continuation
    start: int  # of the continuation


class _Canvas(NamedTuple):
    """A text, by its number, with some positions of its continuation masked, ascending."""

    text: int
    masked: TokenArray


def estimate_many(
    model: Transformer, pairs: Sequence[TokenPair], batch_size: int, reading: MaskedReading
) -> list[TokenScore]:
    """Estimates the bound for continuations; copies of the same batch share forwards of up to `MAX_ROWS` rows."""
    # A continuation is greedy if LLaDA's decoding of exactly its length (one block, one token a step, the most
    # confident one, temperature 0) gives it. LLaDA's harness checks the same, but may choose the mask token. Dream's
    # harness never calls a continuation greedy; here Dream is checked like LLaDA, with the rows that it predicts from.
    scores: list[TokenScore] = []
    for start in range(0, len(pairs), batch_size):
        texts = [
            _Text(np.array([*prefix, *continuation], dtype=np.int64), len(prefix))
            for prefix, continuation in pairs[start : start + batch_size]
        ]
        scores += map(TokenScore, _bounds(model, texts, reading), _are_greedy(model, texts, reading))
    return scores


def noised_copies(length: int, num_samples: int, key: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Which tokens are masked in each of up to `num_samples` different copies, [S, L], and the weight of each copy."""
    if 2**length - 1 <= num_samples:  # all subsets, each with its probability 1 / L / C(L, l): no noise
        masked_SL = (np.arange(1, 2**length)[:, None] >> np.arange(length)) % 2 == 1
        num_alike = np.array([math.comb(length, size) for size in masked_SL.sum(axis=1).tolist()])
        probabilities = 1 / (length * num_alike)
    else:
        rng = np.random.default_rng(key)
        # Stratified: the sizes lie evenly from a random offset, which keeps the mean and lowers the variance.
        spread = rng.integers(length) + np.arange(num_samples) * length // num_samples
        permuted = rng.random((num_samples, length)).argsort(axis=1)
        masked_SL, counts = np.unique(permuted <= spread[:, None] % length, axis=0, return_counts=True)
        probabilities = counts / num_samples
    return masked_SL, probabilities * length / masked_SL.sum(axis=1)


def _bounds(model: Transformer, texts: Sequence[_Text], reading: MaskedReading) -> list[float]:
    keys = [draw_key(reading.seed, text.start, *text.tokens.tolist()) for text in texts]
    sizes = [len(text.tokens) - text.start for text in texts]
    noise = [noised_copies(size, reading.num_samples, key) for size, key in zip(sizes, keys, strict=True)]
    canvases = (
        _Canvas(index, text.start + np.flatnonzero(masked_L))
        for index, (text, (masked_SL, _)) in enumerate(zip(texts, noise, strict=True))
        for masked_L in masked_SL
    )
    sums: list[list[float]] = [[] for _ in texts]
    for pack in _packs(texts, canvases):
        hidden_TC, starts = _run(model, texts, pack, reading)
        rows = [
            row for start, canvas in zip(starts, pack, strict=True) for row in start + canvas.masked - reading.shift
        ]
        targets = [token for canvas in pack for token in texts[canvas.text].tokens[canvas.masked]]
        log_probs, _ = score_targets(model, hidden_TC, rows, targets)
        first = 0
        for canvas in pack:
            part = slice(first, first := first + len(canvas.masked))
            sums[canvas.text].append(math.fsum(log_probs[part]))
    return [math.fsum(weights_S * log_probs) for (_, weights_S), log_probs in zip(noise, sums, strict=True)]


def _are_greedy(model: Transformer, texts: Sequence[_Text], reading: MaskedReading) -> list[bool]:
    """Whether greedy decoding gives each continuation; decoding stops at the first token that differs."""
    # Until then every decoded token equals that of the continuation, so the masked positions determine a canvas.
    are_greedy = [True] * len(texts)
    canvases = [_Canvas(index, np.arange(text.start, len(text.tokens))) for index, text in enumerate(texts)]
    while canvases:
        unfinished = []
        for pack in _packs(texts, canvases):
            hidden_TC, starts = _run(model, texts, pack, reading)
            reads = [
                (Read((canvas.masked - reading.shift).tolist(), suppress=(reading.mask_id,)), start)
                for start, canvas in zip(starts, pack, strict=True)
            ]
            readouts = read_out(ReadPlan(reads), hidden_TC, model.logits, model.config.vocab_size)
            for canvas, readout in zip(pack, readouts, strict=True):
                best = int(readout.probs.argmax())
                position = canvas.masked[best]
                if readout.tokens[best] != texts[canvas.text].tokens[position]:
                    are_greedy[canvas.text] = False
                elif len(canvas.masked) > 1:
                    unfinished.append(_Canvas(canvas.text, np.delete(canvas.masked, best)))
        canvases = unfinished
    return are_greedy


def _packs(texts: Sequence[_Text], canvases: Iterable[_Canvas]) -> Iterator[list[_Canvas]]:
    pack: list[_Canvas] = []
    num_rows = 0
    for canvas in canvases:
        width = len(texts[canvas.text].tokens)
        if pack and num_rows + width > MAX_ROWS:
            yield pack
            pack, num_rows = [], 0
        pack.append(canvas)
        num_rows += width
    if pack:
        yield pack


def _run(
    model: Transformer, texts: Sequence[_Text], pack: Sequence[_Canvas], reading: MaskedReading
) -> tuple[Tensor, list[int]]:
    filled = [texts[canvas.text].tokens.copy() for canvas in pack]
    for tokens, canvas in zip(filled, pack, strict=True):
        tokens[canvas.masked] = reading.mask_id
    return run_side_by_side(model, filled, is_causal=False)
