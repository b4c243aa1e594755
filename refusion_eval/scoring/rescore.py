"""`refusion-eval rescore`: judges the recorded texts of runs with another answer filter. No record is changed.

A record holds the text and the hash of its document. The document itself, with the right answer or the tests, comes
from the benchmark's rows, and is the one that was asked if its hash is the recorded one.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from refusion_eval.benchmarks import BENCHMARKS, Row, Task, is_mini
from refusion_eval.benchmarks.rows import redact, texts_of
from refusion_eval.config import check_keys
from refusion_eval.errors import ConfigError, DataError
from refusion_eval.metrics import Interval, bootstrap_mean
from refusion_eval.results.figure import UNISOLATED
from refusion_eval.results.measured import seed_of
from refusion_eval.results.render import Table, csv_text, interval_text
from refusion_eval.results.tables import MINI_CAPTION
from refusion_eval.runs.job import Detokenizer, doc_hash
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.system import System
from refusion_eval.runs.terminal import ProgressDisplay
from refusion_eval.scoring.filters import OURS, AnswerFilter
from refusion_eval.scoring.judge import ERROR, Verdict, judge_extractions
from refusion_eval.store.atomic_write import prepare_output, write_output
from refusion_eval.store.records import NO_ISOLATION, PASSED, Sample, ScoreRow
from refusion_eval.store.run_reader import Run, RunReader
from refusion_eval.types import Trace

FOLDER = "rescored"

_MOST_SHOWN = 5

# A record, and what the filter reads of it: None where the record does not hold that.
RecordedText = tuple[Sample, str | None]


class Rescored(NamedTuple):
    """A record, the filter's verdict on its text, and the run's own verdict (None if it has none)."""

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
class RescoredTask:
    """The texts of one task of a run, generated with one set of settings, under a filter.

    Attributes:
        run: the run.
        task: its name.
        settings: hash of the settings.
        texts: in the order of the records.
        notes: what a reader must know of the figures.
    """

    run: Run
    task: str
    settings: str
    texts: Sequence[Rescored]
    notes: Sequence[str]

    @property
    def num_items(self) -> int:
        """Number of different items."""
        return len({text.sample.key.doc_hash for text in self.texts})

    @property
    def accuracies(self) -> tuple[Interval | None, Interval | None]:
        """Percent of right texts by the recorded verdicts, and under the filter; None where there is no verdict."""
        return self._accuracy("recorded_correct"), self._accuracy("correct")

    def _accuracy(self, verdict: str) -> Interval | None:
        """The interval is that of the tables: by item, with the task's own seed."""
        items: dict[str, list[bool]] = {}
        for text in self.texts:
            if (passed := getattr(text, verdict)) is not None:
                items.setdefault(text.sample.key.doc_hash, []).append(passed)
        means = [np.mean(items[item]) for item in sorted(items)]
        return bootstrap_mean(means, seed=seed_of(self.task)).scaled(100).interval() if means else None

    @property
    def flips(self) -> tuple[int, int]:
        """Texts recorded as wrong that the filter makes right, and the other way round."""
        counts = Counter((text.recorded_correct, text.correct) for text in self.texts)
        return counts[False, True], counts[True, False]

    def text_lines(self) -> list[dict[str, Any]]:
        """The lines of the CSV of texts."""
        return [
            {
                "task": self.task,
                "settings": self.settings,
                "doc_id": text.sample.item_id,
                "sample": text.sample.key.sample,
                "extracted": text.verdict.extracted,
                "verdict": text.verdict.verdict,
                "correct": text.correct,
                "recorded_extracted": text.recorded.extracted if text.recorded else None,
                "recorded_verdict": text.recorded.verdict if text.recorded else None,
                "recorded_correct": text.recorded_correct,
                "tier": text.verdict.tier,
                "reason": text.verdict.reason,
            }
            for text in self.texts
        ]

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

    The arguments are those of the command. `tasks` names tasks or benchmarks, none for all; without `out` the results
    of each run go into its own folder `FOLDER`. Returns the number of texts for which the filter `OURS` does not give
    what is recorded; 0 for any other filter.

    Raises:
        ConfigError: unknown task, or two runs of one name for one folder.
        StoreError: not a run directory, or the results cannot be written.
        DataError: rows are missing, or a run has nothing that the filter can judge.
        SandboxError: code cannot be run in isolation here.
    """
    echo = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    selected = {run_dir: names for run_dir, names in _select_tasks(run_dirs, tasks).items() if names or not tasks}
    name = re.sub(r"[^\w.-]", "_", answer_filter.name)
    folders = {run_dir: run_dir / FOLDER if out is None else out / run_dir.resolve().name for run_dir in selected}
    if len(set(folders.values())) < len(folders):
        raise ConfigError(f"--out {out}: two of the runs have folders of one name; rescore them one by one")
    paths = {run_dir: (folder / f"{name}.csv", folder / f"{name}.summary.csv") for run_dir, folder in folders.items()}
    for path in (path for pair in paths.values() for path in pair):
        prepare_output(path)
    rows = cache(partial(rows_by_hash, data_dir=data))
    judge = partial(judge_extractions, workers=workers, sandbox=sandbox)
    results: list[RescoredTask] = []
    num_differing = 0
    for run_dir, names in selected.items():
        rescored, left_out = _rescore_run(run_dir, answer_filter, names, rows, judge)
        texts_path, summary_path = paths[run_dir]
        write_output(texts_path, _csv([line for task in rescored for line in task.text_lines()]))
        write_output(summary_path, _csv([task.summary_line(answer_filter.name) for task in rescored]))
        run_id = rescored[0].run.run_id
        for why in dict.fromkeys(left_out.values()):
            echo(f"{run_id}: left out, as {why}: {', '.join(task for task, of in left_out.items() if of == why)}")
        if answer_filter.name == OURS:
            num_differing += _report_differences(rescored, echo)
        results += rescored
    console.print(_table(answer_filter.name, results).rich())
    for task in results:
        if task.notes:
            echo(f"{task.run.run_id} {task.task}: {'; '.join(task.notes)}")
    for path, _ in paths.values():
        echo(f"one line a text: {path}")
    return num_differing


def _select_tasks(run_dirs: Sequence[Path], names: Sequence[str]) -> dict[Path, set[str]]:
    """The tasks of each run that a user means by names of tasks and benchmarks; no name means all."""
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
    run_dir: Path,
    answer_filter: AnswerFilter,
    names: set[str],
    rows: Callable[[str, bool], Mapping[str, Row]],
    judge: Callable[..., list[Verdict]],
) -> tuple[list[RescoredTask], dict[str, str]]:
    """The tasks of a run by name, and why the filter says nothing about the others."""
    groups: dict[tuple[str, str, str], list[RecordedText]] = {}
    with RunReader.open(run_dir) as reader:
        run = reader.run
        recorded = {score.key: score for score in reader.scores() if score.metric == PASSED}
        reads_canvas = answer_filter.reads == "canvas"
        detokenizer = recorded_system(run).detokenizer if reads_canvas else None
        for sample in reader.samples(traces=reads_canvas):
            key = sample.key
            if key.task in names:
                text = sample.text if detokenizer is None else canvas_text(sample, detokenizer)
                group = groups.setdefault((key.task, key.task_version, key.settings_hash), [])
                group.append((sample, None if sample.error is not None else text))
    rescored: list[RescoredTask] = []
    left_out: dict[str, str] = {}
    totals = Counter(key[0] for key, texts in groups.items() for _ in texts)
    with ProgressDisplay(f"{answer_filter.name} {run_dir.name}", dict(totals)) as progress:
        for (name, _, settings), texts in sorted(groups.items()):
            usable = [(sample, text) for sample, text in texts if text is not None]
            benchmark = texts[0][0].benchmark
            if refusal := _refusal(answer_filter, benchmark, texts, usable):
                left_out[name] = refusal
                continue
            documents = rows(benchmark, is_mini(name))
            found = [(sample, text) for sample, text in usable if sample.key.doc_hash in documents]
            if not found:
                left_out[name] = f"none of its documents is among the rows of {benchmark} here"
                continue
            task = Task(BENCHMARKS[benchmark], is_mini(name))
            items = [(documents[sample.key.doc_hash], text) for sample, text in found]
            on_verdict = partial(_count, progress, name)
            rule, asked = answer_filter.rules[benchmark], [row for row, _ in items]
            verdicts = judge(task.benchmark, asked, rule.find(items), on_verdict=on_verdict, is_right=rule.is_right)
            if task.sealed:
                verdicts = [_redacted(row, verdict) for row, verdict in zip(asked, verdicts, strict=True)]
            judged = [
                Rescored(sample, verdict, recorded.get(sample.key))
                for (sample, _), verdict in zip(found, verdicts, strict=True)
            ]
            rescored.append(RescoredTask(run, name, settings, judged, _notes(texts, usable, judged)))
    if not rescored:
        why = "; ".join(f"{task}: {reason}" for task, reason in left_out.items()) or "no text is recorded yet"
        raise DataError(f"{run_dir}: filter {answer_filter.name} has nothing to score: {why}")
    return rescored, left_out


def _count(progress: ProgressDisplay, task: str, _index: int, _verdict: Verdict) -> None:
    progress.scored(task)


def rows_by_hash(benchmark: str, mini: bool, data_dir: str | Path | None) -> dict[str, Row]:
    """Rows of a benchmark by the hash that records hold of their document. Raises DataError if they are not found."""
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
    return "" if usable else "its records hold no tokens, which this filter reads"


def _notes(texts: Sequence[RecordedText], usable: Sequence[RecordedText], judged: Sequence[Rescored]) -> list[str]:
    num_failed = sum(sample.error is not None for sample, _ in texts)
    counts = {
        "failed and have no text": num_failed,
        "hold no tokens, which this filter reads": len(texts) - num_failed - len(usable),
        "are about documents that are not among the rows here": len(usable) - len(judged),
        "have no recorded verdict": sum(text.recorded is None for text in judged),
        "could not be judged; see `refusion-eval doctor`": sum(text.correct is None for text in judged),
    }
    notes = [f"{number} of {len(texts)} samples {what}" for what, number in counts.items() if number]
    return [*notes, UNISOLATED] if any(text.verdict.tier == NO_ISOLATION for text in judged) else notes


def _redacted(row: Row, verdict: Verdict) -> Verdict:
    """Withholds the part of a sealed question that a filter may have put into its answer."""
    if verdict.extracted is None:
        return verdict
    return verdict._replace(extracted=redact(verdict.extracted, texts_of(row, "")))


def _table(filter_name: str, results: Sequence[RescoredTask]) -> Table:
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
            "In brackets: 95% bootstrap interval by item.",
            MINI_CAPTION if any(is_mini(task.task) for task in results) else "",
        ],
    )


def _report_differences(tasks: Sequence[RescoredTask], echo: Callable[[str], None]) -> int:
    differing = [
        (task.run.run_id, sample, now, then)
        for task in tasks
        for sample, now, then in task.texts
        if then is not None and now[:2] != (then.extracted, then.verdict)
    ]
    for run_id, sample, now, then in differing[:_MOST_SHOWN]:
        echo(
            f"{run_id}: {sample.key.task} item {sample.item_id} sample {sample.key.sample}: now "
            f"{now.verdict} ({now.reason}), recorded {then.verdict} ({then.reason}) by {then.scorer}"
        )
    return len(differing)


def _csv(lines: Sequence[Mapping[str, Any]]) -> str:
    """Lines as CSV; the first one names the columns. Verdicts are 1 and 0, to be summed."""
    numbers = ([int(value) if isinstance(value, bool) else value for value in line.values()] for line in lines)
    return csv_text(list(lines[0]), numbers) if lines else ""
