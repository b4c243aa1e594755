"""Computes the forwards of a batch and answers their reads: reduced on the device, copied to the host at once.

Shapes: T packed rows, C residual width, N rows that are read, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from refusion_eval.engine.features import ScoringAttend, hidden_with_reuse
from refusion_eval.models.attention import Backend, attend_over, sequence_table
from refusion_eval.models.cache import KVCache
from refusion_eval.models.transformer import Transformer
from refusion_eval.types import PLAIN, FeatureReuse, Forward, Read, Readout

# Waits for the answers of a forward that was launched, and returns them.
Collect = Callable[[], list[Readout]]

# Logits of at most this many entries are held at once (256 MiB in float32); further rows are read chunk by chunk.
MAX_LOGITS = 1 << 26


def hidden_of(
    model: Transformer,
    cache: KVCache,
    forwards: Sequence[Forward],
    backend: Backend,
    sequences: Sequence[int] | None = None,
) -> Tensor:
    """The residual stream of all rows of some forwards before the final norm, in their order, [T, C].

    Their places in the cache ascend; by default they are 0, 1, ...
    """
    sequences = range(len(forwards)) if sequences is None else sequences
    # Forwards that reuse features compute other rows in each layer, so they cannot be packed with others.
    parts = {
        index: hidden_with_reuse(model, cache, sequences[index], forward, forward.approximation)
        for index, forward in enumerate(forwards)
        if isinstance(forward.approximation, FeatureReuse)
    }
    packed = [index for index in range(len(forwards)) if index not in parts]
    if packed:
        together = [forwards[index] for index in packed]
        together_TC = _packed(model, cache, together, [sequences[index] for index in packed], backend)
        parts.update(zip(packed, together_TC.split([len(forwards[index].tokens) for index in packed]), strict=True))
    return torch.cat([parts[index] for index in range(len(forwards))]) if len(parts) > 1 else parts[0]


def _packed(
    model: Transformer, cache: KVCache, together: Sequence[Forward], sequences: Sequence[int], backend: Backend
) -> Tensor:
    tokens = [token for forward in together for token in forward.tokens]
    positions = [position for forward in together for position in forward.positions]
    tokens_T, positions_T = torch.from_numpy(np.array([tokens, positions], dtype=np.int64)).to(model.device)
    attentions = [forward.attention for forward in together]
    is_scored = any(forward.approximation is not None for forward in together)
    if backend == "native" and not is_scored:
        return model.native.hidden(
            tokens_T, positions_T, max(positions), cache, *sequence_table(cache, attentions, sequences)
        )
    attend = attend_over(cache, attentions, backend, sequences)
    if not is_scored:
        return model.hidden(tokens_T, positions_T, max(positions), attend)
    scoring = ScoringAttend(attend, list(zip(sequences, together, strict=True)), model.device)
    hidden_TC = model.hidden(tokens_T, positions_T, max(positions), scoring)
    scoring.store(cache)
    return hidden_TC


def _options_of(read: Read) -> tuple[object, ...]:
    """What a read says besides its rows, given tokens and suppressed ids."""
    scale = read.guidance and read.guidance.scale
    shape = (read.temperature, read.exclude, read.top_p, read.top_k, read.confidence, scale)
    return read.entropy, read.margin, read.logits, *shape


PLAIN_OPTIONS = _options_of(Read(()))


def is_plain(read: Read) -> bool:
    """Whether a read asks for the likeliest token and plain probabilities, of all tokens or of all but one."""
    return _options_of(read) == PLAIN_OPTIONS and len(read.suppress) <= 1


class ReadPlan:
    """The reads of one forward as numbers, those with equal options together."""

    # Each read comes with the number at which its sequence's rows begin among the packed rows of the forward.
    def __init__(self, packed_reads: Sequence[tuple[Read, int]]) -> None:
        self._reads = packed_reads
        by_options: dict[tuple[object, ...], list[int]] = {}  # reads with equal options are answered together
        # Whether the compiled and the fused readout can answer all reads, in one pass over the logits: they ask for the
        # likeliest token and plain probabilities.
        self.is_simple = True
        for index, (read, _) in enumerate(packed_reads):
            options = _options_of(read)
            by_options.setdefault((read.given is None, read.suppress, options), []).append(index)
            self.is_simple &= options == PLAIN_OPTIONS and len(read.suppress) <= 1
        rows: list[int] = []
        given: list[int] = []
        draws: list[int] = []
        suppressed: list[int] = []
        self.guides: list[int] = []  # for each row that is read the row that guides it; empty if no read is guided
        self.groups: list[tuple[Read, slice]] = []  # a read of each group, for its options
        self._places: list[slice] = [slice(0)] * len(packed_reads)  # of the rows of each read among all
        for indices in by_options.values():
            start, first_read = len(rows), packed_reads[indices[0]][0]
            for index in indices:
                read, first_row = packed_reads[index]
                zeros = [0] * len(read.rows)
                if read.guidance is not None:
                    self.guides += [0] * (len(rows) - len(self.guides))
                    self.guides += [first_row + row for row in read.guidance.rows]
                self._places[index] = slice(len(rows), len(rows) + len(zeros))
                rows += [first_row + row for row in read.rows] if first_row else read.rows
                given += zeros if read.given is None else read.given
                # torch has no unsigned 64-bit numbers; the bits stay the same.
                draws += [draw - (1 << 64) if draw >> 63 else draw for draw in read.draws] if read.draws else zeros
            suppressed += [first_read.suppress[0] if first_read.suppress else -1] * (len(rows) - start)
            self.groups.append((first_read, slice(start, len(rows))))
        # Packed row, given token, draw key and suppressed id of every row that is read, [4, N]; 0 where there is none,
        # and -1 where no id is suppressed. A simple read suppresses one id at most.
        self.numbers = np.array((rows, given, draws, suppressed), dtype=np.int64)

    @classmethod
    def of(cls, forwards: Sequence[Forward]) -> Self:
        """The plan of all reads of forwards whose rows are packed one after another."""
        first_rows = accumulate([len(forward.tokens) for forward in forwards], initial=0)
        pairs = zip(forwards, first_rows, strict=False)
        return cls([(read, first_row) for forward, first_row in pairs for read in forward.reads])

    def answer_of(self, read: int) -> int:
        """The number, among all answers, of the first answer of a read."""
        return self._places[read].start

    def readouts(
        self, table: npt.NDArray[np.floating[Any]], model_dtype: torch.dtype, logits: Mapping[int, Tensor] | None = None
    ) -> list[Readout]:
        """The answers from the table of `_statistics`, [5, N], of which simple reads need the first three lines.

        The logits are those of the rows, by their numbers among all, for which a read asks.
        """
        tokens_N, table_32 = table[0].astype(np.int64), table.astype(np.float32, copy=False)
        readouts = []
        for (read, _), place in zip(self._reads, self._places, strict=True):
            rows = [logits[number] for number in range(place.start, place.stop)] if read.logits and logits else []
            wide = table if read.confidence.dtype == "float64" else table_32
            readouts.append(
                Readout(
                    tokens=tokens_N[place],
                    probs=wide[1, place],
                    given=None if read.given is None else wide[2, place],
                    entropy=wide[3, place] if read.entropy else None,
                    margin=wide[4, place] if read.margin else None,
                    rounded_to=str(model_dtype).removeprefix("torch.") if read.confidence.dtype == "model" else "",
                    logits=partial(_fetch_row, rows) if read.logits else None,
                )
            )
        return readouts


def read_out(
    plan: ReadPlan,
    hidden_TC: Tensor,
    head: Callable[[Tensor], Tensor],
    vocab_size: int,
    model_dtype: torch.dtype = torch.float32,
) -> list[Readout]:
    """Answers all reads of one forward; `head` turns rows of the residual stream into float32 logits."""
    numbers_4N = torch.from_numpy(plan.numbers).to(hidden_TC.device)
    return launch_reads(plan, hidden_TC, head, vocab_size, model_dtype, numbers_4N)()


def launch_reads(
    plan: ReadPlan,
    hidden_TC: Tensor,
    head: Callable[[Tensor], Tensor],
    vocab_size: int,
    model_dtype: torch.dtype,
    numbers_4N: Tensor,
) -> Collect:
    """As `read_out`, but does not wait for the device, which has the numbers of the plan already."""
    columns: list[Tensor] = []
    logits: dict[int, Tensor] = {}
    for options, group in plan.groups:
        # By chunks: a plan of many rows times a vocabulary of 150,000 would take gigabytes at once.
        for start in range(group.start, group.stop, chunk := max(1, MAX_LOGITS // vocab_size)):
            part = slice(start, min(start + chunk, group.stop))
            rows_N, given_N, draws_N, _ = numbers_4N[:, part]
            logits_NV = head(_rows(hidden_TC, plan.numbers[0, part], rows_N))
            if options.guidance is not None:
                guides_N = torch.tensor(plan.guides[part], device=hidden_TC.device)
                free_NV = head(_rows(hidden_TC, np.array(plan.guides[part]), guides_N))
                logits_NV = free_NV + (options.guidance.scale + 1) * (logits_NV - free_NV)
            columns.append(_statistics(logits_NV, options, given_N, draws_N, model_dtype))
            if options.logits:  # the buffer of a recorded forward is used again
                logits.update(zip(range(part.start, part.stop), logits_NV.clone(), strict=True))
    if not columns:
        return lambda: plan.readouts(np.empty((5, 0), dtype=np.float32), model_dtype, logits)
    fetched = fetch(torch.cat(columns, dim=1))
    return lambda: plan.readouts(fetched(), model_dtype, logits)


def read_native(plan: ReadPlan, hidden_TC: Tensor, model: Transformer) -> list[Readout]:
    return plan.readouts(model.native.read(hidden_TC, plan.numbers, plan.numbers[3]), model.dtype)


def fetch(table: Tensor) -> Callable[[], npt.NDArray[np.floating[Any]]]:
    """Starts the copy of a table to the host; the function waits for it, which is the only wait of a forward."""
    host, numbers, copied = host_buffer(tuple(table.shape), table.dtype, table.device)
    host.copy_(table, non_blocking=True)
    if copied is not None:
        copied.record()

    def wait() -> npt.NDArray[np.floating[Any]]:
        if copied is not None:
            copied.synchronize()
        return numbers

    return wait


class CopyMark:
    """The end of a copy between a CUDA device and pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, torch.cuda.Event()

    def record(self) -> None:
        """Marks the copies that were started so far."""
        self._event.record(torch.cuda.current_stream(self._device))  # of this device, which may not be the current one

    def synchronize(self) -> None:
        """Waits for the marked copies."""
        self._event.synchronize()


def host_buffer(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, npt.NDArray[Any], CopyMark | None]:
    # Pinned, so that a copy to or from a CUDA device does not wait; the mark is to say when it is done. torch keeps
    # pinned memory that is free again for the next buffer.
    is_cuda = device.type == "cuda"
    buffer = torch.empty(shape, dtype=dtype, pin_memory=is_cuda)
    return buffer, buffer.numpy(), CopyMark(device) if is_cuda else None


def _fetch_row(rows_NV: Sequence[Tensor], row: int) -> npt.NDArray[np.floating[Any]]:
    return fetch(rows_NV[row])()


def _rows(hidden_TC: Tensor, rows: npt.NDArray[np.int64], rows_N: Tensor) -> Tensor:
    # The host knows the rows too: a run of neighbours, the usual case, is a view instead of a copy.
    first, last = rows[0], rows[-1]
    are_neighbours = np.array_equal(rows, np.arange(first, last + 1))
    return hidden_TC[first : last + 1] if are_neighbours else hidden_TC[rows_N]


def _statistics(
    logits_NV: Tensor, options: Read, given_ids_N: Tensor, draws_N: Tensor, model_dtype: torch.dtype
) -> Tensor:
    """Chosen token, its probability, and if requested given token's probability, entropy and margin, [5, N]."""
    # One table of one dtype, so that one copy brings all to the host; token ids below 2**24 are exact in float32.
    logits_NV = _without(logits_NV, options.exclude)
    if options.confidence != PLAIN or _truncates(options):
        return _shaped_statistics(logits_NV, options, given_ids_N, draws_N, model_dtype)
    log_normaliser_N = logits_NV.logsumexp(dim=-1)
    tokens_N, chosen_logit_N = _choose(logits_NV, options, draws_N)

    # exp(logit - logsumexp) for the rows' own tokens alone: no softmax over the whole vocabulary is written.
    probs_N = _probability(chosen_logit_N, log_normaliser_N)
    given_N = entropy_N = margin_N = probs_N
    if options.given is not None:
        given_N = _probability(_at(logits_NV, given_ids_N), log_normaliser_N)
    if options.entropy:
        entropy_N = _entropy((logits_NV - log_normaliser_N[:, None]).exp())
    if options.margin:
        top_N2 = logits_NV.topk(2, dim=-1).values
        margin_N = _probability(top_N2[:, 0], log_normaliser_N) - _probability(top_N2[:, 1], log_normaliser_N)
    return torch.stack((tokens_N.float(), probs_N, given_N, entropy_N, margin_N))


def _shaped_statistics(
    logits_NV: Tensor, options: Read, given_ids_N: Tensor, draws_N: Tensor, model_dtype: torch.dtype
) -> Tensor:
    """As `_statistics`, for confidences from another distribution than the plain softmax."""
    confidence = options.confidence
    dtype = {"float32": torch.float32, "float64": torch.float64, "model": model_dtype}[confidence.dtype]
    shaped_NV = _without(logits_NV.to(dtype), confidence.exclude)
    tempered_NV = shaped_NV / confidence.temperature
    probs_NV = (_truncate(tempered_NV, options) if confidence.truncate else tempered_NV).softmax(dim=-1)
    # In a short dtype several probabilities tie where logits differ, and the releases take the first of them.
    if confidence.choose and options.temperature == 0:
        tokens_N = _without(probs_NV, options.suppress).argmax(dim=-1)
    elif options.temperature > 0 and _truncates(options):
        sampled_NV = _truncate(logits_NV / options.temperature, options)
        tokens_N, _ = _choose(sampled_NV, replace(options, temperature=1.0), draws_N)
    else:
        tokens_N, _ = _choose(logits_NV, options, draws_N)

    probs_N = _at(probs_NV, tokens_N)
    given_N = _at(probs_NV, given_ids_N) if options.given is not None else probs_N
    entropy_N = _entropy(probs_NV) if options.entropy else probs_N
    top_N2 = probs_NV.topk(2, dim=-1).values
    margin_N = top_N2[:, 0] - top_N2[:, 1]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.stack([column.to(wide) for column in (tokens_N, probs_N, given_N, entropy_N, margin_N)])


def _choose(logits_NV: Tensor, options: Read, draws_N: Tensor) -> tuple[Tensor, Tensor]:
    choosable_NV = _without(logits_NV, options.suppress)
    if options.temperature == 0:
        chosen_logit_N, tokens_N = choosable_NV.max(dim=-1)
        return tokens_N, chosen_logit_N
    # The largest sum of logit and Gumbel noise is a sample of the softmax, and needs no normaliser.
    noise_NV = gumbel_noise(draws_N, logits_NV.shape[1])
    tokens_N = (choosable_NV.double() / options.temperature + noise_NV).argmax(dim=-1)
    return tokens_N, _at(logits_NV, tokens_N)


def _without(values_NV: Tensor, ids: tuple[int, ...]) -> Tensor:
    return values_NV.index_fill(1, _kept_ids(ids, values_NV.device), float("-inf")) if ids else values_NV


@lru_cache(maxsize=64)
def _kept_ids(ids: tuple[int, ...], device: torch.device) -> Tensor:
    # The same in every forward of a decoding, and each copy to the device takes some microseconds.
    return torch.tensor(ids, device=device)


def _at(values_NV: Tensor, ids_N: Tensor) -> Tensor:
    return values_NV.gather(1, ids_N[:, None])[:, 0]


def _truncates(options: Read) -> bool:
    return options.top_p < 1 or options.top_k > 0


def _truncate(logits_NV: Tensor, options: Read) -> Tensor:
    if options.top_k_first:
        logits_NV = _truncate(logits_NV, replace(options, top_p=1.0, top_k_first=False))
        options = replace(options, top_k=0)
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


def gumbel_noise(draws_N: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise for every (draw key, token id), float64, [N, V]."""
    # A counter-based generator (splitmix64 seeded with the draw key, token id as counter) in integer arithmetic: the
    # same bits on every device and in every batch.
    # Its constants are signed integers here: torch has no unsigned 64-bit numbers.
    counters_V = torch.arange(1, vocab_size + 1, device=draws_N.device)
    bits_NV = draws_N[:, None] + counters_V * (0x9E3779B97F4A7C15 - (1 << 64))
    bits_NV = (bits_NV ^ _shift_right(bits_NV, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    bits_NV = (bits_NV ^ _shift_right(bits_NV, 27)) * (0x94D049BB133111EB - (1 << 64))
    bits_NV = bits_NV ^ _shift_right(bits_NV, 31)
    # 52 bits and a half: exact in float64, and never 0 or 1.
    uniform_NV = (_shift_right(bits_NV, 12).double() + 0.5) * 2.0**-52
    return -(-uniform_NV.log()).log()


def _shift_right(bits: Tensor, count: int) -> Tensor:
    # A logical shift; torch's own keeps the sign.
    return (bits >> count) & ((1 << (64 - count)) - 1)
