"""Runs a sweep: one run directory for each point, and two CSV files over all of them.

OUT/runs/<system>-<point>/     run directory of a point
OUT/sweep.csv                  every figure of every run, as the command `table` writes them
OUT/points.csv                 system, task and varied settings of each run, and whether it is the operating point
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from refusion_eval.errors import ConfigError
from refusion_eval.evaluation.loop import (
    Outcome,
    Turn,
    load_items,
    num_local_processes,
    run_worker_or_return,
    task_names,
)
from refusion_eval.lm_eval_plugin.tasks import evaluate_any, find_other_tasks, split_names
from refusion_eval.results.facts import read_facts
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.measurement import ACCURACY, MEAN_TASK, Measurement
from refusion_eval.results.render import csv_text, write_csv
from refusion_eval.results.tables import summary
from refusion_eval.runs.manifest import machine
from refusion_eval.runs.model_args import ModelArgs, parse_model_args
from refusion_eval.runs.system import ModelCache, System
from refusion_eval.store.atomic_write import prepare_output, write_output
from refusion_eval.store.run_reader import RUN_JSON, RunReader
from refusion_eval.sweep.spec import TABLE, SweepPoint, SweepSpec, SweptSystem, TaskResult

POINT_COLUMNS = ("run_id", "system", "decoder", "task", "origin", "varied", "operating_point")


class SweepResult(NamedTuple):
    """The runs of a sweep."""

    run_dirs: list[Path]
    incomplete: list[Path]
    figures: list[Measurement]


class _Job(NamedTuple):
    """One point of one system, ready to run."""

    system: SweptSystem
    point: SweepPoint
    args: ModelArgs
    run_dir: Path
    tasks: list[str]


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

    The points take turns in rounds over the items, so that what slows a machine for a while slows all of them; the
    points that a frontier chooses while the sweep runs come last, each in one go.

    Raises:
        ConfigError: a point is impossible, or points were measured on another machine; nothing was run.
        DataError: a task's data cannot be found; nothing was run.
    """
    for name in ("sweep.csv", "points.csv"):
        prepare_output(out / name)
    common = {"data_dir": None if data is None else str(data)}
    if batch_size is not None:
        common["batch_size"] = batch_size
    job_of = partial(_job, spec, out, common)
    planned = [job_of(system, point) for system in spec.systems for point in system.known_points]
    run_worker_or_return(planned[0].args)
    model_cache = ModelCache()
    _check(planned, include_path, sandbox, model_cache)
    _check_machine(planned, model_cache)
    known = list({job.run_dir: job for job in planned}.values())
    rounds = min(rounds, spec.limit or rounds)
    total = len(known) + sum(max(one.frontier.points - 2, 0) for one in spec.systems if one.frontier is not None)
    evaluated = partial(
        evaluate_any, include_path=include_path, limit=spec.limit, sandbox=sandbox, model_cache=model_cache
    )
    points = _Points(lambda job, turn: evaluated(job.args, job.tasks, turn=turn), on_point)
    try:
        for of_round, (number, job) in product(range(1, rounds + 1), enumerate(known, start=1)):
            on_point(f"point {number} of {total}, round {of_round} of {rounds}: {job.run_dir.name}")
            points.decode(job, Turn(of_round, rounds))
        for job in known:
            points.compare(job)
        for job in _chosen(spec, job_of):
            if job.run_dir not in points.result.run_dirs:
                on_point(f"point {len(points.result.run_dirs) + 1} of {total}: {job.run_dir.name}")
                points.decode(job)
                points.compare(job)
    finally:
        points.write(out)
    return points.result


class _Points:
    """The points that were decoded so far."""

    def __init__(self, evaluate: Callable[[_Job, Turn | None], Outcome], on_point: Callable[[str], None]) -> None:
        self._evaluate, self._on_point = evaluate, on_point
        self.result = SweepResult([], [], [])
        self._decoded: dict[tuple[str, str, str], list[tuple[str, Mapping[str, Any]]]] = {}
        self._same: dict[tuple[str, str], str] = {}
        self._described: dict[Path, list[dict[str, Any]]] = {}

    def decode(self, job: _Job, turn: Turn | None = None) -> None:
        """Decodes a point, or its share of one round."""
        outcome = self._evaluate(job, turn)
        if job.run_dir not in self._described:
            self.result.run_dirs.append(job.run_dir)
            self._described[job.run_dir] = list(_described(job))
        if not outcome.is_complete and job.run_dir not in self.result.incomplete:
            self.result.incomplete.append(job.run_dir)

    def compare(self, job: _Job) -> None:
        """Says whether an earlier point decoded the same."""
        for task, other in _same_decodes(job, self._decoded):
            self._same[job.run_dir.name, task] = other
            self._on_point(f"{job.run_dir.name}: {task} is the same decode as {other}: equal tokens and forwards")

    def write(self, out: Path) -> None:
        """Writes the two files of the sweep; once, because every figure of every run is computed for them."""
        if not self.result.run_dirs:
            return
        for one in run_measurements(self.result.run_dirs):
            self.result.figures.append(replace(one, same_decode_as=self._same.get((one.run_id, one.task), "")))
        write_csv(self.result.figures, out / "sweep.csv")
        rows = ([row[column] for column in POINT_COLUMNS] for rows in self._described.values() for row in rows)
        write_output(out / "points.csv", csv_text(POINT_COLUMNS, rows))


def planned_points(spec: SweepSpec) -> Iterator[str]:
    """A line of text for each point, to be read before anything is run."""
    for system in spec.systems:
        for point in system.points:
            yield f"{system.name}-{point.name} ({point.origin})"
        if system.frontier is not None:
            end = system.frontier
            yield f"{system.name}: {end.points} values of {end.setting} from {end.low:g} to {end.high:g} (frontier)"


def _chosen(spec: SweepSpec, job_of: Callable[[SweptSystem, SweepPoint], _Job]) -> Iterator[_Job]:
    """The points of frontiers in turn, which depend on the results of the points before them."""
    for system in spec.systems:
        measured: dict[float, list[TaskResult]] = {}
        while system.frontier is not None and (value := system.frontier.next_value(measured)) is not None:
            job = job_of(system, system.frontier_point(value))
            yield job
            measured[value] = _task_results(job.run_dir)


def _task_results(run_dir: Path) -> list[TaskResult]:
    """TPF and accuracy of each task, sorted by the names of the tasks; 0 for what was not measured."""
    lines = [line for line in summary(run_measurements([run_dir])) if line.task != MEAN_TASK]
    figures = [(line.measurement("tpf"), line.measurement(ACCURACY)) for line in lines]
    return [TaskResult(*(0.0 if figure is None else figure.value for figure in pair)) for pair in figures]


def _job(spec: SweepSpec, out: Path, common: Mapping[str, Any], system: SweptSystem, point: SweepPoint) -> _Job:
    run_dir = out / "runs" / f"{system.name}-{point.name}"
    settings = {**system.settings, **point.settings}
    args = parse_model_args({**system.arguments, **common, **settings, "run_dir": str(run_dir)})
    tasks = task_names(spec.tasks, args.pretrained, data=args.data_dir)
    return _Job(system=system, point=point, args=args, run_dir=run_dir, tasks=tasks)


def _check(jobs: list[_Job], include_path: Path | None, sandbox: str, model_cache: ModelCache) -> None:
    """Resolves the settings of every point for every task, so that none is refused after hours of decoding."""
    names: dict[tuple[str, ...], list[str]] = {}
    for job in jobs:
        system = System(job.args, model_cache)
        _ = system.model  # a checkpoint that cannot be had is refused before the hub is asked for rows
        key = tuple(job.tasks)
        if key not in names:
            own, others = split_names(job.tasks)
            names[key] = [task.name for task in load_items(own, job.args.data_dir)]
            if others:
                names[key] += find_other_tasks(others, include_path, job.args, sandbox).load(others)["tasks"]
        try:
            resolved = [system.resolve(name, {}, announce=False).settings for name in names[key]]
            if dead := job.point.settings.keys() & set.intersection(*map(_without_effect, resolved)):
                raise ConfigError(
                    f"{', '.join(sorted(dead))} changes nothing beside {resolved[0]}; vary another setting"
                )
        except ConfigError as error:
            raise ConfigError(f"{job.system.name}, point {job.point.name}: {error}") from error


def _check_machine(jobs: list[_Job], model_cache: ModelCache) -> None:
    """Refuses to continue a sweep with other threads or hardware: its speeds could not stand in one figure."""
    for job in jobs:
        if job.args.engine != "local" or not (job.run_dir / RUN_JSON).is_file():
            continue
        here = machine(System(job.args, model_cache, num_processes=num_local_processes()))
        with RunReader.open(job.run_dir) as reader:
            others = reader.other_machines(here)
        if others:
            raise ConfigError(
                f"{job.run_dir.name} was measured on {' and '.join(others)}, and this is {here.label()}: speeds of one "
                "sweep must compare; set OMP_NUM_THREADS as before, or name another folder with --out"
            )


def _same_decodes(
    job: _Job, decoded: dict[tuple[str, str, str], list[tuple[str, Mapping[str, Any]]]]
) -> Iterator[tuple[str, str]]:
    """Tasks that a point decoded as an earlier point of its system did with other settings, and that point.

    Args:
        decoded: (system, task, digest of all tokens and forwards) -> points and their settings; this one is added.
    """
    digests: dict[str, Any] = {}
    settings: dict[str, Mapping[str, Any]] = {}
    with RunReader.open(job.run_dir) as reader:
        for sample in reader.samples(traces=False):
            task = sample.key.task
            settings[task] = sample.settings
            identity = [sample.key.doc_hash, sample.key.sample, sample.tokens or sample.text, sample.num_forwards]
            digests.setdefault(task, hashlib.sha256()).update(json.dumps(identity).encode())
    for task, digest in digests.items():
        earlier = decoded.setdefault((job.system.name, task, digest.hexdigest()), [])
        if other := next((name for name, values in earlier if values != settings[task]), None):
            yield task, other
        earlier.append((job.run_dir.name, settings[task]))


def _without_effect(settings: Any) -> set[str]:
    return getattr(settings, "without_effect", set())


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
