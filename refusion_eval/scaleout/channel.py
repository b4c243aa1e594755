"""The processes that a launcher started (torchrun, `accelerate launch`), and the messages between them.

Messages go through the key-value store of the launcher. Only counters and values are used. No call waits inside the
store for long, because the time limits of the store are made for the start of a run and not for hours of decoding.

    rounds, round/R            number of rounds and the header of each: one round for each call of the driver's `run`
    job/R/I, claimed/R         jobs of a round, and the number of claims
    sent, message/K            messages of workers to the driver, in the order of sending
    alive/W                    heartbeat: a counter that the process of worker W increments every few seconds
    finished, left/W           whether the run is over; whether worker W needs the store no more
"""

import atexit
import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from refusion_eval.errors import ScaleOutError
from refusion_eval.store.records import dump

REQUIRED_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

CALL_TIMEOUT = timedelta(minutes=5)  # of one call of the store; one that takes longer is on a machine that is gone
POLL_SECONDS = 0.02
IDLE_SECONDS = 0.05  # between two looks of a worker that has nothing to do
HEARTBEAT_SECONDS = 5.0
# At the end of a run no record can be lost any more, so that few missed heartbeats of a worker are enough.
LEAVE_SILENCE_SECONDS = 3 * HEARTBEAT_SECONDS
LEAVE_SECONDS = 120.0  # rank 0 waits so long for the others to leave, where the store that they read lives in rank 0


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """Rank and number of this process among all of the run and among those of its machine."""

    rank: int  # 0 drives the run, and all others are workers
    num_processes: int
    local_rank: int = 0
    num_local: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self | None:
        """Reads the variables that a launcher sets; None without a launcher, or for a process that runs alone."""
        if any(not environment.get(name) for name in REQUIRED_VARIABLES):
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        try:
            info = cls(*(int(environment.get(name) or default) for name, default in zip(names, "0101", strict=True)))
        except ValueError as error:
            raise ScaleOutError(f"{', '.join(names)}: {error}; start the processes with torchrun") from error
        return info if info.num_processes > 1 else None


@functools.cache
def open_channel() -> "Channel | None":
    """Joins the processes of this run, once, as the address of the store can be bound only once; None if alone.

    When rank 0 exits, for whatever reason, it tells all other ranks to exit.
    """
    info = ProcessInfo.from_environment(os.environ)
    if info is None:
        return None
    try:
        store, _, _ = next(rendezvous("env://"))
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ScaleOutError(f"process {info.rank} cannot reach the first one at {address}: {error}") from error
    # A launcher that restarts the processes may keep its store, with the keys of the processes that ended.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    channel = Channel(PrefixStore(f"refusion_eval/{restart}", store), info)
    if info.rank == 0:
        launcher_holds_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        atexit.register(channel.finish, 0.0 if launcher_holds_store else LEAVE_SECONDS)
    return channel


class Finished(Exception):
    """The driver has declared the run over."""


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        (reason, *_) = str(error).strip().splitlines() or [type(error).__name__]
        gone = f"the process that drives this run cannot be reached any more ({reason})"
        raise ScaleOutError(f"{gone}; run the same command again to continue") from error


class Channel:
    """One process' access to the store; methods raise ScaleOutError if its process or its machine is gone."""

    def __init__(self, store: Store, info: ProcessInfo) -> None:
        self.info = info
        self._store = store
        self._num_read = 0
        self._heartbeats: dict[int, tuple[int, float]] = {}  # rank -> counter, and time at which it was seen to change
        store.set_timeout(CALL_TIMEOUT)

    def _count(self, name: str, increment: int = 0) -> int:
        with _store_errors():
            return self._store.add(name, increment)

    def _write(self, name: str, value: Any) -> None:
        with _store_errors():
            self._store.set(name, dump(value))

    def _read(self, name: str, *, delete: bool) -> Any:
        with _store_errors():
            text = self._store.get(name)
            if delete:
                self._store.delete_key(name)
        return json.loads(text)

    # Methods for the driver.

    def open_round(self, header: Mapping[str, Any], jobs: Sequence[Any]) -> int:
        number = self._count("rounds")
        for index, job in enumerate(jobs):
            self._write(f"job/{number}/{index}", job)
        self._write(f"round/{number}", {**header, "num_jobs": len(jobs)})
        self._count("rounds", 1)
        return number

    def end_claims(self, round_number: int, num_jobs: int) -> int:
        """Ends the claims in a round; returns the number of jobs that were claimed, later calls an upper bound."""
        return min(num_jobs, self._count(f"claimed/{round_number}", num_jobs) - num_jobs)

    def messages(self) -> Iterator[dict[str, Any]]:
        for number in range(self._num_read, self._count("sent")):
            self._num_read = number + 1
            yield self._read(f"message/{number}", delete=True)

    def silent_workers(self, seconds: float) -> set[int]:
        """Ranks of the workers whose heartbeat has stopped for so long, as repeated calls find out."""
        silent = set()
        for rank in range(1, self.info.num_processes):
            counter = self._count(f"alive/{rank}")
            now = time.monotonic()
            last_counter, changed_at = self._heartbeats.get(rank, (0, now))
            if counter != last_counter:
                self._heartbeats[rank] = (counter, now)
            elif counter and now - changed_at > seconds:  # a worker that never had a heartbeat is not silent
                silent.add(rank)
        return silent

    def finish(self, max_seconds: float) -> None:
        """Declares the run over, and waits at most so long until all workers have left that are not silent."""
        with contextlib.suppress(ScaleOutError):  # the process that held the store is gone, and the workers with it
            self._count("finished", 1)
            deadline = time.monotonic() + max_seconds
            present = set(range(1, self.info.num_processes))
            while present and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                present = {rank for rank in present if not self._count(f"left/{rank}")}
                present -= self.silent_workers(LEAVE_SILENCE_SECONDS)

    # Methods for every process.

    def claims(self, round_number: int, num_jobs: int) -> Iterator[tuple[int, Any]]:
        """Claims jobs of a round, one by one; yields number and content of each. Raises Finished."""
        while (number := self._count(f"claimed/{round_number}", 1) - 1) < num_jobs:
            self._check_finished()
            yield number, self._read(f"job/{round_number}/{number}", delete=True)

    def _check_finished(self) -> None:
        if self._count("finished"):
            raise Finished

    # Methods for a worker.

    def wait_for_round(self, num_seen: int) -> tuple[int, Any]:
        """Waits for a round that this worker has not seen; returns number and header of the latest. Raises Finished."""
        while (num_rounds := self._count("rounds")) <= num_seen:
            self._check_finished()
            time.sleep(IDLE_SECONDS)
        return num_rounds - 1, self._read(f"round/{num_rounds - 1}", delete=False)

    def send(self, message: Mapping[str, Any]) -> None:
        self._write(f"message/{self._count('sent', 1) - 1}", {"rank": self.info.rank, **message})

    @contextlib.contextmanager
    def heartbeat(self) -> Iterator[None]:
        """A block during which a thread sends this worker's heartbeat, however busy the worker is."""
        ended = threading.Event()
        name = f"alive/{self.info.rank}"

        def beat() -> None:
            with contextlib.suppress(ScaleOutError):  # the driver is gone, which the worker's own next call reports
                while not ended.wait(HEARTBEAT_SECONDS):
                    self._count(name, 1)

        self._count(name, 1)  # before the first claim: only workers with a heartbeat can be found silent
        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def leave(self) -> None:
        self._count(f"left/{self.info.rank}", 1)
