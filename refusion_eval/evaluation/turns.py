"""Systems that are to be compared take turns over the items, so that what slows a machine slows all of them."""

import gc
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self, TypeVar

from refusion_eval.errors import ConfigError

_System = TypeVar("_System")


class Turn(NamedTuple):
    """A share of the items: every item whose number leaves `number` - 1 when divided by `of`."""

    number: int
    of: int

    @classmethod
    def read(cls, text: str) -> Self:
        number, _, total = text.partition("/")
        if not (number.isdecimal() and total.isdecimal() and 1 <= int(number) <= int(total)):
            raise ConfigError(f"--round {text}: write it as K/N, the K-th of N rounds, for example 1/3")
        return cls(int(number), int(total))


def turns(rounds: int, limit: int | None) -> list[Turn]:
    rounds = min(rounds, limit or rounds)  # with more rounds than items, turns would be empty
    return [Turn(number, rounds) for number in range(1, rounds + 1)]


def run_in_turns(
    systems: Sequence[_System], run: Callable[[_System, Turn], bool], *, rounds: int, limit: int | None = None
) -> None:
    """Runs every system in every round; `run` returns False to leave a system out of the later rounds."""
    remaining = list(systems)
    for turn in turns(rounds, limit):
        for system in list(remaining):
            if not run(system, turn):
                remaining.remove(system)


def free_memory() -> None:
    """Frees what a finished turn leaves behind, so that the next system has as much memory as in its own process."""
    gc.collect()  # a system and its runner refer to each other
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # memory that torch keeps would be missing from the KV budget of the next model
