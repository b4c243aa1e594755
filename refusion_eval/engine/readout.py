"""Logits to readouts: reduced on the device, one device-to-host copy for all reads of a forward.

Shapes: N rows that are read, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from refusion_eval.types import PLAIN, Confidence, Read, Readout

# Logits of at most this many entries are held at once (256 MiB in float32); further rows are read chunk by chunk.
MAX_LOGITS = 1 << 26

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # splitmix64's constants as signed 64-bit integers: torch has no unsigned ones
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


class _ReadOptions(NamedTuple):
    """The options of a read; reads with equal options are answered together."""

    suppress: tuple[int, ...]
    temperature: float
    given: bool
    entropy: bool
    margin: bool
    exclude: tuple[int, ...]
    top_p: float
    top_k: int
    confidence: Confidence
    guidance_scale: float | None

    @classmethod
    def of(cls, read: Read) -> "_ReadOptions":
        return cls(
            read.suppress,
            read.temperature,
            read.given is not None,
            read.entropy,
            read.margin,
            read.exclude,
            read.top_p,
            read.top_k,
            read.confidence,
            read.guidance.scale if read.guidance else None,
        )

    @property
    def truncated(self) -> bool:
        """Whether only some tokens stay in the distributions."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True, slots=True)
class PackedRead:
    """A read, and where its sequence's rows begin among the packed rows of a forward."""

    read: Read
    first_row: int


def read_out(
    packed_reads: Sequence[PackedRead],
    hidden_TC: Tensor,
    head: Callable[[Tensor], Tensor],
    vocab_size: int,
    model_dtype: torch.dtype = torch.float32,
) -> list[Readout]:
    """Answers all reads of one forward, those with equal options together.

    Args:
        packed_reads: reads, in the order of the answers.
        hidden_TC: residual stream of the packed rows.
        head: turns rows of the residual stream into float32 logits.
        vocab_size: V.
        model_dtype: dtype of the weights, for confidences with dtype "model".
    """
    groups: dict[_ReadOptions, list[int]] = {}
    for index, packed in enumerate(packed_reads):
        groups.setdefault(_ReadOptions.of(packed.read), []).append(index)

    columns, order = [], []
    for options, indices in groups.items():
        order += indices
        rows = [packed_reads[index].first_row + row for index in indices for row in packed_reads[index].read.rows]
        given = [token for index in indices for token in packed_reads[index].read.given or ()]
        draws = [draw for index in indices for draw in packed_reads[index].read.draws]
        guides = [row for index in indices for row in _guides(packed_reads[index])]
        for start in range(0, len(rows), chunk := max(1, MAX_LOGITS // vocab_size)):
            part = slice(start, start + chunk)
            logits_NV = head(_rows(hidden_TC, rows[part]))
            if options.guidance_scale is not None:
                free_NV = head(_rows(hidden_TC, guides[part]))
                logits_NV = free_NV + (options.guidance_scale + 1) * (logits_NV - free_NV)
            columns.append(_statistics(logits_NV, options, given[part], draws[part], model_dtype))
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


def _guides(packed: PackedRead) -> list[int]:
    guidance = packed.read.guidance
    return [] if guidance is None else [packed.first_row + row for row in guidance.rows]


def _statistics(
    logits_NV: Tensor, options: _ReadOptions, given: Sequence[int], draws: Sequence[int], model_dtype: torch.dtype
) -> Tensor:
    """Chosen token, its probability, and the requested statistics: [5, N], in the order of `_readout`.

    Token ids below 2**24 are exact in float32.
    """
    if options.exclude:
        logits_NV = _without(logits_NV, options.exclude)
    if options.confidence != PLAIN or options.truncated:
        return _shaped_statistics(logits_NV, options, given, draws, model_dtype)
    log_normaliser_N = logits_NV.logsumexp(dim=-1)
    tokens_N, chosen_logit_N = _choose(logits_NV, options, draws)

    probs_N = _probability(chosen_logit_N, log_normaliser_N)
    given_N = entropy_N = margin_N = probs_N
    if options.given:
        given_N = _probability(_at(logits_NV, given), log_normaliser_N)
    if options.entropy:
        entropy_N = _entropy((logits_NV - log_normaliser_N[:, None]).exp())
    if options.margin:
        top_N2 = logits_NV.topk(2, dim=-1).values
        margin_N = _probability(top_N2[:, 0], log_normaliser_N) - _probability(top_N2[:, 1], log_normaliser_N)
    return torch.stack((tokens_N.float(), probs_N, given_N, entropy_N, margin_N))


def _shaped_statistics(
    logits_NV: Tensor, options: _ReadOptions, given: Sequence[int], draws: Sequence[int], model_dtype: torch.dtype
) -> Tensor:
    """As `_statistics`, for confidences from another distribution than the plain softmax."""
    confidence = options.confidence
    dtype = {"float32": torch.float32, "float64": torch.float64, "model": model_dtype}[confidence.dtype]
    shaped_NV = logits_NV.to(dtype)
    if confidence.exclude:
        shaped_NV = _without(shaped_NV, confidence.exclude)
    probs_NV = _truncate(shaped_NV / confidence.temperature, options).softmax(dim=-1)
    if confidence.choose and options.temperature == 0:
        tokens_N = (_without(probs_NV, options.suppress) if options.suppress else probs_NV).argmax(dim=-1)
    elif options.temperature > 0 and options.truncated:
        tempered_NV = _truncate(logits_NV / options.temperature, options)
        tokens_N, _ = _choose(tempered_NV, options._replace(temperature=1.0), draws)
    else:
        tokens_N, _ = _choose(logits_NV, options, draws)

    probs_N = probs_NV.gather(1, tokens_N[:, None])[:, 0]
    given_N = _at(probs_NV, given) if options.given else probs_N
    entropy_N = _entropy(probs_NV) if options.entropy else probs_N
    top_N2 = probs_NV.topk(2, dim=-1).values
    margin_N = top_N2[:, 0] - top_N2[:, 1]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.stack([column.to(wide) for column in (tokens_N, probs_N, given_N, entropy_N, margin_N)])


def _choose(logits_NV: Tensor, options: _ReadOptions, draws: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The largest logit's token or a sample, and its logit; each [N]."""
    choosable_NV = _without(logits_NV, options.suppress) if options.suppress else logits_NV
    if options.temperature == 0:
        chosen_logit_N, tokens_N = choosable_NV.max(dim=-1)
        return tokens_N, chosen_logit_N
    noise_NV = gumbel_noise(draws, logits_NV.shape[1], logits_NV.device)
    tokens_N = (choosable_NV.double() / options.temperature + noise_NV).argmax(dim=-1)
    return tokens_N, logits_NV.gather(1, tokens_N[:, None])[:, 0]


def _without(values_NV: Tensor, ids: tuple[int, ...]) -> Tensor:
    return values_NV.index_fill(1, torch.tensor(ids, device=values_NV.device), float("-inf"))


def _at(values_NV: Tensor, ids: Sequence[int]) -> Tensor:
    return values_NV.gather(1, torch.tensor(ids, device=values_NV.device)[:, None])[:, 0]


def _truncate(logits_NV: Tensor, options: _ReadOptions) -> Tensor:
    """Applies top-p, then top-k: the logits of removed tokens become minus infinity."""
    if options.top_p < 1:
        sorted_NV, order_NV = logits_NV.sort(dim=-1, descending=True, stable=True)
        cut_NV = sorted_NV.softmax(dim=-1).cumsum(dim=-1) > options.top_p
        # The token at which the sum first exceeds top_p stays.
        cut_NV = torch.cat((torch.zeros_like(cut_NV[:, :1]), cut_NV[:, :-1]), dim=-1)
        logits_NV = logits_NV.masked_fill(torch.empty_like(cut_NV).scatter_(1, order_NV, cut_NV), float("-inf"))
    if 0 < options.top_k < logits_NV.shape[-1]:
        smallest_N1 = logits_NV.topk(options.top_k, dim=-1).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < smallest_N1, float("-inf"))
    return logits_NV


def _entropy(probs_NV: Tensor) -> Tensor:
    return torch.special.entr(probs_NV).sum(dim=-1).clamp(min=0)


def _probability(logit_N: Tensor, log_normaliser_N: Tensor) -> Tensor:
    """Softmax probability, clamped because rounding could exceed 1."""
    return (logit_N - log_normaliser_N).exp().clamp(max=1)


def _readout(read: Read, table: npt.NDArray[np.floating[Any]]) -> Readout:
    if read.confidence.dtype != "float64":
        table = table.astype(np.float32, copy=False)
    tokens, probs, given, entropy, margin = table
    return Readout(
        tokens=tokens.astype(np.int64),
        probs=probs,
        given=given if read.given is not None else None,
        entropy=entropy if read.entropy else None,
        margin=margin if read.margin else None,
    )


def gumbel_noise(draws: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Gumbel noise for every (draw key, token id), float64, [N, V]; the largest sum of logit and noise is a sample.

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
