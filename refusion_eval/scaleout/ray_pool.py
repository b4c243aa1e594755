"""The workers of a run on a Ray cluster: as many as there is room for, also when some die or machines join."""

import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from refusion_eval.errors import ScaleOutError
from refusion_eval.scaleout.ray_cluster import Cluster, Node

log = logging.getLogger(__name__)

# How often the cluster is asked for machines that joined.
GROW_SECONDS = 3.0

# Workers that may die on a machine before they have decoded anything; then it is left out.
MOST_FAILED_STARTS = 3

# A width curve takes seconds; a worker that has none after so long hangs.
MEASURE_SECONDS = 300.0


@dataclass(slots=True, eq=False)
class Member:
    """A worker.

    Attributes:
        name: what the desk knows it as; of one process only.
        node: its machine.
        num_processes: workers meant for that machine.
        actor: Ray's handle.
        doing: what it is at.
        pending: what Ray will deliver next: the answer to a call, or the stream of its records.
        batch_size: requests it decodes together.
    """

    name: str
    node: Node
    num_processes: int
    actor: Any
    doing: str = "starting"
    pending: Any = None
    batch_size: int = 1


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a worker did.

    Attributes:
        kind: "started", "opened", "record", "session ended" or "lost".
        member: the worker.
        value: of "opened" what `RayWorker.open` returned, of "record" what `RayWorker.run` yielded, of "lost" why.
    """

    kind: str
    member: Member
    value: Any = None


@dataclass(slots=True)
class Room:
    """What workers need, and how many are wanted.

    Attributes:
        use_gpu: whether each takes a GPU.
        cpus: cores of each; with a GPU it is one.
        most: how many at most; None is as many as fit.
    """

    use_gpu: bool
    cpus: int
    most: int | None
    left_out: dict[str, str] = field(default_factory=dict)

    def on(self, node: Node) -> int:
        """How many workers fit on a machine."""
        if node.node_id in self.left_out:
            return 0
        return node.num_gpus if self.use_gpu else node.num_cpus // self.cpus


class LostWhileAskedError(Exception):
    """A worker ended while the driver waited for its answer; it is dismissed already.

    Args:
        event: of kind "lost".
    """

    def __init__(self, event: Event) -> None:
        super().__init__(f"{event.member.name} is lost ({event.value})")
        self.event = event


class Pool:
    """The workers.

    Args:
        cluster: where they run.
        room: what each needs.
    """

    def __init__(self, cluster: Cluster, room: Room) -> None:
        from refusion_eval.scaleout.ray_worker import RayWorker

        self._cluster = cluster
        self._ray = cluster.ray
        self.room = room
        self._actor_class = self._ray.remote(RayWorker)
        self._numbers = itertools.count(1)
        self._failed_starts: Counter[str] = Counter()
        self._next_look = 0.0
        self.members: list[Member] = []

    def grow(self) -> None:
        """Starts workers where there is room; looks at most every few seconds.

        Raises:
            ScaleOutError: every machine with room for a worker was left out; the first reason is given.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + GROW_SECONDS
        nodes = self._cluster.nodes()
        here = Counter(member.node.node_id for member in self.members)
        for node in nodes:
            capacity = self.room.on(node)
            while here[node.node_id] < capacity and (self.room.most is None or len(self.members) < self.room.most):
                self._start(node, min(capacity, self.room.most or capacity))
                here[node.node_id] += 1
        if not self.members and self.room.left_out and not any(self.room.on(node) for node in nodes):
            raise ScaleOutError(f"no machine can decode; {next(iter(self.room.left_out.values()))}")

    def _start(self, node: Node, num_processes: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        name = f"worker {next(self._numbers)} on {node.label}"
        actor = self._actor_class.options(
            num_cpus=1 if self.room.use_gpu else self.room.cpus,
            num_gpus=1 if self.room.use_gpu else 0,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        ).remote(name)
        self.members.append(Member(name, node, num_processes, actor, pending=actor.hello.remote()))

    def leave_out(self, node: Node, why: str) -> None:
        """Starts no more workers on a machine."""
        if node.node_id not in self.room.left_out:
            self.room.left_out[node.node_id] = f"{node.label}: {why}"
            log.error("%s decodes nothing: %s", node.label, why)

    def open(self, member: Member, setup: Mapping[str, Any], *, first: bool) -> None:
        """Lets a worker open the checkpoint."""
        device = "cuda" if self.room.use_gpu else "cpu"
        member.doing = "opening"
        member.pending = member.actor.open.remote(setup, device, member.num_processes, first=first)

    def run(self, member: Member, desk: Any, at_once: int) -> None:
        """Lets a worker decode until the desk has nothing for it."""
        member.doing = "decoding"
        member.pending = member.actor.run.options(num_returns="streaming").remote(desk, at_once)

    def width_cost(self, member: Member) -> Mapping[str, Any]:
        """Measures how the time of a forward grows with its rows, on one idle worker.

        Raises:
            LostWhileAskedError: the worker cannot; a machine where this goes on is left out.
        """
        member.doing = "measuring"
        try:
            cost = self._ray.get(member.actor.width_cost.remote(), timeout=MEASURE_SECONDS)
        except self._ray.exceptions.RayError as error:
            raise LostWhileAskedError(self._lost(member, error)) from error
        member.doing = "idle"
        return dict(cost)

    def ask(self, answer: Any) -> Any:
        """Waits for the answer to a call."""
        return self._ray.get(answer)

    def dismiss(self, member: Member) -> None:
        """Ends a worker."""
        self.members.remove(member)
        self._ray.kill(member.actor, no_restart=True)

    def dismiss_all(self) -> None:
        """Ends all workers; what they are decoding is dropped."""
        for member in list(self.members):
            self.dismiss(member)
        self._next_look = 0.0

    def wait(self, seconds: float) -> Iterator[Event]:
        """What happened, after a wait for at least one thing to happen.

        Args:
            seconds: longest wait.
        """
        busy = {member.pending: member for member in self.members if member.pending is not None}
        if not busy:
            time.sleep(seconds)
            return
        pending = list(busy)
        self._ray.wait(pending, num_returns=1, timeout=seconds, fetch_local=False)
        # All that are ready, so that one worker's many short records do not keep another's waiting.
        ready, _ = self._ray.wait(pending, num_returns=len(pending), timeout=0, fetch_local=False)
        for one in ready:
            yield self._event(busy[one])

    def _event(self, member: Member) -> Event:
        doing, pending = member.doing, member.pending
        try:
            if doing == "decoding":
                try:
                    return Event("record", member, self._ray.get(next(pending)))
                except StopIteration:
                    member.doing, member.pending = "idle", None
                    return Event("session ended", member)
            answer = self._ray.get(pending)
        except self._ray.exceptions.RayError as error:
            return self._lost(member, error)
        member.pending = None
        if doing == "starting":
            member.doing = "started"
            return Event("started", member)
        member.doing = "idle"
        return Event("opened", member, answer)

    def _lost(self, member: Member, error: Exception) -> Event:
        self.dismiss(member)
        why = in_short(error)
        if member.doing in ("starting", "opening", "measuring"):
            self._failed_starts[member.node.node_id] += 1
            if self._failed_starts[member.node.node_id] >= MOST_FAILED_STARTS:
                self.leave_out(member.node, f"its workers end while they are set up, the last with {why}")
        return Event("lost", member, why)


def in_short(error: Exception) -> str:
    """What ended a worker: of the many lines that Ray has to say, the kind and what was raised."""
    cause = getattr(error, "cause", None)
    if cause is not None:
        return f"{type(cause).__name__}: {cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"]
    return f"{type(error).__name__}: {lines[-1] if 'creation task' in lines[0] else lines[0]}"
