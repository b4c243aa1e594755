"""Warnings that a reader needs before the figures of a page: marks of single tasks, and sentences about all of them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from refusion_eval.results.facts import TaskFacts


class Mark(NamedTuple):
    """A caution about the figures of a task."""

    kind: str
    sentence: str
    amount: int | str = ""

    @property
    def label(self) -> str:
        """The mark as the table shows it."""
        return f"{self.kind} {self.amount}" if self.amount else self.kind


def marks(task: TaskFacts, num_items: int | None) -> list[Mark]:
    """The marks of a task of one run, whose benchmark has `num_items` items as far as is known."""
    num_asked, num_there = len(task.asked), task.num_expected - task.num_missing
    marks = []
    if not task.isolated:
        marks.append(Mark("sandbox off", "Programs ran without isolation, so their verdicts can be forged."))
    if len(task.hardware) > 1:
        machines = " | ".join(sorted(task.hardware))
        marks.append(Mark("mixed hardware", f"Samples of this task come from several machines: {machines}."))
    if task.num_missing:
        sentence = f"{num_there} of {task.num_expected} samples: the run ended early or is still going."
        marks.append(Mark("unfinished", sentence, f"{num_there}/{task.num_expected}"))
    elif num_items is not None and num_asked < num_items:
        sentence = f"{num_asked} of {num_items} items were asked for."
        marks.append(Mark("limited", sentence, f"{num_asked}/{num_items}"))
    if number := task.num_unscored:
        marks.append(Mark("unscored", f"{number} samples have no verdict: the run has not ended.", number))
    if number := task.num_errors:
        marks.append(Mark("errors", f"{number} samples failed and are in no figure.", number))
    if any(sample.batch_size > 1 for sample in task.samples):
        marks.append(Mark("batched", "Some samples were decoded together; their times are in no speed figure."))
    return marks


def warnings(cells: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Cautions about the table as a whole: columns whose figures are not of the same kind."""
    sentences = []
    machines = sorted({label for run in runs for label in run["hardware"]})
    if len(machines) > 1:
        sentences.append(
            f"Speed was measured on {len(machines)} machines and must not be compared across them: "
            f"{' | '.join(machines)}."
        )
    versions: dict[str, set[str]] = defaultdict(set)
    for cell in cells:
        if not cell["mean"]:
            versions[cell["task"]].add(cell["version"])
    for task, names in sorted(versions.items()):
        if len(names) > 1:
            sentences.append(
                f"{task} is here in versions {', '.join(sorted(names))}, whose figures must not be compared."
            )
    if any(cell["mini"] for cell in cells):
        sentences.append("mini: synthetic look-alikes of this project, not the real benchmarks.")
    return sentences
