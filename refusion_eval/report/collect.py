"""Run directories -> content of the page: figures by task, lists of samples, and chunks of everything else."""

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from refusion_eval.benchmarks import is_mini, is_sealed
from refusion_eval.report.assemble import ChunkWriter
from refusion_eval.report.marks import Mark, limit_of, marks, warnings
from refusion_eval.report.questions import Questions, Sources
from refusion_eval.report.replay import Speller
from refusion_eval.report.sample import body, list_row, rounded
from refusion_eval.results.measured import run_measurements, setting_text
from refusion_eval.results.measurement import MEAN_TASK, METRIC_ORDER, SPEED_METRICS, Measurement
from refusion_eval.store.records import NO_ISOLATION, PASSED, Sample, ScoreRow
from refusion_eval.store.run_reader import Run, RunReader
from refusion_eval.types import Trace

_GREY = "#7f7f7f"
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class ReportData:
    """Content of a page: the JSON value that it reads when it opens, and the parts that it reads later, by name."""

    index: dict[str, Any]
    chunks: Mapping[str, str]


@dataclass(slots=True)
class _Task:
    """One task of one run under one set of settings, while its samples are read.

    `items` holds the hashes of the items that were asked, `num_items` counts those of the whole benchmark.
    """

    task: str
    version: str
    benchmark: str
    settings: dict[str, str]
    num_items: int | None
    num_errors: int = 0
    num_unscored: int = 0
    items: set[str] = field(default_factory=set)
    hardware: set[str] = field(default_factory=set)
    unisolated: bool = False
    batched: bool = False
    marks: Sequence[Mark] = ()
    rows: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class _Part:
    """One run, while its samples are read: its tasks, the times at which samples were recorded, and all seconds.

    `machines` holds the label of the machine of each process.
    """

    speller: Speller
    machines: Mapping[str, str]
    tasks: dict[tuple[str, str, str], _Task] = field(default_factory=dict)
    created: set[str] = field(default_factory=set)
    seconds: float = 0.0


def collect(
    run_dirs: Sequence[str | os.PathLike[str]],
    sources: Sources,
    *,
    baseline: str | None = None,
    colours: Mapping[str, str] | None = None,
) -> ReportData:
    """Reads runs, finished or not.

    Raises:
        StoreError: a directory holds no readable run, or two have the same name.
    """
    collector = _Collector(sources, colours or {})
    measurements = run_measurements(run_dirs, baseline=baseline, visit=collector.take)
    runs = [collector.finish(_run_of(run_dir), measurements) for run_dir in run_dirs]
    cells = [{**cell, "run": number} for number, (_, tasks) in enumerate(runs) for cell in tasks]
    metrics = {name for cell in cells for name in cell["metrics"]}
    ordered = [name for name in METRIC_ORDER if name in metrics]
    chunks, questions = collector.chunks()
    index = {
        "runs": [run for run, _ in runs],
        "cells": cells,
        "questions": questions,
        "metrics": [*ordered, *sorted(metrics - set(ordered))],
        "speed": list(SPEED_METRICS),
        "warnings": warnings(cells, [run for run, _ in runs]),
    }
    return ReportData(index, chunks)


def _run_of(run_dir: str | os.PathLike[str]) -> Run:
    with RunReader.open(run_dir) as reader:
        return reader.run


class _Collector:
    """Takes the samples of one run after the other into shared chunks."""

    def __init__(self, sources: Sources, colours: Mapping[str, str]) -> None:
        self._sources, self._colours = sources, colours
        self._writer, self._questions = ChunkWriter("c"), Questions(sources)
        self._parts: dict[str, _Part] = {}

    def chunks(self) -> tuple[dict[str, str], dict[str, str]]:
        """All chunks, once every run has been finished, and the name of the chunk with the questions of each task."""
        self._writer.flush()
        questions, names = self._questions.finish()
        return self._writer.chunks | questions, names

    def take(self, run: Run, sample: Sample, scores: Mapping[str, ScoreRow], trace: Trace | None) -> None:
        """Takes a sample."""
        part = self._part(run)
        part.created.add(sample.created)
        part.seconds += sample.seconds
        identity = (sample.key.task, sample.key.task_version, sample.key.settings_hash)
        if identity not in part.tasks:
            part.tasks[identity] = self._begin(run, sample)
        task = part.tasks[identity]
        failed = sample.error is not None
        machine = part.machines[sample.process_id]
        task.num_errors += failed
        task.num_unscored += not failed and PASSED not in scores
        task.items.add(sample.key.doc_hash)
        task.hardware.add(machine)
        task.unisolated |= any(score.tier == NO_ISOLATION for score in scores.values())
        task.batched |= sample.batch_size > 1
        sealed = is_sealed(task.task, task.benchmark)
        whole = {**body(sample, scores, sealed, part.speller, trace), "machine": machine}
        asked, question = self._questions.add(run, sample, sealed)
        places = {"bodies": self._writer.add(whole), "asked": asked, "question": question}
        task.rows.append(list_row(sample, scores, sealed) | places)

    def finish(self, run: Run, measurements: Sequence[Measurement]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The description of a run whose samples were all taken, and its tasks as the index of the page holds them."""
        part = self._part(run)
        of_run = [measurement for measurement in measurements if measurement.run_id == run.run_id]
        ordered = [part.tasks[identity] for identity in sorted(part.tasks)]
        for task in ordered:
            task.marks = marks(
                num_asked=len(task.items),
                num_items=task.num_items,
                limit=limit_of(run.manifest.command),
                num_unscored=task.num_unscored,
                num_errors=task.num_errors,
                hardware=task.hardware,
                unisolated=task.unisolated,
                batched=task.batched,
            )
        done = [self._finish(task, metrics) for task, metrics in _with_measurements(ordered, of_run)]
        about = _about(run, part) | {"colour": self._colours.get(run.manifest.decoder, _GREY)}
        return about, [*done, *_empty(run, ordered), *_means(of_run, ordered)]

    def _part(self, run: Run) -> _Part:
        if run.run_id not in self._parts:
            machines = {process_id: run.hardware(process_id).label() for process_id in run.processes}
            self._parts[run.run_id] = _Part(Speller(self._sources.spell(run)), machines)
        return self._parts[run.run_id]

    def _begin(self, run: Run, sample: Sample) -> _Task:
        self._writer.flush()  # no chunk holds two tasks, because readers mostly go on to another sample of the same one
        name, benchmark = sample.key.task, sample.benchmark
        settings = {name: setting_text(value) for name, value in sample.settings.items()}
        num_items = self._sources.num_items(run, name, benchmark)
        return _Task(name, sample.key.task_version, benchmark, settings, num_items)

    def _finish(self, task: _Task, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """A task as the index of the page holds it; its list, item 2 before item 10, is a chunk of its own."""
        self._writer.flush()
        task.rows.sort(key=lambda row: (_natural(row["item_id"]), row["number"]))
        chunk, _ = self._writer.add({name: [row[name] for row in task.rows] for name in task.rows[0]})
        self._writer.flush()
        return _cell(
            task=task.task,
            version=task.version,
            benchmark=task.benchmark,
            mini=is_mini(task.task),
            sealed=is_sealed(task.task, task.benchmark),
            settings=task.settings,
            hardware=sorted(task.hardware),
            items=len(task.items),
            samples=len(task.rows),
            marks=[(mark.label, mark.sentence) for mark in task.marks],
            metrics=metrics,
            list=chunk,
        )


def _natural(item_id: str) -> list[str | int]:
    """The parts of a name as they sort: text, number, text, ..."""
    parts = _DIGITS.split(item_id)
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]


def _with_measurements(
    tasks: Sequence[_Task], measurements: Sequence[Measurement]
) -> Iterator[tuple[_Task, dict[str, Any]]]:
    """Each task with its figures. Two versions of a task under equal settings have theirs in order of version."""
    by_task: dict[tuple, dict[str, list[Measurement]]] = defaultdict(lambda: defaultdict(list))
    for measurement in measurements:
        by_task[measurement.task, *sorted(measurement.settings.items())][measurement.metric].append(measurement)
    seen: dict[tuple, int] = defaultdict(int)
    for task in tasks:
        key = (task.task, *sorted(task.settings.items()))
        number, seen[key] = seen[key], seen[key] + 1
        versions = by_task[key].items()
        yield task, {metric: _encoded(own[number]) for metric, own in versions if number < len(own)}


def _encoded(measurement: Measurement) -> dict[str, Any]:
    """A figure and its interval; NaN is null."""
    return {
        "value": rounded(measurement.value),
        "low": rounded(measurement.ci_low),
        "high": rounded(measurement.ci_high),
        "unit": measurement.unit,
        "n": measurement.n,
        "note": measurement.note,
    }


def _cell(**known: Any) -> dict[str, Any]:
    """A task of a run, or a mean over its tasks, as the index of the page holds it."""
    empty = {
        "task": "",
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
    return empty | known


def _empty(run: Run, done: Sequence[_Task]) -> list[dict[str, Any]]:
    """Tasks that the run was asked for and has no sample of."""
    mark = ("no samples", "The run was stopped before this task began, or has not come to it yet.")
    begun = {task.task for task in done}
    return [
        _cell(task=task, version=str(version), mini=is_mini(task), marks=[mark])
        for task, version in sorted(run.manifest.tasks.items())
        if task not in begun
    ]


def _means(measurements: Sequence[Measurement], tasks: Sequence[_Task]) -> Iterator[dict[str, Any]]:
    """Means over tasks, without samples but with the marks of the tasks that they are over."""
    for mini in (False, True):
        own = [measurement for measurement in measurements if measurement.is_mean and measurement.mini == mini]
        if not own:
            continue
        sentences: dict[str, list[str]] = {}
        for task in tasks:
            for mark in task.marks if is_mini(task.task) == mini else ():
                sentences.setdefault(mark.kind, []).append(f"{task.task}: {mark.sentence}")
        yield _cell(
            task=MEAN_TASK,
            mini=mini,
            mean=True,
            metrics={measurement.metric: _encoded(measurement) for measurement in own},
            items=own[0].n,
            samples=own[0].samples,
            marks=[(kind, " ".join(each)) for kind, each in sentences.items()],
        )


def _about(run: Run, part: _Part) -> dict[str, Any]:
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
        "began": min(part.created, default=""),
        "ended": max(part.created, default=""),
        "seconds": rounded(part.seconds),
    }
