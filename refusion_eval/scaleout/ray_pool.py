"""The workers of a run on a Ray cluster: started wherever there is room, set up alike, and replaced when they die."""

import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from refusion_eval.errors import ScaleOutError
from refusion_eval.runs.job import Job
from refusion_eval.runs.manifest import run_arguments
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.runs.system import System
from refusion_eval.scaleout import ray_worker
from refusion_eval.scaleout.ray_cluster import Cluster, Node
from refusion_eval.scaleout.worker import ATTENTION, Setup, job_to_json
from refusion_eval.store.records import Manifest, SampleKey, as_json

log = logging.getLogger(__name__)

# Time between two looks for machines that joined the cluster.
GROW_SECONDS = 3.0

# Number of workers that may die on a machine before any of them decodes; then the machine is excluded.
MAX_FAILED_STARTS = 3

# A worker that stays longer in such a state hangs. A checkpoint may have to be downloaded; a width curve takes seconds.
MAX_SECONDS = {"opening": 3600.0, "measuring": 300.0}

# A request over which so many workers died is decoded last and alone, so that it costs no other request its worker.
LOSSES_BEFORE_ISOLATION = 2


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
class WorkerHandle:
    """A worker as the driver sees it.

    Attributes:
        called_at: time of that call, in seconds of the monotonic clock.
    """

    name: str
    node: Node
    num_processes: int
    actor: Any
    state: str = "starting"
    call: Any = None
    called_at: float = 0.0
    batch_size: int = 1
    requests: dict[SampleKey, Request] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """Whether the worker decodes, or could."""
        return self.state in ("idle", "decoding")


class WorkerEvent(NamedTuple):
    """An answer of a worker, or its loss."""

    worker: WorkerHandle
    kind: str
    value: Any


class WorkerPool:
    """The workers of a run.

    Attributes:
        manifest: description of the run by the first worker that loaded the checkpoint; None before that.
    """

    def __init__(self, cluster: Cluster, args: ModelArgs) -> None:
        self._cluster = cluster
        self._ray = cluster.ray
        self._args = args
        self._use_gpu = args.device == "cuda" or (
            args.device == "auto" and any(node.num_gpus for node in cluster.nodes())
        )
        self._actor_class = self._ray.remote(ray_worker.RayWorker)
        self._numbers = itertools.count(1)
        self._failed_starts: Counter[str] = Counter()
        self._excluded: dict[str, str] = {}  # node id -> reason why no worker is started there
        self._next_look = 0.0
        self.workers: list[WorkerHandle] = []
        self.manifest: Manifest | None = None
        attention = System(args).wanted_attention()
        self.run_facts: dict[str, Any] = {} if attention == "auto" else {ATTENTION: attention}

    def _capacity(self, node: Node) -> int:
        """Number of workers that fit on a machine."""
        if node.node_id in self._excluded:
            return 0
        return node.num_gpus if self._use_gpu else node.num_cpus // self._args.worker_cpus

    def describe(self) -> str:
        """Resources that a worker needs, and resources of the cluster."""
        need = "a free GPU" if self._use_gpu else f"{self._args.worker_cpus} free cores"
        nodes = ", ".join(
            f"{node.label}: {node.num_gpus} GPUs, {node.num_cpus} cores" for node in self._cluster.nodes()
        )
        return f"each needs {need}; the cluster has {nodes or 'no machine'}"

    def grow(self) -> None:
        """Starts workers where there is room; looks at the cluster every `GROW_SECONDS` at most.

        Raises:
            ScaleOutError: every machine with room for a worker is excluded; the message gives the first reason.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + GROW_SECONDS
        nodes = self._cluster.nodes()
        max_workers = self._args.workers or math.inf
        num_workers = Counter(worker.node.node_id for worker in self.workers)
        for node in nodes:
            capacity = int(min(self._capacity(node), max_workers))
            while num_workers[node.node_id] < capacity and len(self.workers) < max_workers:
                self._start(node, capacity)
                num_workers[node.node_id] += 1
        if not self.workers and self._excluded and not any(map(self._capacity, nodes)):
            raise ScaleOutError(f"no machine can decode; {next(iter(self._excluded.values()))}")

    def _start(self, node: Node, num_processes: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        name = f"worker {next(self._numbers)} on {node.label}"
        actor = self._actor_class.options(
            num_cpus=1 if self._use_gpu else self._args.worker_cpus,
            num_gpus=1 if self._use_gpu else 0,
            max_restarts=0,  # a new worker has to be set up before it decodes, so it is started by `grow`
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        ).remote(name)
        self.workers.append(WorkerHandle(name, node, num_processes, actor, call=actor.hello.remote()))

    def _exclude(self, node: Node, reason: str) -> None:
        """Starts no more workers on a machine."""
        if node.node_id not in self._excluded:
            self._excluded[node.node_id] = f"{node.label}: {reason}"
            log.error("%s takes no part in this run: %s", node.label, reason)

    @property
    def is_first_opening(self) -> bool:
        """Whether the first worker is loading its checkpoint."""
        return self.manifest is None and any(worker.state == "opening" for worker in self.workers)

    def _open_started(self) -> None:
        """Tells workers to load the checkpoint: one first, which describes the run; then all others."""
        for worker in self.workers:
            if worker.state == "started" and not self.is_first_opening:
                device = "cuda" if self._use_gpu else "cpu"
                call = worker.actor.open.remote(
                    self._setup(), device, worker.num_processes, first=self.manifest is None
                )
                self._call(worker, "opening", call)

    def _setup(self) -> dict[str, Any]:
        """The `Setup` of a worker as JSON."""
        arguments = run_arguments(self._args)
        for name in ("pretrained", "adapter", "chat_template"):
            # Ray starts workers in another working directory.
            if name in arguments and (path := Path(str(arguments[name])).expanduser()).exists():
                arguments[name] = str(path.absolute())
        fingerprint = {} if self.manifest is None else self.manifest.fingerprint()
        return asdict(Setup(arguments=as_json(arguments), run_facts=self.run_facts, fingerprint=fingerprint))

    def _finish_opening(self, worker: WorkerHandle, facts: Mapping[str, Any]) -> None:
        """Takes a worker into the run, or excludes its machine."""
        if "problem" in facts:
            self._exclude(worker.node, facts["problem"])
            self.stop(worker)
            return
        worker.batch_size = facts["batch_size"]
        log.info("%s is ready", worker.name)
        if self.manifest is None:
            self.manifest = Manifest.from_json(facts["manifest"])
            if self._args.loop == "engine":
                self.run_facts[ATTENTION] = facts["attention"]

    def measure(self, worker: WorkerHandle) -> None:
        """Tells an idle worker to measure how the time of a forward grows with its rows."""
        self._call(worker, "measuring", worker.actor.width_cost.remote())

    def decode(self, worker: WorkerHandle, requests: Sequence[Request]) -> None:
        """Sends requests to an idle worker, which decodes until one of its requests ends.

        Args:
            requests: requests that join those that the worker has; may be empty if it has some.
        """
        worker.requests |= {request.job.key: request for request in requests}
        jobs = [job_to_json(request.job) for request in requests]
        self._call(worker, "decoding", worker.actor.decode.remote(jobs, self.run_facts))

    def _call(self, worker: WorkerHandle, state: str, call: Any) -> None:
        worker.state, worker.call, worker.called_at = state, call, time.monotonic()

    def stop(self, worker: WorkerHandle) -> None:
        """Kills a worker; requests that it is decoding are lost."""
        self.workers.remove(worker)
        self._ray.kill(worker.actor, no_restart=True)

    def stop_all(self) -> None:
        """Kills all workers."""
        for worker in list(self.workers):
            self.stop(worker)
        self._next_look = 0.0

    def wait(self, seconds: float) -> Iterator[WorkerEvent]:
        """Waits for at least one answer of a worker, at most so many seconds; sets up workers meanwhile.

        Answers are read one by one: a worker whose answer the caller has not received yet does not count as idle.
        """
        for worker in list(self.workers):
            limit = MAX_SECONDS.get(worker.state, math.inf)
            if time.monotonic() - worker.called_at > limit:
                yield self._lose(worker, f"it hung: it was {worker.state} for {limit:.0f} s")
        self._open_started()
        callers = {worker.call: worker for worker in self.workers if worker.call is not None}
        if not callers:
            time.sleep(seconds)
            return
        answers, rest = self._ray.wait(list(callers), num_returns=1, timeout=seconds)
        if answers and rest:  # also takes other answers that are there, so that a fast worker does not delay others
            answers += self._ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        for answer in answers:
            if event := self._event(callers[answer], answer):
                yield event

    def _event(self, worker: WorkerHandle, answer: Any) -> WorkerEvent | None:
        """Reads an answer. Returns None for one that belongs to the setup of a worker."""
        try:
            value = self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            return self._lose(worker, in_short(error))
        state, worker.state, worker.call = worker.state, "idle", None
        if state == "starting":
            worker.state = "started"
        elif state == "opening":
            self._finish_opening(worker, value)
        elif state == "measuring":
            return WorkerEvent(worker, "measured", value)
        else:
            self._failed_starts.pop(worker.node.node_id, None)  # the machine works, whatever failed there before
            return WorkerEvent(worker, "record", value)
        return None

    def _lose(self, worker: WorkerHandle, reason: str) -> WorkerEvent:
        self.stop(worker)
        if worker.state != "decoding":
            self._failed_starts[worker.node.node_id] += 1
            if self._failed_starts[worker.node.node_id] >= MAX_FAILED_STARTS:
                self._exclude(worker.node, f"its workers end while they are set up, the last with {reason}")
        return WorkerEvent(worker, "lost", reason)


def in_short(error: Exception) -> str:
    """One line of Ray's long error: its class, and the error that was raised in the worker."""
    cause = getattr(error, "cause", None)
    if cause is not None:
        return f"{type(cause).__name__}: {cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"]
    return f"{type(error).__name__}: {lines[-1] if 'creation task' in lines[0] else lines[0]}"
