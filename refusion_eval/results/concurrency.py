"""Throughput and latency by the number of requests at once: of a server, or of batches of this project's engine."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from refusion_eval.results.facts import natural_order, with_models_named
from refusion_eval.results.render import Table
from refusion_eval.store.records import Sample, checking, moment
from refusion_eval.store.run_files import DATABASE_NAME
from refusion_eval.store.run_store import RunReader

_HEADINGS = {
    "concurrency": "At once",
    "n": "n",
    "tokens_per_second": "Tokens/s in sum",
    "requests_per_second": "Requests/s",
    "request_tps_p50": "Tokens/s each p50",
    "request_tps_p95": "p95",
    "latency_p50": "Latency s p50",
    "latency_p95": "p95",
    "first_byte_p50": "First byte s p50",
    "first_byte_p95": "p95",
}
_NOTES = (
    "In sum: tokens of all requests by the seconds in which at least one was in flight, those of a first compilation "
    "included.",
    "Each: a request's tokens by its own seconds; in 95 % of the requests it is at least the value under p95.",
)


class LoadPoint(NamedTuple):
    """All good samples of a run that were decoded with so many requests at once; seconds are the client's."""

    run_id: str
    system: str
    where: str  # the machine, or the server on one that is not known
    concurrency: int
    n: int
    tokens_per_second: float | None  # None where a server does not tell the tokens of all
    requests_per_second: float
    request_tps_p50: float | None
    request_tps_p95: float | None
    latency_p50: float
    latency_p95: float
    first_byte_p50: float | None  # None where no first byte is timed
    first_byte_p95: float | None


def run_dir_of(run_dir: Path, concurrency: int) -> Path:
    """Where `run --run-dir RUN_DIR --concurrency ...` records the run with so many requests at once."""
    return run_dir.with_name(f"{run_dir.name}-c{concurrency}")


def _runs_at(place: Path) -> list[Path]:
    """The run at a place; else the runs that `--concurrency` made of it, or those of such runs that lie in it."""
    if (place / DATABASE_NAME).exists():
        return [place]
    of_it = [path for path in place.parent.glob("*") if re.fullmatch(rf"{re.escape(place.name)}-c\d+", path.name)]
    in_it = [path for path in place.glob("*") if re.fullmatch(r".+-c\d+", path.name)]
    return sorted(of_it or in_it, key=lambda path: natural_order(path.name)) or [place]


def load_points(places: Iterable[Path]) -> list[LoadPoint]:
    """A point for each run and number of requests at once, by system and number.

    Args:
        places: run directories, the RUN_DIR of runs with `--concurrency`, or folders in which such runs lie.

    Raises:
        StoreError: there is no run at a place, or one that cannot be read.
    """
    runs, timed = [], []
    for run_dir in (run_dir for place in places for run_dir in _runs_at(place)):
        with RunReader.open(run_dir) as reader:
            runs.append(run := reader.run)
            groups: dict[tuple[str, int], list[Sample]] = defaultdict(list)
            for sample in reader.samples(traces=False):
                if sample.error is None and sample.seconds and sample.created:
                    groups[run.hardware(sample.process_id).label(), sample.batch_size].append(sample)
        timed.append(groups)
    points = [
        _point((run.run_id, run.manifest.system, where, concurrency), samples)
        for run, groups in zip(with_models_named(runs), timed, strict=True)
        for (where, concurrency), samples in groups.items()
    ]
    return sorted(points, key=lambda point: (point.where, point.system, point.concurrency))


def _point(identity: tuple[str, str, str, int], samples: Sequence[Sample]) -> LoadPoint:
    seconds = np.array([sample.seconds for sample in samples])
    decoded = [sample.num_decoded for sample in samples]
    tokens = None if None in decoded else np.array(decoded)
    with checking(f"{identity[0]}: the time of a sample"):
        ends = np.array([moment(sample.created).timestamp() for sample in samples])
    busy = busy_seconds(ends - seconds, ends)
    told = (sample.server or {} for sample in samples)
    first = [facts["first_byte_seconds"] for facts in told if "first_byte_seconds" in facts]
    return LoadPoint(
        *identity,
        n=len(samples),
        tokens_per_second=None if tokens is None else float(tokens.sum() / busy),
        requests_per_second=len(samples) / busy,
        request_tps_p50=None if tokens is None else float(np.quantile(tokens / seconds, 0.5)),
        request_tps_p95=None if tokens is None else float(np.quantile(tokens / seconds, 0.05)),
        latency_p50=float(np.quantile(seconds, 0.5)),
        latency_p95=float(np.quantile(seconds, 0.95)),
        first_byte_p50=float(np.quantile(first, 0.5)) if first else None,
        first_byte_p95=float(np.quantile(first, 0.95)) if first else None,
    )


def busy_seconds(starts: np.ndarray, ends: np.ndarray) -> float:
    """Seconds in which at least one request was in flight: the length of the union of the intervals."""
    # A run may have been interrupted, and turns of other systems may lie between.
    order = np.argsort(starts)
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    gaps = np.maximum(starts[1:] - reached[:-1], 0).sum()
    return float(reached[-1] - starts[0] - gaps)


def load_tables(points: Sequence[LoadPoint]) -> list[Table]:
    """A table for each machine: speeds of machines that differ, or are not known, share no column."""
    return [
        _table(where, [point for point in points if point.where == where])
        for where in dict.fromkeys(point.where for point in points)
    ]


def _table(where: str, points: Sequence[LoadPoint]) -> Table:
    shown = [name for name in _HEADINGS if any(getattr(point, name) is not None for point in points)]
    rows = [(point.system, *(_text(getattr(point, name)) for name in shown)) for point in points]
    title = f"Several requests at once, on {where}"
    return Table(title=title, columns=("System", *map(_HEADINGS.__getitem__, shown)), rows=rows, notes=_NOTES)


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def load_cells(points: Sequence[LoadPoint]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    return LoadPoint._fields, [tuple(point) for point in points]
