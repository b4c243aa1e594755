"""Fair speed: what of it is the engine's, what the algorithm's, and how far it is from the memory's limit.

TPS = forwards/s x tokens/forward. The first factor is the engine's and the second is the algorithm's, unless forwards
are fused: fusing saves forwards that the paper's algorithm makes, which is the engine's gain again; such rows are
marked. A speed-up over this engine's autoregressive loop is the algorithm's gain (with fusing, if there is any); a
speed-up over transformers' `generate` has both gains together.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from refusion_eval.errors import StoreError
from refusion_eval.metrics.bootstrap import Interval
from refusion_eval.results.figure import SPEEDUP, SPEEDUP_STOCK, Figure, require_comparable
from refusion_eval.results.render import Table, csv_text, interval_text


class Column(NamedTuple):
    """One column of the speed table.

    Attributes:
        metric: name in the results CSV.
        heading: heading of the column.
        digits: digits after the point.
        factor: what takes the metric's unit to the heading's.
        with_bounds: whether the table prints the interval; the CSV has that of every figure.
    """

    metric: str
    heading: str
    digits: int = 1
    factor: float = 1.0
    with_bounds: bool = False


COLUMNS = (
    Column("tps", "TPS", with_bounds=True),
    Column("forwards_per_second", "Fwd/s"),
    Column("tpf", "Tok/fwd", 2),
    Column("mbu", "MBU %"),
    Column("one_token_share", "Limit %"),
    Column("prefill_seconds", "Prefill ms", 1, 1000.0),
    Column("decode_tps", "Decode TPS"),
    Column("tokens_mean", "Tokens"),
    Column(SPEEDUP, "x AR, engine", 2, with_bounds=True),
    Column(SPEEDUP_STOCK, "x AR, generate", 2, with_bounds=True),
)
NOTES = (
    "In brackets: 95% bootstrap interval by item. At batch 1; TPS = forwards/s x tokens/forward.",
    "Limit: share of the TPS of one token a forward at this device's copy bandwidth, which no engine exceeds that way.",
    "Prefill: up to the end of the first forward, which reads the prompt; Decode TPS: of all behind it.",
    "x AR: over the autoregressive loop of this engine, and over that of transformers' generate, on the same items.",
)
_FUSED_NOTE = (
    "Fused: verifications carry likely next plans, so tok/fwd and x AR hold a gain of this engine beside the "
    "algorithm's; fuse=false shows the algorithm's alone."
)
_FEWER_NOTE = "Fewer items: other runs of that task have more, so its rows do not rest on the same items."


class SpeedRow(NamedTuple):
    """The speed of one run on one task.

    Attributes:
        figures: figures by metric, of those in `COLUMNS` that were measured; "tps" is always there.
        fewer: whether another run has more items of the task.
    """

    figures: dict[str, Figure]
    fewer: bool

    @property
    def tps(self) -> Figure:
        """The figure that says what the row is about."""
        return self.figures["tps"]

    @property
    def complete(self) -> bool:
        """Whether no sample that was asked for is missing."""
        return all(figure.complete for figure in self.figures.values())


def speed_rows(figures: Sequence[Figure]) -> list[SpeedRow]:
    """The timed figures, one row for each task and run, in the order of the figures; means last.

    Raises:
        StoreError: nothing was timed, the figures are of several machines or task versions, or a run has a task twice.
    """
    metrics = {column.metric for column in COLUMNS}
    groups: dict[tuple[bool, str, str], dict[str, Figure]] = {}
    for figure in figures:
        group = groups.setdefault((figure.mini, figure.benchmark, figure.run_id), {})
        if figure.metric in group:
            raise StoreError(
                f"{figure.run_id} has {figure.metric} of {figure.benchmark} twice; compare its settings with table"
            )
        if figure.metric in metrics:
            group[figure.metric] = figure
    timed = [group for group in groups.values() if "tps" in group]
    if not timed:
        raise StoreError("nothing was timed in these runs; decode at batch size 1, or some of it with tps_samples")
    for mini in (False, True):
        require_comparable([figure for group in timed for figure in group.values() if figure.mini == mini])
    most: dict[tuple[bool, str], int] = {}
    for tps in (group["tps"] for group in timed):
        most[tps.mini, tps.benchmark] = max(tps.n, most.get((tps.mini, tps.benchmark), 0))
    rows = [SpeedRow(group, group["tps"].n < most[group["tps"].mini, group["tps"].benchmark]) for group in timed]
    return sorted(rows, key=lambda row: (row.tps.mini, row.tps.is_mean, row.tps.benchmark))


def speed_table(rows: Sequence[SpeedRow]) -> Table:
    """The rows as a table."""
    run_ids: dict[str, set[str]] = {}
    for row in rows:
        run_ids.setdefault(row.tps.label, set()).add(row.tps.run_id)
    lines = []
    for row in rows:
        tps = row.tps
        facts = {
            tps.run_id: len(run_ids[tps.label]) > 1,  # one system under several settings
            "half-written": not row.complete,
            "fewer items": row.fewer,
            "fused": tps.fused,
        }
        marks = [mark for mark, holds in facts.items() if holds]
        task = f"{tps.benchmark} (mini)" if tps.mini else tps.benchmark
        system = f"{tps.label} [{', '.join(marks)}]" if marks else tps.label
        lines.append((task, system, str(tps.n), *(_text(row.figures.get(c.metric), c) for c in COLUMNS)))
    explained = [_FEWER_NOTE] if any(row.fewer for row in rows) else []
    explained += [_FUSED_NOTE] if any(row.tps.fused for row in rows) else []
    return Table(
        title="Speed of one request at a time",
        columns=("Task", "System", "n", *(column.heading for column in COLUMNS)),
        rows=lines,
        num_left=2,
        notes=(*NOTES, *explained, f"Measured on {' and '.join(sorted({row.tps.hardware for row in rows}))}."),
    )


def speed_csv(rows: Sequence[SpeedRow]) -> str:
    """The rows as CSV, every figure with its bounds."""
    head = ["run_id", "system", "task", "mini", "complete", "n", "fewer", "fused", "hardware"]
    for column in COLUMNS:
        head += [column.metric, f"{column.metric}_ci_low", f"{column.metric}_ci_high"]
    lines = []
    for row in rows:
        tps = row.tps
        line: list[object] = [tps.run_id, tps.label, tps.benchmark, tps.mini, row.complete, tps.n, row.fewer]
        line += [tps.fused, tps.hardware]
        for column in COLUMNS:
            figure = row.figures.get(column.metric)
            line += [None] * 3 if figure is None else [figure.value, figure.ci_low, figure.ci_high]
        lines.append(line)
    return csv_text(head, lines)


def _text(figure: Figure | None, column: Column) -> str:
    if figure is None:
        return ""
    low, high = (figure.ci_low, figure.ci_high) if column.with_bounds else (math.nan, math.nan)
    factor = column.factor
    return interval_text(Interval(figure.value * factor, low * factor, high * factor, figure.n), column.digits)
