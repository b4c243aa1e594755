"""`refusion-eval rescore`: judges the recorded texts of runs with another answer filter. No record is changed.

A record holds the text and the hash of its document. The document itself, with the right answer or the tests, comes
from the benchmark's rows, and is the one that was asked if its hash is the recorded one.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from refusion_eval.benchmarks import BENCHMARKS, Row, Task, is_mini
from refusion_eval.benchmarks.sealing import redact, texts_of
from refusion_eval.config import check_keys
from refusion_eval.errors import ConfigError, DataError
from refusion_eval.metrics.bootstrap import Interval, bootstrap, mean_statistic
from refusion_eval.results.figure import UNISOLATED
from refusion_eval.results.render import Table, csv_text, interval_text
from refusion_eval.results.summary import MINI_CAPTION
from refusion_eval.results.task_metrics import seed_of
from refusion_eval.runs.job import doc_hash
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.progress import ProgressDisplay
from refusion_eval.runs.system import System
from refusion_eval.runs.text import Detokenizer
from refusion_eval.scoring.filters import OURS, AnswerFilter, judge_by_rule
from refusion_eval.scoring.judge import ERROR, Verdict
from refusion_eval.store.atomic_write import prepare_output, write_output
from refusion_eval.store.records import NO_ISOLATION, PASSED, Sample, ScoreRow
from refusion_eval.store.run_reader import Run, RunReader
from refusion_eval.trace import Trace

FOLDER = "rescored"

_MOST_SHOWN = 5

Rows = Callable[[str, bool], Mapping[str, Row]]

# A record, and what the filter reads of it: None where the record does not hold that.
RecordedText = tuple[Sample, str | None]


class Rescored(NamedTuple):
    """A recorded response under a filter.

    Attributes:
        sample: the record.
        verdict: the filter's verdict.
        recorded: the run's own verdict, None if it has none.
    """

    sample: Sample
    verdict: Verdict
    recorded: ScoreRow | None

    @property
    def correct(self) -> bool | None:
        """Whether the text is right; None where the judge failed, which says nothing about the text."""
        return None if self.verdict.verdict == ERROR else self.verdict.passed

    @property
    def recorded_correct(self) -> bool | None:
        """What the run recorded; None if nothing."""
        return None if self.recorded is None else self.recorded.value > 0


@dataclass(frozen=True, slots=True)
class TaskRescored:
    """The texts of one task, generated with one set of settings, under a filter.

    Attributes:
        task: its name.
        settings: hash of the settings.
        samples: the texts in the order of the records.
        notes: what a reader must know of the figures.
    """

    task: str
    settings: str
    samples: Sequence[Rescored]
    notes: Sequence[str]

    @property
    def num_items(self) -> int:
        """Number of different items."""
        return len({one.sample.key.doc_hash for one in self.samples})

    @property
    def accuracies(self) -> tuple[Interval | None, Interval | None]:
        """Percent of right texts by the recorded verdicts, and under the filter; None where there is no verdict."""
        return self._accuracy("recorded_correct"), self._accuracy("correct")

    def _accuracy(self, verdict: str) -> Interval | None:
        """The interval is that of the tables: by item, with the task's own seed."""
        items: dict[str, list[bool]] = {}
        for one in self.samples:
            if (passed := getattr(one, verdict)) is not None:
                items.setdefault(one.sample.key.doc_hash, []).append(passed)
        means = [np.mean(items[item]) for item in sorted(items)]
        return bootstrap([means], mean_statistic, seed=seed_of(self.task)).scaled(100).interval() if means else None

    @property
    def flips(self) -> tuple[int, int]:
        """Texts recorded as wrong that the filter makes right, and the other way round."""
        counts = Counter((one.recorded_correct, one.correct) for one in self.samples)
        return counts[False, True], counts[True, False]

    def sample_cells(self) -> list[dict[str, Any]]:
        """The lines of the CSV of texts."""
        return [
            {
                "task": self.task,
                "settings": self.settings,
                "doc_id": one.sample.item_id,
                "sample": one.sample.key.sample,
                "extracted": one.verdict.extracted,
                "verdict": one.verdict.verdict,
                "correct": one.correct,
                "recorded_extracted": one.recorded.extracted if one.recorded else None,
                "recorded_verdict": one.recorded.verdict if one.recorded else None,
                "recorded_correct": one.recorded_correct,
                "tier": one.verdict.tier,
                "reason": one.verdict.reason,
            }
            for one in self.samples
        ]


@dataclass(slots=True)
class RunRescored:
    """What one run has for one filter.

    Attributes:
        run: the run.
        filter_name: the filter.
        tasks: ordered by name.
        left_out: task -> why the filter says nothing about it.
    """

    run: Run
    filter_name: str
    tasks: list[TaskRescored] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def summary_cells(self) -> list[dict[str, Any]]:
        """The lines of the CSV of tasks."""
        lines = []
        for task in self.tasks:
            cells: dict[str, Any] = {
                "run_id": self.run.run_id,
                "system": self.run.manifest.system,
                "filter": self.filter_name,
                "task": task.task,
                "mini": is_mini(task.task),
                "settings": task.settings,
                "n": task.num_items,
                "samples": len(task.samples),
            }
            for name, interval in zip(("recorded", "rescored"), task.accuracies, strict=True):
                bounds = (interval.value, interval.low, interval.high) if interval else (None, None, None)
                cells |= dict(zip((name, f"{name}_low", f"{name}_high"), bounds, strict=True))
            cells["to_correct"], cells["to_wrong"] = task.flips
            lines.append({**cells, "note": "; ".join(task.notes)})
        return lines


def rescore_command(
    run_dirs: Sequence[Path],
    answer_filter: AnswerFilter,
    *,
    tasks: Sequence[str] = (),
    data: Path | None = None,
    out: Path | None = None,
    workers: int | None = None,
    sandbox: str = "auto",
    console: Console,
) -> int:
    """Judges recorded texts with a filter, prints the summary and writes it beside the records, with one line a text.

    Args:
        run_dirs: run directories, finished or not.
        answer_filter: finds the answers in the texts.
        tasks: tasks or benchmarks; none for all.
        data: directory with the rows, see `Task.rows`.
        out: folder for the results, with one folder a run in it; `FOLDER` in each run directory if None.
        workers: processes for code and for formulas.
        sandbox: "auto", or "none" to run model-written code without isolation.
        console: where lines and the table are printed.

    Returns:
        The number of texts for which the filter `OURS` does not give what is recorded; 0 for any other filter.

    Raises:
        ConfigError: unknown task, or two runs of one name for one folder.
        StoreError: not a run directory, or the results cannot be written.
        DataError: rows are missing, or a run has nothing that the filter can judge.
        SandboxError: code cannot be run in isolation here.
    """
    echo = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    selected = {run_dir: names for run_dir, names in select_tasks(run_dirs, tasks).items() if names or not tasks}
    paths = {run_dir: _paths(run_dir, answer_filter.name, out) for run_dir in selected}
    if len({path for path, _ in paths.values()}) < len(paths):
        raise ConfigError(f"--out {out}: two of the runs have folders of one name; rescore them one by one")
    for path in (path for pair in paths.values() for path in pair):
        prepare_output(path)
    rows = cache(partial(rows_by_hash, data_dir=data))
    results = []
    num_differing = 0
    for run_dir, names in selected.items():
        result = _rescore_run(run_dir, answer_filter, names, rows, workers, sandbox)
        results.append(result)
        samples_path, summary_path = paths[run_dir]
        write_output(samples_path, _csv([cells for task in result.tasks for cells in task.sample_cells()]))
        write_output(summary_path, _csv(result.summary_cells()))
        for why in dict.fromkeys(result.left_out.values()):
            left_out = ", ".join(task for task, reason in result.left_out.items() if reason == why)
            echo(f"{result.run.run_id}: left out, as {why}: {left_out}")
        if answer_filter.name == OURS:
            num_differing += _report_differences(result, echo)
    console.print(_table(answer_filter.name, results).rich())
    for result in results:
        for task in result.tasks:
            if task.notes:
                echo(f"{result.run.run_id} {task.task}: {'; '.join(task.notes)}")
    for path, _ in paths.values():
        echo(f"one line a text: {path}")
    return num_differing


def select_tasks(run_dirs: Sequence[Path], names: Sequence[str]) -> dict[Path, set[str]]:
    """The tasks of each run that a user means.

    Args:
        run_dirs: run directories.
        names: tasks, or benchmarks for all their tasks; none for everything.

    Raises:
        StoreError: a directory holds no readable run.
        ConfigError: no run has a task of that name.
    """
    recorded: dict[Path, dict[str, str]] = {}
    for run_dir in run_dirs:
        with RunReader.open(run_dir) as reader:
            recorded[run_dir] = {sample.key.task: sample.benchmark for sample in reader.samples(traces=False)}
    known = {name for tasks in recorded.values() for pair in tasks.items() for name in pair}
    check_keys(names, known, "", what="task")
    return {
        run_dir: {task for task, benchmark in tasks.items() if not names or {task, benchmark} & set(names)}
        for run_dir, tasks in recorded.items()
    }


def _rescore_run(
    run_dir: Path, answer_filter: AnswerFilter, names: set[str], rows: Rows, workers: int | None, sandbox: str
) -> RunRescored:
    groups: dict[tuple[str, str, str], list[RecordedText]] = {}
    with RunReader.open(run_dir) as reader:
        result = RunRescored(reader.run, answer_filter.name)
        recorded = {score.key: score for score in reader.scores() if score.metric == PASSED}
        reads_canvas = answer_filter.reads == "canvas"
        detokenizer = recorded_system(reader.run).detokenizer if reads_canvas else None
        for sample in reader.samples(traces=reads_canvas):
            key = sample.key
            if key.task in names:
                text = sample.text if detokenizer is None else canvas_text(sample, detokenizer)
                group = groups.setdefault((key.task, key.task_version, key.settings_hash), [])
                group.append((sample, None if sample.error is not None else text))
    totals = Counter(key[0] for key, texts in groups.items() for _ in texts)
    with ProgressDisplay(f"{answer_filter.name} {run_dir.name}", dict(totals)) as progress:
        for (name, _, settings), texts in sorted(groups.items()):
            usable = [(sample, text) for sample, text in texts if text is not None]
            benchmark = texts[0][0].benchmark
            if refusal := _refusal(answer_filter, benchmark, texts, usable):
                result.left_out[name] = refusal
                continue
            documents = rows(benchmark, is_mini(name))
            items = [
                (sample, documents[sample.key.doc_hash], text)
                for sample, text in usable
                if sample.key.doc_hash in documents
            ]
            if not items:
                result.left_out[name] = f"none of its documents is among the rows of {benchmark} here"
                continue
            task = Task(BENCHMARKS[benchmark], is_mini(name))
            verdicts = judge_by_rule(
                task.benchmark,
                answer_filter.rules[benchmark],
                [(row, text) for _, row, text in items],
                workers=workers,
                sandbox=sandbox,
                on_verdict=partial(_count, progress, name),
            )
            if task.sealed:
                verdicts = [_redacted(row, verdict) for (_, row, _), verdict in zip(items, verdicts, strict=True)]
            samples = [
                Rescored(sample, verdict, recorded.get(sample.key))
                for (sample, _, _), verdict in zip(items, verdicts, strict=True)
            ]
            result.tasks.append(TaskRescored(name, settings, samples, _notes(texts, usable, samples)))
    if not result.tasks:
        why = "; ".join(f"{task}: {reason}" for task, reason in result.left_out.items()) or "no text is recorded yet"
        raise DataError(f"{run_dir}: filter {answer_filter.name} has nothing to score: {why}")
    return result


def _count(progress: ProgressDisplay, task: str, _index: int, _verdict: Verdict) -> None:
    progress.scored(task)


def rows_by_hash(benchmark: str, mini: bool, data_dir: str | Path | None) -> dict[str, Row]:
    """Rows of a benchmark by the hash that records hold of their document.

    Raises:
        DataError: the rows cannot be found.
    """
    task = Task(BENCHMARKS[benchmark], mini)
    # The hash is of the item's row, which holds markers in place of sealed questions.
    return {doc_hash(item.row): row for item, row in zip(task.items(data_dir), task.rows(data_dir), strict=True)}


def canvas_text(sample: Sample, detokenizer: Detokenizer) -> str | None:
    """The text of every token that was fixed, in order, without special tokens.

    Returns:
        The text, or None where the record has no trace, or one without its tokens (sealed questions).
    """
    if sample.tokens is None or sample.trace is None:
        return None
    fixed = Trace.from_json(sample.trace).fixed_tokens()
    return detokenizer.text([fixed[position] for position in sorted(fixed)])


def recorded_system(run: Run) -> System:
    """The checkpoint that a run names under its decoder, for its tokenizer: no weights are loaded.

    Raises:
        ConfigError: the checkpoint does not fit the decoder any more.
        CheckpointError: its files are not at hand.
    """
    manifest = run.manifest
    names: dict[str, Any] = {"pretrained": manifest.checkpoint, "decoder": manifest.decoder, "device": "cpu"}
    return System(parse_model_args({**names, "revision": manifest.checkpoint_revision or None}))


def _refusal(
    answer_filter: AnswerFilter, benchmark: str, texts: Sequence[RecordedText], usable: Sequence[RecordedText]
) -> str:
    """Why a filter says nothing about a task; empty if it does."""
    if benchmark not in BENCHMARKS:
        return "it belongs to none of the benchmarks that can be scored here"
    if benchmark not in answer_filter.rules:
        return "the filter does not apply"
    if all(sample.error is not None for sample, _ in texts):
        return f"no text is recorded: all {len(texts)} attempts failed"
    if not usable:
        return "its records hold no tokens, which this filter reads"
    return ""


def _notes(texts: Sequence[RecordedText], usable: Sequence[RecordedText], judged: Sequence[Rescored]) -> list[str]:
    num_failed = sum(sample.error is not None for sample, _ in texts)
    counts = {
        "failed and have no text": num_failed,
        "hold no tokens, which this filter reads": len(texts) - num_failed - len(usable),
        "are about documents that are not among the rows here": len(usable) - len(judged),
        "have no recorded verdict": sum(one.recorded is None for one in judged),
        "could not be judged; see `refusion-eval doctor`": sum(one.correct is None for one in judged),
    }
    notes = [f"{number} of {len(texts)} samples {what}" for what, number in counts.items() if number]
    unisolated = any(one.verdict.tier == NO_ISOLATION for one in judged)
    return [*notes, UNISOLATED] if unisolated else notes


def _redacted(row: Row, verdict: Verdict) -> Verdict:
    """Withholds the part of a sealed question that a filter may have put into its answer."""
    if verdict.extracted is None:
        return verdict
    return verdict._replace(extracted=redact(verdict.extracted, texts_of(row, "")))


def _table(filter_name: str, results: Sequence[RunRescored]) -> Table:
    """The summary for a terminal."""
    runs: dict[str, set[str]] = {}
    for result in results:
        runs.setdefault(result.run.manifest.system, set()).add(result.run.run_id)
    rows = []
    for result in results:
        run_id, system = result.run.run_id, result.run.manifest.system
        times = Counter(task.task for task in result.tasks)
        for task in result.tasks:
            name = f"{task.task} ({task.settings})" if times[task.task] > 1 else task.task
            label = f"{system} ({run_id})" if len(runs[system]) > 1 else system
            accuracies = (interval_text(accuracy, 1, missing="-") for accuracy in task.accuracies)
            rows.append((name, label, str(task.num_items), *accuracies, *map(str, task.flips)))
    mini = any(is_mini(task.task) for result in results for task in result.tasks)
    return Table(
        title=f"filter {filter_name}",
        columns=("Task", "System", "n", "Recorded %", "Rescored %", "wrong to right", "right to wrong"),
        rows=rows,
        num_left=2,
        notes=["In brackets: 95% bootstrap interval by item.", MINI_CAPTION if mini else ""],
    )


def _paths(run_dir: Path, filter_name: str, out: Path | None) -> tuple[Path, Path]:
    """Where the lines of the texts and the summary of a run go."""
    folder = run_dir / FOLDER if out is None else out / run_dir.resolve().name
    name = re.sub(r"[^\w.-]", "_", filter_name)
    return folder / f"{name}.csv", folder / f"{name}.summary.csv"


def _report_differences(result: RunRescored, echo: Callable[[str], None]) -> int:
    differing = [
        (one.sample, one.verdict, one.recorded)
        for task in result.tasks
        for one in task.samples
        if one.recorded is not None and one.verdict[:2] != (one.recorded.extracted, one.recorded.verdict)
    ]
    for sample, now, then in differing[:_MOST_SHOWN]:
        echo(
            f"{result.run.run_id}: {sample.key.task} item {sample.item_id} sample {sample.key.sample}: now "
            f"{now.verdict} ({now.reason}), recorded {then.verdict} ({then.reason}) by {then.scorer}"
        )
    return len(differing)


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV; the first one names the columns. Verdicts are 1 and 0, to be summed."""
    numbers = ([int(value) if isinstance(value, bool) else value for value in row.values()] for row in rows)
    return csv_text(list(rows[0]), numbers) if rows else ""
