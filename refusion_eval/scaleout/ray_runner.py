"""Decodes the jobs of a run on a Ray cluster. This process hands out jobs and stores records; it decodes nothing.

Ray places workers and restarts those that die (`max_restarts`); `ray.util.ActorPool` waits for the next answer of any
worker. A request belongs to one worker until its record arrives or the worker dies, so that it has exactly one record.
A worker has at most as many requests as it decodes together. Each of its calls returns one record, and the next call
brings the request that takes the place of the ended one. A worker idles between the two calls, for milliseconds where
a request takes seconds; in return no request waits at a busy worker while another worker is idle.
"""

import itertools
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import length_hint
from pathlib import Path
from typing import Any

from refusion_eval import api
from refusion_eval.errors import ConfigError, ScaleOutError
from refusion_eval.runs.job import Job, record_error
from refusion_eval.runs.manifest import run_arguments
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.runs.system import System
from refusion_eval.scaleout import ray_worker
from refusion_eval.scaleout.ray_cluster import Cluster, Node
from refusion_eval.scaleout.worker import (
    ATTENTION,
    STOP_SECONDS,
    WIDTH_COST,
    RecordReader,
    Register,
    Setup,
    job_to_json,
    stop_requested,
)
from refusion_eval.store.records import Manifest, Sample, SampleKey, as_json

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5  # longest wait for an answer before the run looks for signals
GROW_SECONDS = 3.0  # time between two looks for machines that joined the cluster
ROOM_SECONDS = 900.0  # longest wait for room: machines that are rented on demand take minutes to start
MEASURING_SECONDS = 300.0  # a worker that measures the width cost for longer hangs: it takes seconds
SILENCE_SECONDS = 60.0  # a run without answers says this often for what it waits

# A worker that fails so often before it decodes takes no part in the run.
MAX_FAILED_STARTS = 3

# A request over which so many workers died is decoded last and alone, so that it costs no other request its worker;
# after `MAX_LOSSES` it gets an error record, because it probably kills workers.
LOSSES_BEFORE_ISOLATION, MAX_LOSSES = 2, 3


@dataclass(slots=True, eq=False)
class Request:
    """A job, and the number of workers that died while they had it."""

    job: Job
    losses: int = 0

    @property
    def is_suspect(self) -> bool:
        """Whether so many workers died over the request that it is decoded last and alone."""
        return self.losses >= LOSSES_BEFORE_ISOLATION

    @property
    def is_solo(self) -> bool:
        """Whether a worker decodes the request without others: because its time is measured, or as a suspect."""
        return self.job.alone or self.is_suspect


@dataclass(slots=True, eq=False)
class Worker:
    """A worker as the driver sees it; `actor` is replaced where Ray does not restart it."""

    name: str
    actor: Any
    state: str = "starting"  # then idle and decoding in turns; "failed" if it takes no part in the run
    num_failures: int = 0  # failed starts since the last record
    problem: str = ""
    batch_size: int = 1
    requests: dict[SampleKey, Request] = field(default_factory=dict)


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
        self._args, self._system, self._keep_workers = args, system, keep_workers
        self._records = RecordReader(register)
        self.cluster = Cluster(args.ray_address)
        self._ray = self.cluster.ray
        has_gpu = any(node.num_gpus for node in self.cluster.nodes())
        self._use_gpu = args.device == "cuda" or (args.device == "auto" and has_gpu)
        attention = System(args).wanted_attention()
        self._run_facts: dict[str, Any] = {} if attention == "auto" else {ATTENTION: attention}
        self._manifest: Manifest | None = None  # description of the run by the first worker that loads the checkpoint
        self._numbers = itertools.count(1)
        self._workers: list[Worker] = []
        self._next_look = self._last_report = 0.0
        self._stop_all()

    def refusal(self, job: Job) -> str | None:
        """The reason why a job cannot be decoded, if that is known before decoding; else None."""
        return self._system.refusal(job)

    def manifest(self, task_versions: Mapping[str, str]) -> Manifest:
        """Describes this run. The device and all that depends on it are those of the first worker, which this awaits.

        Raises:
            ScaleOutError: no worker can be started, or none can load the checkpoint.
        """
        while self._manifest is None:
            self._advance()
        return replace(
            self._manifest,
            tasks=dict(task_versions),
            checkpoint=self._args.pretrained,
            command=sys.argv,
            arguments=run_arguments(self._args) | {"cuda_graphs": self._manifest.arguments["cuda_graphs"]},
        )

    def run(self, jobs: Iterable[Job]) -> Iterator[Sample]:
        """Decodes jobs on all workers and yields the record of each job as it arrives.

        After a signal, it yields only the records of jobs that a worker has begun.

        Args:
            jobs: jobs with different keys, read as workers become free; jobs to be decoded alone come first.

        Raises:
            ScaleOutError: no worker can decode, or the cluster failed.
        """
        self._jobs = iter(jobs)
        self._waiting: list[Request] = []  # requests that no worker has
        stopped_at, last_record, longest_gap = math.inf, math.inf, 0.0
        self._last_answer = time.monotonic()
        is_complete = False
        try:
            while self._has_requests():
                self._assign()
                samples = self._advance()
                self._assign()  # before the records are stored, so that the worker does not wait for the disk
                now = self._last_answer
                for sample in samples:
                    longest_gap, last_record = max(longest_gap, now - last_record), now
                    yield sample
                if stop_requested(self._jobs):
                    stopped_at = min(stopped_at, time.monotonic())
                # A worker may hang; it is waited for longer where records came further apart before.
                silence = time.monotonic() - max(self._last_answer, stopped_at)
                if silence > max(STOP_SECONDS, 2 * longest_gap):
                    missing = "records are missing, as nothing came for %.0f s after the signal: %s"
                    log.warning(missing, silence, self._status())
                    return
            is_complete = True
        except self._ray.exceptions.RayError as error:
            reason = in_short(error)
            raise ScaleOutError(f"the Ray cluster failed ({reason}); run the same command again to continue") from error
        finally:
            if not (self._keep_workers and is_complete):
                self._stop_all()

    def close(self) -> None:
        """Ends the workers and leaves the cluster."""
        self._stop_all()
        self.cluster.close()

    # Workers: their start, their calls and their answers.

    def _room(self, node: Node) -> int:
        """Number of workers that fit on a machine."""
        return node.num_gpus if self._use_gpu else node.num_cpus // self._args.worker_cpus

    def _usable(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.state != "failed"]

    def _grow(self) -> None:
        """Starts workers where there is room: one first, which describes the run; then all others.

        A worker that failed keeps its place, so that Ray does not start another one on its machine.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + GROW_SECONDS
        room = sum(map(self._room, self.cluster.nodes()))
        wanted = 1 if self._manifest is None else self._args.workers or math.inf
        while len(self._usable()) < wanted and len(self._workers) < room:
            self._workers.append(Worker(f"worker {next(self._numbers)}", self._new_actor()))
            self._await_start(self._workers[-1])
        if self._workers and not self._usable():
            raise ScaleOutError(f"no machine can decode; {self._workers[0].problem}")
        if not self._workers and now - self._last_answer > ROOM_SECONDS:
            raise ScaleOutError(f"no worker could be started in {ROOM_SECONDS:.0f} s: {self._status()}")

    def _new_actor(self) -> Any:
        arguments = run_arguments(self._args)
        for name in ("pretrained", "adapter", "chat_template"):
            # Ray starts workers in another working directory.
            if name in arguments and (path := Path(str(arguments[name])).expanduser()).exists():
                arguments[name] = str(path.absolute())
        setup = asdict(Setup(arguments=as_json(arguments), run_facts=self._run_facts))
        most = self._args.workers or sys.maxsize
        num_processes = {node.node_id: min(self._room(node), most) for node in self.cluster.nodes()}
        actor = self._ray.remote(ray_worker.RayWorker).options(
            num_cpus=1 if self._use_gpu else self._args.worker_cpus,
            num_gpus=1 if self._use_gpu else 0,
            max_restarts=MAX_FAILED_STARTS,
        )
        return actor.remote(setup, "cuda" if self._use_gpu else "cpu", num_processes)

    def _await_start(self, worker: Worker) -> None:
        fingerprint = {} if self._manifest is None else self._manifest.fingerprint()
        # Ray repeats this call, and no other, so that it is answered once the worker has been restarted.
        describe = worker.actor.describe.options(max_task_retries=-1)
        self._call(worker, "starting", partial(describe.remote, fingerprint))

    def _call(self, worker: Worker, state: str, method: Callable[[], Any]) -> None:
        worker.state = state
        # Idle workers are kept outside of the pool, so that the pool gives the call to this worker.
        self._pool.push(worker.actor)
        self._pool.submit(lambda actor, _: method(), None)

    def _advance(self) -> list[Sample]:
        """Starts workers where there is room, and handles the next answer; returns the records that it brings."""
        self._grow()
        try:
            if not self._pool.has_next():
                time.sleep(POLL_SECONDS)
                raise TimeoutError
            answer = self._pool.get_next_unordered(POLL_SECONDS)
        except self._ray.exceptions.RayError as error:  # before TimeoutError, which a worker may have raised itself
            answer = error
        except TimeoutError:
            now = time.monotonic()
            if now - max(self._last_answer, self._last_report) > SILENCE_SECONDS:
                self._last_report = now
                log.warning("nothing has come for %.0f s: %s", now - self._last_answer, self._status())
            return []
        self._last_answer = time.monotonic()
        actor = self._pool.pop_idle()  # the actor that answered; the pool drops an actor that died for good
        dead = answer.actor_id if actor is None else None
        (worker,) = (w for w in self._workers if w.actor == actor or w.actor._actor_id.hex() == dead)
        if isinstance(answer, self._ray.exceptions.RayError):
            return self._lose(worker, answer)
        is_record, worker.state = worker.state == "decoding", "idle"
        if not is_record:
            self._take_in(worker, answer)
            return []
        worker.num_failures = 0
        sample = self._records.read((worker.name, answer["pid"]), answer)
        del worker.requests[sample.key]
        return [sample]

    def _take_in(self, worker: Worker, facts: Mapping[str, Any]) -> None:
        """Takes a worker into the run if it could load the checkpoint."""
        labels = [node.label for node in self.cluster.nodes() if node.node_id == facts["node_id"]]
        worker.name = " on ".join([worker.name.partition(" on ")[0], *labels])
        if "problem" in facts:
            self._fail(worker, facts["problem"])
            return
        worker.batch_size = facts["batch_size"]
        log.info("%s is ready", worker.name)
        if self._manifest is None:
            self._manifest, self._next_look = Manifest.from_json(facts["manifest"]), 0.0
            if self._args.loop == "engine":
                self._run_facts[ATTENTION] = facts["attention"]

    def _lose(self, worker: Worker, error: Exception) -> list[Sample]:
        """Puts the requests of a dead worker back, except those over which `MAX_LOSSES` workers died."""
        requests, worker.requests = [*worker.requests.values()], {}
        for request in requests:
            request.losses += worker.state == "decoding"
        given_up = [request for request in requests if request.losses >= MAX_LOSSES]
        self._waiting += [request for request in requests if request not in given_up]
        reason = in_short(error)
        others = f"; others decode its {len(requests) - len(given_up)} requests" if requests else ""
        log.warning("%s is lost (%s)%s", worker.name, reason, others)
        worker.num_failures += worker.state != "decoding"
        if not isinstance(error, self._ray.exceptions.ActorUnavailableError):  # Ray does not restart it
            self._ray.kill(worker.actor)
            worker.actor = self._new_actor()
        if worker.num_failures < MAX_FAILED_STARTS:
            self._await_start(worker)
        else:
            self._fail(worker, f"it ended {MAX_FAILED_STARTS} times before it decoded, the last time with {reason}")
        message = f"{MAX_LOSSES} workers ended while they decoded it, the last was {worker.name} ({reason})"
        return [record_error(request.job, message, batch_size=worker.batch_size) for request in given_up]

    def _fail(self, worker: Worker, reason: str) -> None:
        worker.state, worker.problem = "failed", f"{worker.name}: {reason}"
        log.error("%s takes no part in this run: %s", worker.name, reason)
        self._next_look = 0.0

    def _stop_all(self) -> None:
        """Kills all workers; requests that they are decoding are lost."""
        from ray.util import ActorPool

        for worker in self._workers:
            self._ray.kill(worker.actor)
        self._workers, self._pool = [], ActorPool([])
        self._next_look = 0.0
        self._last_answer = self._last_report = time.monotonic()

    def _status(self) -> str:
        """What the workers do, and the resources of the cluster if none of them is ready."""
        parts = [f"{worker.name} is {worker.state} ({len(worker.requests)} requests)" for worker in self._workers]
        if not any(worker.state in ("idle", "decoding") for worker in self._workers):
            need = "a free GPU" if self._use_gpu else f"{self._args.worker_cpus} free cores"
            nodes = [f"{node.label}: {node.num_gpus} GPUs, {node.num_cpus} cores" for node in self.cluster.nodes()]
            parts.append(f"each worker needs {need}, and the cluster has {', '.join(nodes) or 'no machine'}")
        return ", ".join(parts)

    # Requests: which worker gets which.

    def _has_requests(self) -> bool:
        """Whether a request waits or is decoded; takes the next job unless one waits that is not a suspect."""
        if stop_requested(self._jobs):
            self._waiting.clear()
        elif all(request.is_suspect for request in self._waiting):
            self._waiting += map(Request, itertools.islice(self._jobs, 1))
        return bool(self._waiting) or any(worker.requests for worker in self._workers)

    def _assign(self) -> None:
        """Gives each idle worker as many requests as it has room for."""
        for worker in self._workers:
            if worker.state != "idle":
                continue
            # The last requests are divided evenly, even if the batch of one worker could hold them all.
            num_open = len(self._waiting) + sum(len(other.requests) for other in self._workers)
            share = math.ceil((num_open + length_hint(self._jobs, sys.maxsize)) / len(self._usable()))
            new: dict[SampleKey, Request] = {}
            try:
                while len(worker.requests) < min(worker.batch_size, share) and (request := self._claim(worker)):
                    worker.requests[request.job.key] = new[request.job.key] = request
            except self._ray.exceptions.RayError as error:
                self._lose(worker, error)
                continue
            if worker.requests:
                jobs = [job_to_json(request.job) for request in new.values()]
                self._call(worker, "decoding", partial(worker.actor.decode.remote, jobs, self._run_facts))

    def _claim(self, worker: Worker) -> Request | None:
        """Takes the next request for a worker: timed requests first, suspects last, both only for a free worker.

        While timed requests wait, a worker that is busy gets nothing, so that it becomes free for them.
        """
        self._has_requests()
        request = min(self._waiting, key=lambda waiting: (waiting.is_suspect, not waiting.job.alone), default=None)
        if request is None or (
            worker.requests and any(other.is_solo for other in (request, *worker.requests.values()))
        ):
            return None
        if WIDTH_COST not in self._run_facts and api.needs_width_cost(request.job.resolved.settings):
            # Measured once for the whole run, before the first request that needs it; the run directory may hold it.
            self._run_facts[WIDTH_COST] = self._system.get_or_compute(
                WIDTH_COST, lambda: self._ray.get(worker.actor.width_cost.remote(), timeout=MEASURING_SECONDS)
            )
        self._waiting.remove(request)
        return request


def in_short(error: Exception) -> str:
    """One line of Ray's long error: its class, and the error that was raised in the worker."""
    cause = getattr(error, "cause", None)
    if cause is not None:
        return f"{type(cause).__name__}: {cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"]
    return f"{type(error).__name__}: {lines[-1] if 'creation task' in lines[0] else lines[0]}"
