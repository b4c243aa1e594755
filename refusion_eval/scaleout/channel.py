"""Messages between the processes of one run, over the key-value store that a launcher of PyTorch processes brings.

Only counters and values are used, and nothing waits inside the store: its time limits are made for start-up, not for
hours of decoding.

    rounds, round/R            what is asked for: one round for each call of the driver's `run`
    published/R, job/R/I       its jobs, laid out a little ahead of the claims, so that few lie in the store at a time
    claimed/R, ended/R         how many were claimed; whether no more will come
    sent, message/K            what workers say to the driver, in the order in which they said it
    alive/W                    a counter that worker W bumps every few seconds, as long as its process lives
    finished, left/W           whether the driver is done; whether worker W has taken note
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

# How long one answer of the store may take: beyond that its machine is gone without a word.
ANSWER = timedelta(minutes=5)
POLL_SECONDS = 0.02
IDLE_SECONDS = 0.05  # between two looks of a worker that has nothing to do
HEARTBEAT_SECONDS = 5.0

# At the end of a run no record is at stake, only a worker's quiet leave: few missed heartbeats are enough.
LEAVE_SILENCE_SECONDS = 3 * HEARTBEAT_SECONDS


class KeyValueStore(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Writes a value."""
        ...

    def get(self, key: str) -> bytes:
        """Reads a value; waits for one that is not there yet."""
        ...

    def add(self, key: str, value: int) -> int:
        """Adds to a counter, 0 at first, and returns what it is then."""
        ...

    def delete_key(self, key: str) -> bool:
        """Forgets a value."""
        ...

    def set_timeout(self, timeout: timedelta) -> None:
        """Limits how long an answer may take."""
        ...


class Finished(Exception):
    """The driver is done: nothing is to be decoded any more."""


class Channel:
    """One process' end of the store.

    All methods raise ScaleOutError if the store no longer answers: then its process, or its machine, is gone.

    Args:
        store: shared by the processes of the run.
    """

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store
        self._num_read = 0
        self._heard: dict[int, tuple[int, float]] = {}  # worker -> its counter, and when that was seen to move
        store.set_timeout(ANSWER)

    def _count(self, name: str, more: int = 0) -> int:
        with _Answer():
            return self._store.add(name, more)

    def _write(self, name: str, value: Any) -> None:
        text = dump(value)
        with _Answer():
            self._store.set(name, text)

    def _take(self, name: str) -> Any:
        with _Answer():
            text = self._store.get(name)
            self._store.delete_key(name)
        return json.loads(text)

    # What the driver does.

    def open_round(self, header: Mapping[str, Any]) -> int:
        """Asks the workers for a new round and returns its number."""
        number = self._count("rounds")
        self._write(f"round/{number}", header)
        self._count("rounds", 1)
        return number

    def num_claimed(self, round_number: int) -> int:
        """How many jobs of a round processes have asked for, whether they were there or not."""
        return self._count(f"claimed/{round_number}")

    def publish(self, round_number: int, number: int, job: Mapping[str, Any]) -> None:
        """Lays out a job; numbers are given from 0 on, without holes."""
        self._write(f"job/{round_number}/{number}", job)
        self._count(f"published/{round_number}", 1)

    def end_round(self, round_number: int) -> None:
        """Says that no further job of a round will come."""
        self._count(f"ended/{round_number}", 1)

    def messages(self) -> Iterator[dict[str, Any]]:
        """What workers have said since the last call."""
        for number in range(self._num_read, self._count("sent")):
            self._num_read = number + 1
            yield self._take(f"message/{number}")

    def silent(self, num_workers: int, seconds: float) -> set[int]:
        """The workers that have not been heard for a while, though they were before.

        Time counts between calls: a worker is silent when a later call finds its counter where an earlier one did.

        Args:
            num_workers: how many there are; their ranks begin with 1.
            seconds: how long a worker may be silent.
        """
        silent = set()
        for rank in range(1, num_workers + 1):
            beats = self._count(f"alive/{rank}")
            now = time.monotonic()
            known, since = self._heard.get(rank, (0, now))
            if beats != known:
                self._heard[rank] = (beats, now)
            elif beats and now - since > seconds:
                silent.add(rank)
        return silent

    def finish(self, num_workers: int, most_seconds: float) -> None:
        """Sends the workers home.

        Args:
            num_workers: how many take note before this returns, except those that have fallen silent.
            most_seconds: how long that may take.
        """
        self._count("finished", 1)
        until = time.monotonic() + most_seconds
        present = set(range(1, num_workers + 1))
        while time.monotonic() < until:
            present = {rank for rank in present if not self._count(f"left/{rank}")}
            if not present - self.silent(num_workers, LEAVE_SILENCE_SECONDS):
                return
            time.sleep(POLL_SECONDS)

    # What every process does.

    def claim(self, round_number: int) -> int | None:
        """The number of a job that is this process' from now on; None if there are no more.

        Raises:
            Finished: the driver is done.
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
        """A claimed job, taken out of the store."""
        return self._take(f"job/{round_number}/{number}")

    # What a worker does.

    def check_finished(self) -> None:
        """Raises Finished if the driver is done."""
        if self._count("finished"):
            raise Finished

    def wait_for_round(self, num_seen: int) -> tuple[int, Any]:
        """The latest round, as soon as there are more than a worker has seen; its number and its header.

        Raises:
            Finished: the driver is done.
        """
        while (num_rounds := self._count("rounds")) <= num_seen:
            self.check_finished()
            time.sleep(IDLE_SECONDS)
        with _Answer():
            return num_rounds - 1, json.loads(self._store.get(f"round/{num_rounds - 1}"))

    def send(self, message: Mapping[str, Any]) -> None:
        """Says something to the driver."""
        self._write(f"message/{self._count('sent', 1) - 1}", message)

    @contextlib.contextmanager
    def beating(self, rank: int) -> Iterator[None]:
        """A block during which the driver hears every few seconds that this worker is there, however busy it is."""
        over = threading.Event()

        def beat() -> None:
            with contextlib.suppress(ScaleOutError):  # the driver is gone, which the worker's own next call says
                while not over.wait(HEARTBEAT_SECONDS):
                    self._count(f"alive/{rank}", 1)

        self._count(f"alive/{rank}", 1)  # before the first claim: who owes a record has been heard
        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def leave(self, rank: int) -> None:
        """Says that this worker needs the store no more."""
        self._count(f"left/{rank}", 1)


class _Answer:
    """A block of store calls; what they raise (RuntimeError and its subclasses) becomes one clear error."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ScaleOutError(
                f"the process that drives this run cannot be reached any more ({first_line}); run the same command "
                "again to continue"
            ) from error
