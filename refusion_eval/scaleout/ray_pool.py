"""The workers of a run on a Ray cluster: workers are started wherever there is room, and dead workers are replaced."""

import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from refusion_eval.errors import ScaleOutError
from refusion_eval.scaleout import ray_worker
from refusion_eval.scaleout.ray_cluster import Cluster, Node
from refusion_eval.scaleout.work_queue import Request

log = logging.getLogger(__name__)

# Time between two looks for machines that joined the cluster.
GROW_SECONDS = 3.0

# Number of workers that may die on a machine before any of them decodes; then the machine is excluded.
MAX_FAILED_STARTS = 3

# A worker that stays longer in such a state hangs. A checkpoint may have to be downloaded; a width curve takes seconds.
MAX_SECONDS = {"opening": 3600.0, "measuring": 300.0}

# State of a worker during a call -> kind of the event that the answer causes, and state after it.
ANSWERS = {
    "starting": ("started", "started"),
    "opening": ("opened", "idle"),
    "measuring": ("measured", "idle"),
    "decoding": ("record", "idle"),
}


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """A worker as the driver sees it.

    Attributes:
        name: unique name; a replaced worker's name is not used again.
        node: the worker's machine.
        num_processes: number of workers planned for that machine.
        actor: Ray's handle.
        state: "starting", "started" (the process exists), "opening" (it loads the checkpoint), "idle", "measuring" or
            "decoding".
        call: Ray's reference to the unanswered call; None if there is none.
        called_at: time of that call, in seconds of the monotonic clock.
        batch_size: number of requests that the worker decodes together.
    """

    name: str
    node: Node
    num_processes: int
    actor: Any
    state: str = "starting"
    call: Any = None
    called_at: float = 0.0
    batch_size: int = 1

    @property
    def is_ready(self) -> bool:
        """Whether the worker decodes, or could."""
        return self.state in ("idle", "decoding")


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """An answer of a worker, or its loss.

    Attributes:
        kind: "started", "opened", "measured", "record" or "lost".
        worker: the worker.
        value: the result of `hello`, `open`, `width_cost` or `decode` of `RayWorker`; for "lost" the reason.
    """

    kind: str
    worker: WorkerHandle
    value: Any = None


@dataclass(slots=True)
class Resources:
    """Resources of each worker, and the number of workers.

    Attributes:
        use_gpu: whether a worker takes a GPU.
        cpus: cores of a worker without a GPU; a worker with a GPU takes one core.
        max_workers: largest number of workers; None for as many as fit.
        excluded: node id -> reason why no worker is started there.
    """

    use_gpu: bool
    cpus: int
    max_workers: int | None
    excluded: dict[str, str] = field(default_factory=dict)

    def capacity(self, node: Node) -> int:
        """Number of workers that fit on a machine."""
        if node.node_id in self.excluded:
            return 0
        return node.num_gpus if self.use_gpu else node.num_cpus // self.cpus


class WorkerPool:
    """The workers of a run.

    Args:
        cluster: the Ray cluster on which they run.
        resources: resources of each worker.
    """

    def __init__(self, cluster: Cluster, resources: Resources) -> None:
        self._cluster = cluster
        self._ray = cluster.ray
        self.resources = resources
        self._actor_class = self._ray.remote(ray_worker.RayWorker)
        self._numbers = itertools.count(1)
        self._failed_starts: Counter[str] = Counter()
        self._next_look = 0.0
        self.workers: list[WorkerHandle] = []

    def grow(self) -> None:
        """Starts workers where there is room; looks at the cluster every `GROW_SECONDS` at most.

        Raises:
            ScaleOutError: every machine with room for a worker is excluded; the message gives the first reason.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + GROW_SECONDS
        resources, nodes = self.resources, self._cluster.nodes()
        num_workers = Counter(worker.node.node_id for worker in self.workers)
        for node in nodes:
            capacity = min(resources.capacity(node), resources.max_workers or math.inf)
            while num_workers[node.node_id] < capacity and len(self.workers) < (resources.max_workers or math.inf):
                self._start(node, int(capacity))
                num_workers[node.node_id] += 1
        if not self.workers and resources.excluded and not any(map(resources.capacity, nodes)):
            raise ScaleOutError(f"no machine can decode; {next(iter(resources.excluded.values()))}")

    def _start(self, node: Node, num_processes: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        name = f"worker {next(self._numbers)} on {node.label}"
        actor = self._actor_class.options(
            num_cpus=1 if self.resources.use_gpu else self.resources.cpus,
            num_gpus=1 if self.resources.use_gpu else 0,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        ).remote(name)
        self.workers.append(WorkerHandle(name, node, num_processes, actor, call=actor.hello.remote()))

    def exclude(self, node: Node, reason: str) -> None:
        """Starts no more workers on a machine."""
        if node.node_id not in self.resources.excluded:
            self.resources.excluded[node.node_id] = f"{node.label}: {reason}"
            log.error("%s takes no part in this run: %s", node.label, reason)

    def open(self, worker: WorkerHandle, setup: Mapping[str, Any], *, first: bool) -> None:
        """Tells a worker to load the checkpoint."""
        device = "cuda" if self.resources.use_gpu else "cpu"
        self._call(worker, "opening", worker.actor.open.remote(setup, device, worker.num_processes, first=first))

    def measure(self, worker: WorkerHandle) -> None:
        """Tells an idle worker to measure how the time of a forward grows with its rows."""
        self._call(worker, "measuring", worker.actor.width_cost.remote())

    def decode(self, worker: WorkerHandle, requests: Sequence[Request], run_facts: Mapping[str, Any]) -> None:
        """Sends requests to an idle worker, which decodes until one of its requests ends.

        Args:
            worker: the worker.
            requests: requests that join those that the worker has; may be empty if it has some.
            run_facts: facts of the run, see `Setup`.
        """
        jobs = [(request.number, request.job) for request in requests]
        self._call(worker, "decoding", worker.actor.decode.remote(jobs, run_facts))

    def _call(self, worker: WorkerHandle, state: str, call: Any) -> None:
        worker.state, worker.call, worker.called_at = state, call, time.monotonic()

    def stop(self, worker: WorkerHandle) -> None:
        """Kills a worker."""
        self.workers.remove(worker)
        self._ray.kill(worker.actor, no_restart=True)

    def stop_all(self) -> None:
        """Kills all workers; requests that they are decoding are lost."""
        for worker in list(self.workers):
            self.stop(worker)
        self._next_look = 0.0

    def wait(self, seconds: float) -> Iterator[WorkerEvent]:
        """Waits for at least one event, at most so many seconds, and yields the events that have happened."""
        yield from self._hung_workers()
        callers = {worker.call: worker for worker in self.workers if worker.call is not None}
        if not callers:
            time.sleep(seconds)
            return
        answers, rest = self._ray.wait(list(callers), num_returns=1, timeout=seconds)
        if answers and rest:  # also takes other answers that are there, so that a fast worker does not delay others
            answers = answers + self._ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        for answer in answers:
            if callers[answer] in self.workers:  # the consumer may have stopped it since
                yield self._event(callers[answer], answer)

    def _hung_workers(self) -> Iterator[WorkerEvent]:
        for worker in list(self.workers):
            limit = MAX_SECONDS.get(worker.state, math.inf)
            if time.monotonic() - worker.called_at > limit:
                yield self._lose(worker, f"it hung: it was {worker.state} for {limit:.0f} s")

    def _event(self, worker: WorkerHandle, answer: Any) -> WorkerEvent:
        try:
            value = self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            return self._lose(worker, in_short(error))
        worker.call = None
        kind, worker.state = ANSWERS[worker.state]
        if kind == "record":
            self._failed_starts.pop(worker.node.node_id, None)  # the machine works, whatever failed there before
        return WorkerEvent(kind, worker, value)

    def _lose(self, worker: WorkerHandle, reason: str) -> WorkerEvent:
        self.stop(worker)
        if worker.state != "decoding":
            self._failed_starts[worker.node.node_id] += 1
            if self._failed_starts[worker.node.node_id] >= MAX_FAILED_STARTS:
                self.exclude(worker.node, f"its workers end while they are set up, the last with {reason}")
        return WorkerEvent("lost", worker, reason)


def in_short(error: Exception) -> str:
    """One line of Ray's long error: its class, and the error that was raised in the worker."""
    cause = getattr(error, "cause", None)
    if cause is not None:
        return f"{type(cause).__name__}: {cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"]
    return f"{type(error).__name__}: {lines[-1] if 'creation task' in lines[0] else lines[0]}"
