"""Computes the forwards of a batch and answers their reads: reduced on the device, copied to the host at once.

Shapes: T packed rows, C residual width, N rows that are read, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from refusion_eval.engine import masks
from refusion_eval.engine.features import ScoringAttend, hidden_with_reuse
from refusion_eval.models.attention import Backend
from refusion_eval.models.cache import KVCache
from refusion_eval.models.transformer import Transformer
from refusion_eval.types import PLAIN, Confidence, FeatureReuse, Forward, Read, Readout

# Logits of at most this many entries are held at once (256 MiB in float32); further rows are read chunk by chunk.
MAX_LOGITS = 1 << 26

# Where each statistic of a read is among the three of a simple one, which asks for no entropy and no margin.
STATISTICS_OF_SIMPLE = [0, 1, 2, 1, 1]

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # splitmix64's constants as signed 64-bit integers: torch has no unsigned ones
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def hidden_of(model: Transformer, cache: KVCache, forwards: Sequence[Forward], backend: Backend) -> Tensor:
    """The residual stream of all rows of some forwards before the final norm, in their order, [T, C]."""
    # Forwards that reuse features compute other rows in each layer, so they cannot be packed with others.
    reuse = {
        sequence: forward.approximation
        for sequence, forward in enumerate(forwards)
        if isinstance(forward.approximation, FeatureReuse)
    }
    packed = [sequence for sequence in range(len(forwards)) if sequence not in reuse]
    if len(packed) == len(forwards):
        return _packed(model, cache, forwards, packed, backend)
    parts: dict[int, Tensor] = {}
    if packed:
        together_TC = _packed(model, cache, forwards, packed, backend)
        widths = [len(forwards[sequence].tokens) for sequence in packed]
        parts.update(zip(packed, together_TC.split(widths), strict=True))
    for sequence, how in reuse.items():
        parts[sequence] = hidden_with_reuse(model, cache, sequence, forwards[sequence], how)
    return torch.cat([parts[sequence] for sequence in range(len(forwards))])


def _packed(
    model: Transformer, cache: KVCache, forwards: Sequence[Forward], sequences: Sequence[int], backend: Backend
) -> Tensor:
    """One model call for the forwards of some sequences of a batch."""
    together = [forwards[sequence] for sequence in sequences]
    tokens = [token for forward in together for token in forward.tokens]
    positions = [position for forward in together for position in forward.positions]
    tokens_T, positions_T = torch.from_numpy(np.array([tokens, positions], dtype=np.int64)).to(model.device)
    attentions = [forward.attention for forward in together]
    is_scored = any(forward.approximation is not None for forward in together)
    if backend == "native" and not is_scored:
        return model.native.hidden(
            tokens_T, positions_T, max(positions), cache, *masks.sequence_table(cache, attentions, sequences)
        )
    attend = masks.attend_over(cache, attentions, backend, sequences)
    if not is_scored:
        return model.hidden(tokens_T, positions_T, max(positions), attend)
    scoring = ScoringAttend(attend, list(zip(sequences, together, strict=True)), model.device)
    hidden_TC = model.hidden(tokens_T, positions_T, max(positions), scoring)
    scoring.store(cache)
    return hidden_TC


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

    @property
    def simple(self) -> bool:
        """Whether one pass over the logits answers the read: the likeliest token and plain probabilities."""
        return len(self.suppress) <= 1 and self == _SIMPLE._replace(suppress=self.suppress, given=self.given)


_SIMPLE = _ReadOptions.of(Read(rows=()))


@dataclass(frozen=True, slots=True)
class PackedRead:
    """A read, and where its sequence's rows begin among the packed rows of a forward."""

    read: Read
    first_row: int


class ReadPlan:
    """The reads of one forward as numbers, those with equal options together.

    Attributes:
        numbers: packed row, given token and draw key of every row that is read, [3, N]; 0 where there is none.
        guides: for each of the rows the row that guides it; empty if no read is guided.
        suppressed: the id that each row may not choose, [N]; -1 for none. Right for simple reads only.
    """

    def __init__(self, packed_reads: Sequence[PackedRead]) -> None:
        self._reads = packed_reads
        by_options: dict[_ReadOptions, list[int]] = {}
        for index, packed in enumerate(packed_reads):
            by_options.setdefault(_ReadOptions.of(packed.read), []).append(index)
        self._order = [index for indices in by_options.values() for index in indices]
        rows: list[int] = []
        given: list[int] = []
        draws: list[int] = []
        suppressed: list[int] = []
        self.guides: list[int] = []
        self.groups: list[tuple[_ReadOptions, slice]] = []
        for options, indices in by_options.items():
            start = len(rows)
            for packed in (packed_reads[index] for index in indices):
                read, num_rows = packed.read, len(packed.read.rows)
                rows += [packed.first_row + row for row in read.rows]
                given += [0] * num_rows if read.given is None else read.given
                draws += [_signed(draw) for draw in read.draws] or [0] * num_rows
                suppressed += [options.suppress[0] if options.suppress else -1] * num_rows
                if read.guidance is not None:
                    self.guides += [0] * (len(rows) - num_rows - len(self.guides))
                    self.guides += [packed.first_row + row for row in read.guidance.rows]
            self.groups.append((options, slice(start, len(rows))))
        self.numbers = np.array([rows, given, draws], dtype=np.int64)
        self.suppressed = np.array(suppressed, dtype=np.int64)

    @property
    def is_simple(self) -> bool:
        """Whether the compiled and the fused readout can answer all reads."""
        return all(options.simple for options, _ in self.groups)

    def readouts(self, table: npt.NDArray[np.floating[Any]], model_dtype: torch.dtype) -> list[Readout]:
        """The answers from the statistics of all rows, [5, N], in the order of `_readout`."""
        readouts: dict[int, Readout] = {}
        start = 0
        for index in self._order:
            read = self._reads[index].read
            readouts[index] = _readout(read, table[:, start : start + len(read.rows)], model_dtype)
            start += len(read.rows)
        return [readouts[index] for index in range(len(self._reads))]


def _signed(draw: int) -> int:
    # torch has no unsigned 64-bit numbers; the bits stay the same.
    return draw - (1 << 64) if draw >> 63 else draw


def read_out(
    plan: ReadPlan,
    hidden_TC: Tensor,
    head: Callable[[Tensor], Tensor],
    vocab_size: int,
    model_dtype: torch.dtype = torch.float32,
    numbers_3N: Tensor | None = None,
) -> list[Readout]:
    """Answers all reads of one forward; `head` turns rows of the residual stream into float32 logits."""
    if numbers_3N is None:
        numbers_3N = torch.from_numpy(plan.numbers).to(hidden_TC.device)
    columns = []
    for options, group in plan.groups:
        # By chunks: a plan of many rows times a vocabulary of 150,000 would take gigabytes at once.
        for start in range(group.start, group.stop, chunk := max(1, MAX_LOGITS // vocab_size)):
            part = slice(start, min(start + chunk, group.stop))
            rows_N, given_N, draws_N = numbers_3N[:, part]
            logits_NV = head(_rows(hidden_TC, plan.numbers[0, part], rows_N))
            if options.guidance_scale is not None:
                guides_N = torch.tensor(plan.guides[part], device=hidden_TC.device)
                free_NV = head(_rows(hidden_TC, np.array(plan.guides[part]), guides_N))
                logits_NV = free_NV + (options.guidance_scale + 1) * (logits_NV - free_NV)
            columns.append(_statistics(logits_NV, options, given_N, draws_N, model_dtype))
    table = fetch(torch.cat(columns, dim=1)) if columns else np.empty((5, 0), dtype=np.float32)
    return plan.readouts(table, model_dtype)


def read_native(plan: ReadPlan, hidden_TC: Tensor, model: Transformer) -> list[Readout]:
    """As `read_out`, for simple reads of a model whose forwards are compiled."""
    return plan.readouts(model.native.read(hidden_TC, plan.numbers, plan.suppressed)[STATISTICS_OF_SIMPLE], model.dtype)


def fetch(table: Tensor) -> npt.NDArray[np.floating[Any]]:
    """Copies statistics to the host: the only wait of a forward."""
    return table.cpu().numpy()


def _rows(hidden_TC: Tensor, rows: npt.NDArray[np.int64], rows_N: Tensor) -> Tensor:
    # The host knows the rows too: a run of neighbours, the usual case, is a view instead of a copy.
    first, last = rows[0], rows[-1]
    if np.array_equal(rows, np.arange(first, last + 1)):
        return hidden_TC[first : last + 1]
    return hidden_TC[rows_N]


def statistics_of(plan: ReadPlan, logits_WV: Tensor, numbers_3N: Tensor) -> Tensor:
    """The statistics of all rows that are read, [5, N], from logits that were computed already."""
    columns = []
    for options, part in plan.groups:
        rows_N, given_N, draws_N = numbers_3N[:, part]
        columns.append(_statistics(logits_WV[rows_N].float(), options, given_N, draws_N, logits_WV.dtype))
    return torch.cat(columns, dim=1)


def _statistics(
    logits_NV: Tensor, options: _ReadOptions, given_ids_N: Tensor, draws_N: Tensor, model_dtype: torch.dtype
) -> Tensor:
    """Chosen token, its probability, and the requested statistics: [5, N], in the order of `_readout`."""
    # One table of one dtype, so that one copy brings all to the host; token ids below 2**24 are exact in float32.
    if options.exclude:
        logits_NV = _without(logits_NV, options.exclude)
    if options.confidence != PLAIN or options.truncated:
        return _shaped_statistics(logits_NV, options, given_ids_N, draws_N, model_dtype)
    log_normaliser_N = logits_NV.logsumexp(dim=-1)
    tokens_N, chosen_logit_N = _choose(logits_NV, options, draws_N)

    # exp(logit - logsumexp) for the rows' own tokens alone: no softmax over the whole vocabulary is written.
    probs_N = _probability(chosen_logit_N, log_normaliser_N)
    given_N = entropy_N = margin_N = probs_N
    if options.given:
        given_N = _probability(_at(logits_NV, given_ids_N), log_normaliser_N)
    if options.entropy:
        entropy_N = _entropy((logits_NV - log_normaliser_N[:, None]).exp())
    if options.margin:
        top_N2 = logits_NV.topk(2, dim=-1).values
        margin_N = _probability(top_N2[:, 0], log_normaliser_N) - _probability(top_N2[:, 1], log_normaliser_N)
    return torch.stack((tokens_N.float(), probs_N, given_N, entropy_N, margin_N))


def _shaped_statistics(
    logits_NV: Tensor, options: _ReadOptions, given_ids_N: Tensor, draws_N: Tensor, model_dtype: torch.dtype
) -> Tensor:
    """As `_statistics`, for confidences from another distribution than the plain softmax."""
    confidence = options.confidence
    dtype = {"float32": torch.float32, "float64": torch.float64, "model": model_dtype}[confidence.dtype]
    shaped_NV = logits_NV.to(dtype)
    if confidence.exclude:
        shaped_NV = _without(shaped_NV, confidence.exclude)
    probs_NV = _truncate(shaped_NV / confidence.temperature, options).softmax(dim=-1)
    # In a short dtype several probabilities tie where logits differ, and the releases take the first of them.
    if confidence.choose and options.temperature == 0:
        tokens_N = (_without(probs_NV, options.suppress) if options.suppress else probs_NV).argmax(dim=-1)
    elif options.temperature > 0 and options.truncated:
        tempered_NV = _truncate(logits_NV / options.temperature, options)
        tokens_N, _ = _choose(tempered_NV, options._replace(temperature=1.0), draws_N)
    else:
        tokens_N, _ = _choose(logits_NV, options, draws_N)

    probs_N = probs_NV.gather(1, tokens_N[:, None])[:, 0]
    given_N = _at(probs_NV, given_ids_N) if options.given else probs_N
    entropy_N = _entropy(probs_NV) if options.entropy else probs_N
    top_N2 = probs_NV.topk(2, dim=-1).values
    margin_N = top_N2[:, 0] - top_N2[:, 1]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.stack([column.to(wide) for column in (tokens_N, probs_N, given_N, entropy_N, margin_N)])


def _choose(logits_NV: Tensor, options: _ReadOptions, draws_N: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit's token or a sample, and its logit; each [N]."""
    choosable_NV = _without(logits_NV, options.suppress) if options.suppress else logits_NV
    if options.temperature == 0:
        chosen_logit_N, tokens_N = choosable_NV.max(dim=-1)
        return tokens_N, chosen_logit_N
    # The largest sum of logit and Gumbel noise is a sample of the softmax, and needs no normaliser.
    noise_NV = gumbel_noise(draws_N, logits_NV.shape[1])
    tokens_N = (choosable_NV.double() / options.temperature + noise_NV).argmax(dim=-1)
    return tokens_N, logits_NV.gather(1, tokens_N[:, None])[:, 0]


def _without(values_NV: Tensor, ids: tuple[int, ...]) -> Tensor:
    return values_NV.index_fill(1, _kept_ids(ids, values_NV.device), float("-inf"))


@lru_cache(maxsize=64)
def _kept_ids(ids: tuple[int, ...], device: torch.device) -> Tensor:
    # The same in every forward of a decoding, and each copy to the device takes some microseconds.
    return torch.tensor(ids, device=device)


def _at(values_NV: Tensor, ids_N: Tensor) -> Tensor:
    return values_NV.gather(1, ids_N[:, None])[:, 0]


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
    # Rounding could exceed 1.
    return (logit_N - log_normaliser_N).exp().clamp(max=1)


def _readout(read: Read, table: npt.NDArray[np.floating[Any]], model_dtype: torch.dtype) -> Readout:
    if read.confidence.dtype != "float64":
        table = table.astype(np.float32, copy=False)
    tokens, probs, given, entropy, margin = table
    return Readout(
        tokens=tokens.astype(np.int64),
        probs=probs,
        given=given if read.given is not None else None,
        entropy=entropy if read.entropy else None,
        margin=margin if read.margin else None,
        rounded_to=str(model_dtype).removeprefix("torch.") if read.confidence.dtype == "model" else "",
    )


def gumbel_noise(draws_N: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise for every (draw key, token id), float64, [N, V]."""
    # A counter-based generator (splitmix64 seeded with the draw key, token id as counter) in integer arithmetic: the
    # same bits on every device and in every batch.
    counters_V = torch.arange(1, vocab_size + 1, device=draws_N.device)
    bits_NV = draws_N[:, None] + counters_V * _GOLDEN
    bits_NV = (bits_NV ^ _shift_right(bits_NV, 30)) * _MIX_1
    bits_NV = (bits_NV ^ _shift_right(bits_NV, 27)) * _MIX_2
    bits_NV = bits_NV ^ _shift_right(bits_NV, 31)
    # 52 bits and a half: exact in float64, and never 0 or 1.
    uniform_NV = (_shift_right(bits_NV, 12).double() + 0.5) * 2.0**-52
    return -(-uniform_NV.log()).log()


def _shift_right(bits: Tensor, count: int) -> Tensor:
    # A logical shift; torch's own keeps the sign.
    return (bits >> count) & ((1 << (64 - count)) - 1)
