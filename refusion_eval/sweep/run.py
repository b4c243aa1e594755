"""Runs a sweep: one run directory for each point, and two CSV files over all of them.

OUT/runs/<system>-<point>/     run directory of a point
OUT/sweep.csv                  every figure of every run, as the command `table` writes them
OUT/points.csv                 system, task and varied settings of each run, and whether it is the operating point
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refusion_eval.errors import ConfigError
from refusion_eval.evaluate.loop import evaluate, load_items, task_names
from refusion_eval.evaluate.session import run_worker_or_return
from refusion_eval.results.csv_file import write_csv
from refusion_eval.results.facts import read_facts
from refusion_eval.results.figure import ACCURACY, MEAN_TASK, PASS_AT_1
from refusion_eval.results.measured import run_figures
from refusion_eval.results.render import csv_text
from refusion_eval.runs.model_args import ModelArgs, parse_model_args
from refusion_eval.runs.system import ModelCache, System
from refusion_eval.store.atomic_write import prepare_output, write_output
from refusion_eval.sweep.frontier import TaskResult, next_value
from refusion_eval.sweep.spec import TABLE, SweepPoint, SweepSpec, SweptSystem

POINT_COLUMNS = ("run_id", "system", "decoder", "task", "origin", "varied", "operating_point")


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """The runs of a sweep.

    Attributes:
        run_dirs: run directories of all points, in the order in which they were run.
        incomplete: run directories with samples that failed; running the sweep again retries them.
    """

    run_dirs: list[Path]
    incomplete: list[Path]


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One point of one system, ready to run."""

    system: SweptSystem
    point: SweepPoint
    args: ModelArgs
    run_dir: Path
    tasks: list[str]


def run_sweep(
    spec: SweepSpec,
    out: Path,
    *,
    data: Path | None = None,
    sandbox: str = "auto",
    batch_size: str | None = None,
    on_point: Callable[[str], None] = lambda text: None,
) -> SweepResult:
    """Runs what is missing of a sweep and writes its two files when it ends or is interrupted.

    Args:
        spec: the sweep.
        out: folder of the sweep.
        data: folder with benchmark rows.
        sandbox: "auto", or "none" to run model-written code without isolation.
        batch_size: requests decoded together, or "auto"; None for the value in the file.
        on_point: called with a line of text before every point.

    Raises:
        ConfigError: a point is impossible; nothing was run.
        DataError: a task's data cannot be found; nothing was run.
    """
    for name in ("sweep.csv", "points.csv"):
        prepare_output(out / name)
    common = {"data_dir": None if data is None else str(data)}
    if batch_size is not None:
        common["batch_size"] = batch_size
    planned = [_job(spec, system, point, out, common) for system in spec.systems for point in system.points]
    planned += [
        _job(spec, system, _frontier_point(system, end), out, common)
        for system in spec.systems
        if system.frontier is not None
        for end in (system.frontier.low, system.frontier.high)
    ]
    if planned:
        run_worker_or_return(planned[0].args)
    model_cache = ModelCache()
    _check(planned, model_cache)
    run_dirs: list[Path] = []
    incomplete: list[Path] = []
    described: list[dict[str, Any]] = []
    total = len({job.run_dir for job in planned}) + sum(
        max(system.frontier.points - 2, 0) for system in spec.systems if system.frontier is not None
    )
    try:
        for job in _jobs(spec, out, common):
            if job.run_dir in run_dirs:
                continue
            on_point(f"point {len(run_dirs) + 1} of {total}: {job.run_dir.name}")
            outcome = evaluate(job.args, job.tasks, limit=spec.limit, sandbox=sandbox, model_cache=model_cache)
            run_dirs.append(job.run_dir)
            if not outcome.is_complete:
                incomplete.append(job.run_dir)
            described += _described(job)
    finally:
        if run_dirs:  # only once, because every figure of every run is computed for these files
            write_csv(run_figures(run_dirs), out / "sweep.csv")
            rows = ([row[column] for column in POINT_COLUMNS] for row in described)
            write_output(out / "points.csv", csv_text(POINT_COLUMNS, rows))
    return SweepResult(run_dirs=run_dirs, incomplete=incomplete)


def planned_points(spec: SweepSpec) -> Iterator[str]:
    """A line of text for each point, to be read before anything is run."""
    for system in spec.systems:
        for point in system.points:
            yield f"{system.name}-{point.name} ({point.origin})"
        if system.frontier is not None:
            end = system.frontier
            yield f"{system.name}: {end.points} values of {end.setting} from {end.low:g} to {end.high:g} (frontier)"


def _jobs(spec: SweepSpec, out: Path, common: Mapping[str, Any]) -> Iterator[_Job]:
    """Every point in turn. The points of a frontier depend on the results of the points before them."""
    for system in spec.systems:
        for point in system.points:
            yield _job(spec, system, point, out, common)
        frontier = system.frontier
        if frontier is None:
            continue
        measured: dict[float, list[TaskResult]] = {}
        while (value := next_value(measured, frontier)) is not None:
            job = _job(spec, system, _frontier_point(system, value), out, common)
            yield job
            measured[value] = _task_results(job.run_dir)


def _frontier_point(system: SweptSystem, value: float) -> SweepPoint:
    assert system.frontier is not None
    return system.point({system.frontier.setting: value}, "frontier")


def _task_results(run_dir: Path) -> list[TaskResult]:
    """TPF and accuracy of each task, sorted by the names of the tasks."""
    figures: dict[str, dict[str, float]] = {}
    for row in run_figures([run_dir]):
        if row.task != MEAN_TASK:
            figures.setdefault(row.task, {})[row.metric] = row.value
    return [
        TaskResult(by_metric.get("tpf", 0.0), by_metric.get(ACCURACY, by_metric.get(PASS_AT_1, 0.0)))
        for _, by_metric in sorted(figures.items())
    ]


def _job(spec: SweepSpec, system: SweptSystem, point: SweepPoint, out: Path, common: Mapping[str, Any]) -> _Job:
    run_dir = out / "runs" / f"{system.name}-{point.name}"
    settings = {**system.settings, **point.settings}
    args = parse_model_args({**system.arguments, **common, **settings, "run_dir": str(run_dir)})
    tasks = task_names(spec.tasks, args.pretrained)
    return _Job(system=system, point=point, args=args, run_dir=run_dir, tasks=tasks)


def _check(jobs: list[_Job], model_cache: ModelCache) -> None:
    """Resolves the settings of every point for every task, so that none is refused after hours of decoding."""
    names: dict[tuple[str, ...], list[str]] = {}
    for job in jobs:
        key = tuple(job.tasks)
        if key not in names:
            names[key] = [task.name for task in load_items(job.tasks, job.args.data_dir)]
        system = System(job.args, model_cache)
        try:
            for name in names[key]:
                system.resolve(name, {}, announce=False)
        except ConfigError as error:
            raise ConfigError(f"{job.system.name}, point {job.point.name}: {error}") from error


def _described(job: _Job) -> Iterator[dict[str, Any]]:
    """Rows of points.csv, one for each task. The operating point has the settings of the table's own run."""
    table_dir = job.run_dir.with_name(f"{job.system.name}-{TABLE}")
    operating = {task.task: task.settings for task in read_facts(table_dir).tasks}
    for task in read_facts(job.run_dir).tasks:
        yield {
            "run_id": job.run_dir.name,
            "system": job.args.system_name,
            "decoder": job.args.decoder,
            "task": task.task,
            "origin": job.point.origin,
            "varied": " ".join(f"{key}={value}" for key, value in job.point.settings.items()),
            "operating_point": task.settings == operating.get(task.task),
        }
