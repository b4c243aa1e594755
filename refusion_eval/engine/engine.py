"""Runs decoders. The engine is the only caller of a model: it counts forwards, measures time and holds the KV cache."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch

from refusion_eval.engine.features import check_reuse, check_scores
from refusion_eval.engine.readout import Collect, ReadPlan, hidden_of, read_native, read_out
from refusion_eval.engine.recorded import CAPACITY_STEP, Record, RecordedForwards
from refusion_eval.errors import DecodeError
from refusion_eval.models import device
from refusion_eval.models.attention import Backend, check_attention, is_causal
from refusion_eval.models.cache import KVCache
from refusion_eval.models.transformer import Transformer
from refusion_eval.types import (
    NOTHING,
    Decode,
    Decoded,
    Decoding,
    FeatureReuse,
    Forward,
    ForwardDone,
    Readout,
    Response,
    RowScores,
    Trace,
    causal,
)

log = logging.getLogger(__name__)

SILENT_SECONDS = 60  # after which a batch of which no request ends says how far it is
FIRST_CAPACITY = 512
MIN_SHARED_ROWS = 32  # a shorter common beginning of prompts, such as a chat template's, is not worth the copy


class Request(NamedTuple):
    decode: Decode
    prompt: Sequence[int]
    settings: Any


class _Preempted(NamedTuple):
    """A request that was removed from a batch, with its number, and the cache rows that it needed then."""

    entry: tuple[int, Request]
    rows: int


@dataclass(slots=True)
class _ActiveRequest:
    index: int
    request: Request
    decoding: Decoding
    trace: Trace
    started: float
    prefilled: float | None = None
    pending: Forward | None = None
    response: Response | None = None
    error: DecodeError | None = None
    answers: tuple[Readout, ...] = ()  # of the last forward, until they are checked

    def advance(self, readouts: tuple[Readout, ...] | None) -> None:
        """Sends readouts to the decoder (None starts it) and stores its next forward or how it ended."""
        self.pending, self.answers = None, readouts or ()
        try:
            self.pending = next(self.decoding) if readouts is None else self.decoding.send(readouts)
        except StopIteration as stop:
            self.response = stop.value
        except DecodeError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - the failure of one request becomes its record; the others go on
            self.error = DecodeError(f"the decoder failed: {type(error).__name__}: {error}")
            self.error.__cause__ = error
        if self.pending is None:
            self.check_answers()

    def check_answers(self) -> None:
        """Refuses answers that are not finite, which the decoder has got already."""
        # Called once its next forward runs, for which the device need not wait. A sum of squares is finite only if all
        # probabilities are.
        if self.answers and not np.isfinite([answer.probs @ answer.probs for answer in self.answers]).all():
            done = [*self.trace.of(ForwardDone)][-1]
            self.fail(DecodeError(f"forward {done.forward} ({done.kind}): logits are not finite"))
        self.answers = ()

    def fail(self, error: DecodeError) -> None:
        self.decoding.close()
        self.pending, self.error = None, error

    def is_awaited_by(self, request: Request) -> bool:
        """Whether the next forward computes the rows of a prompt that the other request can copy afterwards."""
        is_first = self.pending is not None and not self.trace.num_forwards and _can_be_shared(self.pending)
        return is_first and self.request.prompt == request.prompt


def _can_be_shared(forward: Forward) -> bool:
    # Only a causal forward: there a row depends on the rows before it alone, so it is the same in all texts.
    is_exact = forward.approximation is None and is_causal(forward.attention)
    return is_exact and len(forward.tokens) >= MIN_SHARED_ROWS


def _num_unread(forward: Forward) -> int:
    """Number of rows that need not be computed if they are known: a row that is read needs its residual stream."""
    return min((min(read.rows) for read in forward.reads if read.rows), default=len(forward.tokens) - 1)


class _SharedPrefix:
    """Keys and values of the last prompt, for requests that begin with the same tokens (few-shot prompts, samples)."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int]] = []  # token and position
        self._keys = self._values = torch.empty(0)

    def begins_with(self, prompt: Sequence[int]) -> bool:
        return [token for token, _ in self._rows[: len(prompt)]] == list(prompt)

    def fill(self, cache: KVCache, sequence: int, forward: Forward) -> int:
        """Copies stored rows to where a forward would write its first rows; returns how many, which are committed."""
        if cache.lengths[sequence] or not _can_be_shared(forward):
            return 0
        unread = forward.tokens[: _num_unread(forward)]
        pairs = zip(self._rows, zip(unread, forward.positions, strict=False), strict=False)
        num_rows = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if num_rows < MIN_SHARED_ROWS:
            return 0
        cache.keys[:, sequence, :, :num_rows] = self._keys[:, :, :num_rows]
        cache.values[:, sequence, :, :num_rows] = self._values[:, :, :num_rows]
        cache.lengths[sequence] = num_rows
        return num_rows

    def keep(self, cache: KVCache, sequence: int, forward: Forward, num_filled: int) -> None:
        num_rows = len(forward.tokens)
        if cache.lengths[sequence] or not _can_be_shared(forward) or num_filled == _num_unread(forward):
            return
        # One prompt is kept: samples of an item follow each other, and a task has one few-shot text. A second copy
        # would take of the batch's memory.
        self._rows = list(zip(forward.tokens, forward.positions, strict=True))
        self._keys = cache.keys[:, sequence, :, :num_rows].clone()
        self._values = cache.values[:, sequence, :, :num_rows].clone()


def _without_first_rows(forward: Forward, num_rows: int) -> Forward:
    """A causal forward without its first rows, whose keys and values are in the cache already."""
    if num_rows == 0:
        return forward
    return replace(
        forward,
        tokens=forward.tokens[num_rows:],
        positions=forward.positions[num_rows:],
        attention=causal(len(forward.tokens) - num_rows),
        reads=tuple(replace(read, rows=[row - num_rows for row in read.rows]) for read in forward.reads),
        commit=NOTHING,
    )


class Engine:
    """Runs decoders on one model: one request (`run`), with which speed is measured, or a batch (`run_many`)."""

    conditions_itself = False  # whether forwards take the logits of the forward before

    def __init__(
        self,
        model: Transformer,
        attention: Backend,
        kv_budget: int | None = None,  # bytes for the keys and values of a batch; None is what is free
        record: Record | None = None,  # on CUDA as graphs; None computes every forward anew
        num_threads: int | None = None,  # of the forwards on a CPU; None is the number of the process
    ) -> None:
        self.model, self.attention = model, attention
        self._has_experts = getattr(model.config, "experts", None) is not None  # config: of transformers, in the bench
        self.kv_budget, self.num_threads = kv_budget, num_threads
        self._joules, self._record = device.energy_counter(model.device), record
        if attention == "native":
            _ = model.native  # compiles before any request waits for it and before any time is taken
        self._cache = self._new_cache(1, FIRST_CAPACITY)
        self.recorded = self._recorded(self._cache)
        self._batch: RecordedForwards | None = None  # of the last batch: recording takes longer than many batches

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values kept between calls of `run`, and of `run_many` if its forwards are recorded."""
        return self._cache.num_bytes + (0 if self._batch is None else self._batch.cache.num_bytes)

    @torch.inference_mode()  # once for a decoding: for each forward it would take as long as sending its numbers
    def run(self, decode: Decode, prompt: Sequence[int], settings: Any) -> Decoded:
        """Decodes one prompt; raises DecodeError if the decoder failed or asked for something impossible."""
        # The time runs from the prompt to the last token on the host, with the device synchronised at both ends. Every
        # forward that is read ends with a copy to the host, so no work is in flight between forwards.
        if self.recorded is not None:
            # Before the time is taken; settings without a length, as in tests, may outgrow the buffer.
            self.recorded.reserve(len(prompt) + getattr(settings, "num_positions", 0))
            self.recorded.prepare()
        self._cache.clear(0)  # not wiped: alone, no padding reaches beyond the rows of the sequence
        joules_before = None if self._joules is None else self._joules()
        if self._has_experts:
            self.model.num_experts_read.zero_()
        active = self._start(self._cache, 0, 0, Request(decode, prompt, settings))
        while active.pending is not None:
            self._cache.reserve(_rows_needed(self._cache, 0, active))
            if self.recorded is not None and self.recorded.is_outgrown:
                if not active.trace.num_unrecorded:
                    log.warning(
                        "a request outgrew the KV buffer of its recorded forwards, because its settings name no length; "
                        "its other forwards are launched one by one, and its time counts them"
                    )
                active.trace.num_unrecorded += 1
            self._step(self._cache, [active], partial(self._launch, self.recorded))
            if active.prefilled is None:
                device.synchronize(self.model.device)  # nothing may be read of a first forward
                active.prefilled = time.perf_counter()
        if active.error is not None:
            raise active.error
        decoded = self._finish(active)
        if self._has_experts:
            decoded = replace(decoded, num_experts_read=int(self.model.num_experts_read))
        if self._joules is None or joules_before is None:
            return decoded
        return replace(decoded, joules=self._joules() - joules_before)

    @torch.inference_mode()  # while the generator runs
    def run_many(self, requests: Iterable[Request], batch_size: int) -> Iterator[tuple[int, Decoded | DecodeError]]:
        """Yields the index of each request and what `run` returns or raises for it, in the order in which they end."""
        # Up to `batch_size` are decoded at a time; when one ends, the next begins (continuous batching).
        # In float32 the tokens are those of `run`, whatever the batch size. Keys and values stay within the budget: if
        # requests grow too long for it, the youngest are preempted and begin again later.
        config, dtype = self.model.config, self.model.dtype
        recorded, self._batch = self._batch, None  # taken, so that no other batch uses it at the same time
        budget = self.kv_budget
        if budget is None:
            budget = device.default_budget(self.model.device, config, dtype)
            budget += 0 if recorded is None else recorded.cache.num_bytes
        max_rows = device.rows_within(budget, config, dtype)
        batch_size = max(1, min(batch_size, max_rows // FIRST_CAPACITY))
        # A buffer that grows is recorded again, so a buffer with recordings has room for long texts from the beginning.
        step = FIRST_CAPACITY if self._record is None else CAPACITY_STEP[self.model.device.type]
        capacity = max(FIRST_CAPACITY, min(step, max_rows // batch_size))
        if recorded is not None and recorded.cache.num_sequences == batch_size <= max_rows // recorded.cache.capacity:
            cache = recorded.cache
        else:
            recorded = None  # its memory is free before the next buffer takes some
            cache = self._new_cache(batch_size, capacity)
            recorded = self._recorded(cache)
        if recorded is not None:
            recorded.prepare()
        shared = _SharedPrefix()
        waiting, preempted = enumerate(requests), deque[_Preempted]()
        batch: list[_ActiveRequest] = []
        told = time.monotonic()
        while True:
            while len(batch) < cache.num_sequences or _grow_back(
                cache, batch, preempted, (batch_size, capacity), max_rows
            ):
                entry = preempted.popleft().entry if preempted else next(waiting, None)
                if entry is None:
                    break
                is_awaited = any(other.is_awaited_by(entry[1]) for other in batch)
                if is_awaited and not shared.begins_with(entry[1].prompt):  # begins one step later, with copied rows
                    preempted.appendleft(_Preempted(entry, rows=0))
                    break
                cache.wipe(len(batch))
                batch.append(self._start(cache, len(batch), *entry))
            if not batch:
                self._batch = recorded
                return
            if all(request.pending is not None for request in batch):
                preempted.extendleft(reversed(self._make_room(cache, batch, max_rows)))
                if recorded is not None:
                    recorded.prepare(used_only=True)
                if all(request.pending is not None for request in batch):
                    self._step(cache, batch, partial(self._launch_shared, recorded, shared))
            for index in reversed(range(len(batch))):
                request = batch[index]
                if request.pending is not None:
                    continue
                # The last sequence takes the free index, so that active sequences stay the first of the buffer.
                last = batch.pop()
                if last is not request:
                    cache.move(len(batch), index)
                    batch[index] = last
                yield request.index, request.error or self._finish(request)
                told = time.monotonic()
            if batch and time.monotonic() - told >= SILENT_SECONDS:
                told, num_tokens = time.monotonic(), sum(len(request.trace.fixed_at()) for request in batch)
                log.info("%d requests at a time: %d tokens in the unfinished responses", len(batch), num_tokens)

    def _make_room(self, cache: KVCache, batch: list[_ActiveRequest], max_rows: int) -> list[_Preempted]:
        """Grows the buffer for the pending forwards, within the budget; returns the requests that it preempted."""
        rows = [_rows_needed(cache, sequence, request) for sequence, request in enumerate(batch)]
        needed = max(rows)
        if needed <= cache.capacity:
            return []
        if needed > max_rows:  # even without the others
            budget = max_rows * device.cache_bytes_per_row(self.model.config, self.model.dtype) / 2**30
            limit = f"the KV budget of {max_rows} rows ({budget:.2f} GiB); raise kv_budget_gib or shorten the prompt"
            for request, num_rows in zip(batch, rows, strict=True):
                if num_rows > max_rows:
                    request.fail(DecodeError(f"a sequence of {num_rows} rows exceeds {limit}"))
            return []
        num_sequences = min(cache.num_sequences, max_rows // needed)
        preempted = []
        for request, num_rows in zip(batch[num_sequences:], rows[num_sequences:], strict=True):
            request.decoding.close()
            preempted.append(_Preempted((request.index, request.request), num_rows))
        del batch[num_sequences:]
        cache.resize(num_sequences, min(max(needed, 2 * cache.capacity), max_rows // num_sequences))
        return preempted

    def _recorded(self, cache: KVCache) -> RecordedForwards | None:
        return None if self._record is None else RecordedForwards(self.model, cache, self._record)

    def _new_cache(self, num_sequences: int, capacity: int) -> KVCache:
        return KVCache(self.model.config, num_sequences, capacity, self.model.dtype, self.model.device)

    def _start(self, cache: KVCache, sequence: int, index: int, request: Request) -> _ActiveRequest:
        trace = Trace()
        device.synchronize(self.model.device)
        started = time.perf_counter()
        decoding = request.decode(request.prompt, request.settings, trace)
        active = _ActiveRequest(index, request, decoding, trace, started)
        self._advance(cache, sequence, active, None)
        return active

    def _advance(
        self, cache: KVCache, sequence: int, request: _ActiveRequest, readouts: tuple[Readout, ...] | None
    ) -> None:
        """Advances the decoder to its next forward, whose commit it applies and whose rows it stages."""
        request.advance(readouts)
        if (forward := request.pending) is None:
            return
        try:
            check_forward(forward, self.model.config.vocab_size)
            if forward.self_conditioning is not None and not self.conditions_itself:
                raise DecodeError(f"{forward.kind}: {self.model.config.family} takes no logits of the forward before")
            cache.commit(sequence, forward.commit.rows, forward.commit.keep)
            if isinstance(forward.approximation, FeatureReuse):  # after the commit, which may empty the cache
                check_reuse(forward, forward.approximation, cache, sequence)
        except DecodeError as error:
            request.fail(error)
            request.check_answers()  # a forward made of answers that are not finite may be impossible for that reason
        else:
            cache.stage(sequence, len(forward.tokens))

    def _step(self, cache: KVCache, batch: Sequence[_ActiveRequest], launch: Callable[..., Collect]) -> None:
        """Computes the pending forwards of sequences 0 .. len(batch) - 1 in one model call and advances each."""
        forwards = [request.pending for request in batch if request.pending is not None]
        collect, end = launch(cache, forwards), 0
        # While the device computes: what the forwards before have left to do, and the traces.
        for sequence, (request, forward) in enumerate(zip(batch, forwards, strict=True)):
            request.check_answers()
            # All rows that the decoder asked for, also those that were shared: TPF does not depend on the batch.
            request.trace.forward(forward.kind, len(forward.tokens), cache.lengths[sequence])
        readouts = collect()
        for sequence, (request, forward) in enumerate(zip(batch, forwards, strict=True)):
            start, end = end, end + len(forward.reads)
            if request.pending is not None:
                self._advance(cache, sequence, request, tuple(readouts[start:end]))

    def _launch_shared(
        self, recorded: RecordedForwards | None, shared: _SharedPrefix, cache: KVCache, forwards: Sequence[Forward]
    ) -> Collect:
        """As `_launch`, but copies the rows that prompts have in common with the stored prompt."""
        filled = [shared.fill(cache, sequence, forward) for sequence, forward in enumerate(forwards)]
        shortened = [_without_first_rows(*pair) for pair in zip(forwards, filled, strict=True)]
        collect = self._launch(recorded, cache, shortened)
        for sequence, num_rows in enumerate(filled):
            cache.lengths[sequence] -= num_rows  # the copied rows counted as committed in this one call
            shared.keep(cache, sequence, forwards[sequence], num_rows)
        return collect

    def _launch(self, recorded: RecordedForwards | None, cache: KVCache, forwards: Sequence[Forward]) -> Collect:
        """Starts one model call, and one more for each forward that reuses features; the answers come in order."""
        if recorded is not None:
            collect = recorded.launch(forwards, ReadPlan.of(forwards), cache.lengths[: len(forwards)])
            if collect is not None:
                return collect
        readouts = self._compute(cache, forwards)
        return lambda: readouts

    def _compute(self, cache: KVCache, forwards: Sequence[Forward]) -> list[Readout]:
        """Makes a model call that is not recorded, and answers all reads."""
        model, plan = self.model, ReadPlan.of(forwards)
        cache.move_rows()
        with device.cpu_threads(self.num_threads):
            hidden_TC = hidden_of(model, cache, forwards, self.attention)
            if self.attention == "native" and plan.is_simple and plan.numbers.size:
                return read_native(plan, hidden_TC, model)
            return read_out(plan, hidden_TC, model.logits, model.config.vocab_size, model.dtype)

    def _finish(self, request: _ActiveRequest) -> Decoded:
        device.synchronize(self.model.device)
        seconds = time.perf_counter() - request.started
        assert request.response is not None
        response, trace = request.response, request.trace
        prefill_seconds = None if request.prefilled is None else request.prefilled - request.started
        return Decoded(
            tuple(response.tokens),
            response.stop,
            trace.num_forwards,
            seconds,
            trace,
            prefill_seconds,
            num_forced=response.num_forced,
        )


def _rows_needed(cache: KVCache, sequence: int, request: _ActiveRequest) -> int:
    return cache.lengths[sequence] + (0 if request.pending is None else len(request.pending.tokens))


def _grow_back(
    cache: KVCache,
    batch: Sequence[_ActiveRequest],
    preempted: Iterable[_Preempted],
    first_size: tuple[int, int],  # sequences and capacity of the buffer at the beginning
    max_rows: int,
) -> bool:
    """Makes places of a buffer that was made for long texts, once its rows fit into a shorter buffer; True if so."""
    batch_size, first_capacity = first_size
    if cache.num_sequences >= batch_size:
        return False
    needed = [_rows_needed(cache, sequence, request) for sequence, request in enumerate(batch)]
    # A preempted request will need its rows again: with less room it would be preempted again.
    needed += [removed.rows for removed in preempted]
    # Twice the need, so that texts that go on growing do not shrink the batch at once.
    capacity = max(first_capacity, 2 * max(needed))
    num_sequences = min(batch_size, max_rows // capacity)
    if num_sequences <= cache.num_sequences:
        return False
    cache.move_rows()
    cache.resize(num_sequences, capacity)
    return True


def check_forward(forward: Forward, vocab_size: int) -> None:
    num_rows = len(forward.tokens)
    num_seen = sum([segment.size for segment in forward.attention])
    if not num_rows == len(forward.positions) == num_seen or num_rows == 0:
        sizes = f"{num_rows} tokens, {len(forward.positions)} positions, attention over {num_seen} rows"
        raise DecodeError(f"{forward.kind}: {sizes}; they must be equally many, at least one")
    if not 0 <= min(forward.tokens) <= max(forward.tokens) < vocab_size or min(forward.positions) < 0:
        numbers = f"tokens {min(forward.tokens)} to {max(forward.tokens)}, positions from {min(forward.positions)}"
        raise DecodeError(f"{forward.kind}: {numbers}; tokens must lie in 0..{vocab_size - 1}, positions from 0 on")
    check_attention(forward.attention)
    for read in forward.reads:
        guides = read.guidance.rows if read.guidance else read.rows
        for rows in (read.rows, guides) if read.guidance else (read.rows,):
            if len(guides) != len(read.rows) or (rows and not 0 <= min(rows) <= max(rows) < num_rows):
                shown = f"rows {list(read.rows)}, guided by {list(guides)}"
                raise DecodeError(f"{forward.kind}: reads {shown}, of {num_rows} rows")
        if read.temperature > 0 and len(read.draws) != len(read.rows):
            raise DecodeError(f"{forward.kind}: sampling {len(read.rows)} rows takes one draw key each")
        if read.given is not None and len(read.given) != len(read.rows):
            raise DecodeError(f"{forward.kind}: {len(read.given)} given tokens for {len(read.rows)} rows")
    if isinstance(forward.approximation, RowScores):
        check_scores(forward, forward.approximation)
