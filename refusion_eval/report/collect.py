"""Run directories -> content of the page: figures by task, lists of samples, and chunks of everything else."""

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from refusion_eval.benchmarks import is_mini, is_sealed
from refusion_eval.report.bodies import ListRow, body, list_row
from refusion_eval.report.chunks import ChunkEntry, ChunkWriter
from refusion_eval.report.marks import Mark, TaskState, marks_of
from refusion_eval.report.pieces import Speller
from refusion_eval.report.sources import Asked, Sources
from refusion_eval.results.figure import MEAN_TASK, METRIC_ORDER, Figure
from refusion_eval.results.measured import run_figures, setting_text
from refusion_eval.store.records import NO_ISOLATION, PASSED, Sample, ScoreRow
from refusion_eval.store.run_reader import Run, RunReader

Identity = tuple[str, str, str]  # task, its version, hash of the settings
Scores = Mapping[str, ScoreRow]


@dataclass(slots=True)
class ReportData:
    """Content of a page.

    Attributes:
        index: JSON value that the page reads when it opens.
        chunks: parts that it reads later, by name.
    """

    index: dict[str, Any]
    chunks: Mapping[str, str]


@dataclass(slots=True)
class _Task:
    """One task of one run under one set of settings, while its samples are read."""

    state: TaskState
    settings: Mapping[str, str]
    marks: Sequence[Mark] = ()
    rows: list[ListRow] = field(default_factory=list)
    bodies: list[ChunkEntry] = field(default_factory=list)
    asked: list[ChunkEntry] = field(default_factory=list)


def collect(run_dirs: Sequence[str | os.PathLike[str]], sources: Sources, *, baseline: str | None = None) -> ReportData:
    """Reads runs, finished or not.

    Args:
        run_dirs: run directories.
        sources: finds questions, right answers and tokenizers.
        baseline: run id that speed-ups are relative to, as for `run_figures`.

    Raises:
        StoreError: a directory holds no readable run, or two have the same name.
    """
    figures = run_figures(run_dirs, baseline=baseline)  # first, because this refuses runs that cannot be read
    collector = _Collector(sources)
    runs = [collector.read(Path(run_dir), figures) for run_dir in run_dirs]
    cells = [cell for _, tasks in runs for cell in tasks]
    metrics = {name for cell in cells for name in cell["metrics"]}
    ordered = [name for name in METRIC_ORDER if name in metrics]
    index = {
        "runs": [run for run, _ in runs],
        "cells": [{**cell, "run": number} for number, (_, tasks) in enumerate(runs) for cell in tasks],
        "metrics": [*ordered, *sorted(metrics - set(ordered))],
        "warnings": _warnings(cells, [run for run, _ in runs]),
    }
    return ReportData(index, collector.chunks())


class _Collector:
    """Reads one run after the other into shared chunks. A question that several runs asked is stored once."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.writer = ChunkWriter("c")
        self._questions = ChunkWriter("q")
        self._asked: dict[tuple[str, str, str], ChunkEntry] = {}

    def chunks(self) -> dict[str, str]:
        """All chunks, once everything has been read."""
        for writer in (self.writer, self._questions):
            writer.flush()
        return self.writer.chunks | self._questions.chunks

    def read(self, directory: Path, figures: Sequence[Figure]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The description of a run, and its tasks as the index of the page holds them."""
        with RunReader.open(directory) as reader:
            run = reader.run
            scores = reader.scores_by_sample()
            tasks: dict[Identity, _Task] = {}
            speller = Speller(self.sources.spell(run))
            for sample in reader.samples():
                identity = (sample.key.task, sample.key.task_version, sample.key.settings_hash)
                if identity not in tasks:
                    tasks[identity] = self._begin(run, sample)
                self._take(tasks[identity], run, sample, scores.get(sample.key, {}), speller)
        of_run = [figure for figure in figures if figure.run_id == run.run_id]
        ordered = [tasks[identity] for identity in sorted(tasks)]
        for task in ordered:
            task.marks = marks_of(task.state, run)
        done = [self._finish(task, metrics) for task, metrics in _with_figures(ordered, of_run)]
        return _about(run), [*done, *_empty(run, tasks), *_means(of_run, ordered)]

    def _begin(self, run: Run, sample: Sample) -> _Task:
        self.writer.flush()  # no chunk holds two tasks, because readers mostly go on to another sample of the same task
        state = TaskState(sample.key.task, sample.key.task_version, sample.benchmark)
        state.num_items = self.sources.num_items(run, state.task, state.benchmark)
        return _Task(state, {name: setting_text(value) for name, value in sample.settings.items()})

    def _take(self, task: _Task, run: Run, sample: Sample, scores: Scores, speller: Speller) -> None:
        state = task.state
        failed = sample.error is not None
        state.num_samples += 1
        state.num_errors += failed
        state.num_unscored += not failed and PASSED not in scores
        state.items.add(sample.key.doc_hash)
        state.hardware.add(run.hardware(sample.process_id).label())
        state.unisolated |= any(score.tier == NO_ISOLATION for score in scores.values())
        state.batched |= sample.batch_size > 1
        sealed = is_sealed(state.task, state.benchmark)
        task.rows.append(list_row(sample, scores, sealed))
        task.asked.append(self._question(run, sample, sealed))
        machine = run.hardware(sample.process_id).label()
        task.bodies.append(self.writer.add({**body(sample, scores, sealed, speller), "machine": machine}))

    def _question(self, run: Run, sample: Sample, sealed: bool) -> ChunkEntry:
        key = sample.key
        identity = (key.task, key.doc_hash, key.prompt_hash)
        if identity not in self._asked:
            asked = self.sources.asked(run, sample)
            if sealed:
                asked = Asked(None, asked.gold, "")
            self._asked[identity] = self._questions.add(asdict(asked))
        return self._asked[identity]

    def _finish(self, task: _Task, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """A task as the index of the page holds it; its list of samples is a chunk of its own."""
        state = task.state
        self.writer.flush()
        columns = {
            **{name: [getattr(row, name) for row in task.rows] for name in ListRow._fields},
            "bodies": task.bodies,
            "asked": task.asked,
        }
        entry = self.writer.add(columns)
        self.writer.flush()
        return {
            "task": state.task,
            "version": state.version,
            "benchmark": state.benchmark,
            "mini": is_mini(state.task),
            "sealed": is_sealed(state.task, state.benchmark),
            "mean": False,
            "settings": dict(task.settings),
            "hardware": sorted(state.hardware),
            "items": len(state.items),
            "samples": state.num_samples,
            "marks": [(mark.label, mark.sentence) for mark in task.marks],
            "metrics": metrics,
            "list": entry.chunk,
        }


def _with_figures(tasks: Sequence[_Task], figures: Sequence[Figure]) -> Iterator[tuple[_Task, dict[str, Any]]]:
    """Each task with its figures. Two versions of a task under equal settings have theirs in order of version."""
    by_name: dict[tuple[str, tuple, str], list[Figure]] = defaultdict(list)
    for figure in figures:
        by_name[figure.task, _sorted(figure.settings), figure.metric].append(figure)
    seen: dict[tuple[str, tuple], int] = defaultdict(int)
    for task in tasks:
        key = (task.state.task, _sorted(task.settings))
        number, seen[key] = seen[key], seen[key] + 1
        own = {name[2]: versions for name, versions in by_name.items() if name[:2] == key and number < len(versions)}
        yield task, {metric: _encoded(versions[number]) for metric, versions in own.items()}


def _sorted(settings: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(settings.items()))


def _encoded(figure: Figure) -> dict[str, Any]:
    """A figure and its interval; NaN is null."""
    numbers = {"value": figure.value, "low": figure.ci_low, "high": figure.ci_high}
    return {
        **{name: None if math.isnan(value) else float(f"{value:.6g}") for name, value in numbers.items()},
        "unit": figure.unit,
        "n": figure.n,
        "note": figure.note,
    }


def _means(figures: Sequence[Figure], tasks: Sequence[_Task]) -> list[dict[str, Any]]:
    """Means over tasks, as tasks without samples but with the marks of the tasks that they are over."""
    means = []
    for mini in (False, True):
        own = [figure for figure in figures if figure.is_mean and figure.mini == mini]
        if own:
            averaged = [task for task in tasks if is_mini(task.state.task) == mini]
            means.append({**_NO_SAMPLES, "task": MEAN_TASK, "mini": mini, "mean": True} | _mean_facts(own, averaged))
    return means


_NO_SAMPLES: dict[str, Any] = {
    "version": "",
    "benchmark": "",
    "mini": False,
    "sealed": False,
    "mean": False,
    "settings": {},
    "hardware": [],
    "items": 0,
    "samples": 0,
    "marks": [],
    "metrics": {},
    "list": None,
}


def _mean_facts(figures: Sequence[Figure], tasks: Sequence[_Task]) -> dict[str, Any]:
    sentences: dict[str, list[str]] = {}
    if figures[0].mini:
        sentences["mini"] = ["A mean of this project's synthetic look-alikes, not of the real benchmarks."]
    for task in tasks:
        for mark in task.marks:
            if mark.kind != "mini":
                sentences.setdefault(mark.kind, []).append(f"{task.state.task}: {mark.sentence}")
    return {
        "metrics": {figure.metric: _encoded(figure) for figure in figures},
        "items": figures[0].n,
        "samples": figures[0].samples,
        "marks": [(kind, " ".join(each)) for kind, each in sentences.items()],
    }


def _empty(run: Run, tasks: Mapping[Identity, _Task]) -> list[dict[str, Any]]:
    """Tasks that the run was asked for and has no sample of."""
    done = {task for task, _, _ in tasks}
    mark = ("no samples", "The run was stopped before this task began, or has not come to it yet.")
    return [
        {**_NO_SAMPLES, "task": task, "version": str(version), "mini": is_mini(task), "marks": [mark]}
        for task, version in sorted(run.manifest.tasks.items())
        if task not in done
    ]


def _about(run: Run) -> dict[str, Any]:
    """What the page says about a run."""
    manifest = run.manifest
    names = ("system", "backbone", "decoder", "checkpoint", "dtype", "device", "attention", "seed", "warmup")
    return {
        "id": run.run_id,
        **{name: getattr(manifest, name) for name in names},
        "revision": manifest.checkpoint_revision or manifest.checkpoint_hash,
        "package": manifest.package_version,
        "commit": manifest.git_commit,
        "command": " ".join(manifest.command),
        "hardware": sorted({run.hardware(process).label() for process in run.processes}),
        "versions": dict(manifest.versions),
    }


def _warnings(cells: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What must be said about the table as a whole: columns whose figures are not of the same kind."""
    warnings = []
    machines = sorted({label for run in runs for label in run["hardware"]})
    if len(machines) > 1:
        warnings.append(
            f"Speed was measured on {len(machines)} machines and must not be compared across them: "
            f"{' | '.join(machines)}."
        )
    versions: dict[str, set[str]] = defaultdict(set)
    for cell in cells:
        if not cell["mean"]:
            versions[cell["task"]].add(cell["version"])
    for task, names in sorted(versions.items()):
        if len(names) > 1:
            warnings.append(
                f"{task} is here in versions {', '.join(sorted(names))}, whose figures must not be compared."
            )
    if any(cell["mini"] for cell in cells):
        warnings.append("mini: synthetic look-alikes of this project, not the real benchmarks.")
    return warnings
