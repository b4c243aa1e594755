"""Logits to readouts: reduced on the device in float32, one device-to-host copy for all reads of a forward.

Shapes: N rows that are read, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from refusion_eval.types import Read, Readout

# Logits of at most this many entries are held at once (256 MiB in float32); further rows are read chunk by chunk.
MAX_LOGITS = 1 << 26

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # splitmix64's constants as signed 64-bit integers: torch has no unsigned ones
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


class _Style(NamedTuple):
    """What reads must have in common to be answered together."""

    suppress: tuple[int, ...]
    temperature: float
    given: bool
    entropy: bool
    margin: bool


@dataclass(frozen=True, slots=True)
class PackedRead:
    """A read, and where its sequence's rows begin among the packed rows of a forward."""

    read: Read
    first_row: int


def read_out(
    packed_reads: Sequence[PackedRead], hidden_TC: Tensor, head: Callable[[Tensor], Tensor], vocab_size: int
) -> list[Readout]:
    """Answers all reads of one forward, reads of the same style together.

    Args:
        packed_reads: in the order of the answers.
        hidden_TC: residual stream of the packed rows.
        head: turns rows of it into float32 logits.
        vocab_size: V.
    """
    styles: dict[_Style, list[int]] = {}
    for index, packed in enumerate(packed_reads):
        read = packed.read
        style = _Style(read.suppress, read.temperature, read.given is not None, read.entropy, read.margin)
        styles.setdefault(style, []).append(index)

    columns, order = [], []
    for style, indices in styles.items():
        order += indices
        rows = [packed_reads[index].first_row + row for index in indices for row in packed_reads[index].read.rows]
        given = [token for index in indices for token in packed_reads[index].read.given or ()]
        draws = [draw for index in indices for draw in packed_reads[index].read.draws]
        for start in range(0, len(rows), chunk := max(1, MAX_LOGITS // vocab_size)):
            part = slice(start, start + chunk)
            logits_NV = head(_rows(hidden_TC, rows[part]))
            columns.append(_statistics(logits_NV, style, given[part], draws[part]))
    table = torch.cat(columns, dim=1).cpu().numpy() if columns else np.empty((5, 0), dtype=np.float32)

    readouts: list[Readout | None] = [None] * len(packed_reads)
    start = 0
    for index in order:
        read = packed_reads[index].read
        readouts[index] = _readout(read, table[:, start : start + len(read.rows)])
        start += len(read.rows)
    return [readout for readout in readouts if readout is not None]


def _rows(hidden_TC: Tensor, rows: Sequence[int]) -> Tensor:
    """Selects rows; a run of neighbours, the usual case, is a view."""
    first, last = rows[0], rows[-1]
    if last - first + 1 == len(rows) and all(row == first + offset for offset, row in enumerate(rows)):
        return hidden_TC[first : last + 1]
    return hidden_TC[torch.tensor(rows, device=hidden_TC.device)]


def _statistics(logits_NV: Tensor, style: _Style, given: Sequence[int], draws: Sequence[int]) -> Tensor:
    """Chosen token, its probability, and what else is wanted: float32, [5, N], in the order of `_readout`.

    Token ids below 2**24 are exact in float32.
    """
    device = logits_NV.device
    log_normaliser_N = logits_NV.logsumexp(dim=-1)
    choosable_NV = logits_NV
    if style.suppress:
        choosable_NV = logits_NV.index_fill(1, torch.tensor(style.suppress, device=device), float("-inf"))
    if style.temperature == 0:
        chosen_logit_N, tokens_N = choosable_NV.max(dim=-1)
    else:
        noise_NV = gumbel_noise(draws, logits_NV.shape[1], device)
        tokens_N = (choosable_NV.double() / style.temperature + noise_NV).argmax(dim=-1)
        chosen_logit_N = logits_NV.gather(1, tokens_N[:, None])[:, 0]

    probs_N = _probability(chosen_logit_N, log_normaliser_N)
    given_N = entropy_N = margin_N = probs_N
    if style.given:
        given_logit_N1 = logits_NV.gather(1, torch.tensor(given, device=device)[:, None])
        given_N = _probability(given_logit_N1[:, 0], log_normaliser_N)
    if style.entropy:
        probs_NV = (logits_NV - log_normaliser_N[:, None]).exp()
        entropy_N = (log_normaliser_N - (probs_NV * logits_NV).sum(dim=-1)).clamp(min=0)
    if style.margin:
        top_N2 = logits_NV.topk(2, dim=-1).values
        margin_N = _probability(top_N2[:, 0], log_normaliser_N) - _probability(top_N2[:, 1], log_normaliser_N)
    return torch.stack((tokens_N.float(), probs_N, given_N, entropy_N, margin_N))


def _probability(logit_N: Tensor, log_normaliser_N: Tensor) -> Tensor:
    """Softmax probability; rounding must not lift it above 1."""
    return (logit_N - log_normaliser_N).exp().clamp(max=1)


def _readout(read: Read, table: npt.NDArray[np.float32]) -> Readout:
    tokens, probs, given, entropy, margin = table
    return Readout(
        tokens=tokens.astype(np.int64),
        probs=probs,
        given=given if read.given is not None else None,
        entropy=entropy if read.entropy else None,
        margin=margin if read.margin else None,
    )


def gumbel_noise(draws: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Gumbel noise for every (draw key, token id), float64, [N, V]: adding it to logits and taking the largest samples.

    A counter-based generator (splitmix64 seeded with the draw key, token id as counter) in integer arithmetic: the same
    bits on every device and in every batch.

    Args:
        draws: 64-bit keys, one a row.
        vocab_size: V.
        device: where the noise is made.
    """
    signed = [draw - (1 << 64) if draw >> 63 else draw for draw in draws]
    keys_N1 = torch.tensor(signed, dtype=torch.int64, device=device)[:, None]
    counters_V = torch.arange(1, vocab_size + 1, device=device)
    bits_NV = keys_N1 + counters_V * _GOLDEN
    bits_NV = (bits_NV ^ _shift_right(bits_NV, 30)) * _MIX_1
    bits_NV = (bits_NV ^ _shift_right(bits_NV, 27)) * _MIX_2
    bits_NV = bits_NV ^ _shift_right(bits_NV, 31)
    # 52 bits and a half: exact in float64, and never 0 or 1.
    uniform_NV = (_shift_right(bits_NV, 12).double() + 0.5) * 2.0**-52
    return -(-uniform_NV.log()).log()


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
