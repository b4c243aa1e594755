"""The processes that a launcher started: torchrun, `accelerate launch`, or what sets the same variables."""

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

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# How long a driver that holds the store itself waits for workers to hear that it is done.
LEAVE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Place:
    """Which of the processes of a run this one is.

    Attributes:
        rank: its number; 0 drives.
        num_processes: how many there are.
        local_rank: its number on its machine.
        num_local: how many there are on its machine.
    """

    rank: int
    num_processes: int
    local_rank: int = 0
    num_local: int = 1

    @classmethod
    def found(cls, environment: Mapping[str, str]) -> Self | None:
        """What a launcher says of this process; None if there is none, or if it started this process alone.

        Raises:
            ScaleOutError: a variable is not a number.
        """
        if any(not environment.get(name) for name in NEEDED):
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        try:
            place = cls(*(int(environment.get(name) or default) for name, default in zip(names, "0101", strict=True)))
        except ValueError as error:
            raise ScaleOutError(f"{', '.join(names)}: {error}; start the processes with torchrun") from error
        return place if place.num_processes > 1 else None


@dataclass(frozen=True, slots=True)
class Team:
    """The processes of a run, as one of them sees them."""

    place: Place
    channel: Channel


@functools.cache
def team() -> Team | None:
    """Joins the processes of this run, once; None for a process alone.

    Of the first process every ending, errors included, sends the others home.

    Raises:
        ScaleOutError: the first process cannot be reached.
    """
    place = Place.found(os.environ)
    if place is None:
        return None
    try:
        store, _, _ = next(rendezvous("env://"))
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ScaleOutError(f"process {place.rank} cannot reach the first one at {address}: {error}") from error
    # A launcher that restarts the processes may keep its store, and with it what the last ones left there.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    channel = Channel(PrefixStore(f"refusion_eval/{restart}", store))
    if place.rank == 0:
        launcher_holds_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        atexit.register(_finish, channel, 0 if launcher_holds_store else place.num_processes - 1)
    return Team(place, channel)


def _finish(channel: Channel, num_workers: int) -> None:
    with contextlib.suppress(ScaleOutError):  # whoever held the store is gone, and with it the workers
        channel.finish(num_workers, LEAVE_SECONDS)
