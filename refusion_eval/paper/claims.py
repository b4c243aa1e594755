"""Judged claims and averages of speed-ups as CSV, Markdown and tables for a terminal."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from refusion_eval.metrics import Interval
from refusion_eval.paper.formulas import Computed
from refusion_eval.paper.judge import ALL_TASKS, NO_FORMULA, Average, JudgedClaim
from refusion_eval.results.render import Table, TableRow, csv_text, interval_text, text_cells
from refusion_eval.store.atomic_write import write_output

HOW = (
    "Intervals: 95%, each cell drawn within its own bootstrap interval, cells independently. A verdict is about the "
    "same systems on the same benchmarks only, asked with the prompts of the release; speed is that of an A100. Mini: "
    "this project's synthetic look-alikes, which say no more than a direction, about speed only from several rounds "
    "(runs of one system). n: items of the smallest cell. [fused]: with fused forwards, which the paper's algorithm "
    "has not."
)
_COLUMNS = ("id", "claim", "statement", "location", "published", "value", "unit", "reading", "formula")


# Columns that the brief table lacks, and those that it lacks on a narrow terminal.
_NOT_BRIEF = {"Where", "On published cells", "n", "Mini n"}
_NOT_NARROW = {*_NOT_BRIEF, "Mini"}
_NARROW = "A wider terminal and claims.md (--out) also have intervals and the figures of mini tasks."


def claims_table(judged: Sequence[JudgedClaim], *, brief: bool = False, narrow: bool = False) -> Table:
    """One line for each claim that has a formula; the other claims are counted below. A narrow terminal has less."""
    left_out = _NOT_NARROW if narrow else _NOT_BRIEF if brief else set()
    rows = [
        (
            each.claim.id,
            each.claim.statement,
            each.claim.location,
            each.verdict,
            f"{each.claim.value or each.claim.published} {each.claim.unit}".strip(),
            _number(each.on_published),
            interval_text(_without_bounds(each.measured.interval) if narrow else each.measured.interval),
            str(each.measured.fewest_items or ""),
            _mini_text(each.mini),
            str(each.mini.fewest_items or ""),
            each.mini_verdict,
        )
        for each in judged
        if each.claim.formula
    ]
    judging = ("Id", "Claim", "Where", "Verdict", "Printed", "On published cells")
    columns = (*judging, "Measured", "n", "Mini", "Mini n", "Mini says")
    shown = [at for at, column in enumerate(columns) if column not in left_out]
    others = f"{len(judged) - len(rows)} more statements have {NO_FORMULA}; claims.md (--out) says where to look."
    return Table(
        title="Claims of the paper",
        columns=[columns[at] for at in shown],
        rows=[[row[at] for at in shown] for row in rows],
        num_left=3 if left_out else 4,
        notes=(HOW, *([_NARROW] if narrow else []), others),
    )


def unjudged_table(judged: Sequence[JudgedClaim]) -> Table:
    """The statements without a formula, and where this project shows what they are about. They have no verdict."""
    return Table(
        title=f"Statements with {NO_FORMULA}",
        columns=("Id", "Claim", "Where", "Printed", "Look at"),
        rows=[
            (each.claim.id, each.claim.statement, each.claim.location, each.claim.published, each.claim.look)
            for each in judged
            if not each.claim.formula
        ],
        num_left=5,
        notes=("Nothing to look at: arithmetic, or facts about trainings, protocols and other models.",),
    )


def averages_table(averages: Sequence[Average], tasks: str = ALL_TASKS, *, narrow: bool = False) -> Table:
    """Every average of every claimed speed-up side by side, one line for each claim, baseline and origin of figures.

    On a narrow terminal each average has a line of its own.
    """
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
        measured = [interval_text(each.measured.interval) for each in line]
        mini = [_mini_text(each.mini) for each in line]
        rows += [
            (claim_id, origin, baseline, "", *texts)
            for origin, texts in (("measured", measured), ("mini", mini))
            if any(texts)
        ]
    return Table(title=title, columns=("Id", "Cells", "Over", "Claimed x", *rules), rows=rows, num_left=3, notes=notes)


def _average_rows(averages: Sequence[Average]) -> list[TableRow]:
    """A row for each average; those of one claim and baseline form a group that names them once."""
    rows: list[TableRow] = []
    before = None
    for each in averages:
        group = (each.claim.id, each.baseline)
        texts = (each.claim.id, each.baseline.replace("+", " + "), _stated(each), each.rule, _printed(each))
        cells = text_cells(*texts, interval_text(_without_bounds(each.measured.interval)))
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


def write_claims(judged: Sequence[JudgedClaim], averages: Sequence[Average], folder: Path) -> None:
    """Writes claims.csv, averages.csv and claims.md. Raises StoreError if a file cannot be written."""
    intervals = [f"{prefix}_{name}" for prefix in ("measured", "mini") for name in ("value", "ci_low", "ci_high")]
    head = [*_COLUMNS, "on_published", "follows", "verdict", "reason", *intervals]
    head += ["items", "mini_items", "mini_fused", "mini_verdict", "note", "look"]
    head += ["prompts"] if any(each.measured.prompts for each in judged) else []
    lines: list[list[object]] = [
        [
            *(getattr(each.claim, name) for name in _COLUMNS),
            *(each.on_published, each.follows, each.verdict, each.reason, *_bounds(each)),
            *(each.measured.fewest_items, each.mini.fewest_items, each.mini.fused, each.mini_verdict),
            *(each.claim.note, each.claim.look, *([each.measured.prompts] if head[-1] == "prompts" else [])),
        ]
        for each in judged
    ]
    write_output(folder / "claims.csv", csv_text(head, lines))
    head = ["id", "claimed", "baseline", "tasks", "rule", "on_published", "gives_claim", *intervals, "mini_fused"]
    lines = [
        [
            *(each.claim.id, each.claim.value, each.baseline, each.tasks, each.rule, each.on_published),
            *(each.gives_claim, *_bounds(each), each.mini.fused),
        ]
        for each in averages
    ]
    write_output(folder / "averages.csv", csv_text(head, lines))
    task_sets = dict.fromkeys(average.tasks for average in averages)
    tables = [claims_table(judged), unjudged_table(judged), *(averages_table(averages, tasks) for tasks in task_sets)]
    write_output(folder / "claims.md", "\n".join(table.markdown() for table in tables))


def _bounds(each: JudgedClaim | Average) -> list[float]:
    return [
        number
        for result in (each.measured.interval, each.mini.interval)
        for number in (result.value, result.low, result.high)
    ]


def _mini_text(result: Computed) -> str:
    return interval_text(result.interval) + (" [fused]" if result.fused else "")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
