"""Decodes the jobs of a run on a Ray cluster. This process hands out jobs and stores records; it decodes nothing.

A worker has at most as many requests as it decodes together. Each call of a worker returns one record, and the next
call brings the request that takes the place of the ended one. A worker idles between the two calls, for milliseconds
where a request takes seconds; in return no request waits at a busy worker while another worker is idle.
"""

import itertools
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from refusion_eval import api
from refusion_eval.errors import ConfigError, ScaleOutError
from refusion_eval.runs.job import Job, record_error
from refusion_eval.runs.manifest import run_arguments
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.runs.system import GetOrCompute, System
from refusion_eval.runs.terminal import StoppableIterator
from refusion_eval.scaleout.ray_cluster import Cluster
from refusion_eval.scaleout.ray_pool import Request, WorkerEvent, WorkerHandle, WorkerPool, in_short
from refusion_eval.scaleout.worker import WIDTH_COST, RecordReader, Register
from refusion_eval.store.records import Manifest, Sample

log = logging.getLogger(__name__)

# Longest wait for an answer before the run looks for signals and for machines that joined.
POLL_SECONDS = 0.5

# Longest wait for the first worker: machines that are rented on demand take minutes to start.
FIRST_WORKER_SECONDS = 900.0

# A run without answers says that often for what it waits.
SILENCE_SECONDS = 60.0

# After a signal, requests in flight are given up if no answer comes for so long, because their worker may hang. The
# time is longer where records came further apart before.
STOP_SECONDS = 15.0

# A request over which so many workers died gets an error record: it probably kills workers.
MAX_LOSSES = 3


def driver_args(args: ModelArgs) -> ModelArgs:
    """Arguments of the driver's own system, which loads no weights and needs no GPU."""
    return replace(args, device="cpu", attention="sdpa", cuda_graphs=False, loop="engine", run_dir=None)


class RayRunner:
    """A `JobRunner` whose workers are processes of a Ray cluster.

    Args:
        keep_workers: whether workers stay alive after `run`, for another call. By default their resources become free.

    Raises:
        ConfigError: ray is missing, or an argument means one process only.
        ScaleOutError: the cluster cannot be reached.
    """

    def __init__(self, args: ModelArgs, system: System, register: Register, *, keep_workers: bool = False) -> None:
        if args.device.startswith("cuda:"):
            raise ConfigError(
                f"device={args.device} names one GPU, and with engine=ray each worker has its own: say cuda"
            )
        self._args = args
        self._system = system
        self._keep_workers = keep_workers
        self._records = RecordReader(register)
        self.cluster = Cluster(args.ray_address)
        self._pool = WorkerPool(self.cluster, args)

    def refusal(self, job: Job) -> str | None:
        """The reason why a job cannot be decoded, if that is known before decoding; else None."""
        return self._system.refusal(job)

    def manifest(self, task_versions: Mapping[str, str]) -> Manifest:
        """Describes this run. The device and all that depends on it are those of the first worker, which this awaits.

        Raises:
            ScaleOutError: no worker can be started, or none can load the checkpoint.
        """
        manifest = self._wait_for_manifest(lambda: False)
        assert manifest is not None
        return replace(
            manifest,
            tasks=dict(task_versions),
            checkpoint=self._args.pretrained,
            command=sys.argv,
            arguments=run_arguments(self._args) | {"cuda_graphs": manifest.arguments["cuda_graphs"]},
        )

    def _wait_for_manifest(self, stop_requested: Callable[[], bool]) -> Manifest | None:
        """Waits for the first worker's description of the run; returns None if a stop is requested before."""
        pool, now = self._pool, time.monotonic()
        deadline, next_line = now + FIRST_WORKER_SECONDS, now + SILENCE_SECONDS
        while pool.manifest is None and not stop_requested():
            pool.grow()
            for event in pool.wait(POLL_SECONDS):
                log.warning("%s is lost (%s)", event.worker.name, event.value)
            now = time.monotonic()
            if now > next_line:
                next_line = now + SILENCE_SECONDS
                states = ", ".join(f"{worker.name} is {worker.state}" for worker in pool.workers)
                log.info("waiting for a first worker: %s; %s", states or "there is no room", pool.describe())
            if pool.is_first_opening:  # it has started; its checkpoint may have to be downloaded
                deadline = now + FIRST_WORKER_SECONDS
            if now > deadline:
                raise ScaleOutError(f"no worker started in {FIRST_WORKER_SECONDS:.0f} s: {pool.describe()}")
        return pool.manifest

    def run(self, jobs: Iterable[Job]) -> Iterator[Sample]:
        """Decodes jobs on all workers and yields the record of each job as it arrives.

        Args:
            jobs: jobs with different keys, read as workers become free, and a few jobs ahead; jobs to be decoded alone
                come before all others.

        Raises:
            ScaleOutError: no worker can decode, or the cluster failed.
        """
        is_complete = False
        try:
            if self._wait_for_manifest(lambda: _stop_requested(jobs)) is None:
                return
            dispatcher = Dispatcher(self._pool, iter(jobs), self._records, self._system.get_or_compute)
            yield from dispatcher.records()
            is_complete = dispatcher.is_complete
        except self.cluster.ray.exceptions.RayError as error:
            raise ScaleOutError(
                f"the Ray cluster failed ({in_short(error)}); run the same command again to continue"
            ) from error
        finally:
            if not (self._keep_workers and is_complete):
                self._pool.stop_all()

    def close(self) -> None:
        """Ends the workers and leaves the cluster."""
        self._pool.stop_all()
        self.cluster.close()


class Dispatcher:
    """One pass over the jobs of a run, which makes sure that every job gets one record."""

    def __init__(
        self, pool: WorkerPool, jobs: Iterator[Job], records: RecordReader, get_or_compute: GetOrCompute
    ) -> None:
        self._pool = pool
        self._jobs = jobs
        self._records = records
        self._get_or_compute = get_or_compute
        self._waiting: list[Request] = []  # requests that no worker has
        self._is_exhausted = False  # whether `jobs` has ended
        self._last_event = self._last_report = time.monotonic()
        self._last_record: float | None = None
        self._longest_gap = 0.0  # between two records
        self._stopped_at: float | None = None
        self._fill()

    @property
    def is_complete(self) -> bool:
        """Whether every job has its record; after a signal, whether every job that was begun has it."""
        return not self._waiting and not any(worker.requests for worker in self._pool.workers)

    def records(self) -> Iterator[Sample]:
        """Yields the record of each job as it arrives; after a signal, only records of jobs that were begun."""
        while not self.is_complete:
            self._pool.grow()
            self._assign()
            for event in self._pool.wait(POLL_SECONDS):
                samples = self._handle(event)
                self._assign()  # before the records are stored, so that the worker does not wait for the disk
                yield from samples
            self._stop_if_requested()
            if self._is_stuck():
                return

    def _stop_if_requested(self) -> None:
        """After a signal, drops the jobs that no worker has."""
        if _stop_requested(self._jobs):
            self._stopped_at = self._stopped_at or time.monotonic()
            self._waiting.clear()

    def _is_stuck(self) -> bool:
        """Whether no more records can be expected after a signal; reports a long silence."""
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
            f"{worker.name} has {len(worker.requests)} requests"
            if worker.state == "decoding"
            else f"{worker.name} is {worker.state}"
            for worker in self._pool.workers
        ]
        if not any(worker.is_ready for worker in self._pool.workers):
            parts.append(f"no worker is ready; {self._pool.describe()}")
        return f"{', '.join(parts)}; {len(self._waiting)} more wait for a worker"

    def _fill(self) -> None:
        """Keeps as many requests waiting as all workers could take at once."""
        num_wanted = 1 + sum(worker.batch_size + 1 for worker in self._pool.workers if worker.is_ready)
        self._waiting += map(Request, itertools.islice(self._jobs, max(0, num_wanted - len(self._waiting))))
        self._is_exhausted = len(self._waiting) < num_wanted

    def _assign(self) -> None:
        """Gives each idle worker as many requests as it has room for."""
        self._stop_if_requested()
        self._fill()
        num_open = len(self._waiting) + sum(len(worker.requests) for worker in self._pool.workers)
        for worker in self._pool.workers:
            if worker.state != "idle":
                continue
            share = worker.batch_size
            if self._is_exhausted:
                # The last requests are divided evenly, even if the batch of one worker could hold them all.
                share = min(share, math.ceil(num_open / len(self._pool.workers)))
            requests: list[Request] = []
            while len(worker.requests) + len(requests) < share and (request := self._claim(worker, requests)):
                requests.append(request)
            if requests or worker.requests:
                self._pool.decode(worker, requests)

    def _claim(self, worker: WorkerHandle, claimed: list[Request]) -> Request | None:
        """Takes the next request for a worker: timed requests first, suspects last, both only for a free worker.

        While timed requests wait, a worker that is busy gets nothing, so that it becomes free for them.
        """
        request = min(self._waiting, key=lambda waiting: (waiting.is_suspect, not waiting.job.alone), default=None)
        held = [*worker.requests.values(), *claimed]
        if request is None or (held and any(other.is_solo for other in (request, *held))):
            return None
        if not self._has_facts(request.job):
            if not any(other.requests or other.state == "measuring" for other in self._pool.workers) and not claimed:
                self._pool.measure(worker)
            return None
        self._waiting.remove(request)
        return request

    def _has_facts(self, job: Job) -> bool:
        """Whether the facts that a job needs are known, in this process or from the run directory."""
        run_facts = self._pool.run_facts
        if WIDTH_COST not in run_facts and api.needs_width_cost(job.resolved.settings):
            try:
                run_facts[WIDTH_COST] = self._get_or_compute(WIDTH_COST, _fail)
            except _NotRecordedError:
                return False
        return True

    def _handle(self, event: WorkerEvent) -> list[Sample]:
        """Handles an event and returns the records that it brings."""
        worker, kind, value = event
        self._last_event = time.monotonic()
        if kind == "record":
            self._longest_gap = max(self._longest_gap, self._last_event - (self._last_record or self._last_event))
            self._last_record = self._last_event
            sample = self._records.read(worker.name, value)
            del worker.requests[sample.key]
            return [sample]
        if kind == "measured":
            self._pool.run_facts[WIDTH_COST] = self._get_or_compute(WIDTH_COST, lambda: value)
            return []
        return self._handle_loss(worker, value)

    def _handle_loss(self, worker: WorkerHandle, reason: str) -> list[Sample]:
        """Puts the requests of a dead worker back, save those over which `MAX_LOSSES` workers died."""
        given_up: list[Request] = []
        for request in worker.requests.values():
            request.losses += 1
            (given_up if request.losses >= MAX_LOSSES else self._waiting).append(request)
        others = f"; others decode its {len(worker.requests) - len(given_up)} requests" if worker.requests else ""
        log.warning("%s is lost (%s)%s", worker.name, reason, others)
        error = f"{MAX_LOSSES} workers ended while they decoded it, the last was {worker.name} ({reason})"
        return [record_error(request.job, error, batch_size=worker.batch_size) for request in given_up]


class _NotRecordedError(Exception):
    """The run directory does not hold a fact of the run."""


def _fail() -> None:
    raise _NotRecordedError


def _stop_requested(jobs: Iterable[Job]) -> bool:
    """Whether a signal has ended these jobs."""
    return isinstance(jobs, StoppableIterator) and jobs.stop_requested
