"""Run directories -> content of the page: figures by task, lists of samples, and chunks of everything else."""

import itertools
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from refusion_eval.benchmarks import is_mini, is_sealed
from refusion_eval.report.assemble import ChunkWriter
from refusion_eval.report.replay import Spell, Speller
from refusion_eval.report.sample import body, list_row, rounded
from refusion_eval.results.figure import MEAN_TASK, METRIC_ORDER, Figure
from refusion_eval.results.measured import run_figures, setting_text
from refusion_eval.store.records import NO_ISOLATION, PASSED, Sample, ScoreRow
from refusion_eval.store.run_reader import Run, RunReader

_LIMIT_OPTIONS = ("--limit", "-L")


@dataclass(frozen=True, slots=True)
class Asked:
    """The question of a sample.

    Attributes:
        prompt: text of the prompt, None if it is not at hand.
        gold: the right answer, None if it is not at hand.
        note: what a reader of the prompt must know, or why there is no prompt.
    """

    prompt: str | None
    gold: str | None
    note: str = ""


class Sources(Protocol):
    """Finds what records do not hold: questions, right answers and tokenizers."""

    def asked(self, run: Run, sample: Sample) -> Asked:
        """The question of a sample. The prompt of a sealed task is never shown."""
        ...

    def num_items(self, run: Run, task: str, benchmark: str) -> int | None:
        """Number of items of the whole task, None if it is not known."""
        ...

    def spell(self, run: Run) -> Spell | None:
        """Gives the text of token ids of the run, None if its tokenizer is not at hand."""
        ...


@dataclass(frozen=True, slots=True)
class ReportData:
    """Content of a page: the JSON value that it reads when it opens, and the parts that it reads later, by name."""

    index: dict[str, Any]
    chunks: Mapping[str, str]


class Mark(NamedTuple):
    """What a reader must know about a task before its figures.

    Attributes:
        kind: what it says, without counts; equal for all tasks that it is true of.
        label: a word or two for the page, with counts.
        sentence: the explanation.
    """

    kind: str
    label: str
    sentence: str


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
    cells = [{**cell, "run": number} for number, (_, tasks) in enumerate(runs) for cell in tasks]
    metrics = {name for cell in cells for name in cell["metrics"]}
    ordered = [name for name in METRIC_ORDER if name in metrics]
    index = {
        "runs": [run for run, _ in runs],
        "cells": cells,
        "metrics": [*ordered, *sorted(metrics - set(ordered))],
        "warnings": _warnings(cells, [run for run, _ in runs]),
    }
    return ReportData(index, collector.chunks())


class _Collector:
    """Reads one run after the other into shared chunks. A question that several runs asked is stored once."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._writer, self._questions = ChunkWriter("c"), ChunkWriter("q")
        self._asked: dict[tuple[str, str, str], tuple[str, int]] = {}

    def chunks(self) -> dict[str, str]:
        """All chunks, once everything has been read."""
        self._writer.flush()
        self._questions.flush()
        return self._writer.chunks | self._questions.chunks

    def read(self, directory: Path, figures: Sequence[Figure]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The description of a run, and its tasks as the index of the page holds them."""
        with RunReader.open(directory) as reader:
            run = reader.run
            scores = reader.scores_by_sample()
            tasks: dict[tuple[str, str, str], _Task] = {}
            speller = Speller(self._sources.spell(run))
            for sample in reader.samples():
                identity = (sample.key.task, sample.key.task_version, sample.key.settings_hash)
                if identity not in tasks:
                    tasks[identity] = self._begin(run, sample)
                self._take(tasks[identity], run, sample, scores.get(sample.key, {}), speller)
        of_run = [figure for figure in figures if figure.run_id == run.run_id]
        ordered = [tasks[identity] for identity in sorted(tasks)]
        for task in ordered:
            task.marks = _marks(task, run)
        done = [self._finish(task, metrics) for task, metrics in _with_figures(ordered, of_run)]
        return _about(run), [*done, *_empty(run, ordered), *_means(of_run, ordered)]

    def _begin(self, run: Run, sample: Sample) -> _Task:
        self._writer.flush()  # no chunk holds two tasks, because readers mostly go on to another sample of the same one
        name, benchmark = sample.key.task, sample.benchmark
        settings = {name: setting_text(value) for name, value in sample.settings.items()}
        num_items = self._sources.num_items(run, name, benchmark)
        return _Task(name, sample.key.task_version, benchmark, settings, num_items)

    def _take(self, task: _Task, run: Run, sample: Sample, scores: Mapping[str, ScoreRow], speller: Speller) -> None:
        failed = sample.error is not None
        machine = run.hardware(sample.process_id).label()
        task.num_errors += failed
        task.num_unscored += not failed and PASSED not in scores
        task.items.add(sample.key.doc_hash)
        task.hardware.add(machine)
        task.unisolated |= any(score.tier == NO_ISOLATION for score in scores.values())
        task.batched |= sample.batch_size > 1
        sealed = is_sealed(task.task, task.benchmark)
        whole = {**body(sample, scores, sealed, speller), "machine": machine}
        places = {"bodies": self._writer.add(whole), "asked": self._question(run, sample, sealed)}
        task.rows.append(list_row(sample, scores, sealed) | places)

    def _question(self, run: Run, sample: Sample, sealed: bool) -> tuple[str, int]:
        identity = (sample.key.task, sample.key.doc_hash, sample.key.prompt_hash)
        if identity not in self._asked:
            asked = self._sources.asked(run, sample)
            if sealed:
                asked = Asked(None, asked.gold, "")
            self._asked[identity] = self._questions.add(asdict(asked))
        return self._asked[identity]

    def _finish(self, task: _Task, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """A task as the index of the page holds it; its list of samples is a chunk of its own."""
        self._writer.flush()
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


def _marks(task: _Task, run: Run) -> list[Mark]:
    marks = []

    def mark(kind: str, sentence: str, count: int | str = "") -> None:
        marks.append(Mark(kind, f"{kind} {count}" if count else kind, sentence))

    if is_mini(task.task):
        mark("mini", "A synthetic look-alike of this project, not the real benchmark.")
    if task.unisolated:
        mark("sandbox off", "Programs ran without isolation, so their verdicts can be forged.")
    if len(task.hardware) > 1:
        machines = " | ".join(sorted(task.hardware))
        mark("mixed hardware", f"Samples of this task come from several machines: {machines}.")
    num_asked, limit = len(task.items), limit_of(run.manifest.command)
    if task.num_items is not None and num_asked < task.num_items:
        kind = "limited" if limit is not None and num_asked >= limit else "unfinished"
        reason = f" (--limit {limit})" if kind == "limited" else ": the run ended early or is still going"
        mark(kind, f"{num_asked} of {task.num_items} items{reason}.", f"{num_asked}/{task.num_items}")
    elif task.num_items is None and limit is not None:
        mark("limited", f"Run with --limit {limit}; the benchmark's rows are not at hand here.", num_asked)
    if task.num_unscored:
        sentence = f"{task.num_unscored} samples have no verdict: the run has not ended."
        mark("unscored", sentence, task.num_unscored)
    if task.num_errors:
        mark("errors", f"{task.num_errors} samples failed and are in no figure.", task.num_errors)
    if task.batched:
        mark("batched", "Some samples were decoded together; their times are in no speed figure.")
    return marks


def limit_of(command: Sequence[str]) -> int | None:
    """The limit on items that a command line asked for, None if it asked for none."""
    words = [part for word in command for part in word.split("=", 1)]
    for option, value in itertools.pairwise(words):
        if option in _LIMIT_OPTIONS and value.isdigit():
            return int(value)
    return None


def _with_figures(tasks: Sequence[_Task], figures: Sequence[Figure]) -> Iterator[tuple[_Task, dict[str, Any]]]:
    """Each task with its figures. Two versions of a task under equal settings have theirs in order of version."""
    by_task: dict[tuple, dict[str, list[Figure]]] = defaultdict(lambda: defaultdict(list))
    for figure in figures:
        by_task[figure.task, *sorted(figure.settings.items())][figure.metric].append(figure)
    seen: dict[tuple, int] = defaultdict(int)
    for task in tasks:
        key = (task.task, *sorted(task.settings.items()))
        number, seen[key] = seen[key], seen[key] + 1
        versions = by_task[key].items()
        yield task, {metric: _encoded(own[number]) for metric, own in versions if number < len(own)}


def _encoded(figure: Figure) -> dict[str, Any]:
    """A figure and its interval; NaN is null."""
    return {
        "value": rounded(figure.value),
        "low": rounded(figure.ci_low),
        "high": rounded(figure.ci_high),
        "unit": figure.unit,
        "n": figure.n,
        "note": figure.note,
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


def _means(figures: Sequence[Figure], tasks: Sequence[_Task]) -> Iterator[dict[str, Any]]:
    """Means over tasks, without samples but with the marks of the tasks that they are over."""
    for mini in (False, True):
        own = [figure for figure in figures if figure.is_mean and figure.mini == mini]
        if not own:
            continue
        sentences: dict[str, list[str]] = {}
        if mini:
            sentences["mini"] = ["A mean of this project's synthetic look-alikes, not of the real benchmarks."]
        for task in tasks:
            for mark in task.marks if is_mini(task.task) == mini else ():
                if mark.kind != "mini":
                    sentences.setdefault(mark.kind, []).append(f"{task.task}: {mark.sentence}")
        yield _cell(
            task=MEAN_TASK,
            mini=mini,
            mean=True,
            metrics={figure.metric: _encoded(figure) for figure in own},
            items=own[0].n,
            samples=own[0].samples,
            marks=[(kind, " ".join(each)) for kind, each in sentences.items()],
        )


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
