"""One pass over the jobs of a run: they go to workers as these have room, and what comes back becomes records.

A worker decodes what its first turn brought while those of the next one lie beside it: when a record is done, what
follows is there already, and neither waits for the driver.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from refusion_eval import api
from refusion_eval.runs.interrupt import StoppableIterator
from refusion_eval.runs.job import Job, record_error
from refusion_eval.scaleout.desk import MOST_LOSSES, Desk, Entry
from refusion_eval.scaleout.ray_pool import Event, Member, Pool
from refusion_eval.scaleout.wire import job_to_json
from refusion_eval.scaleout.worker import WIDTH_COST
from refusion_eval.store.records import Sample

log = logging.getLogger(__name__)

# Turns of a worker under way: one that decodes, and one that waits beside it.
TURNS = 2

# How often a run to which nothing comes looks for signals and for machines that joined.
LOOK_SECONDS = 0.5

# How often a run to which nothing comes says whom it waits for.
SILENCE_SECONDS = 60.0

# How long nothing may come after a signal before what is in flight is given up: its worker may hang. Longer where
# records came further apart than that.
STOP_SECONDS = 15.0


class _NotMeasured(Exception):
    """A fact of the run is recorded nowhere."""


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
        numbers: numbers for jobs, each used once as long as the workers live.
        jobs: what is to be decoded; a `StoppableIterator` tells at once when a signal ends them.
        office: knows the run and its workers.
    """

    def __init__(self, pool: Pool, numbers: Iterator[int], jobs: Iterator[Job], office: Office) -> None:
        self._pool = pool
        self._desk = Desk()
        self._jobs = jobs
        self._office = office
        self._numbers = numbers
        self._next = next(jobs, None)
        self._open: dict[int, Job] = {}
        self._heard = self._said = time.monotonic()
        self._asked_at: float | None = None
        self._record_at: float | None = None
        self._longest_gap = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether every job has its record; after a signal, every one that was begun."""
        return self._next is None and not self._open

    def records(self) -> Iterator[Sample]:
        """Yields the record of each job as it arrives; after a signal, of those that come without a long silence."""
        while not self.is_complete:
            self._pool.grow()
            self._stock()
            self._feed()
            self._relieve()
            for event in self._pool.wait(LOOK_SECONDS):
                yield from self._after(event)
                self._hear(event)
            self._stop_if_asked()
            if self._is_stuck():
                return

    def _hear(self, event: Event) -> None:
        self._heard = time.monotonic()
        if event.kind == "record":
            self._longest_gap = max(self._longest_gap, self._heard - (self._record_at or self._heard))
            self._record_at = self._heard

    def _stop_if_asked(self) -> None:
        """After a signal, takes back whatever no worker has begun."""
        if not (isinstance(self._jobs, StoppableIterator) and self._jobs.stop_requested):
            return
        self._asked_at = self._asked_at or time.monotonic()
        self._next = None
        for number in self._desk.clear():
            del self._open[number]
        for member in self._pool.members:
            self._pool.withdraw(member)

    def _is_stuck(self) -> bool:
        """Whether to wait no longer, as after a signal nothing comes; says whom a silent run waits for."""
        now = time.monotonic()
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
        what = [
            f"{member.name} has {self._desk.num_held(member.name)} requests"
            if member.doing == "decoding"
            else f"{member.name} is {member.doing}"
            for member in self._pool.members
        ]
        if not self._ready():
            what.append(f"no worker is ready; {self._office.demand()}")
        return f"{', '.join(what)}; {self._desk.num_waiting()} more wait for a worker"

    def _ready(self) -> list[Member]:
        return [member for member in self._pool.members if member.doing in ("idle", "decoding")]

    def _stock(self) -> None:
        """Keeps as many requests at the desk as all workers could take at once, so that the last ones are known."""
        wanted = sum(member.batch_size + 1 for member in self._ready())
        while self._desk.num_waiting() < wanted and self._next is not None and self._is_settled(self._next):
            number = next(self._numbers)
            self._open[number] = self._next
            self._desk.put(number, job_to_json(self._next))
            self._next = next(self._jobs, None)

    def _is_settled(self, job: Job) -> bool:
        """Whether everything that a job needs is known; measured once nothing else is decoded."""
        if not api.needs_width_cost(job.resolved.settings) or WIDTH_COST in self._office.settled:
            return True
        try:
            self._office.settle_width_cost(_not_measured)
        except _NotMeasured:
            if self._ready() and all(member.doing not in ("decoding", "measuring") for member in self._pool.members):
                self._pool.measure(self._ready()[0])
            return False
        return True

    def _feed(self) -> None:
        """Gives each worker what it has room for, and then what it finds when a record is done."""
        ready = self._ready()
        for under_way in range(TURNS):
            # The last ones are not laid beside one worker while another may be free for them sooner.
            may_take = not under_way or self._desk.num_waiting() >= len(ready)
            for member in ready:
                if len(member.turns) == under_way:
                    self._give(member, may_take=may_take)

    def _give(self, member: Member, *, may_take: bool) -> None:
        num_held = self._desk.num_held(member.name)
        entries: list[Entry] = []
        while may_take and num_held + len(entries) < self._room(member):
            entry = self._desk.claim(member.name)
            if entry is None:
                break
            entries.append(entry)
        # Every turn answers with one record, of those that the worker has by then.
        if entries or num_held > len(member.turns):
            self._pool.give(member, entries, self._office.settled)

    def _room(self, member: Member) -> int:
        """Most requests that a worker may have, with those of its next turn."""
        room = (1 if self._desk.next_is_alone() else member.batch_size) + len(member.turns)
        if self._next is not None:
            return room
        # Of the last requests each worker takes its share, however many its batch would hold.
        return min(room, math.ceil(len(self._open) / len(self._pool.members)))

    def _relieve(self) -> None:
        """Asks busy workers for what they have not begun, where others have nothing to do."""
        ready = self._ready()
        if self._desk.num_waiting():
            return
        num_wanted = sum(member.doing == "idle" for member in ready)
        num_wanted -= sum(member.withdrawing is not None for member in ready)
        for member in ready:
            if num_wanted > 0 and self._pool.withdraw(member):
                num_wanted -= 1

    def _after(self, event: Event) -> Iterator[Sample]:
        name = event.member.name
        if event.kind == "record":
            number, fields = event.value
            sample = self._office.signed(event.member, fields)
            self._desk.finished(name, number)
            del self._open[number]
            yield sample
        elif event.kind == "withdrawn":
            for number in event.value:
                self._desk.give_back(name, number)
        elif event.kind == "measured":
            self._office.settle_width_cost(lambda: event.value)
        elif event.kind == "lost" and self._desk.num_held(name):
            yield from self._after_loss(event)
        else:
            self._office.welcome(event)

    def _after_loss(self, event: Event) -> Iterator[Sample]:
        name = event.member.name
        num_held, given_up = self._desk.lose(name)
        log.warning("%s is lost (%s); others decode its %d requests", name, event.value, num_held - len(given_up))
        for number in given_up:
            reason = f"{MOST_LOSSES} workers ended while they decoded it, the last was {name} ({event.value})"
            yield record_error(self._open.pop(number), reason, batch_size=event.member.batch_size)


def _not_measured() -> Mapping[str, Any]:
    raise _NotMeasured
