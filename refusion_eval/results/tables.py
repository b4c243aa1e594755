"""Runs -> long, tidy rows: one figure a run, task and metric, with its interval. Equal records give equal rows."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from refusion_eval.errors import StoreError
from refusion_eval.metrics.bootstrap import mean_of
from refusion_eval.results.facts import RunFacts, TaskFacts, read_facts
from refusion_eval.results.table_rows import MEAN_TASK, TableRow, read_csv, write_csv
from refusion_eval.results.task_metrics import (
    ACCURACY,
    HALF_WRITTEN,
    PASS_AT_1,
    SPEEDUP,
    SPEEDUP_STOCK,
    UNISOLATED,
    Measure,
    Reference,
    TaskMeasures,
    measure_task,
)
from refusion_eval.store.manifest import STOCK_GENERATE
from refusion_eval.store.run_reader import Run

__all__ = ["MEAN_TASK", "METRIC_ORDER", "TableRow", "read_csv", "tidy_rows", "write_csv"]

AUTOREGRESSIVE = "autoregressive"
MINI_NOTE = "synthetic look-alike, not the real benchmark"

# Metrics that are figures of one machine.
SPEED_METRICS = (
    "tps",
    "tps_mean",
    "decode_tps",
    "prefill_seconds",
    "latency_mean",
    "latency_p50",
    "latency_p95",
    "speedup",
    "speedup_stock",
    "forwards_per_second",
    "mbu",
    "one_token_share",
)
# Order of the metrics in a table; others follow by name.
METRIC_ORDER = (
    "accuracy",
    "pass@1",
    "extracted",
    *SPEED_METRICS,
    "tpf",
    "tpf_release",
    "tokens_mean",
    "forwards_mean",
)


def tidy_rows(run_dirs: Iterable[str | os.PathLike[str]], *, baseline: str | None = None) -> list[TableRow]:
    """Every figure of some runs.

    Args:
        run_dirs: run directories.
        baseline: run id that speed-ups are relative to. Without it each run is compared with the one autoregressive
            run of its backbone, dtype and device among them, if there is exactly one.

    Returns:
        Rows sorted by system, run, task (means last) and metric.

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
    rows = [row for facts in runs for row in _rows_of_run(facts, runs, baseline)]
    return sorted(rows, key=_sort_key)


def _rows_of_run(facts: RunFacts, runs: Sequence[RunFacts], baseline: str | None) -> Iterator[TableRow]:
    engine, refusal = _reference_run(facts, runs, AUTOREGRESSIVE, baseline)
    stock, stock_refusal = _reference_run(facts, runs, STOCK_GENERATE)
    measured: list[tuple[TaskFacts, TaskMeasures]] = []
    for task in facts.tasks:
        references = [_reference_task(task, engine, SPEEDUP), _reference_task(task, stock, SPEEDUP_STOCK)]
        result = measure_task(task, [reference for reference in references if reference is not None])
        result.notes += filter(None, (refusal, stock_refusal))
        measured.append((task, result))
        for measure in result.measures:
            yield _row(facts.run, task.task, [task], [measure], [*result.notes, measure.note])
    for mini in (False, True):
        yield from _mean_rows(facts.run, [(task, result) for task, result in measured if task.mini == mini])


def _mean_rows(run: Run, part: Sequence[tuple[TaskFacts, TaskMeasures]]) -> Iterator[TableRow]:
    """Means over tasks, of the metrics that every task has; pass@1 of a code task is its accuracy."""
    tasks = [task for task, _ in part]
    if len(tasks) < 2 or len({task.task for task in tasks}) < len(tasks):
        return  # one task needs no mean; a task under two settings has no single figure
    by_name = [{_mean_name(measure.metric): measure for measure in result.measures} for _, result in part]
    notes = [f"unweighted mean over {len(tasks)} tasks ({', '.join(task.task for task in tasks)})"]
    if num_errors := sum(task.num_errors for task in tasks):
        notes.append(f"{num_errors} samples are errors and in no figure")
    partial = [task.task for task, result in part if any(note.startswith(HALF_WRITTEN) for note in result.notes)]
    if partial:
        notes.append(f"{HALF_WRITTEN}: {', '.join(partial)}")
    if any(UNISOLATED in result.notes for _, result in part):
        notes.append(UNISOLATED)
    for metric in by_name[0]:
        if all(metric in measures for measures in by_name):
            yield _row(run, MEAN_TASK, tasks, [measures[metric] for measures in by_name], notes)


def _row(
    run: Run, name: str, tasks: Sequence[TaskFacts], measures: Sequence[Measure], notes: Sequence[str]
) -> TableRow:
    """The row of one metric of one task, or of the mean of several."""
    manifest = run.manifest
    combined = mean_of([measure.bootstrap for measure in measures])
    interval = combined.interval()
    samples = [sample for measure in measures for sample in measure.samples]
    mini = tasks[0].mini
    return TableRow(
        run_id=run.run_id,
        system=manifest.system,
        backbone=manifest.backbone,
        task=name,
        n=interval.n,
        metric=measures[0].metric if len(measures) == 1 else _mean_name(measures[0].metric),
        value=interval.value,
        ci_low=interval.low,
        ci_high=interval.high,
        unit=measures[0].unit,
        batch_size="|".join(map(str, sorted({sample.timing.batch_size for sample in samples}))),
        dtype=manifest.dtype,
        device=manifest.device,
        forwards=sum(sample.timing.forwards for sample in samples),
        tokens=sum(sample.timing.tokens for sample in samples),
        seconds=math.fsum(sample.timing.seconds for sample in samples),
        benchmark=tasks[0].benchmark if len(tasks) == 1 else "",
        mini=mini,
        samples=len(samples),
        errors=sum(task.num_errors for task in tasks),
        attention=manifest.attention,
        hardware=" | ".join(sorted({label for task in tasks for label in task.hardware})),
        note="; ".join(filter(None, [MINI_NOTE if mini else "", *notes])),
        task_version="|".join(sorted({task.task_version for task in tasks})),
        settings=_common_settings(tasks),
    )


def _reference_run(
    facts: RunFacts, runs: Sequence[RunFacts], decoder: str, baseline: str | None = None
) -> tuple[RunFacts | None, str]:
    """The run that speed-ups over a decoder are relative to, or None and, if that needs saying, why."""
    mine = facts.run.manifest
    if baseline is not None:
        if facts.run.run_id == baseline:
            return None, ""
        chosen = next(other for other in runs if other.run.run_id == baseline)
        theirs = chosen.run.manifest
        differing = [name for name in ("dtype", "device") if getattr(mine, name) != getattr(theirs, name)]
        if differing:
            return None, f"no speed-up over {baseline}: {' and '.join(differing)} differ"
        return chosen, ""
    if mine.decoder == decoder:
        return None, ""
    comparable = ("backbone", "dtype", "device")
    candidates = [
        other
        for other in runs
        if other.run.manifest.decoder == decoder
        and all(getattr(other.run.manifest, name) == getattr(mine, name) for name in comparable)
    ]
    if len(candidates) > 1:
        names = ", ".join(sorted(other.run.run_id for other in candidates))
        return None, f"no speed-up: several {decoder} runs could be the baseline ({names}); name one"
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
    """Settings of the tasks; one that differs among them `varies`."""
    shown = [{name: setting_text(value) for name, value in task.settings.items()} for task in tasks]
    names = sorted({name for settings in shown for name in settings})
    return {
        name: shown[0].get(name, "") if len({settings.get(name) for settings in shown}) == 1 else "varies"
        for name in names
    }


def setting_text(value: Any) -> str:
    """A setting as `TableRow.settings` writes it."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _mean_name(metric: str) -> str:
    return ACCURACY if metric == PASS_AT_1 else metric


def _sort_key(row: TableRow) -> tuple:
    known = row.metric in METRIC_ORDER
    rank = METRIC_ORDER.index(row.metric) if known else len(METRIC_ORDER)
    settings = sorted(row.settings.items())
    return row.system, row.run_id, row.mini, row.task == MEAN_TASK, row.task, settings, rank, row.metric
