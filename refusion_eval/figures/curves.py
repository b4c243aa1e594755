"""Points of the figures that have CSV files of their own: locality (Figure 3) and scaling with data (Figure 7)."""

import math
from collections.abc import Sequence
from pathlib import Path

from refusion_eval.errors import DataError
from refusion_eval.figures.names import TASK_NAMES, task_title
from refusion_eval.figures.rows import Point, numbers, read_records
from refusion_eval.results.figure import AVERAGE

LOCALITY_COLUMNS = (
    *("model", "dataset", "mini", "masking_ratio", "distance", "n_pairs", "n_responses"),
    *("jsd_mean", "ci_low", "ci_high", "unit", "reading"),
)
SCALING_COLUMNS = ("samples", "task", "metric", "value", "ci_low", "ci_high", "n")
_SCALING_OPTIONAL = ("system", "hardware", "mini", "note")

DISTANCES = tuple(sign * 2**power for sign in (-1, 1) for power in range(8))  # the ticks of the paper's figure


def locality_points(files: Sequence[Path]) -> list[Point]:
    """Points of Figure 3: Jensen-Shannon divergence by distance, a panel for each model, a series for each ratio.

    Args:
        files: files of `refusion-eval locality`. Only distances that the paper's axis has are used.

    Raises:
        DataError: a file is malformed, two are of the same model and data, or none has such a distance.
    """
    points: dict[tuple, Point] = {}
    for file in files:
        for line, record in read_records(file, LOCALITY_COLUMNS):
            where = f"{file}, line {line}"
            columns = ("masking_ratio", "distance", "jsd_mean", "ci_low", "ci_high", "n_responses", "n_pairs")
            value = numbers(record, columns, where)
            ratio, distance = value["masking_ratio"], value["distance"]
            if distance not in DISTANCES or not value["n_pairs"]:
                continue
            model, mini = Path(record["model"]).name, record["mini"] == "yes"
            key = (model, record["dataset"], record["reading"], ratio, distance)
            if key in points:
                raise DataError(f"{where}: {model} on {record['dataset']} is there twice; leave one out")
            points[key] = Point(
                panel=f"{model}, {task_title(record['dataset'], mini)}",
                series=f"t={ratio:g}",
                label=f"$t$ = {ratio:g}",
                origin="measured",
                metric="jsd",
                x=distance,
                y=value["jsd_mean"],
                y_low=value["ci_low"],
                y_high=value["ci_high"],
                n=int(value["n_responses"]),
                mini=mini,
            )
    if not points:
        raise DataError(f"{', '.join(map(str, files))}: none of the distances {min(DISTANCES)} to {max(DISTANCES)}")
    return sorted(points.values(), key=lambda point: (point.panel, point.series, point.x))


def scaling_points(files: Sequence[Path]) -> list[Point]:
    """Points of Figure 7: score and throughput by the number of training samples, a panel for each task.

    Args:
        files: CSV with `samples,task,metric,value,ci_low,ci_high,n` and optionally `system,hardware,mini,note`. Metrics
            are accuracy, pass@1 and tps.

    Raises:
        DataError: a file is malformed, a figure is there twice, or speed comes from several machines.
    """
    points: dict[tuple, Point] = {}
    for file in files:
        for line, record in read_records(file, SCALING_COLUMNS):
            where = f"{file}, line {line}"
            value = numbers(record, ("samples", "value", "ci_low", "ci_high", "n"), where)
            if math.isnan(value["value"]):
                continue  # not measured
            system, hardware, mini, note = (record.get(name) or "" for name in _SCALING_OPTIONAL)
            task, metric = record["task"], record["metric"]
            key = (task, system, metric, value["samples"])
            if key in points:
                raise DataError(f"{where}: {metric} of {task} at {record['samples']} samples is there twice")
            if not value["samples"] > 0:
                raise DataError(
                    f"{where}: samples is {record['samples']!r}; the axis is logarithmic and begins above 0"
                )
            points[key] = Point(
                panel=task,
                series=system or "refusion",
                label=system or "ReFusion",
                origin="measured",
                metric=metric,
                x=value["samples"],
                y=value["value"],
                y_low=value["ci_low"],
                y_high=value["ci_high"],
                n=int(value["n"]) if record["n"] else 0,
                hardware=hardware if metric == "tps" else "",
                mini=mini == "yes",
                note=note,
            )
    machines = sorted({point.hardware for point in points.values() if point.metric == "tps"})
    if len(machines) > 1:
        raise DataError(f"speed of several machines ({', '.join(machines)}) is no comparison; measure all on one")
    if not points:
        raise DataError(f"{', '.join(map(str, files))}: no figure has a value")
    if len({point.mini for point in points.values()}) > 1:
        raise DataError("benchmarks and mini look-alikes are both there; show them in two figures")
    order = [*TASK_NAMES, AVERAGE]
    places = {task: place for place, task in enumerate(order)}
    return sorted(
        points.values(),
        key=lambda point: (places.get(point.panel, len(order)), point.panel, point.metric, point.series, point.x),
    )
