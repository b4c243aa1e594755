"""The workers of a run on a Ray cluster: as many as there is room for, also when some die or machines join."""

import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from refusion_eval.errors import ScaleOutError
from refusion_eval.scaleout import ray_worker
from refusion_eval.scaleout.desk import Entry
from refusion_eval.scaleout.ray_cluster import Cluster, Node

log = logging.getLogger(__name__)

# How often the cluster is asked for machines that joined.
GROW_SECONDS = 3.0

# Workers that may die on a machine before they have decoded anything; then it is left out.
MOST_FAILED_STARTS = 3

# A worker that is at something for so long hangs: a checkpoint may have to be downloaded, a width curve takes seconds.
MOST_SECONDS = {"opening": 3600.0, "measuring": 300.0}


@dataclass(slots=True, eq=False)
class Turn:
    """A call of `RayWorker.turn` that has not been answered.

    Attributes:
        answer: Ray's reference to the answer.
        number: of the turn.
        requests: numbers of the requests that came with it.
        asked_back: whether the worker was asked to leave them.
    """

    answer: Any
    number: int
    requests: Sequence[int]
    asked_back: bool = False


@dataclass(slots=True, eq=False)
class Member:
    """A worker.

    Attributes:
        name: what the desk knows it as; of one process only.
        node: its machine.
        num_processes: workers meant for that machine.
        actor: Ray's handle.
        doing: what it is at.
        pending: reference to the answer of a call that is no turn.
        since: when that call was made.
        batch_size: requests it decodes together.
        turns: those under way, in their order.
        num_turns: how many there were.
        withdrawing: the answer to whether a turn has not begun, and the turn.
    """

    name: str
    node: Node
    num_processes: int
    actor: Any
    doing: str = "starting"
    pending: Any = None
    since: float = 0.0
    batch_size: int = 1
    turns: deque[Turn] = field(default_factory=deque)
    num_turns: int = 0
    withdrawing: tuple[Any, Turn] | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a worker did.

    Attributes:
        kind: "started", "opened", "measured", "record", "withdrawn" or "lost".
        member: the worker.
        value: of "opened", "measured" and "record" what `open`, `width_cost` and `turn` of `RayWorker` returned; of
            "withdrawn" the numbers of the requests, of "lost" why.
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


class Pool:
    """The workers.

    Args:
        cluster: where they run.
        room: what each needs.
    """

    def __init__(self, cluster: Cluster, room: Room) -> None:
        self._cluster = cluster
        self._ray = cluster.ray
        self.room = room
        self._actor_class = self._ray.remote(concurrency_groups={ray_worker.MAIL: 1})(ray_worker.RayWorker)
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
        self._call(member, "opening", member.actor.open.remote(setup, device, member.num_processes, first=first))

    def measure(self, member: Member) -> None:
        """Lets an idle worker measure how the time of a forward grows with its rows."""
        self._call(member, "measuring", member.actor.width_cost.remote())

    def _call(self, member: Member, doing: str, answer: Any) -> None:
        member.doing, member.pending, member.since = doing, answer, time.monotonic()

    def give(self, member: Member, entries: Sequence[Entry], settled: Mapping[str, Any]) -> None:
        """Lets a worker take a further turn, behind those under way.

        Args:
            member: the worker.
            entries: what it is to decode beside what it has; none if it only is to answer with the next record.
            settled: facts of the run that are known by now.
        """
        member.doing = "decoding"
        member.num_turns += 1
        jobs = [(entry.number, entry.job) for entry in entries]
        answer = member.actor.turn.remote(member.num_turns, jobs, settled)
        member.turns.append(Turn(answer, member.num_turns, [entry.number for entry in entries]))

    def withdraw(self, member: Member) -> bool:
        """Asks a worker to leave what it has not begun, unless it has nothing such; it says later whether it does.

        Returns:
            Whether it was asked.
        """
        last = member.turns[-1] if len(member.turns) > 1 else None
        if last is None or not last.requests or last.asked_back or member.withdrawing is not None:
            return False
        last.asked_back = True
        withdraw = member.actor.withdraw.options(concurrency_group=ray_worker.MAIL)
        member.withdrawing = (withdraw.remote(last.number), last)
        return True

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
        yield from self._overdue()
        awaited: dict[Any, Member] = {}
        for member in self.members:
            awaited |= dict.fromkeys(_next_answers(member), member)
        if not awaited:
            time.sleep(seconds)
            return
        answers = list(awaited)
        ready, rest = self._ray.wait(answers, num_returns=1, timeout=seconds)
        # All that are ready, so that one worker's many short records do not keep another's waiting.
        more = self._ray.wait(rest, num_returns=len(rest), timeout=0)[0] if ready and rest else []
        for answer in ready + more:
            member = awaited[answer]
            event = self._event(member, answer) if member in self.members else None
            if event is not None:
                yield event

    def _overdue(self) -> Iterator[Event]:
        now = time.monotonic()
        for member in list(self.members):
            most = MOST_SECONDS.get(member.doing, math.inf)
            if now - member.since > most:
                yield self._lost(member, f"it hung: it was {member.doing} for {most:.0f} s")

    def _event(self, member: Member, answer: Any) -> Event | None:
        try:
            value = self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            return self._lost(member, in_short(error))
        if member.withdrawing is not None and answer == member.withdrawing[0]:
            (_, turn), member.withdrawing = member.withdrawing, None
            return Event("withdrawn", member, turn.requests if value else ())
        if member.turns and answer == member.turns[0].answer:
            member.turns.popleft()
            member.doing = "decoding" if member.turns else "idle"
            self._failed_starts.pop(member.node.node_id, None)  # what failed once was no fault of the machine
            return None if value is None else Event("record", member, value)
        member.pending = None
        kind, member.doing = {
            "starting": ("started", "started"),
            "opening": ("opened", "idle"),
            "measuring": ("measured", "idle"),
        }[member.doing]
        return Event(kind, member, value)

    def _lost(self, member: Member, why: str) -> Event:
        self.dismiss(member)
        if member.doing in ("starting", "opening", "measuring"):
            self._failed_starts[member.node.node_id] += 1
            if self._failed_starts[member.node.node_id] >= MOST_FAILED_STARTS:
                self.leave_out(member.node, f"its workers end while they are set up, the last with {why}")
        return Event("lost", member, why)


def _next_answers(member: Member) -> list[Any]:
    """What a worker can answer next; turns are answered in their order."""
    answers = [] if member.pending is None else [member.pending]
    answers += [member.turns[0].answer] if member.turns else []
    return answers + ([] if member.withdrawing is None else [member.withdrawing[0]])


def in_short(error: Exception) -> str:
    """What ended a worker: of the many lines that Ray has to say, the kind and what was raised."""
    cause = getattr(error, "cause", None)
    if cause is not None:
        return f"{type(cause).__name__}: {cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"]
    return f"{type(error).__name__}: {lines[-1] if 'creation task' in lines[0] else lines[0]}"
