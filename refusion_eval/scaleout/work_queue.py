"""The queue of requests that the driver of a run on Ray hands out to workers.

The queue knows nothing of Ray: sending requests to workers is done elsewhere.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# A request over which so many workers died gets an error record: it probably kills workers.
MAX_LOSSES = 3

# A request over which so many workers died is decoded alone, so that it cannot cost other requests their worker.
LOSSES_BEFORE_ISOLATION = 2


@dataclass(slots=True)
class Request:
    """A job in the queue.

    Attributes:
        number: number of the request, unique in the run.
        job: the job as JSON.
        losses: number of workers that died while they had the request.
    """

    number: int
    job: Mapping[str, Any]
    losses: int = 0

    @property
    def is_suspect(self) -> bool:
        """Whether so many workers died over the request that it is decoded last and alone."""
        return self.losses >= LOSSES_BEFORE_ISOLATION

    @property
    def is_solo(self) -> bool:
        """Whether a worker decodes the request without others: because its time is measured, or as a suspect."""
        return bool(self.job["alone"]) or self.is_suspect


class WorkQueue:
    """Requests that wait for a worker, and requests that each worker has. Not thread-safe."""

    def __init__(self) -> None:
        self._timed: deque[Request] = deque()
        self._shared: deque[Request] = deque()
        self._suspects: deque[Request] = deque()
        self._assigned: dict[str, dict[int, Request]] = {}

    def put(self, number: int, job: Mapping[str, Any]) -> None:
        """Appends a request; a number is used once."""
        self._append(Request(number, job))

    def _append(self, request: Request) -> None:
        queue = self._suspects if request.is_suspect else self._timed if request.is_solo else self._shared
        queue.append(request)

    def claim(self, worker: str) -> Request | None:
        """Returns the next request for a worker: timed requests first, suspects last, both only to a free worker.

        While timed requests wait, a worker that is busy gets nothing, so that it becomes free for them.

        Returns:
            None if there is no request for this worker now.
        """
        assigned = self._assigned.setdefault(worker, {})
        if assigned and (self._timed or any(request.is_solo for request in assigned.values())):
            return None
        queue = self._timed or self._shared or (None if assigned else self._suspects)
        if not queue:
            return None
        request = queue.popleft()
        assigned[request.number] = request
        return request

    def complete(self, worker: str, number: int) -> None:
        """Removes a request whose record has arrived."""
        self._assigned.get(worker, {}).pop(number, None)

    def requeue_lost(self, worker: str) -> tuple[int, list[int]]:
        """Puts the requests of a dead worker back into the queue.

        Returns:
            Number of requests that the worker had, and the numbers of those that are given up because `MAX_LOSSES`
            workers died over each.
        """
        assigned = self._assigned.pop(worker, {})
        given_up = []
        for request in assigned.values():
            request.losses += 1
            if request.losses >= MAX_LOSSES:
                given_up.append(request.number)
            else:
                self._append(request)
        return len(assigned), given_up

    def clear(self) -> list[int]:
        """Removes the waiting requests and returns their numbers."""
        numbers = []
        for queue in (self._timed, self._shared, self._suspects):
            numbers += [request.number for request in queue]
            queue.clear()
        return numbers

    def num_waiting(self) -> int:
        """Number of requests that no worker has."""
        return len(self._timed) + len(self._shared) + len(self._suspects)

    def num_assigned(self, worker: str) -> int:
        """Number of requests that a worker has."""
        return len(self._assigned.get(worker, {}))
