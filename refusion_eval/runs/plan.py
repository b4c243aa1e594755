"""What is run: runs with their arguments, their tasks and their folders, and the turns that they take."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from refusion_eval.errors import ConfigError
from refusion_eval.runs.model_args import ModelArgs


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

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run, resolved: nothing about it is read or decided again while it runs."""

    args: ModelArgs  # with the run directory, the folder of rows and, of a protocol, what records say of it
    tasks: tuple[str, ...]  # of this project and of lm-eval
    limit: int | None = None  # items of each task
    include_path: Path | None = None  # folder with task files of lm-eval
    sandbox: str = "auto"
    name: str = ""  # in messages
    options: Mapping[str, Any] = field(default_factory=dict)  # of `refusion-eval run`, with which it makes this run

    @property
    def run_dir(self) -> Path:
        """The folder of its records; ConfigError if it has none."""
        if self.args.run_dir is None:
            raise ConfigError("a run needs a run directory: give --run-dir")
        return Path(self.args.run_dir)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Runs, and the turns that each of them takes; the turn None is all items at once."""

    runs: tuple[PlannedRun, ...]
    turns: tuple[Turn | None, ...] = (None,)


def turns(rounds: int, limit: int | None) -> tuple[Turn, ...]:
    """The turns of so many rounds over `limit` items."""
    rounds = min(rounds, limit or rounds)  # with more rounds than items, turns would be empty
    return tuple(Turn(number, rounds) for number in range(1, rounds + 1))
