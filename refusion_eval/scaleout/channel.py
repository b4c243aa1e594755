"""Messages between the processes of one run, through the key-value store of the launcher (torchrun, accelerate).

Only counters and values are used. No call waits inside the store for long, because the time limits of the store are
made for the start of a run and not for hours of decoding.

    rounds, round/R            number of rounds and the header of each: one round for each call of the driver's `run`
    published/R, job/R/I       jobs of a round, published a little ahead of the claims so that few are in the store
    claimed/R, ended/R         number of claims; whether no more jobs will be published
    sent, message/K            messages of workers to the driver, in the order of sending
    alive/W                    heartbeat: a counter that the process of worker W increments every few seconds
    finished, left/W           whether the run is over; whether worker W needs the store no more
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol

from refusion_eval.errors import ScaleOutError
from refusion_eval.store.records import dump

# Time limit of one call of the store; a store that takes longer is on a machine that is gone.
CALL_TIMEOUT = timedelta(minutes=5)
POLL_SECONDS = 0.02
IDLE_SECONDS = 0.05  # between two looks of a worker that has nothing to do
HEARTBEAT_SECONDS = 5.0

# At the end of a run no record can be lost any more, so that few missed heartbeats of a worker are enough.
LEAVE_SILENCE_SECONDS = 3 * HEARTBEAT_SECONDS


class KeyValueStore(Protocol):
    """The methods of `torch.distributed.Store` that the channel uses."""

    def set(self, key: str, value: str) -> None:
        """Writes a value."""
        ...

    def get(self, key: str) -> bytes:
        """Reads a value; waits until it has been written."""
        ...

    def add(self, key: str, value: int) -> int:
        """Adds to a counter, which starts at 0, and returns its new value."""
        ...

    def delete_key(self, key: str) -> bool:
        """Deletes a value."""
        ...

    def set_timeout(self, timeout: timedelta) -> None:
        """Limits the time of a call."""
        ...


class Finished(Exception):
    """The driver has declared the run over."""


class Channel:
    """One process' access to the store.

    All methods raise ScaleOutError if the store no longer answers, because its process or its machine is gone.

    Args:
        store: key-value store that the processes of the run share.
    """

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store
        self._num_read = 0
        self._heartbeats: dict[int, tuple[int, float]] = {}  # rank -> counter, and time at which it was seen to change
        store.set_timeout(CALL_TIMEOUT)

    def _count(self, name: str, increment: int = 0) -> int:
        with _StoreCall():
            return self._store.add(name, increment)

    def _write(self, name: str, value: Any) -> None:
        text = dump(value)
        with _StoreCall():
            self._store.set(name, text)

    def _take(self, name: str) -> Any:
        with _StoreCall():
            text = self._store.get(name)
            self._store.delete_key(name)
        return json.loads(text)

    # Methods for the driver.

    def open_round(self, header: Mapping[str, Any]) -> int:
        """Opens a round of jobs and returns its number."""
        number = self._count("rounds")
        self._write(f"round/{number}", header)
        self._count("rounds", 1)
        return number

    def num_claimed(self, round_number: int) -> int:
        """Number of claims in a round, which may be larger than the number of its jobs."""
        return self._count(f"claimed/{round_number}")

    def publish(self, round_number: int, number: int, job: Mapping[str, Any]) -> None:
        """Publishes a job; the numbers of a round's jobs are consecutive from 0."""
        self._write(f"job/{round_number}/{number}", job)
        self._count(f"published/{round_number}", 1)

    def end_round(self, round_number: int) -> None:
        """Declares that no more jobs of a round will be published."""
        self._count(f"ended/{round_number}", 1)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yields the messages that workers have sent since the last call."""
        for number in range(self._num_read, self._count("sent")):
            self._num_read = number + 1
            yield self._take(f"message/{number}")

    def silent_workers(self, num_workers: int, seconds: float) -> set[int]:
        """Ranks of the workers whose heartbeat has stopped; a worker that never had one is not silent.

        A worker is silent if a later call finds its counter unchanged, so that this has to be called repeatedly.

        Args:
            num_workers: number of workers; their ranks begin with 1.
            seconds: how long the counter of a worker may stay unchanged.
        """
        silent = set()
        for rank in range(1, num_workers + 1):
            counter = self._count(f"alive/{rank}")
            now = time.monotonic()
            last_counter, changed_at = self._heartbeats.get(rank, (0, now))
            if counter != last_counter:
                self._heartbeats[rank] = (counter, now)
            elif counter and now - changed_at > seconds:
                silent.add(rank)
        return silent

    def finish(self, num_workers: int, max_seconds: float) -> None:
        """Declares the run over.

        Args:
            num_workers: number of workers that must have left before this returns, except silent ones.
            max_seconds: longest wait for them.
        """
        self._count("finished", 1)
        deadline = time.monotonic() + max_seconds
        present = set(range(1, num_workers + 1))
        while time.monotonic() < deadline:
            present = {rank for rank in present if not self._count(f"left/{rank}")}
            if not present - self.silent_workers(num_workers, LEAVE_SILENCE_SECONDS):
                return
            time.sleep(POLL_SECONDS)

    # Methods for every process.

    def claim(self, round_number: int) -> int | None:
        """Waits for the next unclaimed job and claims it for this process.

        Returns:
            Number of the job; None if the round has no more jobs.

        Raises:
            Finished: the run is over.
        """
        number = self._count(f"claimed/{round_number}", 1) - 1
        while True:
            self.check_finished()
            has_ended = self._count(f"ended/{round_number}") > 0
            if number < self._count(f"published/{round_number}"):
                return number
            if has_ended:
                return None
            time.sleep(POLL_SECONDS)

    def take_job(self, round_number: int, number: int) -> Any:
        """Reads a claimed job and removes it from the store."""
        return self._take(f"job/{round_number}/{number}")

    # Methods for a worker.

    def check_finished(self) -> None:
        """Raises Finished if the run is over."""
        if self._count("finished"):
            raise Finished

    def wait_for_round(self, num_seen: int) -> tuple[int, Any]:
        """Waits until there are more rounds than this worker has seen; returns number and header of the latest.

        Raises:
            Finished: the run is over.
        """
        while (num_rounds := self._count("rounds")) <= num_seen:
            self.check_finished()
            time.sleep(IDLE_SECONDS)
        with _StoreCall():
            return num_rounds - 1, json.loads(self._store.get(f"round/{num_rounds - 1}"))

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message to the driver."""
        self._write(f"message/{self._count('sent', 1) - 1}", message)

    @contextlib.contextmanager
    def heartbeat(self, rank: int) -> Iterator[None]:
        """A block during which a thread sends this worker's heartbeat, however busy the worker is."""
        ended = threading.Event()

        def beat() -> None:
            with contextlib.suppress(ScaleOutError):  # the driver is gone, which the worker's own next call reports
                while not ended.wait(HEARTBEAT_SECONDS):
                    self._count(f"alive/{rank}", 1)

        self._count(f"alive/{rank}", 1)  # before the first claim: only workers with a heartbeat can be found silent
        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def leave(self, rank: int) -> None:
        """Declares that this worker needs the store no more."""
        self._count(f"left/{rank}", 1)


class _StoreCall:
    """A block of store calls; their errors (RuntimeError and its subclasses) become one ScaleOutError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ScaleOutError(
                f"the process that drives this run cannot be reached any more ({first_line}); run the same command "
                "again to continue"
            ) from error
