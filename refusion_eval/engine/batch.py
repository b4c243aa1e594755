"""Continuous batching: requests are decoded together, and when one ends, the next takes its place."""

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from refusion_eval.engine.prefix import SharedPrefix, without_first_rows
from refusion_eval.engine.readout import Collect, is_plain
from refusion_eval.engine.recorded import NOTHING_FED, RecordedForwards
from refusion_eval.engine.request import ActiveRequest, Request
from refusion_eval.errors import DecodeError
from refusion_eval.models import device
from refusion_eval.models.attention import is_causal
from refusion_eval.models.cache import KVCache
from refusion_eval.types import Commit, Decoded, Forward, causal

log = logging.getLogger(__name__)

SILENT_SECONDS = 60  # after which a batch of which no request ends says how far it is
FIRST_CAPACITY = 512


class _Preempted(NamedTuple):
    """A request that was removed from a batch, with its number, and the cache rows that it needed then."""

    entry: tuple[int, Request]
    rows: int


@dataclass(slots=True)
class BatchCounts:
    """Model calls of a batch, their requests and rows in total, and the seconds that the host waited for answers."""

    steps: int = 0
    requests: int = 0
    rows: int = 0
    waited_seconds: float = 0.0

    def add(self, forwards: Sequence[Forward], waited_seconds: float) -> None:
        self.steps += 1
        self.requests += len(forwards)
        self.rows += sum([len(forward.tokens) for forward in forwards])
        self.waited_seconds += waited_seconds


@dataclass(slots=True, eq=False)
class _Flight:
    """A forward of a request that was launched and whose answers are not read yet."""

    request: ActiveRequest
    forward: Forward
    is_guess: bool  # whether the request has not asked for it, and if a call was collected since, never will


class _Call(NamedTuple):
    flights: Sequence[_Flight]
    collect: Collect


class Batch:
    """The requests that are decoded together, and the buffer of their keys and values.

    Without overlap, the host waits for the answers of each call before it makes the next. With it, two calls are under
    way: while the device computes one, the host reads the answers of the other and makes the next. Requests whose next
    forward is known but for its token, as of autoregressive decoding, are part of both: the token is fed on the device,
    and a forward that the decoder does not ask for afterwards is dropped. All others are part of one of the two.
    """

    def __init__(
        self,
        engine: Any,  # an Engine, whose module imports this one
        cache: KVCache,
        recorded: RecordedForwards | None,
        first_size: tuple[int, int],  # the most requests at a time, and the capacity of a buffer for so many
        max_rows: int,
    ) -> None:
        self._engine, self._cache, self._recorded = engine, cache, recorded
        self._first_size, self._max_rows = first_size, max_rows
        self._overlaps = engine.overlaps and recorded is not None
        self._shared = SharedPrefix()
        self._active: list[ActiveRequest] = []
        self._preempted = deque[_Preempted]()
        self._calls = deque[_Call]()
        self.counts = BatchCounts()

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Decoded | DecodeError]]:
        """See `Engine.run_many`."""
        waiting, told = enumerate(requests), time.monotonic()
        while True:
            self._admit(waiting)
            if not self._active:
                while self._calls:  # of guesses alone
                    self._collect(self._calls.popleft())
                return
            if all(request.pending is not None for request in self._active):
                self._step()
            for request in [request for request in self._active if request.pending is None]:
                self._active.remove(request)
                yield request.index, request.error or self._engine._finish(request)
                told = time.monotonic()
            if self._active and time.monotonic() - told >= SILENT_SECONDS:
                told, num_tokens = time.monotonic(), sum(len(request.trace.fixed_at()) for request in self._active)
                log.info("%d requests at a time: %d tokens in the unfinished responses", len(self._active), num_tokens)

    def _admit(self, waiting: Iterator[tuple[int, Request]]) -> None:
        """Starts requests as long as there are places for them."""
        cache = self._cache
        while len(self._active) < cache.num_sequences or self._grow_back():
            entry = self._preempted.popleft().entry if self._preempted else next(waiting, None)
            if entry is None:
                return
            is_awaited = any(other.is_awaited_by(entry[1]) for other in self._active)
            if is_awaited and not self._shared.begins_with(entry[1].prompt):  # begins one step later, with copied rows
                self._preempted.appendleft(_Preempted(entry, rows=0))
                return
            taken = {request.sequence for request in self._active}
            place = next(number for number in range(cache.num_sequences) if number not in taken)
            cache.wipe(place)
            self._active.append(self._engine._start(cache, place, *entry))

    def _step(self) -> None:
        if self._overlaps:
            self._overlap()
        elif self._make_room():
            self._engine._step(self._cache, self._active, self._launch_call, self.counts)

    def _launch_call(
        self,
        cache: KVCache,
        forwards: Sequence[Forward],
        sequences: Sequence[int],
        fed: Mapping[int, int] = NOTHING_FED,
    ) -> Collect | None:
        """Starts a model call, in which the rows that prompts have in common with the stored one are copied."""
        engine, shared = self._engine, self._shared
        if engine.shares_prompts:
            filled = [shared.fill(cache, *pair) for pair in zip(sequences, forwards, strict=True)]
            shortened = [without_first_rows(*pair) for pair in zip(forwards, filled, strict=True)]
            collect = engine._launch(self._recorded, cache, shortened, sequences, fed)
            for sequence, forward, num_rows in zip(sequences, forwards, filled, strict=True):
                cache.lengths[sequence] -= num_rows  # the copied rows counted as committed in this one call
                if collect is not None:
                    shared.keep(cache, sequence, forward, num_rows)
        else:
            collect = engine._launch(self._recorded, cache, forwards, sequences, fed)
        curve = engine.load_curve
        if collect is None or curve is None:
            return collect
        cost = curve.row_cost(sum([len(forward.tokens) for forward in forwards]), len(forwards))
        return lambda: [replace(readout, row_cost=cost) for readout in collect()]

    # Without overlap, and whenever the buffer changes: no call is under way.

    def _make_room(self) -> bool:
        """Grows the buffer for the pending forwards, within the budget; False if that ended or removed all requests."""
        cache, max_rows, model = self._cache, self._max_rows, self._engine.model
        self._close_gaps()
        rows = [request.rows_needed(cache) for request in self._active]
        needed = max(rows)
        if needed <= cache.capacity:
            return True
        if needed > max_rows:  # even without the others
            budget = max_rows * device.cache_bytes_per_row(model.config, model.dtype) / 2**30
            limit = f"the KV budget of {max_rows} rows ({budget:.2f} GiB); raise kv_budget_gib or shorten the prompt"
            for request, num_rows in zip(self._active, rows, strict=True):
                if num_rows > max_rows:
                    request.fail(DecodeError(f"a sequence of {num_rows} rows exceeds {limit}"))
            return False
        num_sequences = min(cache.num_sequences, max_rows // needed)
        for request, num_rows in reversed([*zip(self._active, rows, strict=True)][num_sequences:]):
            request.decoding.close()
            self._preempted.appendleft(_Preempted((request.index, request.request), num_rows))
        del self._active[num_sequences:]
        cache.resize(num_sequences, min(max(needed, 2 * cache.capacity), max_rows // num_sequences))
        if self._recorded is not None:
            self._recorded.prepare(lazily=True)
        return True

    def _close_gaps(self) -> None:
        # So that active sequences are the first of the buffer: where forwards are not recorded, attention is padded
        # over neighbours. The last ones take the free places.
        taken = {request.sequence for request in self._active}
        free = [place for place in range(len(self._active)) if place not in taken]
        for request in self._active:
            if request.sequence >= len(self._active):
                place = free.pop(0)
                self._cache.move(request.sequence, place)
                request.sequence = place
        self._active.sort(key=lambda request: request.sequence)

    def _grow_back(self) -> bool:
        """Makes places of a buffer that was made for long texts, once its rows fit into a shorter one; True if so."""
        cache, (batch_size, first_capacity) = self._cache, self._first_size
        if cache.num_sequences >= batch_size or self._calls:
            return False
        needed = [request.rows_needed(cache) for request in self._active]
        # A preempted request will need its rows again: with less room it would be preempted again.
        needed += [removed.rows for removed in self._preempted]
        # Twice the need, so that texts that go on growing do not shrink the batch at once.
        capacity = max(first_capacity, 2 * max(needed))
        num_sequences = min(batch_size, self._max_rows // capacity)
        if num_sequences <= cache.num_sequences:
            return False
        cache.move_rows()
        cache.resize(num_sequences, capacity)
        if self._recorded is not None:
            self._recorded.prepare(lazily=True)
        return True

    # With overlap.

    def _overlap(self) -> None:
        """Launches what can be launched beside the call that is under way, and waits for the older of two calls."""
        is_small = self._cache.num_sequences < self._first_size[0]
        flying = {id(flight.request) for call in self._calls for flight in call.flights if not flight.is_guess}
        free = [request for request in self._active if id(request) not in flying]
        is_short = any(request.rows_needed(self._cache) > self._cache.capacity for request in free)
        if self._calls and (is_short or is_small):  # the buffer can only change while no call is under way
            self._collect(self._calls.popleft())
            return
        if is_short:
            if not self._make_room():
                return
            free = list(self._active)
        flights = [_Flight(request, request.pending, is_guess=False) for request in free if request.pending is not None]
        if self._calls:
            flights += self._guesses(self._calls[0])
        elif not (is_small or all(_is_regular(flight) for flight in flights)):
            flights = flights[: -(-len(flights) // 2)]
        if call := self._launch(flights):
            self._calls.append(call)
        if len(self._calls) == 2 or call is None:
            self._collect(self._calls.popleft())

    def _guesses(self, call: _Call) -> list[_Flight]:
        """The forwards that follow those of a call if each decoder feeds the token that it gets."""
        config, cache, guesses = self._engine.model.config, self._cache, []
        for flight in call.flights:
            request, forward = flight.request, flight.forward
            position, num_rows = forward.positions[-1] + 1, request.rows_needed(cache)
            if _is_regular(flight) and num_rows < cache.capacity and position < config.max_positions:
                read = replace(forward.reads[0], rows=(0,))
                positions, commit = range(position, position + 1), Commit(range(len(forward.tokens)))
                guesses.append(_Flight(request, Forward([0], positions, causal(1), (read,), commit), is_guess=True))
        return guesses

    def _launch(self, flights: Sequence[_Flight]) -> _Call | None:
        flights = sorted(flights, key=lambda flight: flight.request.sequence)
        fed: dict[int, int] = {}
        if any(flight.is_guess for flight in flights):
            reads = accumulate([len(flight.forward.reads) for flight in self._calls[0].flights], initial=0)
            numbers = {id(flight.request): read for flight, read in zip(self._calls[0].flights, reads, strict=False)}
            fed = {flight.request.sequence: numbers[id(flight.request)] for flight in flights if flight.is_guess}
        forwards, sequences = [flight.forward for flight in flights], [flight.request.sequence for flight in flights]
        if not forwards:
            return None
        collect = self._launch_call(self._cache, forwards, sequences, fed)
        if collect is None:  # then without the guesses
            return self._launch([flight for flight in flights if not flight.is_guess])
        for flight in flights:
            if flight.is_guess:
                self._cache.touch(flight.request.sequence, flight.request.rows_needed(self._cache) + 1)
            else:
                flight.request.note_launch(self._cache)
        return _Call(flights, collect)

    def _collect(self, call: _Call) -> None:
        """Waits for the answers of a call, advances its requests, and keeps or drops what was guessed of them."""
        started, end = time.perf_counter(), 0
        readouts = call.collect()
        self.counts.add([flight.forward for flight in call.flights], time.perf_counter() - started)
        guesses = {id(flight.request): flight for later in self._calls for flight in later.flights if flight.is_guess}
        for flight in call.flights:
            start, end = end, end + len(flight.forward.reads)
            request = flight.request
            if flight.is_guess or request.pending is not flight.forward:  # dropped, or failed since
                continue
            answers = tuple(readouts[start:end])
            self._engine._advance(self._cache, request, answers)
            guess = guesses.get(id(request))
            if guess is None or request.pending is None:
                continue
            if _key(request.pending) == _key(replace(guess.forward, tokens=answers[0].tokens.tolist())):
                guess.forward, guess.is_guess = request.pending, False
                request.note_launch(self._cache)
            else:
                request.is_regular = False


def _is_regular(flight: _Flight) -> bool:
    """Whether the next forward of a request is known but for its token: it feeds the likeliest token after all rows."""
    request, forward = flight.request, flight.forward
    if flight.is_guess or not request.is_regular or request.pending is not forward or len(forward.reads) != 1:
        return False
    read, is_exact = forward.reads[0], forward.approximation is None and forward.self_conditioning is None
    is_last = list(read.rows) == [len(forward.tokens) - 1] and read.given is None and is_plain(read)
    return is_exact and is_last and is_causal(forward.attention)


def _key(forward: Forward) -> tuple[Any, ...]:
    """What two forwards have in common that compute and keep the same."""
    reads = [replace(read, rows=list(read.rows)) for read in forward.reads]
    commit = (list(forward.commit.rows), forward.commit.keep)
    exactness = (forward.approximation, forward.self_conditioning)
    return list(forward.tokens), list(forward.positions), forward.attention, reads, commit, exactness
