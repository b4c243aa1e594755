"""Runs a sweep: a run directory for each point (OUT/runs/<system>-<point>), and two CSV files over all of them.

`sweep.csv` has the columns of `refusion-eval table --csv`; `points.csv` says which settings each run varies. A point
whose settings are those of an earlier point shares its run, and has rows of its own in `points.csv` only.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from refusion_eval.errors import ConfigError
from refusion_eval.evaluation.loop import num_local_processes, run_worker_or_return
from refusion_eval.evaluation.tasks import own_tasks, plan_run
from refusion_eval.evaluation.turns import free_memory, run_in_turns
from refusion_eval.lm_eval_plugin.any_task import evaluate_any, load_any
from refusion_eval.results.facts import read_facts
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.measurement import MEAN_TASK, Measurement
from refusion_eval.results.metric_list import ACCURACY
from refusion_eval.results.render import csv_text
from refusion_eval.results.results_file import write_csv
from refusion_eval.results.tables import summary
from refusion_eval.runs.plan import Plan, PlannedRun, Turn, turns
from refusion_eval.runs.system import ModelCache, System
from refusion_eval.store.atomic_write import prepare_output, write_output
from refusion_eval.store.run_files import RUN_JSON
from refusion_eval.store.run_store import RunReader
from refusion_eval.sweep.spec import SweepPoint, SweepSpec, SweptSystem, TaskResult

MORE_COLLAPSED = 5  # percentage points of answers, from which on a sweep warns
POINT_COLUMNS = ("run_id", "system", "decoder", "task", "origin", "varied", "operating_point")


class SweepResult(NamedTuple):
    run_dirs: list[Path]
    num_points: int  # some of which may share a run
    incomplete: list[Path]
    figures: list[Measurement]


class _Job(NamedTuple):
    system: SweptSystem
    point: SweepPoint
    run: PlannedRun

    @property
    def run_dir(self) -> Path:
        return self.run.run_dir


def run_sweep(
    spec: SweepSpec,
    out: Path,
    include_path: Path | None = None,
    *,
    data: Path | None = None,
    sandbox: str = "auto",
    batch_size: str | None = None,
    rounds: int = 1,
    on_point: Callable[[str], None] = lambda text: None,
) -> SweepResult:
    """Runs what is missing of a sweep and writes its two files when it ends or is interrupted.

    The points take turns; those that a frontier chooses while the sweep runs come last, each in one go.
    """
    for name in ("sweep.csv", "points.csv"):
        prepare_output(out / name)
    plan = plan_sweep(spec, out, include_path, data=data, sandbox=sandbox, batch_size=batch_size, on_point=on_point)
    planned, model_cache = plan.jobs, plan.model_cache
    jobs = {job.run_dir: job for job in planned}
    places = list(jobs)
    total = len(jobs) + sum(system.frontier.points - 2 for system in spec.systems if system.frontier is not None)
    decoded: list[Path] = []
    incomplete: list[Path] = []
    duplicates = _Duplicates(on_point)

    def decode(run: PlannedRun, turn: Turn | None = None) -> bool:
        shown = f", round {turn.number} of {turn.of}" if turn else ""
        number = places.index(run.run_dir) + 1 if turn else len(decoded) + 1
        on_point(f"point {number} of {total}{shown}: {run.run_dir.name}")
        outcome = evaluate_any(run, model_cache=model_cache, turn=turn)
        if run.run_dir not in decoded:
            decoded.append(run.run_dir)
        if not outcome.is_complete and run.run_dir not in incomplete:
            incomplete.append(run.run_dir)
        free_memory()
        return True

    try:
        run_in_turns(Plan(runs=tuple(job.run for job in jobs.values()), turns=turns(rounds, spec.limit)), decode)
        for job in jobs.values():
            duplicates.compare(job)
        for job in _frontier_jobs(spec, plan.job_of):
            planned.append(job)
            if job.run_dir not in decoded:
                decode(job.run)
                duplicates.compare(job)
    finally:
        described = {(job.run_dir, job.point.name): job for job in planned if job.run_dir in decoded}
        figures = [
            replace(figure, same_decode_as=duplicates.same.get((figure.run_id, figure.task), ""))
            for figure in run_measurements(decoded)
        ]
        for warning in _collapsed(planned, figures):  # whose first point may be missing in a sweep that was interrupted
            on_point(warning)
        if decoded:
            write_csv(figures, out / "sweep.csv")
            rows = itertools.chain.from_iterable(map(_described, described.values()))
            write_output(out / "points.csv", csv_text(POINT_COLUMNS, rows))
    return SweepResult(decoded, len(described), incomplete, figures)


def _collapsed(jobs: Iterable[_Job], figures: Iterable[Measurement]) -> Iterator[str]:
    """Warnings about points with the most tokens a forward whose answers collapsed more often than at the first."""
    values = {(figure.run_id, figure.task, figure.metric): figure.value for figure in figures}
    runs: dict[str, list[str]] = {}
    for job in jobs:
        runs.setdefault(job.system.name, []).append(job.run_dir.name)
    for system, (first, *others) in runs.items():
        for task in dict.fromkeys(task for run, task, metric in values if run == first and metric == "tpf"):
            fastest = max((first, *others), key=lambda run: values.get((run, task, "tpf"), 0.0))
            here, there = (values.get((run, task, "collapsed"), 0.0) for run in (fastest, first))
            if here >= there + MORE_COLLAPSED:
                yield (
                    f"{fastest}: {here:.0f} % of its answers to {task} are collapsed, of {first} {there:.0f} %, and it "
                    f"has the most tokens a forward of {system}: part of them may be such answers"
                )


class SweepPlan(NamedTuple):
    """The points that are known before the sweep starts, and what makes those of frontiers."""

    jobs: list[_Job]
    job_of: Callable[[SweptSystem, SweepPoint], _Job]
    model_cache: ModelCache


def plan_sweep(
    spec: SweepSpec,
    out: Path,
    include_path: Path | None = None,
    *,
    data: Path | None = None,
    sandbox: str = "auto",
    batch_size: str | None = None,
    on_point: Callable[[str], None] = lambda text: None,
) -> SweepPlan:
    """Resolves checkpoints, tasks and settings of a sweep without decoding; raises ConfigError for what cannot run."""
    common = {} if batch_size is None else {"batch_size": batch_size}
    of_run: dict[str, Any] = {"data": data, "limit": spec.limit, "include_path": include_path, "sandbox": sandbox}

    def made(system: SweptSystem, point: SweepPoint) -> _Job:
        arguments = {**system.arguments, **common, **system.settings, **point.settings}
        run_dir = out / "runs" / f"{system.name}-{point.name}"
        return _Job(system, point, plan_run(arguments, spec.tasks, run_dir, **of_run))

    jobs = [made(system, point) for system in spec.systems for point in system.known_points]
    run_worker_or_return(jobs[0].run.args)
    shared = _SharedRuns(model_cache := ModelCache(), on_point)
    jobs = [shared.job(job) for job in jobs]
    _check_machine(jobs, model_cache)
    return SweepPlan(jobs, lambda system, point: shared.job(made(system, point)), model_cache)


class _SharedRuns:
    """Resolves the settings of every point for every task, so that none is refused after hours of decoding."""

    def __init__(self, model_cache: ModelCache, on_point: Callable[[str], None]) -> None:
        self._model_cache = model_cache
        self._on_point = on_point
        self._names: dict[tuple[str, ...], list[str]] = {}
        self._first: dict[tuple[str, ...], _Job] = {}  # system and digests of the settings -> the first such point

    def job(self, job: _Job) -> _Job:
        """The job, in the run of an earlier point if it has the same settings for all tasks."""
        system = System(job.run.args, self._model_cache)
        _ = system.backend  # a checkpoint that cannot be had is refused before the hub is asked for rows
        if job.run.tasks not in self._names:
            self._names[job.run.tasks] = load_any(job.run)
        names = self._names[job.run.tasks]
        try:
            resolved = [system.resolve(name, {}, announce=False) for name in names]
            _refuse_without_effect(job, [of_task.settings for of_task in resolved])
        except ConfigError as error:
            raise ConfigError(f"{job.system.name}, point {job.point.name}: {error}") from error
        # A task of lm-eval has generation arguments, over which the settings of a point count even where they are equal
        # to those of the table.
        is_own = own_tasks(names).keys() >= set(names)
        digests = [of_task.digest for of_task in resolved] if is_own else [job.point.name]
        first = self._first.setdefault((job.system.name, *digests), job)
        if first.run_dir != job.run_dir:
            self._on_point(f"{job.run_dir.name} has the settings of {first.run_dir.name}, whose run stands for both")
        return first._replace(point=job.point)


def _refuse_without_effect(job: _Job, settings: list[Any]) -> None:
    reasons: list[dict[str, str]] = [getattr(of_task, "without_effect", {}) for of_task in settings]
    for name in sorted(job.point.settings.keys() & set.intersection(*map(set, reasons))):
        raise ConfigError(f"{name} changes nothing: {reasons[0][name]} to the system, or vary another setting")


class _Duplicates:
    """Finds points that decode the same as an earlier point of their system with other settings."""

    def __init__(self, on_point: Callable[[str], None]) -> None:
        self._on_point = on_point
        # (system, task, digest of all tokens and forwards) -> points and their settings
        self._decoded: dict[tuple[str, str, str], list[tuple[str, Mapping[str, Any]]]] = {}
        self.same: dict[tuple[str, str], str] = {}  # (point, task) -> the earlier point

    def compare(self, job: _Job) -> None:
        digests: dict[str, Any] = {}
        settings: dict[str, Mapping[str, Any]] = {}
        with RunReader.open(job.run_dir) as reader:
            for sample in reader.samples(traces=False):
                if sample.error is not None:  # nothing was decoded
                    continue
                task = sample.key.task
                settings[task] = sample.settings
                identity = [sample.key.doc_hash, sample.key.sample, sample.tokens or sample.text, sample.num_forwards]
                digests.setdefault(task, hashlib.sha256()).update(json.dumps(identity).encode())
        point = job.run_dir.name
        for task, digest in digests.items():
            earlier = self._decoded.setdefault((job.system.name, task, digest.hexdigest()), [])
            if other := next((name for name, values in earlier if values != settings[task]), None):
                self.same[point, task] = other
                self._on_point(f"{point}: {task} is the same decode as {other}: equal tokens and forwards")
            earlier.append((point, settings[task]))


def planned_points(spec: SweepSpec) -> Iterator[str]:
    for system in spec.systems:
        for point in system.points:
            yield f"{system.name}-{point.name} ({point.origin})"
        if system.frontier is not None:
            end = system.frontier
            yield f"{system.name}: {end.points} values of {end.setting} from {end.low:g} to {end.high:g} (frontier)"


def plan_entries(spec: SweepSpec, plan: SweepPlan) -> Iterator[dict[str, Any]]:
    """What `planned_points` lists, for programs: `run_dir` is the run that has the point, `settings` outrank the table.

    A frontier is one entry without point and run, because the results choose its values.
    """
    for system in spec.systems:
        common = {"system": system.name, "decoder": system.arguments["decoder"]}
        jobs = [job for job in plan.jobs if job.system.name == system.name]
        for job in jobs:
            if job.point.origin != "frontier":
                point = {"point": f"{system.name}-{job.point.name}", "run_dir": str(job.run_dir), **common}
                settings = {"settings": {**system.settings, **job.point.settings}, "varied": dict(job.point.settings)}
                yield point | {"origin": job.point.origin, "tasks": list(job.run.tasks), **settings, "frontier": None}
        if system.frontier is not None:
            point = {"point": None, "run_dir": None, **common, "origin": "frontier", "tasks": list(jobs[0].run.tasks)}
            yield point | {"settings": dict(system.settings), "varied": {}, "frontier": asdict(system.frontier)}


def _frontier_jobs(spec: SweepSpec, job_of: Callable[[SweptSystem, SweepPoint], _Job]) -> Iterator[_Job]:
    """The points of frontiers in turn, which depend on the results of the points before them."""
    for system in spec.systems:
        measured: dict[float, list[TaskResult]] = {}
        while system.frontier is not None and (value := system.frontier.next_value(measured)) is not None:
            job = job_of(system, system.frontier_point(value))
            yield job
            measured[value] = _task_results(job.run_dir)


def _task_results(run_dir: Path) -> list[TaskResult]:
    """TPF and accuracy of each task, sorted by the names of the tasks; 0 if not measured."""
    lines = [line for line in summary(run_measurements([run_dir])) if line.task != MEAN_TASK]
    pairs = [(line.measurement("tpf"), line.measurement(ACCURACY)) for line in lines]
    values = ((0.0 if one is None or math.isnan(one.value) else one.value for one in pair) for pair in pairs)
    return [TaskResult(*of_task) for of_task in values]


def _check_machine(jobs: list[_Job], model_cache: ModelCache) -> None:
    """Refuses to continue a sweep with other threads or hardware: its speeds could not stand in one figure."""
    for job in jobs:
        if job.run.args.engine != "local" or not (job.run_dir / RUN_JSON).is_file():
            continue
        here = System(job.run.args, model_cache, num_processes=num_local_processes()).backend.hardware()
        with RunReader.open(job.run_dir) as reader:
            others = reader.other_machines(here)
        if others:
            raise ConfigError(
                f"{job.run_dir.name} was measured on {' and '.join(others)}, and this is {here.label()}: speeds of one "
                "sweep must compare; set OMP_NUM_THREADS as before, or name another folder with --out"
            )


def _described(job: _Job) -> Iterator[tuple[Any, ...]]:
    """Rows of points.csv, one for each task. The operating point has the settings of the point that varies nothing."""
    reference = job.run_dir.with_name(f"{job.system.name}-{job.system.points[0].name}")
    operating = {task.task: task.settings for task in read_facts(reference).tasks}
    varied = " ".join(f"{key}={value}" for key, value in job.point.settings.items())
    for task in read_facts(job.run_dir).tasks:
        is_operating = task.settings == operating.get(task.task)
        run = (job.run_dir.name, job.run.args.system_name, job.run.args.decoder)
        yield *run, task.task, job.point.origin, varied, is_operating
