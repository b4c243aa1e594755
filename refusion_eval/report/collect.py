"""Run directories -> content of the page: figures by task, lists of samples, and chunks of everything else."""

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from refusion_eval.benchmarks import is_mini, is_sealed
from refusion_eval.report.assemble import ChunkWriter
from refusion_eval.report.frames import LOOKS
from refusion_eval.report.marks import Mark, marks, warnings
from refusion_eval.report.questions import Questions, Sources
from refusion_eval.report.replay import Speller
from refusion_eval.report.sample import body, list_row, rounded
from refusion_eval.results.facts import RunFacts, TaskFacts, read_facts
from refusion_eval.results.measured import measurements_of, setting_text
from refusion_eval.results.measurement import MEAN_TASK, METRIC_ORDER, SPEED_METRICS, Measurement
from refusion_eval.store.records import Sample, ScoreRow
from refusion_eval.store.run_reader import Run
from refusion_eval.types import Trace

_GREY = "#7f7f7f"
_DIGITS = re.compile(r"(\d+)")

Identity = tuple[str, str, str]  # of a task in a run: its name, version and hash of settings


@dataclass(frozen=True, slots=True)
class ReportData:
    """Content of a page: the JSON value that it reads when it opens, and the parts that it reads later, by name."""

    index: dict[str, Any]
    chunks: Mapping[str, str]


@dataclass(slots=True)
class _Part:
    """The parts of a run that the page has besides its facts; `created` holds the times of its samples."""

    speller: Speller
    machines: Mapping[str, str]
    rows: dict[Identity, list[dict[str, Any]]] = field(default_factory=dict)
    created: set[str] = field(default_factory=set)
    seconds: float = 0.0


def collect(
    run_dirs: Sequence[str | os.PathLike[str]],
    sources: Sources,
    *,
    baseline: str | None = None,
    colours: Mapping[str, str] | None = None,
) -> ReportData:
    """Reads runs, finished or not. Raises StoreError for a directory without a readable run, or two of one name."""
    collector = _Collector(sources)
    facts = [read_facts(run_dir, collector.take) for run_dir in run_dirs]
    measurements = measurements_of(facts, baseline=baseline)
    runs, cells = [], []
    for number, each in enumerate(facts):
        own = [measurement for measurement in measurements if measurement.run_id == each.run.run_id]
        cells += [{**cell, "run": number} for cell in collector.cells(each, own)]
        runs.append(collector.about(each.run) | {"colour": (colours or {}).get(each.run.manifest.decoder, _GREY)})
    metrics = {name for cell in cells for name in cell["metrics"]}
    ordered = [name for name in METRIC_ORDER if name in metrics]
    chunks, questions = collector.chunks()
    index = {
        "runs": runs,
        "cells": cells,
        "questions": questions,
        "metrics": [*ordered, *sorted(metrics - set(ordered))],
        "speed": list(SPEED_METRICS),
        "states": {state: look.name for state, look in LOOKS.items()},
        "warnings": warnings(cells, runs),
    }
    return ReportData(index, chunks)


class _Collector:
    """Takes the samples of one run after the other into shared chunks."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
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
        if identity not in part.rows:
            self._writer.flush()  # no chunk holds two tasks: readers mostly go on to another sample of the same one
        sealed = is_sealed(sample.key.task, sample.benchmark)
        whole = {**body(sample, scores, sealed, part.speller, trace), "machine": part.machines[sample.process_id]}
        asked, question = self._questions.add(run, sample, sealed)
        places = {"bodies": self._writer.add(whole), "asked": asked, "question": question}
        part.rows.setdefault(identity, []).append(list_row(sample, scores, sealed) | places)

    def cells(self, facts: RunFacts, measurements: Sequence[Measurement]) -> Iterator[dict[str, Any]]:
        """The tasks of a run whose samples were all taken, and the means over them, as in the index of the page."""
        run, part = facts.run, self._part(facts.run)
        by_task: dict[tuple, dict[str, Any]] = defaultdict(dict)
        for one in measurements:
            by_task[one.task, one.task_version, *sorted(one.settings.items())][one.metric] = _encoded(one)
        marks_by_task: dict[str, list[Mark]] = {}
        for task in facts.tasks:
            num_items = self._sources.num_items(run, task.task, task.benchmark)
            marks_by_task.setdefault(task.task, []).extend(task_marks := marks(task, num_items))
            rows = sorted(part.rows[task.identity], key=lambda row: (_natural(row["item_id"]), row["number"]))
            self._writer.flush()
            chunk, _ = self._writer.add({name: [row[name] for row in rows] for name in rows[0]})
            self._writer.flush()
            settings = {name: setting_text(value) for name, value in task.settings.items()}
            yield _cell(
                task=task.task,
                version=task.task_version,
                benchmark=task.benchmark,
                mini=task.mini,
                sealed=is_sealed(task.task, task.benchmark),
                settings=settings,
                hardware=sorted(task.hardware),
                items=len(task.asked),
                samples=len(rows),
                marks=[(mark.label, mark.sentence) for mark in task_marks],
                metrics=by_task[task.task, task.task_version, *sorted(settings.items())],
                list=chunk,
            )
        yield from _empty(run, facts.tasks)
        yield from _means(measurements, marks_by_task)

    def about(self, run: Run) -> dict[str, Any]:
        """The description of a run whose samples were all taken."""
        manifest, part = run.manifest, self._part(run)
        names = ("system", "backbone", "decoder", "checkpoint", "dtype", "device", "attention", "seed", "warmup")
        return {
            "id": run.run_id,
            **{name: getattr(manifest, name) for name in names},
            "revision": manifest.checkpoint_revision or manifest.checkpoint_hash,
            "package": manifest.package_version,
            "commit": manifest.git_commit,
            "command": " ".join(manifest.command),
            "hardware": sorted(set(part.machines.values())),
            "versions": dict(manifest.versions),
            "began": min(part.created, default=""),
            "ended": max(part.created, default=""),
            "seconds": rounded(part.seconds),
        }

    def _part(self, run: Run) -> _Part:
        if run.run_id not in self._parts:
            machines = {process_id: run.hardware(process_id).label() for process_id in run.processes}
            self._parts[run.run_id] = _Part(Speller(self._sources.spell(run)), machines)
        return self._parts[run.run_id]


def _natural(item_id: str) -> list[str | int]:
    """The parts of a name as they sort: text, number, text, ..."""
    parts = _DIGITS.split(item_id)
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]


def _encoded(measurement: Measurement) -> dict[str, Any]:
    """A measurement and its interval; NaN is null."""
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


def _empty(run: Run, begun: Sequence[TaskFacts]) -> Iterator[dict[str, Any]]:
    """Tasks that the run was asked for and has no sample of."""
    mark = ("no samples", "The run was stopped before this task began, or has not come to it yet.")
    for task, version in sorted(run.manifest.tasks.items()):
        if task not in {facts.task for facts in begun}:
            yield _cell(task=task, version=str(version), mini=is_mini(task), marks=[mark])


def _means(
    measurements: Sequence[Measurement], marks_by_task: Mapping[str, Sequence[Mark]]
) -> Iterator[dict[str, Any]]:
    """Means over tasks, without samples but with the marks of the tasks that they are over."""
    for mini in (False, True):
        own = [measurement for measurement in measurements if measurement.is_mean and measurement.mini == mini]
        if not own:
            continue
        sentences: dict[str, list[str]] = {}
        for task, task_marks in marks_by_task.items():
            for mark in task_marks if is_mini(task) == mini else ():
                sentences.setdefault(mark.kind, []).append(f"{task}: {mark.sentence}")
        yield _cell(
            task=MEAN_TASK,
            mini=mini,
            mean=True,
            metrics={measurement.metric: _encoded(measurement) for measurement in own},
            items=own[0].n,
            samples=own[0].samples,
            marks=[(kind, " ".join(each)) for kind, each in sentences.items()],
        )
