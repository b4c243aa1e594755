"""How far the distributions at masked positions move when one more token is revealed (arXiv 2512.13586, section 4.1).

The measure is the Jensen-Shannon divergence in nats: with m = (p + q) / 2 it is (KL(p, m) + KL(q, m)) / 2, between 0
and ln 2. Divide by ln 2 (multiply by 1.4427) for bits.

Shapes: N rows that are read, M masked positions, K revealed positions, C residual width, V vocabulary.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import softplus

from refusion_eval.engine.readout import MAX_LOGITS
from refusion_eval.engine.scoring import run_side_by_side
from refusion_eval.errors import DecodeError
from refusion_eval.models.transformer import Transformer

Reading = Literal["bidirectional", "bidirectional_shifted", "refusion"]

# Upper bound of the arrays [rows, V] that are alive at once for one chunk of rows.
_ARRAYS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class MaskedText:
    """A text with masked positions, ascending, some of which are to be revealed."""

    tokens: Sequence[int]
    masked: Sequence[int]
    revealed: Sequence[int]


class _Arranged(NamedTuple):
    """A text in the row order of a forward: token ids, position ids, and the rows whose logits are read."""

    tokens: list[int]
    positions: list[int]
    rows: list[int]


def reveal_divergences(
    model: Transformer, texts: Sequence[MaskedText], reading: Reading, mask_id: int, batch_size: int
) -> Iterator[npt.NDArray[np.float64]]:
    """Compares the distributions at all masked positions before and after each single reveal.

    The readings:
        bidirectional: every row sees every row, and the row of a mask predicts its own position (LLaDA).
        bidirectional_shifted: every row sees every row, and row i - 1 predicts position i (Dream).
        refusion: attention is causal over the prompt and all clean tokens in the order of their positions, then all
            masks in that order, each with its own position id; the row of a mask predicts its own position. So a mask
            sees every clean token, wherever it stands, but only the masks before it. Revealing a token moves its row in
            front of all masks: the masks before it see a new row, those after it see its token instead of its mask. The
            two directions therefore differ.

    Args:
        batch_size: texts in one forward, >= 1. A text counts once as it is and once for each revealed position.

    Yields:
        For each text, in order, the divergences in nats, [K, M] in the orders of `revealed` and `masked`. NaN where the

    Raises:
        DecodeError: logits are not finite.
    """
    arranged = chain.from_iterable(_variants(text, reading, mask_id) for text in texts)
    read = _read_rows(model, arranged, batch_size, is_causal=reading == "refusion")
    for text in texts:
        base_MC = next(read)
        divergence_KM = _divergences(model, base_MC, [next(read) for _ in text.revealed])
        revealed_KM = np.array(text.revealed, dtype=np.int64)[:, None] == np.array(text.masked, dtype=np.int64)
        if not np.isfinite(divergence_KM).all():
            raise DecodeError(f"a text of {len(text.tokens)} tokens, {len(text.masked)} masked: logits are not finite")
        yield np.where(revealed_KM, np.nan, divergence_KM)


def jensen_shannon(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """Jensen-Shannon divergence of distributions that are given by their log-probabilities.

    With d = |log q - log p| a token contributes m (ln 2 - H(s)), where H is the binary entropy, s = 1 / (1 + exp(-d))
    and m = (p + q) / 2. Every contribution is >= 0, so nothing cancels between tokens. For small d the contribution is
    computed in a form without cancellation: ln 2 - H(s) = (d tanh(d/2) + ln(1 - tanh(d/2)^2)) / 2.

    Returns:
        Divergence of each row in nats, float64, [N].
    """
    difference_NV = (log_q_NV - log_p_NV).abs()
    tanh_NV = (difference_NV / 2).tanh()
    small_NV = (difference_NV * tanh_NV + torch.log1p(-tanh_NV * tanh_NV)) / 2
    large_NV = math.log(2) - difference_NV * torch.sigmoid(-difference_NV) - softplus(-difference_NV)
    each_NV = torch.where(difference_NV < 1, small_NV, large_NV)
    mean_NV = (log_p_NV.exp() + log_q_NV.exp()) / 2
    return (mean_NV * each_NV).sum(dim=-1, dtype=torch.float64).clamp(0, math.log(2))


def _variants(text: MaskedText, reading: Reading, mask_id: int) -> Iterator[_Arranged]:
    """The text with all masks, then with each revealed position in turn, arranged for a forward.

    All variants read the rows of `text.masked`, so that they can be compared.
    """
    shift = int(reading == "bidirectional_shifted")
    for revealed in (None, *text.revealed):
        hidden = [position for position in text.masked if position != revealed]
        is_hidden = set(hidden)
        order = list(range(len(text.tokens)))
        if reading == "refusion":
            order = [position for position in order if position not in is_hidden] + hidden
        row_of = {position: row for row, position in enumerate(order)}
        yield _Arranged(
            tokens=[mask_id if position in is_hidden else text.tokens[position] for position in order],
            positions=order,
            rows=[row_of[position - shift] for position in text.masked],
        )


def _read_rows(model: Transformer, texts: Iterable[_Arranged], batch_size: int, is_causal: bool) -> Iterator[Tensor]:
    """Residual stream of the rows that are read, [M, C] for each text, `batch_size` texts in one forward."""
    remaining = iter(texts)
    while batch := list(islice(remaining, batch_size)):
        tokens = [np.array(text.tokens, dtype=np.int64) for text in batch]
        positions = [np.array(text.positions, dtype=np.int64) for text in batch]
        hidden_TC, starts = run_side_by_side(model, tokens, is_causal, positions)
        for text, start in zip(batch, starts, strict=True):
            yield hidden_TC[torch.tensor([start + row for row in text.rows], device=model.device)]


@torch.inference_mode()
def _divergences(model: Transformer, base_MC: Tensor, revealed_MC: Sequence[Tensor]) -> npt.NDArray[np.float64]:
    """Divergence of each variant from the base, [K, M]. Logits exist for one chunk of rows at a time."""
    rows_at_once = max(1, MAX_LOGITS // (_ARRAYS_AT_ONCE * model.config.vocab_size))
    chunks = []
    for base_NC, *variants_NC in zip(*(rows.split(rows_at_once) for rows in (base_MC, *revealed_MC)), strict=True):
        log_p_NV = model.logits(base_NC).log_softmax(dim=-1)
        chunks.append(
            torch.stack([jensen_shannon(log_p_NV, model.logits(each).log_softmax(dim=-1)) for each in variants_NC])
        )
    divergence_KM: npt.NDArray[np.float64] = torch.cat(chunks, dim=1).cpu().numpy()
    return divergence_KM
