"""Decodes the jobs of a run on a Ray cluster. This process hands out jobs and stores records; it decodes nothing.

Ray places workers and restarts those that die (`max_restarts`); `ray.util.ActorPool` waits for the next answer of any
worker. A request belongs to one worker until its record arrives or the worker dies, so that it has exactly one record.
A worker has at most as many requests as it decodes together. Each of its calls returns one record, and the next call
brings the request that takes the place of the ended one, so that no request waits at a busy worker while another idles.
"""

import itertools
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import length_hint
from pathlib import Path
from typing import Any, NamedTuple

from refusion_eval import api
from refusion_eval.errors import ConfigError, ScaleOutError
from refusion_eval.runs.job import Job, record_error
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.runs.own_engine import wanted_attention
from refusion_eval.runs.system import System, of_command, run_arguments
from refusion_eval.scaleout import messages, ray_worker
from refusion_eval.store.manifest import Manifest
from refusion_eval.store.records import Sample, SampleKey, as_json

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5  # longest wait for an answer before the run looks for signals
GROW_SECONDS = 3.0  # time between two looks for machines that joined the cluster
ROOM_SECONDS = 900.0  # longest wait for room: machines that are rented on demand take minutes to start
MEASURING_SECONDS = 300.0  # a worker that measures the width cost for longer hangs: it takes seconds
SILENCE_SECONDS = 60.0  # a run without answers says this often for what it waits

MAX_FAILED_STARTS = 3  # a worker that fails so often before it decodes takes no part in the run
# A request over which so many workers died is decoded last and alone, so that it costs no other request its worker;
# after `MAX_LOSSES` it gets an error record, because it probably kills workers.
LOSSES_BEFORE_ISOLATION, MAX_LOSSES = 2, 3

# Requests and records are small; Ray's own default takes a third of the memory.
OBJECT_STORE_BYTES = 200 * 2**20

# Ray reads these when it is imported. It sends no usage statistics, keeps the output of workers in its log files, and
# gives workers of a cluster that starts here the normal priority instead of the lowest.
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": ".", "RAY_worker_niceness": "0"}


def import_ray() -> Any:
    os.environ.update(ENVIRONMENT | os.environ)
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"engine=ray needs Ray on every machine ({error}): pip install -e '.[ray]' in a checkout"
        ) from error
    return ray


class Node(NamedTuple):
    node_id: str
    label: str
    num_gpus: int
    num_cpus: int


class Cluster:
    """A connection to the Ray cluster at "HOST:PORT", or to that of this machine ("auto"); all runs share it.

    None starts a cluster here, unless RAY_ADDRESS names one, as in a job that Ray itself started.
    """

    def __init__(self, address: str | None) -> None:
        self.ray = import_ray()
        self._owns_connection = not self.ray.is_initialized()
        if not self._owns_connection:
            return
        target = address or os.environ.get("RAY_ADDRESS") or "local"
        memory = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False} if target == "local" else {}
        handler = signal.getsignal(signal.SIGTERM)
        try:
            self.ray.init(address=target, log_to_driver=False, logging_level=logging.ERROR, **memory)
        except Exception as error:  # ray raises a plain Exception if a start takes too long
            raise ScaleOutError(
                f"no Ray cluster at {target} ({error}); start one with `ray start`, give its HOST:PORT as ray_address, "
                "and the same token (RAY_AUTH_TOKEN) on every machine where Ray asks for one"
            ) from error
        finally:
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # ray replaces it
        log.info("connected to the Ray cluster at %s", self.ray.get_runtime_context().gcs_address)

    def nodes(self) -> list[Node]:
        nodes = []
        for node in self.ray.nodes():
            host, address, resources = str(node["NodeManagerHostname"]), node["NodeManagerAddress"], node["Resources"]
            if node["Alive"]:
                label = host if host == address else f"{host} ({address})"
                nodes.append(Node(node["NodeID"], label, int(resources.get("GPU", 0)), int(resources.get("CPU", 0))))
        return nodes

    def close(self) -> None:
        """Disconnects from the cluster, which ends a cluster that was started here."""
        if self._owns_connection:
            self.ray.shutdown()


@dataclass(slots=True, eq=False)
class HeldJob:
    job: Job
    losses: int = 0  # number of workers that died while they had it

    @property
    def is_suspect(self) -> bool:
        return self.losses >= LOSSES_BEFORE_ISOLATION

    @property
    def is_solo(self) -> bool:
        """Whether a worker decodes the request without others: because its time is measured, or as a suspect."""
        return self.job.alone or self.is_suspect


@dataclass(slots=True, eq=False)
class Worker:
    name: str
    actor: Any  # replaced where Ray does not restart it
    state: str = "starting"  # then idle and decoding in turns; "failed" if it takes no part in the run
    num_failures: int = 0  # failed starts since the last record
    problem: str = ""
    batch_size: int = 1
    requests: dict[SampleKey, HeldJob] = field(default_factory=dict)


def driver_args(args: ModelArgs) -> ModelArgs:
    """Arguments of the driver's own system, which loads no weights and needs no GPU."""
    return replace(args, device="cpu", attention="sdpa", cuda_graphs=False, loop="engine", run_dir=None)


class RayRunner:
    """A `JobRunner` whose workers are processes of a Ray cluster; `keep_workers` keeps them for another `run`."""

    def __init__(
        self, args: ModelArgs, system: System, register: messages.Register, *, keep_workers: bool = False
    ) -> None:
        if args.device.startswith("cuda:"):
            raise ConfigError(f"device={args.device} names one GPU; with engine=ray each worker has its own: say cuda")
        self._args, self._system, self._keep_workers = args, system, keep_workers
        self._records = messages.RecordReader(register)
        self.cluster = Cluster(args.ray_address)
        self._ray = self.cluster.ray
        has_gpu = any(node.num_gpus for node in self.cluster.nodes())
        self._use_gpu = args.device == "cuda" or (args.device == "auto" and has_gpu)
        attention = wanted_attention(args)
        self._run_facts: dict[str, Any] = {} if attention == "auto" else {messages.ATTENTION: attention}
        self._manifest: Manifest | None = None  # description of the run by the first worker that loads the checkpoint
        self._workers: list[Worker] = []
        self._next_look = self._last_report = 0.0
        self._stop_all()

    def manifest(self, task_versions: Mapping[str, str]) -> Manifest:
        """Describes this run; the device and all that depends on it are those of the first worker, which it awaits."""
        while self._manifest is None:
            self._advance()
        cuda_graphs = self._manifest.arguments["cuda_graphs"]
        own = of_command(self._args, task_versions, cuda_graphs=cuda_graphs)
        return replace(self._manifest, checkpoint=self._args.pretrained, **own)

    def run(self, jobs: Iterable[Job]) -> Iterator[Sample]:
        """Decodes jobs with different keys, those that are timed alone first; yields each record as it arrives.

        After a signal it yields the records of the jobs that a worker has begun.
        """
        self._jobs = iter(jobs)
        self._waiting: list[HeldJob] = []  # requests that no worker has
        stopped_at, last_record, longest_gap, is_complete = math.inf, math.inf, 0.0, False
        self._last_answer = time.monotonic()
        try:
            while self._has_requests():
                self._assign()
                samples = self._advance()
                self._assign()  # before the records are stored, so that the worker does not wait for the disk
                now = self._last_answer
                for sample in samples:
                    longest_gap, last_record = max(longest_gap, now - last_record), now
                    yield sample
                if messages.stop_requested(self._jobs):
                    stopped_at = min(stopped_at, time.monotonic())
                # A worker may hang; it is waited for longer where records came further apart before.
                silence = time.monotonic() - max(self._last_answer, stopped_at)
                if silence > max(messages.STOP_SECONDS, 2 * longest_gap):
                    log.warning("records are missing: nothing for %.0f s after the signal; %s", silence, self._status())
                    return
            is_complete = True
        except self._ray.exceptions.RayError as error:
            message = f"the Ray cluster failed ({in_short(error)}); run the same command again to continue"
            raise ScaleOutError(message) from error
        finally:
            if not (self._keep_workers and is_complete):
                self._stop_all()

    def close(self) -> None:
        self._stop_all()
        self.cluster.close()

    # Workers: their start, their calls and their answers.

    def _room(self, node: Node) -> int:
        return node.num_gpus if self._use_gpu else node.num_cpus // self._args.worker_cpus

    def _usable(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.state != "failed"]

    def _grow(self) -> None:
        """Starts workers where there is room: one first, which describes the run; then all others."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + GROW_SECONDS
        # A worker that failed keeps its place, so that Ray does not start another one on its machine.
        room = sum(map(self._room, self.cluster.nodes()))
        wanted = 1 if self._manifest is None else self._args.workers or math.inf
        while len(self._usable()) < wanted and len(self._workers) < room:
            self._workers.append(Worker(f"worker {len(self._workers) + 1}", self._new_actor()))
            self._start(self._workers[-1])
        if self._workers and not self._usable():
            raise ScaleOutError(f"no machine can decode; {self._workers[0].problem}")
        if not self._workers and now - self._last_answer > ROOM_SECONDS:
            raise ScaleOutError(f"no worker could be started in {ROOM_SECONDS:.0f} s: {self._status()}")

    def _new_actor(self) -> Any:
        arguments = run_arguments(self._args)
        for name in arguments.keys() & {"pretrained", "adapter", "chat_template"}:
            if (path := Path(str(arguments[name])).expanduser()).exists():
                arguments[name] = str(path.absolute())  # Ray starts workers in another working directory
        setup = asdict(messages.Setup(arguments=as_json(arguments), run_facts=self._run_facts))
        most = self._args.workers or sys.maxsize
        num_processes = {node.node_id: min(self._room(node), most) for node in self.cluster.nodes()}
        device, num_cpus = ("cuda", 1) if self._use_gpu else ("cpu", self._args.worker_cpus)
        options = {"num_cpus": num_cpus, "num_gpus": int(self._use_gpu), "max_restarts": MAX_FAILED_STARTS}
        return self._ray.remote(ray_worker.RayWorker).options(**options).remote(setup, device, num_processes)

    def _start(self, worker: Worker) -> None:
        fingerprint = {} if self._manifest is None else self._manifest.fingerprint()
        # Ray repeats this call, and no other, so that it is answered once the worker has been restarted.
        self._call(worker, "starting", worker.actor.load.options(max_task_retries=-1), fingerprint)

    def _call(self, worker: Worker, state: str, method: Any, *arguments: Any) -> None:
        worker.state = state
        # Idle workers are kept outside of the pool, so that the pool gives the call to this worker.
        self._pool.push(worker.actor)
        self._pool.submit(lambda actor, _: method.remote(*arguments), None)

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
        if worker.state == "starting":
            self._take_in(worker, answer)
            return []
        worker.state, worker.num_failures = "idle", 0
        sample = self._records.read((worker.name, answer["pid"]), answer)
        del worker.requests[sample.key]
        return [sample]

    def _take_in(self, worker: Worker, facts: Mapping[str, Any]) -> None:
        labels = [node.label for node in self.cluster.nodes() if node.node_id == facts["node_id"]]
        worker.name = " on ".join([worker.name.partition(" on ")[0], *labels])
        if "problem" in facts:
            self._fail(worker, facts["problem"])
            return
        worker.state, worker.batch_size = "idle", facts["batch_size"]
        log.info("%s is ready", worker.name)
        if self._manifest is None:
            self._manifest, self._next_look = Manifest.from_json(facts["manifest"]), 0.0
            if self._args.loop == "engine":
                self._run_facts[messages.ATTENTION] = facts["attention"]

    def _lose(self, worker: Worker, error: Exception) -> list[Sample]:
        """Puts the requests of a dead worker back, except those over which `MAX_LOSSES` workers died."""
        requests, worker.requests = [*worker.requests.values()], {}
        was_decoding, reason = worker.state == "decoding", in_short(error)
        for request in requests:
            request.losses += was_decoding
        given_up = [request for request in requests if request.losses >= MAX_LOSSES]
        self._waiting += [request for request in requests if request not in given_up]
        others = f"; others decode its {len(requests) - len(given_up)} requests" if requests else ""
        log.warning("%s is lost (%s)%s", worker.name, reason, others)
        worker.num_failures += not was_decoding
        if not isinstance(error, self._ray.exceptions.ActorUnavailableError):  # Ray does not restart it
            self._ray.kill(worker.actor)
            worker.actor = self._new_actor()
        if worker.num_failures < MAX_FAILED_STARTS:
            self._start(worker)
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
        """State of each worker, and the resources of the cluster if none of them is ready."""
        parts = [f"{worker.name} is {worker.state} ({len(worker.requests)} requests)" for worker in self._workers]
        if not any(worker.state in ("idle", "decoding") for worker in self._workers):
            need = "a free GPU" if self._use_gpu else f"{self._args.worker_cpus} free cores"
            nodes = [f"{node.label}: {node.num_gpus} GPUs, {node.num_cpus} cores" for node in self.cluster.nodes()]
            parts.append(f"each worker needs {need}, and the cluster has {', '.join(nodes) or 'no machine'}")
        return ", ".join(parts)

    # Requests: which worker gets which.

    def _has_requests(self) -> bool:
        """Whether a request waits or is decoded; takes the next job unless one waits that is not a suspect."""
        if messages.stop_requested(self._jobs):
            self._waiting.clear()
        elif all(request.is_suspect for request in self._waiting):
            self._waiting += map(HeldJob, itertools.islice(self._jobs, 1))
        return bool(self._waiting) or any(worker.requests for worker in self._workers)

    def _assign(self) -> None:
        """Gives each idle worker as many requests as it has room for."""
        for worker in self._workers:
            if worker.state != "idle":
                continue
            # The last requests are divided evenly, even if the batch of one worker could hold them all.
            num_open = len(self._waiting) + sum(len(other.requests) for other in self._workers)
            share = math.ceil((num_open + length_hint(self._jobs, sys.maxsize)) / len(self._usable()))
            jobs = []
            try:
                while len(worker.requests) < min(worker.batch_size, share) and (request := self._claim(worker)):
                    worker.requests[request.job.key] = request
                    jobs.append(messages.job_to_json(request.job))
            except self._ray.exceptions.RayError as error:
                self._lose(worker, error)
                continue
            if worker.requests:
                self._call(worker, "decoding", worker.actor.decode, jobs, self._run_facts)

    def _claim(self, worker: Worker) -> HeldJob | None:
        """Takes the next request for a worker: timed requests first, suspects last, both only for a free worker."""
        self._has_requests()
        request = min(self._waiting, key=lambda waiting: (waiting.is_suspect, not waiting.job.alone), default=None)
        # While timed requests wait, a worker that is busy gets nothing, so that it becomes free for them.
        held = worker.requests.values()
        if request is None or (held and any(other.is_solo for other in (request, *held))):
            return None
        if messages.WIDTH_COST not in self._run_facts and api.needs_width_cost(request.job.resolved.settings):
            # Measured once for the whole run, before the first request that needs it; the run directory may hold it.
            self._run_facts[messages.WIDTH_COST] = self._system.get_or_compute(
                messages.WIDTH_COST, lambda: self._ray.get(worker.actor.width_cost.remote(), timeout=MEASURING_SECONDS)
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
