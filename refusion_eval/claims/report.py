"""Judged claims and averages of speed-ups as CSV, Markdown and tables for a terminal."""

from collections.abc import Sequence
from pathlib import Path

from refusion_eval.claims.averages import ALL_TASKS, Average
from refusion_eval.claims.verdicts import NO_FORMULA, Judged
from refusion_eval.metrics.bootstrap import Interval
from refusion_eval.results.render import Table, csv_text, interval_text
from refusion_eval.store.atomic_write import write_output

HOW = (
    "Intervals: 95%, each cell drawn within its own bootstrap interval, cells independently. A verdict is about the "
    "same systems on the same benchmarks only. Mini: this project's synthetic look-alikes, which say no more than a "
    "direction. n: items of the smallest cell. [fused]: with fused forwards, which the paper's algorithm has not."
)
_INTERVAL = ("value", "ci_low", "ci_high")


def claims_table(judged: Sequence[Judged]) -> Table:
    """One line for each claim that a formula over cells can say something about; the others are counted below."""
    judging = ("Id", "Claim", "Where", "Verdict", "Printed", "On published cells")
    headings = (*judging, "Measured", "n", "Mini", "Mini n", "Mini says")
    rows = [
        (
            one.claim.id,
            one.claim.statement,
            one.claim.location,
            one.verdict,
            f"{one.claim.value or one.claim.published} {one.claim.unit}".strip(),
            "" if one.on_published is None else f"{one.on_published:.4g}",
            interval_text(one.measured),
            str(one.items or ""),
            _mini(one.mini, one.mini_fused),
            str(one.mini_items or ""),
            one.mini_verdict,
        )
        for one in judged
        if one.claim.formula
    ]
    others = f"{len(judged) - len(rows)} more statements have {NO_FORMULA}; claims.md (--out) says where to look."
    return Table(title="Claims of the paper", columns=headings, rows=rows, num_left=4, notes=(HOW, others))


def unjudged_table(judged: Sequence[Judged]) -> Table:
    """The statements that no cells say, and where this project shows what they are about. No verdict is given."""
    return Table(
        title=f"Statements with {NO_FORMULA}",
        columns=("Id", "Claim", "Where", "Printed", "Look at"),
        rows=[
            (one.claim.id, one.claim.statement, one.claim.location, one.claim.published, one.claim.look)
            for one in judged
            if not one.claim.formula
        ],
        num_left=5,
        notes=("Nothing to look at: arithmetic, or facts about trainings, protocols and other models.",),
    )


def averages_table(averages: Sequence[Average], tasks: str = ALL_TASKS) -> Table:
    """Every average of every claimed speed-up, side by side: one line a claim and baseline.

    Args:
        averages: of all claims.
        tasks: over which tasks.
    """
    chosen = [one for one in averages if one.tasks == tasks]
    rules = list(dict.fromkeys(one.rule for one in chosen))
    by_line: dict[tuple[str, str], dict[str, Average]] = {}
    for one in chosen:
        by_line.setdefault((one.claim.id, one.baseline), {})[one.rule] = one
    rows = []
    for (name, baseline), found in by_line.items():
        claim = next(iter(found.values())).claim
        stated = f"{claim.value} ({claim.reading})"
        printed = [f"{_number(found[rule].on_published)}{' *' if found[rule].gives_claim else ''}" for rule in rules]
        rows.append((name, "published", baseline, stated, *printed))
        measured = [interval_text(found[rule].measured) for rule in rules]
        mini = [_mini(found[rule].mini, found[rule].mini_fused) for rule in rules]
        rows += [
            (name, cells, baseline, "", *figures)
            for cells, figures in (("measured", measured), ("mini", mini))
            if any(figures)
        ]
    return Table(
        title=f"Averages of the claimed speed-ups, {tasks} tasks",
        columns=("Id", "Cells", "Over", "Claimed x", *rules),
        rows=rows,
        num_left=3,
        notes=("*: gives the claimed figure. Total time: one request a task, by mean latency (v2 Table 9).",),
    )


def write_claims(judged: Sequence[Judged], averages: Sequence[Average], folder: Path) -> None:
    """Writes claims.csv, averages.csv and claims.md.

    Raises:
        StoreError: a file cannot be written.
    """
    columns: tuple[str, ...] = (
        "id",
        "claim",
        "statement",
        "location",
        "published",
        "value",
        "unit",
        "reading",
        "formula",
    )
    found = ("on_published", "follows", "verdict", "reason")
    about = ("items", "mini_items", "mini_fused", "mini_verdict")
    head: tuple[str, ...] = (*columns, *found, *_names("measured"), *_names("mini"), *about, "note", "look")
    lines: list[tuple[object, ...]] = [
        (
            *(getattr(one.claim, name) for name in columns),
            *(getattr(one, name) for name in found),
            *(*_bounds(one.measured), *_bounds(one.mini), *(getattr(one, name) for name in about)),
            *(one.claim.note, one.claim.look),
        )
        for one in judged
    ]
    write_output(folder / "claims.csv", csv_text(head, lines))
    columns = ("baseline", "tasks", "rule", "on_published", "gives_claim")
    head = ("id", "claimed", *columns, *_names("measured"), *_names("mini"), "mini_fused")
    lines = [
        (
            *(one.claim.id, one.claim.value, *(getattr(one, name) for name in columns)),
            *(*_bounds(one.measured), *_bounds(one.mini), one.mini_fused),
        )
        for one in averages
    ]
    write_output(folder / "averages.csv", csv_text(head, lines))
    sets = list(dict.fromkeys(one.tasks for one in averages))
    tables = [claims_table(judged), unjudged_table(judged), *(averages_table(averages, tasks) for tasks in sets)]
    write_output(folder / "claims.md", "\n".join(table.markdown() for table in tables))


def _names(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}_{name}" for name in _INTERVAL)


def _bounds(interval: Interval | None) -> tuple[float | None, ...]:
    return (None, None, None) if interval is None else (interval.value, interval.low, interval.high)


def _mini(interval: Interval | None, fused: bool) -> str:
    return interval_text(interval) + (" [fused]" if fused else "")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
