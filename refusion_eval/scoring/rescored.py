"""Rescored texts as figures: one line a text, one line a task, the table of a terminal, and what a reader must know."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from refusion_eval.benchmarks import find_task, is_mini
from refusion_eval.metrics import Interval, accuracy
from refusion_eval.results.measured import seed_of
from refusion_eval.results.measurement import UNISOLATED
from refusion_eval.results.render import Table, csv_text, interval_text
from refusion_eval.results.tables import MINI_CAPTION
from refusion_eval.scoring.judge import ERROR, Verdict
from refusion_eval.store.records import NO_ISOLATION, Sample, ScoreRow
from refusion_eval.store.run_reader import Run

# The columns of the CSV of texts.
_TEXT_COLUMNS = (
    "task", "settings", "doc_id", "sample", "extracted", "verdict", "correct",
    "recorded_extracted", "recorded_verdict", "recorded_correct", "tier", "reason",
)  # fmt: skip


class RecordedText(NamedTuple):
    """A record, what the filter reads of it (None where it does not hold that), and the run's own verdict, if any."""

    sample: Sample
    text: str | None
    recorded: ScoreRow | None

    def judged(self, verdict: Verdict) -> dict[str, Any]:
        """The line of the text under a verdict: `_TEXT_COLUMNS`, the document's hash, and what the run recorded.

        What is recorded is None where there is no verdict.
        """
        key, recorded = self.sample.key, self.recorded
        return {
            "task": key.task,
            "settings": key.settings_hash,
            "doc_id": self.sample.item_id,
            "sample": key.sample,
            **verdict._asdict(),
            "correct": verdict.passed,
            "recorded_extracted": recorded.extracted if recorded else None,
            "recorded_verdict": recorded.verdict if recorded else None,
            "recorded_correct": recorded.value > 0 if recorded else None,
            "doc_hash": key.doc_hash,
            "recorded": recorded,
        }


@dataclass(frozen=True, slots=True)
class RescoredTask:
    """The texts of one task of a run, generated with one set of settings, under a filter.

    Attributes:
        texts: a line for each text, as `RecordedText.judged` gives it, in the order of the records.
    """

    run: Run
    task: str
    settings: str
    texts: Sequence[Mapping[str, Any]]
    notes: Sequence[str]

    @property
    def num_items(self) -> int:
        """Number of different items."""
        return len({text["doc_hash"] for text in self.texts})

    @property
    def accuracies(self) -> tuple[Interval | None, Interval | None]:
        """Percent of right texts by the recorded verdicts, and under the filter; None where there is no verdict."""
        return self._accuracy("recorded_correct"), self._accuracy("correct")

    def _accuracy(self, column: str) -> Interval | None:
        """The interval is that of the tables: by item, with the task's own seed."""
        items: dict[str, list[bool]] = {}
        for text in self.texts:
            if text[column] is not None:
                items.setdefault(text["doc_hash"], []).append(text[column])
        means = [np.mean(items[item]) for item in sorted(items)]
        return accuracy(means, seed=seed_of(self.task)).scaled(100).interval() if means else None

    @property
    def flips(self) -> tuple[int, int]:
        """Texts recorded as wrong that the filter makes right, and the other way round."""
        counts = Counter((text["recorded_correct"], text["correct"]) for text in self.texts)
        return counts[False, True], counts[True, False]

    def summary_line(self, filter_name: str) -> dict[str, Any]:
        """The line of the CSV of tasks."""
        line: dict[str, Any] = {
            "run_id": self.run.run_id,
            "system": self.run.manifest.system,
            "filter": filter_name,
            "task": self.task,
            "mini": is_mini(self.task),
            "settings": self.settings,
            "n": self.num_items,
            "samples": len(self.texts),
        }
        for name, interval in zip(("recorded", "rescored"), self.accuracies, strict=True):
            line[name], line[f"{name}_low"], line[f"{name}_high"] = (
                (interval.value, interval.low, interval.high) if interval else (None, None, None)
            )
        line["to_correct"], line["to_wrong"] = self.flips
        return {**line, "note": "; ".join(self.notes)}


def notes(texts: Sequence[RecordedText], judged: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know of the figures of a task."""
    num_failed = sum(text.sample.error is not None for text in texts)
    num_usable = sum(text.text is not None for text in texts)
    counts = {
        "failed and have no text": num_failed,
        "hold no tokens, which this filter reads": len(texts) - num_failed - num_usable,
        "are about documents that are not among the rows here": num_usable - len(judged),
        "have no recorded verdict": sum(text["recorded"] is None for text in judged),
        "could not be judged and count as wrong": sum(text["verdict"] == ERROR for text in judged),
    }
    found = [f"{number} of {len(texts)} samples {what}" for what, number in counts.items() if number]
    key = texts[0].sample.key
    task = find_task(key.task)
    now = task.benchmark.prompts.version if task and key.task.startswith(task.name) else key.task_version
    if key.task_version != now:  # lm-eval's own tasks have versions of their own
        found.append(f"recorded by version {key.task_version} of the task, whose rules may differ from those of {now}")
    return [*found, UNISOLATED] if any(text["tier"] == NO_ISOLATION for text in judged) else found


def rescored_table(filter_name: str, results: Sequence[RescoredTask]) -> Table:
    """The summary for a terminal."""
    num_runs = Counter(system for system, _ in {(task.run.manifest.system, task.run.run_id) for task in results})
    num_settings = Counter((id(task.run), task.task) for task in results)  # folders of two runs may have one name
    rows = []
    for task in results:
        run_id, system = task.run.run_id, task.run.manifest.system
        name = f"{task.task} ({task.settings})" if num_settings[id(task.run), task.task] > 1 else task.task
        label = f"{system} ({run_id})" if num_runs[system] > 1 else system
        accuracies = (interval_text(accuracy, 1, missing="-") for accuracy in task.accuracies)
        rows.append((name, label, str(task.num_items), *accuracies, *map(str, task.flips)))
    return Table(
        title=f"filter {filter_name}",
        columns=("Task", "System", "n", "Recorded %", "Rescored %", "wrong to right", "right to wrong"),
        rows=rows,
        num_left=2,
        notes=[
            "In brackets: 95% interval by item.",
            MINI_CAPTION if any(is_mini(task.task) for task in results) else "",
        ],
    )


def differing_texts(tasks: Sequence[RescoredTask]) -> list[str]:
    """A sentence for each text whose answer or verdict is not the recorded one."""
    differing = [
        (task.run.run_id, text, text["recorded"])
        for task in tasks
        for text in task.texts
        if text["recorded"]
        and (text["extracted"], text["verdict"]) != (text["recorded_extracted"], text["recorded_verdict"])
    ]
    return [
        f"{run_id}: {now['task']} item {now['doc_id']} sample {now['sample']}: now {now['verdict']} ({now['reason']}), "
        f"recorded {then.verdict} ({then.reason}) by {then.scorer}"
        for run_id, now, then in differing
    ]


def texts_csv(tasks: Sequence[RescoredTask]) -> str:
    """The CSV of texts."""
    return _csv(_TEXT_COLUMNS, [text for task in tasks for text in task.texts])


def summary_csv(tasks: Sequence[RescoredTask], filter_name: str) -> str:
    """The CSV of tasks, of which there is at least one."""
    lines = [task.summary_line(filter_name) for task in tasks]
    return _csv(list(lines[0]), lines)


def _csv(columns: Sequence[str], lines: Iterable[Mapping[str, Any]]) -> str:
    """Lines as CSV. Verdicts are 1 and 0, to be summed."""
    values = ([line[column] for column in columns] for line in lines)
    return csv_text(columns, ([int(value) if isinstance(value, bool) else value for value in row] for row in values))
