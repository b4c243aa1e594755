"""Who decodes what: workers are given requests as they have room, and those of a worker that died go to others.

Plain Python without a cluster, in the driver: whatever carries requests to the workers is no matter of this module.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Workers that may die over one request before it is given up: it is more likely to kill them than to be unlucky.
MOST_LOSSES = 3

# A request that was lost so often is decoded with no other beside it, so that they do not pay for what it does.
LOSSES_BEFORE_LONE = 2


@dataclass(slots=True)
class Entry:
    """A request and how often a worker died over it.

    Attributes:
        number: its number in the run, used once.
        job: the job as JSON.
        losses: workers that died over it.
    """

    number: int
    job: Mapping[str, Any]
    losses: int = 0

    @property
    def lone(self) -> bool:
        """Whether it must be the only one of its worker."""
        return self.losses >= LOSSES_BEFORE_LONE


class Desk:
    """Requests that wait, and who has those that do not. Not thread-safe."""

    def __init__(self) -> None:
        self._alone: deque[Entry] = deque()
        self._shared: deque[Entry] = deque()
        self._lone: deque[Entry] = deque()
        self._held: dict[str, dict[int, Entry]] = {}

    def put(self, number: int, job: Mapping[str, Any]) -> None:
        """Takes a further request.

        Args:
            number: of the request; used once.
            job: the job as JSON.
        """
        entry = Entry(number, job)
        self._queue_of(entry).append(entry)

    def _queue_of(self, entry: Entry) -> deque[Entry]:
        return self._lone if entry.lone else self._alone if entry.job["alone"] else self._shared

    def claim(self, worker: str) -> Entry | None:
        """Hands out a request: those to be measured alone first, and what killed workers last and by itself.

        Args:
            worker: who gets it.

        Returns:
            None if there is nothing for this worker now.
        """
        held = self._held.setdefault(worker, {})
        if any(entry.lone for entry in held.values()):
            return None
        queue = self._alone or self._shared or (self._lone if not held else None)
        if not queue:
            return None
        entry = queue.popleft()
        held[entry.number] = entry
        return entry

    def next_is_alone(self) -> bool:
        """Whether the next request is to be measured alone."""
        return bool(self._alone)

    def finished(self, worker: str, number: int) -> None:
        """Forgets a request whose record has arrived."""
        self._held.get(worker, {}).pop(number, None)

    def give_back(self, worker: str, number: int) -> None:
        """Takes back a request that its worker has not begun: it is the next to be handed out."""
        entry = self._held[worker].pop(number)
        self._queue_of(entry).appendleft(entry)

    def lose(self, worker: str) -> tuple[int, list[int]]:
        """Takes back what a dead worker had.

        Returns:
            How many requests it had, and the numbers of those that are given up: `MOST_LOSSES` workers have died over
            each.
        """
        held = self._held.pop(worker, {})
        given_up = []
        for entry in held.values():
            entry.losses += 1
            if entry.losses >= MOST_LOSSES:
                given_up.append(entry.number)
            else:
                self._queue_of(entry).append(entry)
        return len(held), given_up

    def clear(self) -> list[int]:
        """Forgets the requests that wait, and returns their numbers."""
        waiting = [entry.number for queue in (self._alone, self._shared, self._lone) for entry in queue]
        for queue in (self._alone, self._shared, self._lone):
            queue.clear()
        return waiting

    def num_waiting(self) -> int:
        """Requests that no worker has."""
        return len(self._alone) + len(self._shared) + len(self._lone)

    def num_held(self, worker: str) -> int:
        """How many requests a worker has."""
        return len(self._held.get(worker, {}))
