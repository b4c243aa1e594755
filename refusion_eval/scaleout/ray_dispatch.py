"""One pass over the jobs of a run: they go to the desk as workers take them, and what comes back becomes records."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from refusion_eval import api
from refusion_eval.evaluate.interrupt import UntilAsked
from refusion_eval.evaluate.jobs import Job, record_error
from refusion_eval.scaleout.desk import MOST_LOSSES
from refusion_eval.scaleout.ray_pool import GROW_SECONDS, Event, LostWhileAskedError, Member, Pool
from refusion_eval.scaleout.wire import job_to_json
from refusion_eval.scaleout.worker import WIDTH_COST
from refusion_eval.store.records import Sample

log = logging.getLogger(__name__)

# How often a run to which nothing comes says whom it waits for.
SILENCE_SECONDS = 60.0

# How long nothing may come after a signal before what is in flight is given up: its worker may hang. Longer where
# records came further apart than that.
STOP_SECONDS = 15.0


class Office(Protocol):
    """What knows the run and its workers.

    Attributes:
        settled: facts of the run, see `Setup`.
    """

    settled: dict[str, Any]

    def welcome(self, event: Event) -> None:
        """Takes a worker from its start to where it can decode."""
        ...

    def signed(self, member: Member, sample: Mapping[str, Any]) -> Sample:
        """A worker's record, with the process that made it."""
        ...

    def settle_width_cost(self, measure: Callable[[], Mapping[str, Any]]) -> None:
        """Finds out how the time of a forward grows with its rows."""
        ...

    def demand(self) -> str:
        """What a worker needs, and what the cluster has."""
        ...


class Dispatch:
    """Sees to it that every job gets one record.

    Args:
        pool: the workers.
        desk: handle of an actor that holds a `Desk` where nothing waits.
        numbers: numbers for jobs that the desk has not seen yet.
        jobs: what is to be decoded; of `UntilAsked` it is known at once when a signal ends them.
        office: knows the run and its workers.
    """

    def __init__(self, pool: Pool, desk: Any, numbers: Iterator[int], jobs: Iterator[Job], office: Office) -> None:
        self._pool = pool
        self._desk = desk
        self._jobs = jobs
        self._office = office
        self._numbers = numbers
        self._next = next(jobs, None)
        self._said_last = False
        self._open: dict[int, Job] = {}
        self._heard = self._said = time.monotonic()
        self._asked_at: float | None = None
        self._record_at: float | None = None
        self._longest_gap = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether every job that was taken has its record."""
        return self._next is None and not self._open

    def records(self) -> Iterator[Sample]:
        """Yields the record of each job as it arrives; after a signal, of those that come without a long silence."""
        while not self.is_complete:
            self._pool.grow()
            self._feed()
            self._start_idle()
            for event in self._pool.wait(GROW_SECONDS):
                yield from self._after(event)
                self._hear(event)
            if self._is_stuck():
                return

    def _hear(self, event: Event) -> None:
        self._heard = time.monotonic()
        if event.kind == "record":
            self._longest_gap = max(self._longest_gap, self._heard - (self._record_at or self._heard))
            self._record_at = self._heard

    def _is_stuck(self) -> bool:
        """Whether to wait no longer, as after a signal nothing comes; says whom a silent run waits for."""
        now = time.monotonic()
        if self._asked_at is None and isinstance(self._jobs, UntilAsked) and self._jobs.asked:
            self._asked_at = now
        if self._asked_at is not None:
            silence = now - max(self._heard, self._asked_at)
            if silence > max(STOP_SECONDS, 2 * self._longest_gap):
                log.warning("not waited for, as nothing came for %.0f s: %s", silence, self._awaited())
                return True
        if now - max(self._heard, self._said) > SILENCE_SECONDS:
            self._said = now
            log.warning("nothing has come for %.0f s: %s", now - self._heard, self._awaited())
        return False

    def _awaited(self) -> str:
        held = self._pool.ask(self._desk.held.remote())
        what = [
            f"{member.name} has {held.get(member.name, 0)} requests"
            if member.doing == "decoding"
            else f"{member.name} is {member.doing}"
            for member in self._pool.members
        ]
        if not self._ready():
            what.append(f"no worker is ready; {self._office.demand()}")
        return f"{', '.join(what)}; {self._pool.ask(self._desk.num_waiting.remote())} more wait for a worker"

    def settle_down(self) -> None:
        """Waits until no worker asks the desk any more, so that all can serve another pass."""
        while any(member.doing == "decoding" for member in self._pool.members):
            for event in self._pool.wait(GROW_SECONDS):
                left = list(self._after(event))
                assert not left, "a record after the last one"

    def _ready(self) -> list[Member]:
        return [member for member in self._pool.members if member.doing in ("idle", "decoding")]

    def _feed(self) -> None:
        """Keeps a little more at the desk than the workers hold: one that ends a request finds the next one there."""
        room = sum(member.batch_size + 1 + member.batch_size // 4 for member in self._ready()) - len(self._open)
        put: list[tuple[int, dict[str, Any]]] = []
        while room > len(put) and self._next is not None and self._is_settled(self._next):
            number = next(self._numbers)
            self._open[number] = self._next
            put.append((number, job_to_json(self._next)))
            self._next = next(self._jobs, None)
        # While a measurement is outstanding no session may wait for more: it has to end first.
        last = self._next is None or not self._is_settled(self._next)
        if put or last != self._said_last:
            self._desk.put.remote(put, self._office.settled, not last)
            self._said_last = last

    def _is_settled(self, job: Job) -> bool:
        """Whether everything that a job needs is known; measured once nothing else is decoded."""
        if not api.needs_width_cost(job.resolved.settings) or WIDTH_COST in self._office.settled:
            return True
        ready = self._ready()
        if not ready or any(member.doing == "decoding" for member in ready):
            return False
        try:
            self._office.settle_width_cost(lambda: self._pool.width_cost(ready[0]))
        except LostWhileAskedError as lost:
            self._office.welcome(lost.event)
            return False
        self._heard = time.monotonic()
        return True

    def _start_idle(self) -> None:
        idle = [member for member in self._pool.members if member.doing == "idle"]
        if not idle or not self._open:
            return
        # Of the last requests each worker takes its share, however many its batch would hold.
        share = math.ceil(len(self._open) / len(self._pool.members))
        for member in idle[: self._pool.ask(self._desk.num_waiting.remote())]:
            self._pool.run(member, self._desk, min(member.batch_size, share) if self._said_last else member.batch_size)

    def _after(self, event: Event) -> Iterator[Sample]:
        if event.kind == "record":
            number, fields = event.value
            sample = self._office.signed(event.member, fields)
            self._desk.finished.remote(event.member.name, number)
            if self._open.pop(number, None) is not None:
                yield sample
        elif event.kind == "lost" and event.member.doing == "decoding":
            yield from self._after_loss(event)
        elif event.kind != "session ended":
            self._office.welcome(event)

    def _after_loss(self, event: Event) -> Iterator[Sample]:
        name = event.member.name
        num_held, given_up = self._pool.ask(self._desk.lose.remote(name))
        log.warning("%s is lost (%s); others decode its %d requests", name, event.value, num_held - len(given_up))
        for number in given_up:
            job = self._open.pop(number, None)
            if job is not None:
                reason = f"{MOST_LOSSES} workers ended while they decoded it, the last was {name} ({event.value})"
                yield record_error(job, reason, batch_size=event.member.batch_size)
