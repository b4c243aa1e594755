"""Fair speed: of every timed cell what the engine does, what the algorithm does, and how far both are from the limit.

TPS = forwards/s x tokens/forward. The first factor is the engine's, the second the algorithm's, unless forwards are
fused: these save forwards that the paper's algorithm makes, the engine's gain again, and such rows are marked.
Speed-ups over both autoregressive loops, this engine's and transformers' `generate`, say the same of a ratio: over this
engine's loop it is the algorithm's gain (with fusing, if there is any), over the stock one both gains together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from refusion_eval.errors import StoreError
from refusion_eval.metrics.bootstrap import Interval
from refusion_eval.results.figure import AVERAGE, Figure, require_comparable
from refusion_eval.results.render import Table, csv_text, interval_text


class Column(NamedTuple):
    """One figure of the speed table.

    Attributes:
        metric: in the results CSV.
        heading: of the column.
        digits: behind the point.
        factor: from the metric's unit to the heading's.
        with_bounds: whether its interval is printed; the CSV has that of every figure.
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
    Column("speedup", "x AR, engine", 2, with_bounds=True),
    Column("speedup_stock", "x AR, generate", 2, with_bounds=True),
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


@dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """The speed of one run on one task.

    Attributes:
        task: benchmark, or the mean over all.
        label: name of the system.
        run_id: the run.
        hardware: the machine.
        mini: whether the task is a synthetic look-alike.
        complete: whether the run has every sample that was asked for.
        n: benchmark items that were timed.
        fewer: whether another run of the task has more items.
        fused: whether forwards were fused.
        cells: metric -> figure, of those in `COLUMNS` that were measured.
    """

    task: str
    label: str
    run_id: str
    hardware: str
    mini: bool
    complete: bool
    n: int
    fewer: bool
    fused: bool
    cells: dict[str, Figure]


def speed_rows(cells: Sequence[Figure]) -> list[SpeedRow]:
    """The timed cells, one row a task and run, in the order of the cells; means last.

    Raises:
        StoreError: nothing was timed, they are of several machines or task versions, or a run has a task twice.
    """
    wanted = {column.metric for column in COLUMNS}
    groups: dict[tuple[bool, str, str], dict[str, Figure]] = {}
    for cell in cells:
        of_run = groups.setdefault((cell.mini, cell.benchmark, cell.run_id), {})
        if cell.metric in of_run:
            raise StoreError(
                f"{cell.run_id} has {cell.metric} of {cell.benchmark} twice; compare its settings with table"
            )
        if cell.metric in wanted:
            of_run[cell.metric] = cell
    timed = {key: found for key, found in groups.items() if "tps" in found}
    if not timed:
        raise StoreError("nothing was timed in these runs; decode at batch size 1, or some of it with tps_samples")
    for mini in (False, True):
        require_comparable([cell for key, found in timed.items() if key[0] == mini for cell in found.values()])
    most: dict[tuple[bool, str], int] = {}
    for (mini, task, _), found in timed.items():
        most[mini, task] = max(found["tps"].n, most.get((mini, task), 0))
    rows = [
        SpeedRow(
            task=task,
            label=found["tps"].label,
            run_id=run_id,
            hardware=found["tps"].hardware,
            mini=mini,
            complete=all(cell.complete for cell in found.values()),
            n=found["tps"].n,
            fewer=found["tps"].n < most[mini, task],
            fused=found["tps"].fused,
            cells=found,
        )
        for (mini, task, run_id), found in timed.items()
    ]
    return sorted(rows, key=lambda row: (row.mini, row.task == AVERAGE, row.task))


def speed_table(rows: Sequence[SpeedRow]) -> Table:
    """The rows as text."""
    runs = {label: {row.run_id for row in rows if row.label == label} for label in {row.label for row in rows}}
    lines = []
    for row in rows:
        said = {
            row.run_id: len(runs[row.label]) > 1,  # one system under several settings
            "half-written": not row.complete,
            "fewer items": row.fewer,
            "fused": row.fused,
        }
        marks = [mark for mark, holds in said.items() if holds]
        task = f"{row.task} (mini)" if row.mini else row.task
        system = f"{row.label} [{', '.join(marks)}]" if marks else row.label
        lines.append(
            (task, system, str(row.n), *(interval_text(_shown(row, column), column.digits) for column in COLUMNS))
        )
    explained = [_FEWER_NOTE] if any(row.fewer for row in rows) else []
    explained += [_FUSED_NOTE] if any(row.fused for row in rows) else []
    return Table(
        title="Speed of one request at a time",
        columns=("Task", "System", "n", *(column.heading for column in COLUMNS)),
        rows=lines,
        num_left=2,
        notes=(*NOTES, *explained, f"Measured on {' and '.join(sorted({row.hardware for row in rows}))}."),
    )


def speed_csv(rows: Sequence[SpeedRow]) -> str:
    """The rows as CSV, every figure with its bounds."""
    facts = ("run_id", "label", "task", "mini", "complete", "n", "fewer", "fused", "hardware")
    head = ["system" if name == "label" else name for name in facts]
    for column in COLUMNS:
        head += [column.metric, f"{column.metric}_ci_low", f"{column.metric}_ci_high"]
    lines = []
    for row in rows:
        line: list[object] = [getattr(row, name) for name in facts]
        for column in COLUMNS:
            cell = row.cells.get(column.metric)
            line += [None] * 3 if cell is None else [cell.value, cell.ci_low, cell.ci_high]
        lines.append(line)
    return csv_text(head, lines)


def _shown(row: SpeedRow, column: Column) -> Interval | None:
    cell = row.cells.get(column.metric)
    if cell is None or math.isnan(cell.value):
        return None
    factor = column.factor
    if not column.with_bounds:
        return Interval(cell.value * factor, math.nan, math.nan, cell.n)
    return Interval(cell.value * factor, cell.ci_low * factor, cell.ci_high * factor, cell.n)
