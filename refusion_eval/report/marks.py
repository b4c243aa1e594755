"""What a reader must know about a task of a run before its figures: short marks with a sentence each."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from refusion_eval.benchmarks import is_mini
from refusion_eval.store.run_reader import Run

_LIMIT_OPTIONS = ("--limit", "-L")


class Mark(NamedTuple):
    """One mark.

    Attributes:
        kind: what it says, without counts; equal for all tasks that it is true of.
        label: a word or two for the page, with counts.
        sentence: the explanation.
    """

    kind: str
    label: str
    sentence: str


@dataclass(slots=True)
class TaskState:
    """What the records of one task say about it beside its figures.

    Attributes:
        task: name of the task.
        version: version of the task.
        benchmark: benchmark that the task belongs to.
        num_samples: samples, failed ones included.
        num_errors: failed samples.
        num_unscored: good samples without a verdict.
        items: hashes of the items that were asked.
        hardware: labels of the machines that the samples were decoded on.
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


def marks_of(state: TaskState, run: Run) -> list[Mark]:
    """The marks of a task."""
    marks = []

    def mark(kind: str, sentence: str, count: int | str = "") -> None:
        marks.append(Mark(kind, f"{kind} {count}" if count else kind, sentence))

    if is_mini(state.task):
        mark("mini", "A synthetic look-alike of this project, not the real benchmark.")
    if state.unisolated:
        mark("sandbox off", "Programs ran without isolation, so their verdicts can be forged.")
    if len(state.hardware) > 1:
        machines = " | ".join(sorted(state.hardware))
        mark("mixed hardware", f"Samples of this task come from several machines: {machines}.")
    num_asked, limit = len(state.items), limit_of(run.manifest.command)
    if state.num_items is not None and num_asked < state.num_items:
        kind = "limited" if limit is not None and num_asked >= limit else "unfinished"
        reason = f" (--limit {limit})" if kind == "limited" else ": the run ended early or is still going"
        mark(kind, f"{num_asked} of {state.num_items} items{reason}.", f"{num_asked}/{state.num_items}")
    elif state.num_items is None and limit is not None:
        mark("limited", f"Run with --limit {limit}; the benchmark's rows are not at hand here.", num_asked)
    if state.num_unscored:
        sentence = f"{state.num_unscored} samples have no verdict: the run has not ended."
        mark("unscored", sentence, state.num_unscored)
    if state.num_errors:
        mark("errors", f"{state.num_errors} samples failed and are in no figure.", state.num_errors)
    if state.batched:
        mark("batched", "Some samples were decoded together; their times are in no speed figure.")
    return marks


def limit_of(command: Sequence[str]) -> int | None:
    """The limit on items that a command line asked for, None if it asked for none."""
    words = [part for word in command for part in word.split("=", 1)]
    for option, value in itertools.pairwise(words):
        if option in _LIMIT_OPTIONS and value.isdigit():
            return int(value)
    return None
