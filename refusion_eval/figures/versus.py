"""Points relative to the autoregressive baseline: Figure 1, and the sweeps of Figures 4, 6 and 8."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from refusion_eval.claims.formula import evaluate
from refusion_eval.errors import DataError
from refusion_eval.figures.names import system_label
from refusion_eval.figures.rows import BASELINE, OPERATING_POINT, Point, number, read_records
from refusion_eval.metrics.bootstrap import Interval
from refusion_eval.results.figure import SCORES, Figure, FigureKey, by_key, require_comparable
from refusion_eval.results.measured import measured_figures
from refusion_eval.results.published import beside_published, published_figures

TASK = "mbpp"  # of all these figures in the paper
DELTA_SCORE, DELTA_TPS = "delta_score", "delta_tps"

# The autoregressive system that others are held against: first found wins.
BASELINES = ("qwen3", "autoregressive", "llama3")

_POINT_COLUMNS = ("run_id", "system", "decoder", "task", "origin", "varied", "operating_point")
_DELTAS = {
    DELTA_SCORE: "score('point', {0!r}) - score('baseline', {0!r})",
    DELTA_TPS: "tps('point', {0!r}) - tps('baseline', {0!r})",
}


def against_baseline(sources: Sequence[Path], task: str = TASK) -> list[Point]:
    """Points of Figure 1: throughput and score of every system minus those of the baseline.

    Args:
        sources: run directories and results CSV files; none gives the published points alone.
        task: benchmark.

    Raises:
        StoreError: a source cannot be read, or its figures may not stand in one plot.
        DataError: the task, or an autoregressive run of it, is not among the sources.
    """
    points = [] if task != TASK else list(_published())
    if not sources:
        return points
    cells = [
        beside_published(cell)
        for cell in measured_figures(sources)
        if cell.benchmark == task and cell.metric in (*SCORES, "tps")
    ]
    require_comparable(cells)
    placed = by_key(cells)
    systems = list(dict.fromkeys(cell.system for cell in cells))
    baseline = next((name for plain in BASELINES for name in systems if name.split(" on ")[0] == plain), None)
    if baseline is None:
        raise DataError(f"no autoregressive run of {task} lies among the sources; add one, or name another --task")
    for system in systems:
        of_system = [cell for cell in cells if cell.system == system]
        if not _is_timed(of_system):
            continue
        deltas = _deltas(of_system, [placed[place] for place in placed if place[0] == baseline], task)
        x, y = (Interval(0, math.nan, math.nan, of_system[0].n),) * 2 if system == baseline else deltas
        mark = BASELINE if system == baseline else ""
        points.append(_point(of_system, "measured", system, x, y, metric=DELTA_SCORE, mark=mark))
    return points


def _published() -> Iterable[Point]:
    cells = by_key(published_figures(("figure1",)))
    for system in dict.fromkeys(system for system, _, _ in cells):
        x, y = (cells[system, TASK, metric] for metric in ("delta_tps", "delta_pass@1"))
        yield Point(
            panel="published",
            series=system,
            label=x.label,
            origin="published",
            metric=DELTA_SCORE,
            x=x.value,
            y=y.value,
            mark=BASELINE if system == "qwen3" else "",
            hardware=x.hardware,
        )


def swept(folders: Sequence[Path], task: str = TASK) -> list[Point]:
    """Points of Figures 4 and 8: one setting at a time, score and throughput minus those of the baseline.

    Args:
        folders: of sweeps, each with sweep.csv and points.csv.
        task: benchmark.

    Returns:
        Two points a value, one of each metric; panels are the settings that were varied. Where the operating point's
        own run and a run of the same value are both there, the latter stands for both.

    Raises:
        StoreError: as `against_baseline`.
        DataError: a file is missing or malformed, or holds no baseline.
    """
    runs = [run for folder in folders for run in _read_sweep(folder, task)]
    baselines = [run for run in runs if run.described["decoder"] == "autoregressive"]
    require_comparable([cell for run in runs for cell in run.cells])
    if not baselines:
        raise DataError(f"{folders[0]} has no autoregressive run of {task} to compare with; name one in the sweep")
    points: dict[tuple, Point] = {}
    varied = dict.fromkeys(name for run in runs for name in run.varied)
    for name in varied:
        # The table's own point comes first and is replaced by a run that says the same in so many words.
        for run in runs:
            if run in baselines or set(run.varied) - {name} or not _is_timed(run.cells):
                continue
            value = number(run.cells[0].settings.get(name, ""), f"{run.cells[0].run_id}, {name}")
            if math.isnan(value):
                continue  # a system without this setting
            deltas = zip((DELTA_TPS, DELTA_SCORE), _deltas(run.cells, baselines[0].cells, task), strict=True)
            mark = OPERATING_POINT if run.described["operating_point"] == "yes" else ""
            for metric, y in deltas:
                x = Interval(value, math.nan, math.nan, y.n)
                point = _point(run.cells, name, run.cells[0].system, x, y, metric=metric, mark=mark)
                points[name, point.series, metric, value] = point
    if not points:
        raise DataError(
            f"{folders[0]}: no run of {task} varies one setting; figures 4 and 8 are drawn from such sweeps"
        )
    return sorted(points.values(), key=lambda point: (list(varied).index(point.panel), point.metric, point.x))


def frontier(folders: Sequence[Path], task: str = TASK) -> list[Point]:
    """Points of Figure 6: score against tokens per forward, all points of every system but the baseline.

    Args:
        folders: of sweeps.
        task: benchmark.

    Raises:
        StoreError, DataError: as `swept`.
    """
    runs = [run for folder in folders for run in _read_sweep(folder, task)]
    require_comparable([cell for run in runs for cell in run.cells if cell.metric in (*SCORES, "tpf")])
    points = []
    for run in runs:
        by_metric = {cell.metric: cell for cell in run.cells}
        score = next((by_metric[name] for name in SCORES if name in by_metric), None)
        if score is None or "tpf" not in by_metric or run.described["decoder"] == "autoregressive":
            continue
        mark = OPERATING_POINT if run.described["operating_point"] == "yes" else ""
        x, y = _interval(by_metric["tpf"]), _interval(score)
        point = _point(run.cells, task, score.system, x, y, metric=score.metric, mark=mark)
        points.append(replace(point, hardware=""))  # neither axis is a time
    if not points:
        raise DataError(f"{folders[0]}: no run of {task} has a score and tokens per forward")
    return sorted(points, key=lambda point: (point.series, point.x, point.y))


class _SweptRun:
    """One run of a sweep: what points.csv says of it, and its figures."""

    def __init__(self, described: Mapping[str, str], cells: list[Figure]) -> None:
        self.described = described
        self.cells = cells
        self.varied = dict(pair.split("=", 1) for pair in described["varied"].split(" ") if pair)


def _read_sweep(folder: Path, task: str) -> list[_SweptRun]:
    missing = [name for name in ("points.csv", "sweep.csv") if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"{folder} has no {' and no '.join(missing)}, so it is no sweep; figures 4, 6 and 8 are drawn from "
            "the folders that refusion-eval sweep SPEC --out FOLDER writes"
        )
    described = [record for _, record in read_records(folder / "points.csv", _POINT_COLUMNS)]
    cells: dict[str, list[Figure]] = {}
    for cell in map(beside_published, measured_figures([folder / "sweep.csv"])):
        if cell.benchmark == task and cell.metric in (*SCORES, "tps", "tpf"):
            cells.setdefault(cell.run_id, []).append(cell)
    runs = [_SweptRun(one, cells[one["run_id"]]) for one in described if one["run_id"] in cells]
    names = {one["run_id"]: one["task"] for one in described}
    if not runs:
        raise DataError(f"{folder} has no figures of {task}; its tasks are {', '.join(sorted(set(names.values())))}")
    return [run for run in runs if run.described["task"].endswith(task)]


def _is_timed(cells: Sequence[Figure]) -> bool:
    metrics = {cell.metric for cell in cells}
    return "tps" in metrics and bool(metrics & set(SCORES))


def _deltas(cells: Sequence[Figure], baseline: Sequence[Figure], task: str) -> tuple[Interval, Interval]:
    """Throughput and score minus the baseline's, with intervals."""
    placed: dict[FigureKey, Figure] = by_key(
        [replace(cell, system=name) for name, part in (("point", cells), ("baseline", baseline)) for cell in part]
    )
    x, y = (evaluate(_DELTAS[metric].format(task), placed).interval for metric in (DELTA_TPS, DELTA_SCORE))
    return replace(x, n=cells[0].n), replace(y, n=cells[0].n)


def _point(
    cells: Sequence[Figure], panel: str, series: str, x: Interval, y: Interval, *, metric: str, mark: str
) -> Point:
    incomplete = [cell.run_id for cell in cells if not cell.complete]
    return Point(
        task=cells[0].benchmark,
        panel=panel,
        series=series,
        label=system_label(cells[0]),
        origin="measured",
        metric=metric,
        x=x.value,
        x_low=x.low,
        x_high=x.high,
        y=y.value,
        y_low=y.low,
        y_high=y.high,
        n=y.n,
        mark=mark,
        hardware=next((cell.hardware for cell in cells if cell.metric == "tps"), ""),
        mini=cells[0].mini,
        fused=any(cell.fused for cell in cells),
        note=f"{incomplete[0]} is half-written" if incomplete else "",
    )


def _interval(cell: Figure) -> Interval:
    return cell.interval
