"""Run directories -> what the page holds: figures by task, lists of samples, and chunks of everything else."""

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from refusion_eval.benchmarks import is_mini, is_sealed
from refusion_eval.report.bodies import ListRow, body, list_row
from refusion_eval.report.chunks import ChunkWriter, Place
from refusion_eval.report.marks import TaskState, marks_of
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
    """What a page is made from.

    Attributes:
        index: what the page reads when it opens, as JSON types.
        chunks: what it reads later, by name.
    """

    index: dict[str, Any]
    chunks: Mapping[str, str]


@dataclass(slots=True)
class _Cell:
    """One task of one run under one set of settings, while its samples are read."""

    state: TaskState
    settings: Mapping[str, str]
    rows: list[ListRow] = field(default_factory=list)
    bodies: list[Place] = field(default_factory=list)
    asked: list[Place] = field(default_factory=list)


def collect(run_dirs: Sequence[str | os.PathLike[str]], sources: Sources, *, baseline: str | None = None) -> ReportData:
    """Reads runs, finished or not.

    Args:
        run_dirs: run directories.
        sources: finds questions, answers and tokenizers.
        baseline: run id that speed-ups are relative to, as for `run_figures`.

    Raises:
        StoreError: a directory holds no readable run, or two have the same name.
    """
    figures = run_figures(run_dirs, baseline=baseline)  # first: it refuses what cannot be read
    collector = _Collector(sources)
    runs = [collector.read(Path(run_dir), figures) for run_dir in run_dirs]
    cells = [cell for _, of_run in runs for cell in of_run]
    metrics = {name for cell in cells for name in cell["metrics"]}
    known = [name for name in METRIC_ORDER if name in metrics]
    index = {
        "runs": [run for run, _ in runs],
        "cells": [{**cell, "run": number} for number, (_, of_run) in enumerate(runs) for cell in of_run],
        "metrics": [*known, *sorted(metrics - set(known))],
        "warnings": _warnings(cells, [run for run, _ in runs]),
    }
    return ReportData(index, collector.chunks())


class _Collector:
    """Reads one run after the other into shared chunks; a question that several runs asked stands once."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.writer = ChunkWriter("c")
        self._questions = ChunkWriter("q")
        self._asked: dict[tuple[str, str, str], Place] = {}

    def chunks(self) -> dict[str, str]:
        """All chunks, when everything has been read."""
        for writer in (self.writer, self._questions):
            writer.flush()
        return self.writer.chunks | self._questions.chunks

    def read(self, directory: Path, figures: Sequence[Figure]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What a run is, and its tasks."""
        with RunReader.open(directory) as reader:
            run = reader.run
            scores = reader.scores_by_sample()
            cells: dict[Identity, _Cell] = {}
            speller = Speller(self.sources.spell(run))
            for sample in reader.samples():
                identity = (sample.key.task, sample.key.task_version, sample.key.settings_hash)
                if identity not in cells:
                    cells[identity] = self._begin(run, sample)
                self._take(cells[identity], run, sample, scores.get(sample.key, {}), speller)
        mine = [row for row in figures if row.run_id == run.run_id]
        ordered = [cells[identity] for identity in sorted(cells)]
        done = [self._finish(cell, run, metrics) for cell, metrics in _with_figures(ordered, mine)]
        return _about(run), [*done, *_empty(run, cells), *_means(mine, done)]

    def _begin(self, run: Run, sample: Sample) -> _Cell:
        self.writer.flush()  # no chunk holds two tasks: what is opened next is most often of the same task
        state = TaskState(sample.key.task, sample.key.task_version, sample.benchmark)
        state.num_items = self.sources.num_items(run, state.task, state.benchmark)
        return _Cell(state, {name: setting_text(value) for name, value in sample.settings.items()})

    def _take(self, cell: _Cell, run: Run, sample: Sample, scores: Scores, speller: Speller) -> None:
        state = cell.state
        failed = sample.error is not None
        state.num_samples += 1
        state.num_errors += failed
        state.num_unscored += not failed and PASSED not in scores
        state.items.add(sample.key.doc_hash)
        state.hardware.add(run.hardware(sample.process_id).label())
        state.unisolated |= any(score.tier == NO_ISOLATION for score in scores.values())
        state.batched |= sample.batch_size > 1
        sealed = is_sealed(state.task, state.benchmark)
        cell.rows.append(list_row(sample, scores, sealed))
        cell.asked.append(self._question(run, sample, sealed))
        machine = run.hardware(sample.process_id).label()
        cell.bodies.append(self.writer.add({**body(sample, scores, sealed, speller), "machine": machine}))

    def _question(self, run: Run, sample: Sample, sealed: bool) -> Place:
        key = sample.key
        identity = (key.task, key.doc_hash, key.prompt_hash)
        if identity not in self._asked:
            asked = self.sources.asked(run, sample)
            if sealed:
                asked = Asked(None, asked.gold, "")
            self._asked[identity] = self._questions.add(asdict(asked))
        return self._asked[identity]

    def _finish(self, cell: _Cell, run: Run, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """A task as the page's index holds it; its list is a chunk of its own."""
        state = cell.state
        self.writer.flush()
        columns = {
            **{name: [getattr(row, name) for row in cell.rows] for name in ListRow._fields},
            "bodies": cell.bodies,
            "asked": cell.asked,
        }
        place = self.writer.add(columns)
        self.writer.flush()
        return {
            "task": state.task,
            "version": state.version,
            "benchmark": state.benchmark,
            "mini": is_mini(state.task),
            "sealed": is_sealed(state.task, state.benchmark),
            "mean": False,
            "settings": dict(cell.settings),
            "hardware": sorted(state.hardware),
            "items": len(state.items),
            "samples": state.num_samples,
            "marks": marks_of(state, run),
            "metrics": metrics,
            "list": place.chunk,
        }


def _with_figures(cells: Sequence[_Cell], rows: Sequence[Figure]) -> Iterator[tuple[_Cell, dict[str, Any]]]:
    """Each task with its figures. Two versions of a task under equal settings have theirs in order of version."""
    by_name: dict[tuple[str, tuple, str], list[Figure]] = defaultdict(list)
    for row in rows:
        by_name[row.task, _sorted(row.settings), row.metric].append(row)
    seen: dict[tuple[str, tuple], int] = defaultdict(int)
    for cell in cells:
        key = (cell.state.task, _sorted(cell.settings))
        number, seen[key] = seen[key], seen[key] + 1
        found = {name[2]: rows[number] for name, rows in by_name.items() if name[:2] == key and number < len(rows)}
        yield cell, {name: _figure(row) for name, row in found.items()}


def _sorted(settings: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(settings.items()))


def _figure(row: Figure) -> dict[str, Any]:
    """A figure and its interval; what is no number is null."""
    numbers = {"value": row.value, "low": row.ci_low, "high": row.ci_high}
    return {
        **{name: None if math.isnan(value) else float(f"{value:.6g}") for name, value in numbers.items()},
        "unit": row.unit,
        "n": row.n,
        "note": row.note,
    }


def _means(rows: Sequence[Figure], tasks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means over tasks, as cells without samples but with the marks of their tasks."""
    means = []
    for mini in (False, True):
        mine = [row for row in rows if row.task == MEAN_TASK and row.mini == mini]
        if mine:
            means.append({**_NO_SAMPLES, "task": MEAN_TASK, "mini": mini, "mean": True} | _mean_facts(mine, tasks))
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


def _mean_facts(rows: Sequence[Figure], tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    mini = [("mini", "A mean of this project's synthetic look-alikes, not of the real benchmarks.")]
    said: dict[str, list[str]] = defaultdict(list)
    for task in tasks:
        for mark, sentence in task["marks"] if task["mini"] == rows[0].mini else ():
            kind = " ".join(word for word in mark.split() if word.isalpha())  # without counts, which differ by task
            if kind != "mini":
                said[kind].append(f"{task['task']}: {sentence}")
    return {
        "metrics": {row.metric: _figure(row) for row in rows},
        "items": rows[0].n,
        "samples": rows[0].samples,
        "marks": (mini if rows[0].mini else []) + [(kind, " ".join(whys)) for kind, whys in said.items()],
    }


def _empty(run: Run, cells: Mapping[Identity, _Cell]) -> list[dict[str, Any]]:
    """Tasks that the run was to do and has nothing of."""
    done = {task for task, _, _ in cells}
    mark = ("no samples", "The run was stopped before this task began, or has not come to it yet.")
    return [
        {**_NO_SAMPLES, "task": task, "version": str(version), "mini": is_mini(task), "marks": [mark]}
        for task, version in sorted(run.manifest.tasks.items())
        if task not in done
    ]


def _about(run: Run) -> dict[str, Any]:
    """What the page says of a run."""
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
    """What must be said of the table as a whole: columns whose figures are not of the same kind."""
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
    for task, found in sorted(versions.items()):
        if len(found) > 1:
            warnings.append(
                f"{task} is here in versions {', '.join(sorted(found))}, whose figures must not be compared."
            )
    if any(cell["mini"] for cell in cells):
        warnings.append("mini: synthetic look-alikes of this project, not the real benchmarks.")
    return warnings
