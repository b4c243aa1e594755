"""What a reader must know of a task of a run before its figures, as short marks with a sentence each."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from refusion_eval.benchmarks import is_mini
from refusion_eval.store.run_reader import Run

_LIMIT_OPTIONS = ("--limit", "-L")


@dataclass(slots=True)
class TaskState:
    """What the records of one task say about themselves, beside its figures.

    Attributes:
        task: its name.
        version: its version.
        benchmark: what it belongs to.
        num_samples: samples, failed ones included.
        num_errors: failed ones.
        num_unscored: good ones without a verdict.
        items: hashes of the items that were asked.
        hardware: labels of the machines.
        unisolated: whether a program ran without isolation.
        batched: whether a sample was decoded beside others, so that its time measures no speed.
        num_items: items of the whole benchmark, None if its rows are not at hand.
    """

    task: str
    version: str
    benchmark: str
    num_samples: int = 0
    num_errors: int = 0
    num_unscored: int = 0
    items: set[str] = field(default_factory=set)
    hardware: set[str] = field(default_factory=set)
    unisolated: bool = False
    batched: bool = False
    num_items: int | None = None


def marks_of(state: TaskState, run: Run) -> list[tuple[str, str]]:
    """Marks of a task: a word or two, and the sentence behind them."""
    marks = []
    if is_mini(state.task):
        marks.append(("mini", "A synthetic look-alike of this project, not the real benchmark."))
    if state.unisolated:
        marks.append(("sandbox off", "Programs ran without isolation, so their verdicts can be forged."))
    if len(state.hardware) > 1:
        machines = " | ".join(sorted(state.hardware))
        marks.append(("mixed hardware", f"Samples of this task come from several machines: {machines}."))
    num_asked, limit = len(state.items), limit_of(run.manifest.command)
    if state.num_items is not None and num_asked < state.num_items:
        kind = "limited" if limit is not None and num_asked >= limit else "unfinished"
        why = f" (--limit {limit})" if kind == "limited" else ": the run ended early or is still going"
        marks.append((f"{kind} {num_asked}/{state.num_items}", f"{num_asked} of {state.num_items} items{why}."))
    elif state.num_items is None and limit is not None:
        marks.append((f"limited {num_asked}", f"Run with --limit {limit}; the benchmark's rows are not at hand here."))
    if state.num_unscored:
        marks.append(
            (f"unscored {state.num_unscored}", f"{state.num_unscored} samples have no verdict: the run has not ended.")
        )
    if state.num_errors:
        marks.append((f"errors {state.num_errors}", f"{state.num_errors} samples failed and are in no figure."))
    if state.batched:
        marks.append(("batched", "Some samples were decoded together; their times are in no speed figure."))
    return marks


def limit_of(command: Sequence[str]) -> int | None:
    """The limit on items that a command line asked for, None if it asked for none."""
    words = [part for word in command for part in word.split("=", 1)]
    for option, value in itertools.pairwise(words):
        if option in _LIMIT_OPTIONS and value.isdigit():
            return int(value)
    return None
