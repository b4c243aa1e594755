"""Judged claims and averages of speed-ups as CSV, Markdown and tables for a terminal."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from refusion_eval.metrics import Interval
from refusion_eval.paper.formulas import MARGIN, Computed
from refusion_eval.paper.judge import ALL_TASKS, NO_FORMULA, Average, JudgedClaim
from refusion_eval.results.render import Table, TableRow, csv_text, interval_text, text_cells
from refusion_eval.store.atomic_write import write_output

HOW = (
    "Intervals: 95%, each cell drawn within its own interval; cells of runs on the same items are drawn together "
    "(paired by item), cells of CSV files independently (unpaired). Not decided: the interval is too wide to tell. "
    "Sweet spots: shown to be faster than AR and no worse by more than {margin:g} points. A verdict is about the same "
    "systems on the same benchmarks only, asked with the prompts of the release; speed is that of an A100. Mini: this "
    "project's synthetic look-alikes, which say no more than a direction, about speed only from several rounds (runs "
    "of one system). n: items of the smallest cell. [fused]: with fused forwards, which the paper's algorithm has not."
)
_INTERVALS = [f"{prefix}_{name}" for prefix in ("measured", "mini") for name in ("value", "ci_low", "ci_high")]
_COLUMNS = ("id", "claim", "statement", "location", "published", "value", "unit", "reading", "formula")


# Columns that the brief table lacks, and those that it lacks on a narrow terminal.
_NOT_BRIEF = {"Where", "On published cells", "n", "Mini n"}
_NOT_NARROW = {*_NOT_BRIEF, "Mini"}
_NARROW = "A wider terminal and claims.md (--out) also have intervals and the figures of mini tasks."


def claims_table(
    judged: Sequence[JudgedClaim],
    known: Sequence[str] = (),
    *,
    margin: float = MARGIN,
    brief: bool = False,
    narrow: bool = False,
) -> Table:
    """One line for each claim that has a formula; the other claims are counted below. A narrow terminal has less."""
    left_out = _NOT_NARROW if narrow else _NOT_BRIEF if brief else set()
    rows = [
        (
            result.claim.id,
            result.claim.statement,
            result.claim.location,
            result.verdict,
            f"{result.claim.value or result.claim.published} {result.claim.unit}".strip(),
            _number(result.on_published),
            interval_text(_without_bounds(result.measured.interval) if narrow else result.measured.interval),
            str(result.measured.fewest_items or ""),
            _mini_text(result.mini),
            str(result.mini.fewest_items or ""),
            result.mini_verdict,
        )
        for result in judged
        if result.claim.formula
    ]
    judging = ("Id", "Claim", "Where", "Verdict", "Printed", "On published cells")
    columns = (*judging, "Measured", "n", "Mini", "Mini n", "Mini says")
    shown = [at for at, column in enumerate(columns) if column not in left_out]
    num_others = len(judged) - len(rows)
    others = f"{num_others} more statements have {NO_FORMULA}; claims.md (--out) says where to look."
    return Table(
        title="Claims of the paper",
        columns=[columns[at] for at in shown],
        rows=[[row[at] for at in shown] for row in rows],
        num_left=3 if left_out else 4,
        notes=(
            HOW.format(margin=margin),
            _NARROW if narrow else "",
            *(f"{result.claim.id}: {result.beside}" for result in judged if result.beside),
            others if num_others else "",
            *known,
        ),
    )


def unjudged_table(judged: Sequence[JudgedClaim]) -> Table:
    """The statements without a formula, and where this project shows what they are about. They have no verdict."""
    return Table(
        title=f"Statements with {NO_FORMULA}",
        columns=("Id", "Claim", "Where", "Printed", "Look at"),
        rows=[
            (result.claim.id, result.claim.statement, result.claim.location, result.claim.published, result.claim.look)
            for result in judged
            if not result.claim.formula
        ],
        num_left=5,
        notes=("Nothing to look at: arithmetic, or facts about trainings, protocols and other models.",),
    )


def averages_table(averages: Sequence[Average], tasks: str = ALL_TASKS, *, narrow: bool = False) -> Table:
    """Every average of every claimed speed-up side by side; on a narrow terminal each has a line of its own."""
    shown = [average for average in averages if average.tasks == tasks]
    title = f"Averages of the claimed speed-ups, {tasks} tasks"
    notes = ("*: gives the claimed figure. Total time: one request a task, by mean latency (v2 Table 9).",)
    if narrow:
        columns = ("Id", "Over", "Claimed x", "Average", "Published", "Measured")
        return Table(title=title, columns=columns, rows=_average_rows(shown), num_left=4, notes=notes)
    rules = list(dict.fromkeys(average.rule for average in shown))
    by_line: dict[tuple[str, str], dict[str, Average]] = {}
    for average in shown:
        by_line.setdefault((average.claim.id, average.baseline), {})[average.rule] = average
    rows = []
    for (claim_id, baseline), by_rule in by_line.items():
        line = [by_rule[rule] for rule in rules]
        rows.append((claim_id, "published", baseline, _stated(line[0]), *map(_printed, line)))
        measured = [interval_text(average.measured.interval) for average in line]
        mini = [_mini_text(average.mini) for average in line]
        of_origin = {"measured": measured, "mini": mini}
        rows += [(claim_id, origin, baseline, "", *texts) for origin, texts in of_origin.items() if any(texts)]
    return Table(title=title, columns=("Id", "Cells", "Over", "Claimed x", *rules), rows=rows, num_left=3, notes=notes)


def _average_rows(averages: Sequence[Average]) -> list[TableRow]:
    """A row for each average; those of one claim and baseline form a group that names them once."""
    rows: list[TableRow] = []
    before = None
    for average in averages:
        group = (average.claim.id, average.baseline)
        baseline = average.baseline.replace("+", " + ")
        texts = (average.claim.id, baseline, _stated(average), average.rule, _printed(average))
        cells = text_cells(*texts, interval_text(_without_bounds(average.measured.interval)))
        repeated = 3 if group == before else 0
        rows.append(TableRow(cells=cells, begins_group=not repeated, num_repeated=repeated))
        before = group
    return rows


def _stated(average: Average) -> str:
    return f"{average.claim.value} ({average.claim.reading})"


def _printed(average: Average) -> str:
    return _number(average.on_published) + (" *" if average.gives_claim else "")


def _without_bounds(interval: Interval | None) -> Interval | None:
    return None if interval is None else replace(interval, low=math.nan, high=math.nan)


def write_claims(
    judged: Sequence[JudgedClaim], averages: Sequence[Average], folder: Path, known: Sequence[str], margin: float
) -> None:
    """Writes claims.csv, averages.csv and claims.md. Raises StoreError if a file cannot be written."""
    write_output(folder / "claims.csv", csv_text(*claims_cells(judged)))
    write_output(folder / "averages.csv", csv_text(*averages_cells(averages)))
    task_sets = dict.fromkeys(average.tasks for average in averages)
    tables = [
        claims_table(judged, known, margin=margin),
        unjudged_table(judged),
        *(averages_table(averages, tasks) for tasks in task_sets),
    ]
    write_output(folder / "claims.md", "\n".join(table.markdown() for table in tables))


def claims_cells(judged: Sequence[JudgedClaim]) -> tuple[list[str], list[list[object]]]:
    """Columns and rows of claims.csv."""
    head = [*_COLUMNS, "on_published", "follows", "verdict", "reason", *_INTERVALS]
    head += ["items", "mini_items", "mini_fused", "mini_verdict", "note", "look"]
    head += ["prompts"] if any(result.measured.prompts for result in judged) else []
    lines: list[list[object]] = []
    for result in judged:
        line = [getattr(result.claim, name) for name in _COLUMNS]
        line += [result.on_published, result.follows, result.verdict, result.reason, *_bounds(result)]
        line += [result.measured.fewest_items, result.mini.fewest_items, result.mini.fused, result.mini_verdict]
        line += ["; ".join(filter(None, (result.claim.note, result.beside))), result.claim.look]
        lines.append([*line, *([result.measured.prompts] if head[-1] == "prompts" else [])])
    return head, lines


def averages_cells(averages: Sequence[Average]) -> tuple[list[str], list[list[object]]]:
    """Columns and rows of averages.csv."""
    facts = ("baseline", "tasks", "rule", "on_published", "gives_claim")
    lines: list[list[object]] = []
    for average in averages:
        values = (getattr(average, name) for name in facts)
        lines.append([average.claim.id, average.claim.value, *values, *_bounds(average), average.mini.fused])
    return ["id", "claimed", *facts, *_INTERVALS, "mini_fused"], lines


def _bounds(judged: JudgedClaim | Average) -> list[float]:
    return [
        number
        for result in (judged.measured.interval, judged.mini.interval)
        for number in (result.value, result.low, result.high)
    ]


def _mini_text(result: Computed) -> str:
    return interval_text(result.interval) + (" [fused]" if result.fused else "")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
