"""Points of Figures 1, 3, 4, 6, 7 and 8, read from runs, sweeps and CSV files."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.errors import DataError
from refusion_eval.metrics import Interval
from refusion_eval.paper.formulas import setting_number
from refusion_eval.paper.names import benchmark_of, system_label, task_title
from refusion_eval.paper.rows import BASELINE, OPERATING_POINT, REFERENCE, Point, read_records
from refusion_eval.results.differences import Difference, difference, not_in_turns
from refusion_eval.results.measured import read_measurements, run_measurements
from refusion_eval.results.measurement import AVERAGE, Measurement, by_key, require_comparable, speeds_of
from refusion_eval.results.metric_list import SCORES
from refusion_eval.results.published import beside_published, published_measurements

log = logging.getLogger(__name__)

TASK = "mbpp"  # benchmark of Figures 1, 4, 6 and 8 in the paper
DELTA_SCORE, DELTA_TPS = "delta_score", "delta_tps"
# Of several autoregressive systems that were measured the first of these is the baseline, else the first one.
BASELINES = ("qwen3", "autoregressive", "llama3")
DISTANCES = tuple(sign * 2**power for sign in (-1, 1) for power in range(8))  # the ticks of the paper's Figure 3

# Columns of the CSV files with the types of their values.
_POINTS = dict.fromkeys(("run_id", "system", "decoder", "task", "origin", "varied", "operating_point"), str)
LOCALITY_COLUMNS: dict[str, type] = {
    "model": str,
    "dataset": str,
    "mini": bool,
    **dict.fromkeys(("masking_ratio", "distance", "n_pairs", "n_responses", "jsd_mean", "ci_low", "ci_high"), float),
    "unit": str,
    "reading": str,
}
SCALING_COLUMNS: dict[str, type] = {
    "samples": float,
    **dict.fromkeys(("task", "metric"), str),
    **dict.fromkeys(("value", "ci_low", "ci_high", "n"), float),
}
_SCALING_OPTIONAL = ("system", "hardware", "mini", "note")


def against_baseline(sources: Sequence[Path], task: str = TASK) -> list[Point]:
    """Points of Figure 1: throughput and score of every system minus those of the baseline.

    Raises DataError if the task, or an autoregressive run of it, is not among the sources.
    """
    points = list(_published()) if task == TASK else []
    if not sources:
        return points
    measured = read_measurements(sources)
    measurements = _timed_scores(measured, task)
    if not measurements:
        tasks = ", ".join(sorted({entry.task for entry in measured if not entry.is_mean}))
        raise DataError(f"the sources have no figures of {task}; their tasks are {tasks}: name one as --task")
    require_comparable(measurements)
    by_key(measurements)  # refuses what was measured twice
    by_system: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        by_system.setdefault(measurement.system, []).append(measurement)
    plain = {
        entry.base_system: entry.system
        for entry in reversed(measurements)
        if entry.is_autoregressive and not entry.variants
    }
    baseline = next((plain[name] for name in (*BASELINES, *reversed(plain)) if name in plain), None)
    if baseline is None:
        generated = any(entry.generate for entry in measurements)
        engine = " by this engine (transformers' generate is not a baseline)" if generated else ""
        raise DataError(f"no autoregressive run of {task}{engine} lies among the sources; add one")
    run_dirs = {source.resolve().name: source for source in sources if source.is_dir()}
    left_out: dict[str, str] = {}
    for system, group in by_system.items():
        if not _is_timed(group):
            continue
        if system == baseline:
            zero = Interval(0, math.nan, math.nan, group[0].n)
            points.append(_point(group, "measured", zero, zero, metric=DELTA_SCORE, mark=BASELINE))
        elif reason := _not_in_turns(group, by_system[baseline], of_sweep=False):
            left_out[group[0].run_id] = reason
        else:
            parts, items = [group, by_system[baseline]], _other_items(group, by_system[baseline])
            directories = [run_dirs[part[0].run_id] for part in parts if part[0].run_id in run_dirs]
            if items and len(directories) == len(parts):
                common = _timed_scores(run_measurements(directories, common_items=True), task)
                of_runs = [[entry for entry in common if entry.run_id == part[0].run_id] for part in parts]
                if all(map(_is_timed, of_runs)):
                    parts, items = of_runs, ", on the items that both have"
            tps, score = _deltas(*parts)
            pairing = _pairing(score=score.paired, speed=tps.paired) + items
            point = _point(parts[0], "measured", tps.interval, score.interval, metric=DELTA_SCORE)
            points.append(replace(point, pairing=pairing))
    return _without(points, left_out)


def _timed_scores(measurements: Sequence[Measurement], task: str) -> list[Measurement]:
    """The scores and throughputs of a benchmark, by the systems that they stand beside."""
    return [
        beside_published(entry)
        for entry in measurements
        if task in (entry.benchmark, entry.task) and entry.metric in (*SCORES, "tps")
    ]


def _other_items(measurements: Sequence[Measurement], baseline: Sequence[Measurement]) -> str:
    """Words for scores of other items than the baseline's, as far as the items, or their numbers, are known."""
    one, other = (next((e for e in part if e.metric in SCORES), part[0]) for part in (measurements, baseline))
    return "" if (one.items, one.n) == (other.items, other.n) else ", over different items"


def _pairing(**parts: bool) -> str:
    """Whether differences are paired, in words; part by part where the parts differ."""
    texts = {name: "paired by item" if paired else "unpaired" for name, paired in parts.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{name} {text}" for name, text in texts.items())


def is_better(score: Any, tps: Any, margin: float) -> Any:
    """Whether bounds of both differences from the baseline say that a system is faster and not worse by the margin.

    Of lower bounds: shown to be so. Of upper bounds: not shown to be otherwise.
    """
    return (score > -margin) & (tps > 0)


def _published() -> Iterator[Point]:
    measurements = by_key(published_measurements(("figure1",)))
    for system in dict.fromkeys(system for system, _, _ in measurements):
        x, y = (measurements[system, TASK, metric] for metric in ("delta_tps", "delta_pass@1"))
        yield Point(
            panel="published",
            series=system,
            label=x.label,
            origin="published",
            metric=DELTA_SCORE,
            x=x.value,
            y=y.value,
            mark=BASELINE if system == BASELINES[0] else "",
            hardware=x.hardware,
        )


class _SweptRun(NamedTuple):
    """One run of a sweep: the settings that differ from the settings table, and its figures."""

    varied: tuple[str, ...]
    is_autoregressive: bool
    mark: str
    measurements: list[Measurement]


def swept(folders: Sequence[Path], task: str = TASK) -> list[Point]:
    """Points of Figures 4 and 8: one setting at a time, score and throughput minus those of the baseline.

    There are two points for each value, one of each metric; panels are the settings that were varied. The first
    autoregressive system is the baseline; each further one has two points without a value (NaN) in every panel.
    """
    runs = [run for folder in folders for run in _swept_runs(folder, task)]
    autoregressive: dict[str, _SweptRun] = {}
    for run in runs:
        if run.is_autoregressive:
            autoregressive.setdefault(run.measurements[0].system, run)
    baseline, *further = autoregressive.values() or (None,)
    require_comparable([entry for run in runs for entry in run.measurements])
    if baseline is None:
        raise DataError(f"{folders[0]} has no autoregressive run of {task} to compare with; name one in the sweep")
    points: dict[tuple, Point] = {}
    left_out: dict[str, str] = {}
    settings = list(dict.fromkeys(name for run in runs for name in run.varied))
    for name in settings:
        # The run of the settings table comes first and is replaced by a run that names the same value.
        for run in (*(run for run in runs if not run.is_autoregressive), *further):
            if set(run.varied) - {name} or not _is_timed(run.measurements):
                continue
            first = run.measurements[0]
            value, mark = math.nan, REFERENCE
            if not run.is_autoregressive:
                value, mark = setting_number(first.settings.get(name, ""), f"{first.run_id}, {name}"), run.mark
                if math.isnan(value):
                    continue  # the system does not have this setting
            if reason := _not_in_turns(run.measurements, baseline.measurements, of_sweep=True):
                left_out[first.run_id] = reason
                continue
            deltas = _deltas(run.measurements, baseline.measurements)
            items = _other_items(run.measurements, baseline.measurements)
            for metric, (y, paired) in zip((DELTA_TPS, DELTA_SCORE), deltas, strict=True):
                x = Interval(value, math.nan, math.nan, y.n)
                point = _point(run.measurements, name, x, y, metric=metric, mark=mark)
                points[name, point.series, metric, value] = replace(point, pairing=_pairing(**{metric: paired}) + items)
    if not points and not left_out:
        advice = "figures 4 and 8 are drawn from such sweeps"
        raise DataError(f"{folders[0]}: no run of {task} varies one setting; {advice}")
    of_runs = sorted(
        points.values(),
        key=lambda point: (settings.index(point.panel), point.metric, point.mark == REFERENCE, point.x),
    )
    return _without(of_runs, left_out)


def frontier(folders: Sequence[Path], task: str = TASK) -> list[Point]:
    """Points of Figure 6: score against tokens per forward, all points of every system but the baseline."""
    runs = [run for folder in folders for run in _swept_runs(folder, task)]
    require_comparable([entry for run in runs for entry in run.measurements if entry.metric in (*SCORES, "tpf")])
    points = []
    for run in {run.measurements[0].run_id: run for run in runs}.values():  # points may share a run
        by_metric = {entry.metric: entry for entry in run.measurements}
        score = next((by_metric[name] for name in SCORES if name in by_metric), None)
        if score is None or "tpf" not in by_metric or run.is_autoregressive:
            continue
        x, y = by_metric["tpf"].interval, score.interval
        point = _point(run.measurements, score.benchmark, x, y, metric=score.metric, mark=run.mark)
        # Neither axis is a time.
        untimed = replace(point, hardware="", num_rounds=0, slowed_by="", attention="")
        points.append(replace(untimed, scored_on=score.card))
    if not points:
        raise DataError(f"{folders[0]}: no run of {task} has a score and tokens per forward")
    return sorted(points, key=lambda point: (point.series, point.x, point.y))


def only_task(folders: Sequence[Path]) -> str | None:
    """The benchmark of sweeps that have only one; None for several, and for other sources."""
    files = [folder / "points.csv" for folder in folders]
    if not all(file.is_file() for file in files):
        return None
    tasks = {benchmark_of(record["task"]) for file in files for _, record in read_records(file, _POINTS)}
    return tasks.pop() if len(tasks) == 1 else None


def read_sweep(folder: Path) -> tuple[list[dict[str, Any]], list[Measurement]]:
    """The rows of a sweep's points.csv, and its measurements, read from its runs if they are there, or sweep.csv.

    Raises DataError if the folder is not that of a sweep.
    """
    missing = [name for name in ("points.csv", "sweep.csv") if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"{folder} has no {' and no '.join(missing)}, so it is no finished sweep; figures 4, 6 and 8 are drawn "
            "from the folders that refusion-eval sweep SPEC --out FOLDER writes, and the same command continues one"
        )
    records = [record for _, record in read_records(folder / "points.csv", _POINTS)]
    measurements = read_measurements([folder / "sweep.csv"])
    run_dirs = [folder / "runs" / run_id for run_id in dict.fromkeys(record["run_id"] for record in records)]
    if not all(map(Path.is_dir, run_dirs)):
        return records, measurements
    # A run has its items, by which points are compared with the baseline; the file has what the sweep found out.
    same = {(entry.run_id, entry.task): entry.same_decode_as for entry in measurements}
    of_runs = read_measurements(run_dirs)
    return records, [replace(one, same_decode_as=same.get((one.run_id, one.task), "")) for one in of_runs]


def _swept_runs(folder: Path, task: str) -> list[_SweptRun]:
    records, every = read_sweep(folder)
    measurements: dict[str, list[Measurement]] = {}
    for measurement in map(beside_published, every):
        if task in (measurement.benchmark, measurement.task) and measurement.metric in (*SCORES, "tps", "tpf"):
            measurements.setdefault(measurement.run_id, []).append(measurement)
    if not any(record["run_id"] in measurements for record in records):
        tasks = sorted({record["task"] for record in records})
        raise DataError(f"{folder} has no figures of {task}; its tasks are {', '.join(tasks)}")
    return [
        _SweptRun(
            varied=tuple(pair.partition("=")[0] for pair in record["varied"].split(" ") if pair),
            is_autoregressive=record["decoder"] == "autoregressive",
            mark=OPERATING_POINT if record["operating_point"] == "yes" else "",
            measurements=measurements[record["run_id"]],
        )
        for record in records
        if record["run_id"] in measurements and task in (record["task"], benchmark_of(record["task"]))
    ]


def _is_timed(measurements: Sequence[Measurement]) -> bool:
    metrics = {entry.metric for entry in measurements}
    return "tps" in metrics and bool(metrics & set(SCORES))


def _deltas(measurements: Sequence[Measurement], baseline: Sequence[Measurement]) -> tuple[Difference, Difference]:
    """Throughput and score of a run on a benchmark minus the baseline's."""
    both = (baseline, measurements)
    for part in both:
        by_key(part)  # refuses what was measured twice
    if not _is_timed(baseline):
        missing = f"{baseline[0].run_id} lacks the score or the speed of {baseline[0].benchmark}"
        raise DataError(f"{missing}, so nothing can be compared with it; run it at batch size 1")
    tps, score = (
        difference(*(next(entry for entry in part if entry.metric in metrics) for part in both))
        for metrics in (("tps",), SCORES)
    )
    return tps, score


def _not_in_turns(measurements: Sequence[Measurement], baseline: Sequence[Measurement], *, of_sweep: bool) -> str:
    """Why the speeds of a run and of the baseline have no difference; empty if they took turns, as far as is known."""
    speed, base = (next((entry for entry in part if entry.metric == "tps"), None) for part in (measurements, baseline))
    return not_in_turns(speed, base, of_sweep=of_sweep) if speed and base else ""  # what is missing is said elsewhere


def _without(points: list[Point], left_out: Mapping[str, str]) -> list[Point]:
    """The points, of which the first says in its note, and so in the caption, which runs are left out.

    Raises DataError if no run is left beside the baseline.
    """
    if not left_out:
        return points
    sentences = [f"{run_id} is left out: {reason}" for run_id, reason in left_out.items()]
    if all(point.origin == "published" or point.mark == BASELINE for point in points):
        raise DataError("; ".join(sentences))
    for sentence in sentences:
        log.warning("%s", sentence)
    runs = {reason: [name for name, other in left_out.items() if other == reason] for reason in left_out.values()}
    noted = [f"{', '.join(names)} left out ({reason.partition(';')[0]})" for reason, names in runs.items()]
    place = next(number for number, point in enumerate(points) if point.origin != "published")
    note = "; ".join(filter(None, (points[place].note, *noted)))
    return [*points[:place], replace(points[place], note=note), *points[place + 1 :]]


def _point(
    measurements: Sequence[Measurement], panel: str, x: Interval, y: Interval, *, metric: str, mark: str = ""
) -> Point:
    first = measurements[0]
    timed = next((entry for entry in measurements if entry.metric == "tps"), None)
    incomplete = next((entry for entry in measurements if not entry.complete), None)
    notes = (
        [] if incomplete is None else [f"{incomplete.run_id} lacks samples ({incomplete.unfinished or 'see its note'})"]
    )
    notes += [f"{first.run_id}: same decode as {first.same_decode_as}"] if first.same_decode_as else []
    return Point(
        task=first.benchmark,
        panel=panel,
        series=first.system,
        label=system_label(first),
        metric=metric,
        **_bounded("x", x),
        **_bounded("y", y),
        n=y.n,
        mark=mark,
        hardware="" if timed is None else timed.hardware,
        mini=first.mini,
        fused=any(entry.fused for entry in measurements),
        note="; ".join(notes),
        limited=first.limited and f"{first.task} {first.limited}",
        protocol=first.protocol,
        **{name: getattr(timed, name) for name in ("num_rounds", "slowed_by", "attention") if timed is not None},
    )


def _bounded(axis: str, interval: Interval) -> dict[str, Any]:
    return {axis: interval.value, f"{axis}_low": interval.low, f"{axis}_high": interval.high}


def locality_points(files: Sequence[Path]) -> list[Point]:
    """Points of Figure 3: Jensen-Shannon divergence by distance, a panel for each model, a series for each ratio."""
    points: dict[tuple, Point] = {}
    for file in files:
        for where, record in read_records(file, LOCALITY_COLUMNS):
            ratio, distance, dataset = record["masking_ratio"], record["distance"], record["dataset"]
            if distance not in DISTANCES or not record["n_pairs"]:
                continue
            model = Path(record["model"]).name
            key = (model, dataset, record["reading"], ratio, distance)
            if key in points:
                raise DataError(f"{where}: {model} on {dataset} is there twice; leave one out")
            points[key] = Point(
                panel=f"{model}, {task_title(dataset, record['mini'])}",
                series=f"t={ratio:g}",
                label=f"$t$ = {ratio:g}",
                metric="jsd",
                x=distance,
                y=record["jsd_mean"],
                y_low=record["ci_low"],
                y_high=record["ci_high"],
                n=int(record["n_responses"]),
                mini=record["mini"],
            )
    if not points:
        raise DataError(f"{', '.join(map(str, files))}: none of the distances {min(DISTANCES)} to {max(DISTANCES)}")
    return sorted(points.values(), key=lambda point: (point.panel, point.series, point.x))


def scaling_points(files: Sequence[Path]) -> list[Point]:
    """Points of Figure 7: score and throughput by the number of training samples, a panel for each task."""
    points: dict[tuple, Point] = {}
    for where, record in (entry for file in files for entry in read_records(file, SCALING_COLUMNS)):
        samples, task, metric, n = (record[name] for name in ("samples", "task", "metric", "n"))
        if math.isnan(record["value"]):
            continue  # not measured
        system, hardware, mini, note = (record.get(name) or "" for name in _SCALING_OPTIONAL)
        key = (task, system, metric, samples)
        if key in points:
            raise DataError(f"{where}: {metric} of {task} at {samples:g} samples is there twice")
        if not samples > 0:
            raise DataError(f"{where}: samples is {samples:g}; the axis is logarithmic and begins above 0")
        points[key] = Point(
            panel=task,
            series=system or "refusion",
            label=system or "ReFusion",
            metric=metric,
            x=samples,
            y=record["value"],
            y_low=record["ci_low"],
            y_high=record["ci_high"],
            n=0 if math.isnan(n) else int(n),
            hardware=hardware if metric == "tps" else "",
            mini=mini == "yes",
            note=note,
        )
    machines = sorted({point.hardware for point in points.values() if point.metric == "tps"})
    if len(machines) > 1:
        raise DataError(f"{speeds_of(', '.join(machines))}; measure all on one")
    if not points:
        raise DataError(f"{', '.join(map(str, files))}: no figure has a value")
    if len({point.mini for point in points.values()}) > 1:
        raise DataError("benchmarks and mini look-alikes are both there; show them in two figures")
    order = [*BENCHMARKS, AVERAGE]
    places = {task: place for place, task in enumerate(order)}
    return sorted(
        points.values(),
        key=lambda point: (places.get(point.panel, len(order)), point.panel, point.metric, point.series, point.x),
    )
