"""The processes that a launcher started: torchrun, `accelerate launch`, or any program that sets the same variables."""

import atexit
import contextlib
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from refusion_eval.errors import ScaleOutError
from refusion_eval.scaleout.channel import Channel

REQUIRED_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# How long rank 0 waits for the other ranks to leave, where the key-value store that they read lives in rank 0.
LEAVE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """Which of the processes of a run this process is.

    Attributes:
        rank: number of the process among all; rank 0 drives the run.
        num_processes: number of processes.
        local_rank: number of the process on its machine.
        num_local: number of processes on the same machine.
    """

    rank: int
    num_processes: int
    local_rank: int = 0
    num_local: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self | None:
        """Reads the variables that a launcher sets; None without a launcher, or for a process that runs alone.

        Raises:
            ScaleOutError: a variable is not a number.
        """
        if any(not environment.get(name) for name in REQUIRED_VARIABLES):
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        try:
            info = cls(*(int(environment.get(name) or default) for name, default in zip(names, "0101", strict=True)))
        except ValueError as error:
            raise ScaleOutError(f"{', '.join(names)}: {error}; start the processes with torchrun") from error
        return info if info.num_processes > 1 else None


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The processes of a run, seen from one of them.

    Attributes:
        info: which of the processes this one is.
        channel: connection to the others.
    """

    info: ProcessInfo
    channel: Channel


def num_local_processes() -> int:
    """Number of processes of this run on this machine."""
    info = ProcessInfo.from_environment(os.environ)
    return 1 if info is None else info.num_local


@functools.cache
def process_group() -> ProcessGroup | None:
    """Joins the processes of this run; None for a process that runs alone.

    A process joins once, whatever it evaluates, because the address of the store can be bound only once. When rank 0
    exits, for whatever reason, it tells all other ranks to exit.

    Raises:
        ScaleOutError: rank 0 cannot be reached.
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
    channel = Channel(PrefixStore(f"refusion_eval/{restart}", store))
    if info.rank == 0:
        launcher_holds_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        atexit.register(_finish, channel, 0 if launcher_holds_store else info.num_processes - 1)
    return ProcessGroup(info, channel)


def _finish(channel: Channel, num_workers: int) -> None:
    with contextlib.suppress(ScaleOutError):  # the process that held the store is gone, and the workers with it
        channel.finish(num_workers, LEAVE_SECONDS)
