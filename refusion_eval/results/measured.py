"""Runs -> figures: one for each run, task and metric, and for each mean over tasks. Equal records, equal figures."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from refusion_eval.errors import StoreError
from refusion_eval.metrics.bootstrap import mean_of
from refusion_eval.results.csv_file import read_csv
from refusion_eval.results.facts import RunFacts, TaskFacts, read_facts
from refusion_eval.results.figure import (
    ACCURACY,
    AVERAGE,
    HALF_WRITTEN,
    MEAN_OVER,
    MEAN_TASK,
    METRIC_ORDER,
    NOT_SCORED,
    PASS_AT_1,
    SPEEDUP,
    SPEEDUP_STOCK,
    UNISOLATED,
    VARIES,
    Figure,
)
from refusion_eval.results.published import system_key
from refusion_eval.results.task_metrics import Measure, Reference, TaskMeasures, measure_task
from refusion_eval.store.manifest import STOCK_GENERATE
from refusion_eval.store.run_reader import Run

AUTOREGRESSIVE = "autoregressive"


def measured_figures(sources: Iterable[str | os.PathLike[str]], *, baseline: str | None = None) -> list[Figure]:
    """The figures of runs and of results CSV files, without those that are no number.

    Args:
        sources: run directories, and files that `refusion-eval table --csv` wrote. Speed-ups of directories are among
            the directories given.
        baseline: as for `run_figures`.

    Raises:
        StoreError: a source cannot be read.
    """
    paths = [Path(source) for source in sources]
    figures = [figure for path in paths if path.is_file() for figure in read_csv(path)]
    directories = [path for path in paths if not path.is_file()]
    if directories:
        figures += run_figures(directories, baseline=baseline)
    return [figure for figure in figures if not math.isnan(figure.value)]


def run_figures(run_dirs: Iterable[str | os.PathLike[str]], *, baseline: str | None = None) -> list[Figure]:
    """Every figure of some runs.

    Args:
        run_dirs: run directories.
        baseline: run id that speed-ups are relative to. Without it each run is compared with the one autoregressive
            run of its backbone, dtype and device among them, if there is exactly one.

    Returns:
        Figures sorted by label, run, task (means last) and metric.

    Raises:
        StoreError: a directory cannot be read, two have the same name, or the baseline is not among them.
    """
    runs = [read_facts(run_dir) for run_dir in run_dirs]
    names = [facts.run.run_id for facts in runs]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise StoreError(f"two run directories are called {doubled[0]}; name each once, and rename one if they differ")
    if baseline is not None and baseline not in names:
        raise StoreError(
            f"the baseline {baseline!r} is none of the runs ({', '.join(sorted(names))}); add it or pick one"
        )
    figures = [figure for facts in runs for figure in _figures_of_run(facts, runs, baseline)]
    return sorted(figures, key=_sort_key)


def _figures_of_run(facts: RunFacts, runs: Sequence[RunFacts], baseline: str | None) -> Iterator[Figure]:
    engine, refusal = _reference_run(facts, runs, AUTOREGRESSIVE, baseline)
    stock, stock_refusal = _reference_run(facts, runs, STOCK_GENERATE)
    measured: list[tuple[TaskFacts, TaskMeasures]] = []
    for task in facts.tasks:
        references = [_reference_task(task, engine, SPEEDUP), _reference_task(task, stock, SPEEDUP_STOCK)]
        result = measure_task(task, [reference for reference in references if reference is not None])
        result.notes += filter(None, (refusal, stock_refusal))
        measured.append((task, result))
        for measure in result.measures:
            yield _figure(facts.run, [task], [measure], [*result.notes, measure.note])
    for mini in (False, True):
        yield from _mean_figures(facts.run, [(task, result) for task, result in measured if task.mini == mini])


def _mean_figures(run: Run, part: Sequence[tuple[TaskFacts, TaskMeasures]]) -> Iterator[Figure]:
    """Means over tasks, of the metrics that every task has; pass@1 of a code task is its accuracy."""
    tasks = [task for task, _ in part]
    if len(tasks) < 2 or len({task.task for task in tasks}) < len(tasks):
        return  # one task needs no mean; a task under two settings has no single figure
    by_name = [{_mean_name(measure.metric): measure for measure in result.measures} for _, result in part]
    notes = [f"{MEAN_OVER} {len(tasks)} tasks ({', '.join(task.task for task in tasks)})"]
    if num_errors := sum(task.num_errors for task in tasks):
        notes.append(f"{num_errors} samples are errors and in no figure")
    if unfinished := [task.task for task in tasks if not task.finished]:
        notes.append(f"{HALF_WRITTEN}: {', '.join(unfinished)}")
    if num_unscored := sum(task.num_unscored for task in tasks):
        notes.append(f"{num_unscored} {NOT_SCORED}")
    if not all(task.isolated for task in tasks):
        notes.append(UNISOLATED)
    for metric in by_name[0]:
        if all(metric in measures for measures in by_name):
            yield _figure(run, tasks, [measures[metric] for measures in by_name], notes)


def _figure(run: Run, tasks: Sequence[TaskFacts], measures: Sequence[Measure], notes: Sequence[str]) -> Figure:
    """The figure of one metric of one task, or of the mean of several tasks."""
    manifest = run.manifest
    interval = mean_of([measure.bootstrap for measure in measures]).interval()
    samples = [sample for measure in measures for sample in measure.samples]
    settings = _common_settings(tasks)
    is_mean = len(tasks) > 1
    return Figure(
        origin="measured",
        system=system_key(manifest.system, manifest.backbone, settings),
        label=manifest.system,
        backbone=manifest.backbone,
        decoder=manifest.decoder,
        benchmark=AVERAGE if is_mean else tasks[0].benchmark or tasks[0].task,
        task=MEAN_TASK if is_mean else tasks[0].task,
        task_version="|".join(sorted({task.task_version for task in tasks})),
        mini=tasks[0].mini,
        num_tasks=len(tasks),
        metric=_mean_name(measures[0].metric) if is_mean else measures[0].metric,
        value=interval.value,
        ci_low=interval.low,
        ci_high=interval.high,
        unit=measures[0].unit,
        n=interval.n,
        samples=len(samples),
        errors=sum(task.num_errors for task in tasks),
        finished=all(task.finished for task in tasks),
        scored=not any(task.num_unscored for task in tasks),
        isolated=all(task.isolated for task in tasks),
        batch_size="|".join(map(str, sorted({sample.timing.batch_size for sample in samples}))),
        dtype=manifest.dtype,
        device=manifest.device,
        attention=manifest.attention,
        hardware=" | ".join(sorted({label for task in tasks for label in task.hardware})),
        forwards=sum(sample.timing.forwards for sample in samples),
        tokens=sum(sample.timing.tokens for sample in samples),
        seconds=math.fsum(sample.timing.seconds for sample in samples),
        settings=settings,
        run_id=run.run_id,
        notes=tuple(note for sentence in notes for note in sentence.split("; ") if note),
    )


def _reference_run(
    facts: RunFacts, runs: Sequence[RunFacts], decoder: str, baseline: str | None = None
) -> tuple[RunFacts | None, str]:
    """The run that speed-ups over a decoder are relative to, or None and, if that needs saying, why."""
    manifest = facts.run.manifest
    if baseline is not None:
        if facts.run.run_id == baseline:
            return None, ""
        reference = next(other for other in runs if other.run.run_id == baseline)
        names = ("dtype", "device")
        differing = [name for name in names if getattr(manifest, name) != getattr(reference.run.manifest, name)]
        if differing:
            return None, f"no speed-up over {baseline}: {' and '.join(differing)} differ"
        return reference, ""
    if manifest.decoder == decoder:
        return None, ""
    comparable = ("backbone", "dtype", "device")
    candidates = [
        other
        for other in runs
        if other.run.manifest.decoder == decoder
        and all(getattr(other.run.manifest, name) == getattr(manifest, name) for name in comparable)
    ]
    if len(candidates) > 1:
        run_ids = ", ".join(sorted(other.run.run_id for other in candidates))
        return None, f"no speed-up: several {decoder} runs could be the baseline ({run_ids}); name one"
    if not candidates and len(runs) > 1 and decoder == AUTOREGRESSIVE:
        return None, f"no speed-up: no autoregressive run of the same {', '.join(comparable)} lies beside this one"
    return (candidates[0] if candidates else None), ""


def _reference_task(task: TaskFacts, reference: RunFacts | None, metric: str) -> Reference | None:
    """The same task and version in the reference run, if it is there once."""
    if reference is None:
        return None
    identity = (task.task, task.task_version)
    same = [other for other in reference.tasks if (other.task, other.task_version) == identity]
    return Reference(reference.run.run_id, same[0], metric) if len(same) == 1 else None


def _common_settings(tasks: Sequence[TaskFacts]) -> dict[str, str]:
    """Settings of the tasks as text; `VARIES` where the tasks differ."""
    settings = [{name: setting_text(value) for name, value in task.settings.items()} for task in tasks]
    return {
        name: settings[0].get(name, "") if len({each.get(name) for each in settings}) == 1 else VARIES
        for name in sorted({name for each in settings for name in each})
    }


def setting_text(value: Any) -> str:
    """A setting as `Figure.settings` has it."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _mean_name(metric: str) -> str:
    return ACCURACY if metric == PASS_AT_1 else metric


def _sort_key(figure: Figure) -> tuple:
    rank = METRIC_ORDER.index(figure.metric) if figure.metric in METRIC_ORDER else len(METRIC_ORDER)
    place = (figure.label, figure.run_id, figure.mini, figure.is_mean, figure.task, sorted(figure.settings.items()))
    return *place, rank, figure.metric
