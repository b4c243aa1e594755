"""Who decodes what: workers ask for one request at a time, and those of a worker that died are handed out again.

Plain Python without a cluster: the driver fills and reads it, workers ask it, and whatever carries the calls is no
matter of this module.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# Workers that may die over one request before it is given up: it is more likely to kill them than to be unlucky.
MOST_LOSSES = 3

# A request that was lost so often is decoded with no other beside it, so that they do not pay for what it does.
LOSSES_BEFORE_LONE = 2


@dataclass(slots=True)
class _Entry:
    """A request and how often a worker died over it."""

    number: int
    job: Mapping[str, Any]
    losses: int = 0

    @property
    def lone(self) -> bool:
        return self.losses >= LOSSES_BEFORE_LONE


@dataclass(frozen=True, slots=True)
class Claim:
    """What a worker gets.

    Attributes:
        state: "job", "wait" (there is none now, and more come) or "none" (end what is in flight and report).
        number: of the job.
        job: the job as JSON.
        settled: facts of the run that the job needs, see `Setup`.
    """

    state: Literal["job", "wait", "none"]
    number: int = -1
    job: Mapping[str, Any] | None = None
    settled: Mapping[str, Any] | None = None


class Desk:
    """Requests that wait, and who has those that do not. Not thread-safe.

    A session is what a worker decodes between two waits: within one it asks again and again, and batches what it gets.
    """

    def __init__(self) -> None:
        self._alone: deque[_Entry] = deque()
        self._shared: deque[_Entry] = deque()
        self._lone: deque[_Entry] = deque()
        self._held: dict[str, dict[int, _Entry]] = {}
        self._lost: set[str] = set()
        self._guarded: set[str] = set()  # workers on a request that must stay the only one
        self._settled: dict[str, Any] = {}
        self._more = True

    def put(self, jobs: Sequence[tuple[int, Mapping[str, Any]]], settled: Mapping[str, Any], more: bool) -> None:
        """Takes further requests.

        Args:
            jobs: number and JSON of each; a number is used once.
            settled: facts of the run that are known by now.
            more: whether further ones may come.
        """
        for number, job in jobs:
            self._queue(_Entry(number, job))
        self._settled.update(settled)
        self._more = more

    def _queue(self, entry: _Entry) -> None:
        (self._lone if entry.lone else self._alone if entry.job["alone"] else self._shared).append(entry)

    def claim(self, worker: str, holding: int, batching: bool) -> Claim:
        """Hands out a request.

        Args:
            worker: who asks.
            holding: how many it is decoding now, by its own count: the driver may not have heard yet of the last ones.
            batching: whether its session has taken a request that shares a batch; what is to be measured alone must
                not follow in the same session.
        """
        if worker in self._lost or (worker in self._guarded and holding):
            return Claim("none")
        self._guarded.discard(worker)
        if self._alone and not batching:
            return self._hand_out(worker, self._alone.popleft())
        if self._lone and not holding and not (batching and self._lone[0].job["alone"]):
            self._guarded.add(worker)
            return self._hand_out(worker, self._lone.popleft())
        if self._shared:
            return self._hand_out(worker, self._shared.popleft())
        return Claim("wait" if self._more and not self.num_waiting() else "none")

    def _hand_out(self, worker: str, entry: _Entry) -> Claim:
        self._held.setdefault(worker, {})[entry.number] = entry
        return Claim("job", entry.number, entry.job, dict(self._settled))

    def finished(self, worker: str, number: int) -> None:
        """Forgets a request whose record has arrived."""
        self._held.get(worker, {}).pop(number, None)

    def lose(self, worker: str) -> tuple[int, list[int]]:
        """Takes back what a dead worker had; it gets nothing any more, even if a call of it is still on its way.

        Returns:
            How many requests it had, and the numbers of those that are given up: `MOST_LOSSES` workers have died over
            each.
        """
        self._lost.add(worker)
        held = self._held.pop(worker, {})
        given_up = []
        for entry in held.values():
            entry.losses += 1
            if entry.losses >= MOST_LOSSES:
                given_up.append(entry.number)
            else:
                self._queue(entry)
        return len(held), given_up

    def num_waiting(self) -> int:
        """Requests that no worker has."""
        return len(self._alone) + len(self._shared) + len(self._lone)

    def held(self) -> dict[str, int]:
        """How many requests each worker has, as far as the driver has heard of their ends."""
        return {worker: len(entries) for worker, entries in self._held.items()}
