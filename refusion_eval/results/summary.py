"""The compact table: for each task and system accuracy, TPS, TPF and speed-up; as data, on a terminal, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from refusion_eval.benchmarks import is_mini
from refusion_eval.metrics.bootstrap import Interval
from refusion_eval.results.table_rows import MEAN_TASK, TableRow
from refusion_eval.results.task_metrics import ACCURACY, PASS_AT_1, UNISOLATED

MINI_CAPTION = "mini: tasks of this project's synthetic look-alikes, not the real benchmarks."
_HEADINGS = ("Task", "System", "n", "Accuracy %", "TPS", "TPF", "Speed-up")
_NUM_LEFT_ALIGNED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRow:
    """One task of one run.

    Attributes:
        task: task, or the mean over tasks.
        system: name of the system; with the run id where two runs share it, and the settings where a run has several.
        n: items of the accuracy, or of whatever is there.
        accuracy: percent; pass@1 for code.
        tps: tokens a second of one request at a time.
        tpf: tokens a forward.
        speedup: TPS relative to the autoregressive run.
        mini: whether it is a synthetic look-alike.
        errors: samples in no figure.
        unisolated: whether programs ran without isolation.
    """

    task: str
    system: str
    n: int
    accuracy: Interval | None
    tps: Interval | None
    tpf: Interval | None
    speedup: Interval | None
    mini: bool
    errors: int
    unisolated: bool

    def cells(self) -> tuple[str, ...]:
        """What the renderers print, in the order of the headings."""
        task = f"{self.task} (mini)" if self.mini and not is_mini(self.task) else self.task
        marks = [f"{self.errors} errors"] if self.errors else []
        marks += ["no isolation"] if self.unisolated else []
        system = f"{self.system} [{', '.join(marks)}]" if marks else self.system
        figures = (
            shown(self.accuracy, 1),
            shown(self.tps, 1),
            shown(self.tpf, 2),
            shown(self.speedup, 2),
        )
        return (task, system, str(self.n), *figures)


def summary(rows: Iterable[TableRow]) -> list[SummaryRow]:
    """Condenses tidy rows (`tidy_rows`, or `read_csv`), one line a task and run, in their order by task; means last."""
    groups: dict[tuple, dict[str, TableRow]] = {}
    run_ids: dict[str, set[str]] = {}
    settings: dict[tuple, set[tuple]] = {}
    for row in rows:
        in_force = tuple(sorted(row.settings.items()))
        key = (row.mini, row.task == MEAN_TASK, row.task, row.system, row.run_id, in_force)
        groups.setdefault(key, {})[row.metric] = row
        run_ids.setdefault(row.system, set()).add(row.run_id)
        settings.setdefault(key[:-1], set()).add(in_force)
    lines = []
    for key in sorted(groups):
        *_, system, run_id, in_force = key
        marks = [run_id] if len(run_ids[system]) > 1 else []
        # A task decoded under several settings in one run: say in which of them the lines differ.
        always = set.intersection(*map(set, settings[key[:-1]]))
        marks += [f"{name}={value}" for name, value in in_force if (name, value) not in always]
        lines.append(_summary_row(groups[key], f"{system} ({', '.join(marks)})" if marks else system))
    return lines


def rich_table(lines: Sequence[SummaryRow], *, title: str = "") -> Table:
    """The summary for a terminal."""
    table = Table(title=title or None, caption=_caption(lines) or None, caption_justify="left")
    for number, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="left" if number < _NUM_LEFT_ALIGNED else "right")
    previous = None
    for line in lines:
        if previous is not None and line.task != previous:
            table.add_section()
        previous = line.task
        table.add_row(*(escape(cell) for cell in line.cells()))
    return table


def markdown(lines: Sequence[SummaryRow]) -> str:
    """The summary as a Markdown table, with what a reader must know below it."""
    rules = [":--" if number < _NUM_LEFT_ALIGNED else "--:" for number in range(len(_HEADINGS))]
    body = [[cell.replace("|", "\\|") for cell in line.cells()] for line in lines]
    text = "".join(f"| {' | '.join(cells)} |\n" for cells in (_HEADINGS, rules, *body))
    caption = _caption(lines)
    return f"{text}\n{caption}\n" if caption else text


def _summary_row(metrics: dict[str, TableRow], system: str) -> SummaryRow:
    any_row = next(iter(metrics.values()))
    accuracy = metrics.get(ACCURACY) or metrics.get(PASS_AT_1)
    return SummaryRow(
        task=any_row.task,
        system=system,
        n=(accuracy or any_row).n,
        accuracy=accuracy.interval if accuracy else None,
        **{name: metrics[name].interval if name in metrics else None for name in ("tps", "tpf", "speedup")},
        mini=any_row.mini,
        errors=max(row.errors for row in metrics.values()),
        unisolated=any(UNISOLATED in row.note for row in metrics.values()),
    )


def _caption(lines: Sequence[SummaryRow]) -> str:
    sentences = ["In brackets: 95% bootstrap interval by item." if lines else ""]
    if any(line.mini for line in lines):
        sentences.append(MINI_CAPTION)
    if num_errors := sum(line.errors for line in lines if line.task != MEAN_TASK):
        sentences.append(f"{num_errors} samples are errors and in no figure; run the same command again to retry them.")
    if any(line.unisolated for line in lines):
        sentences.append(f"No isolation: {UNISOLATED}.")
    if any(line.tps is None for line in lines):
        sentences.append("No TPS where no sample was decoded alone after a warm-up, or on several machines.")
    return " ".join(filter(None, sentences))


def shown(interval: Interval | None, digits: int) -> str:
    """Value and bounds, or a dash."""
    if interval is None or math.isnan(interval.value):
        return "-"
    value = f"{interval.value:.{digits}f}"
    if math.isnan(interval.low):
        return value
    return f"{value} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"
