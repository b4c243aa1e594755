"""One pass over the jobs of a run on Ray: jobs go to workers that have room, and their answers become records.

A worker has at most as many requests as it decodes together. Each call of a worker returns one record, and the next
call brings the request that takes the place of the ended one. A worker idles between the two calls, for milliseconds
where a request takes seconds; in return no request waits at a busy worker while another worker is idle.
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from refusion_eval import api
from refusion_eval.runs.interrupt import StoppableIterator
from refusion_eval.runs.job import Job, record_error
from refusion_eval.scaleout.ray_pool import WorkerEvent, WorkerHandle, WorkerPool
from refusion_eval.scaleout.wire import job_to_json
from refusion_eval.scaleout.work_queue import MAX_LOSSES, Request, WorkQueue
from refusion_eval.store.records import Sample

log = logging.getLogger(__name__)

# Longest wait for an event before the run looks for signals and for machines that joined.
POLL_SECONDS = 0.5

# A run without events says that often for what it waits.
SILENCE_SECONDS = 60.0

# After a signal, requests in flight are given up if no event comes for so long, because their worker may hang. The time
# is longer where records came further apart before.
STOP_SECONDS = 15.0


class RunContext(Protocol):
    """The run, as far as the dispatcher has to know it.

    Attributes:
        run_facts: facts of the run that workers need, see `Setup`.
    """

    run_facts: dict[str, Any]

    def on_setup_event(self, event: WorkerEvent) -> None:
        """Advances the setup of workers, or logs the loss of a worker without requests."""
        ...

    def sample(self, worker: WorkerHandle, fields: Mapping[str, Any]) -> Sample:
        """Decodes a worker's record from JSON and adds the worker's process id."""
        ...

    def has_width_cost(self) -> bool:
        """Whether the cost of a forward by its rows is known, in this process or from the run directory."""
        ...

    def set_width_cost(self, measured: Mapping[str, Any]) -> None:
        """Records the cost of a forward by its rows."""
        ...

    def describe_resources(self) -> str:
        """Resources that a worker needs, and resources of the cluster."""
        ...


class Dispatcher:
    """Makes sure that every job gets one record.

    Args:
        pool: the workers.
        numbers: numbers for requests; none is used twice as long as the workers live.
        jobs: jobs to be decoded; a `StoppableIterator` tells when a signal has ended it.
        run: the run to which the jobs belong.
    """

    def __init__(self, pool: WorkerPool, numbers: Iterator[int], jobs: Iterator[Job], run: RunContext) -> None:
        self._pool = pool
        self._queue = WorkQueue()
        self._jobs = jobs
        self._run = run
        self._numbers = numbers
        self._next_job = next(jobs, None)
        self._open: dict[int, Job] = {}  # jobs without a record, by the number of the request
        self._last_event = self._last_report = time.monotonic()
        self._stopped_at: float | None = None
        self._last_record: float | None = None
        self._longest_gap = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether every job has its record; after a signal, whether every job that was begun has it."""
        return self._next_job is None and not self._open

    def records(self) -> Iterator[Sample]:
        """Yields the record of each job as it arrives; after a signal, only records of jobs that were begun."""
        while not self.is_complete:
            self._pool.grow()
            self._assign()
            for event in self._pool.wait(POLL_SECONDS):
                self._note_time(event)
                samples = self._handle(event)
                self._assign()  # before the records are stored, so that the worker does not wait for the disk
                yield from samples
            self._stop_if_requested()
            if self._is_stuck():
                return

    def _note_time(self, event: WorkerEvent) -> None:
        self._last_event = time.monotonic()
        if event.kind == "record":
            self._longest_gap = max(self._longest_gap, self._last_event - (self._last_record or self._last_event))
            self._last_record = self._last_event

    def _stop_if_requested(self) -> None:
        """After a signal, drops the jobs that no worker has."""
        if isinstance(self._jobs, StoppableIterator) and self._jobs.stop_requested:
            self._stopped_at = self._stopped_at or time.monotonic()
            self._next_job = None
            for number in self._queue.clear():
                del self._open[number]

    def _is_stuck(self) -> bool:
        """Whether no more events can be expected after a signal; reports a long silence."""
        now = time.monotonic()
        if self._stopped_at is not None:
            silence = now - max(self._last_event, self._stopped_at)
            if silence > max(STOP_SECONDS, 2 * self._longest_gap):
                log.warning(
                    "records are missing, as nothing came for %.0f s after the signal: %s", silence, self._status()
                )
                return True
        if now - max(self._last_event, self._last_report) > SILENCE_SECONDS:
            self._last_report = now
            log.warning("nothing has come for %.0f s: %s", now - self._last_event, self._status())
        return False

    def _status(self) -> str:
        parts = [
            f"{worker.name} has {self._queue.num_assigned(worker.name)} requests"
            if worker.state == "decoding"
            else f"{worker.name} is {worker.state}"
            for worker in self._pool.workers
        ]
        if not self._ready_workers():
            parts.append(f"no worker is ready; {self._run.describe_resources()}")
        return f"{', '.join(parts)}; {self._queue.num_waiting()} more wait for a worker"

    def _ready_workers(self) -> list[WorkerHandle]:
        return [worker for worker in self._pool.workers if worker.is_ready]

    def _assign(self) -> None:
        """Fills the queue, and gives each idle worker as many requests as it has room for."""
        self._stop_if_requested()
        self._fill_queue()
        for worker in self._pool.workers:
            if worker.state != "idle":
                continue
            num_assigned = self._queue.num_assigned(worker.name)
            requests: list[Request] = []
            while num_assigned + len(requests) < self._share(worker):
                request = self._queue.claim(worker.name)
                if request is None:
                    break
                requests.append(request)
            if requests or num_assigned:
                self._pool.decode(worker, requests, self._run.run_facts)

    def _fill_queue(self) -> None:
        """Keeps as many requests in the queue as all workers could take at once."""
        num_wanted = sum(worker.batch_size + 1 for worker in self._ready_workers())
        while self._queue.num_waiting() < num_wanted and self._next_job is not None and self._is_known(self._next_job):
            number = next(self._numbers)
            self._open[number] = self._next_job
            self._queue.put(number, job_to_json(self._next_job))
            self._next_job = next(self._jobs, None)

    def _is_known(self, job: Job) -> bool:
        """Whether the facts that a job needs are known; starts their measurement once no worker decodes."""
        if not api.needs_width_cost(job.resolved.settings) or self._run.has_width_cost():
            return True
        workers = self._pool.workers
        is_busy = any(worker.state == "measuring" or self._queue.num_assigned(worker.name) for worker in workers)
        idle = [worker for worker in workers if worker.state == "idle"]
        if idle and not is_busy and not self._queue.num_waiting():
            self._pool.measure(idle[0])
        return False

    def _share(self, worker: WorkerHandle) -> int:
        """Largest number of requests that a worker may have now."""
        if self._next_job is not None:
            return worker.batch_size
        # The last requests are divided evenly, even if the batch of one worker could hold them all.
        return min(worker.batch_size, math.ceil(len(self._open) / len(self._pool.workers)))

    def _handle(self, event: WorkerEvent) -> list[Sample]:
        """Handles an event and returns the records that it brings."""
        name = event.worker.name
        if event.kind == "record":
            number, fields = event.value
            self._queue.complete(name, number)
            del self._open[number]
            return [self._run.sample(event.worker, fields)]
        if event.kind == "measured":
            self._run.set_width_cost(event.value)
        elif event.kind == "lost" and self._queue.num_assigned(name):
            return self._handle_loss(event)
        else:
            self._run.on_setup_event(event)
        return []

    def _handle_loss(self, event: WorkerEvent) -> list[Sample]:
        name, batch_size = event.worker.name, event.worker.batch_size
        num_assigned, given_up = self._queue.requeue_lost(name)
        log.warning("%s is lost (%s); others decode its %d requests", name, event.value, num_assigned - len(given_up))
        reason = f"{MAX_LOSSES} workers ended while they decoded it, the last was {name} ({event.value})"
        return [record_error(self._open.pop(number), reason, batch_size=batch_size) for number in given_up]
