"""The compact table: accuracy, TPS, TPF and speed-up of each task and system."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from refusion_eval.benchmarks import is_mini
from refusion_eval.results.figure import ACCURACY, MEAN_TASK, PASS_AT_1, SPEEDUP, UNISOLATED, Figure
from refusion_eval.results.render import Table, TableRow, interval_text, text_cells

MINI_CAPTION = "mini: tasks of this project's synthetic look-alikes, not the real benchmarks."
# Metric -> heading and digits after the point. pass@1 stands for the accuracy of code.
_COLUMNS = {ACCURACY: ("Accuracy %", 1), "tps": ("TPS", 1), "tpf": ("TPF", 2), SPEEDUP: ("Speed-up", 2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryLine:
    """One task of one run under one set of settings.

    Attributes:
        task: task, or the mean over tasks.
        system: label of the system; with the run id where runs share a label, and with the settings that differ where a
            run has a task under several settings.
        figures: figures by metric; at least one.
    """

    task: str
    system: str
    figures: dict[str, Figure]

    @property
    def any_figure(self) -> Figure:
        """The score, or any other figure if there is none."""
        return self.figures.get(ACCURACY) or self.figures.get(PASS_AT_1) or next(iter(self.figures.values()))

    def figure(self, metric: str) -> Figure | None:
        """The figure of a column, None if it was not measured."""
        return self.figures.get(metric) or (self.figures.get(PASS_AT_1) if metric == ACCURACY else None)

    @property
    def errors(self) -> int:
        """Samples that are in no figure."""
        return max(figure.errors for figure in self.figures.values())

    @property
    def isolated(self) -> bool:
        """Whether no program ran without isolation."""
        return all(figure.isolated for figure in self.figures.values())

    def texts(self) -> tuple[str, ...]:
        """The cells of the line."""
        figure = self.any_figure
        mini = " (mini)" if figure.mini and not is_mini(self.task) else ""
        marks = [f"{self.errors} errors"] if self.errors else []
        marks += [] if self.isolated else ["no isolation"]
        system = f"{self.system} [{', '.join(marks)}]" if marks else self.system
        intervals = (
            interval_text(None if measured is None else measured.interval, digits, missing="-")
            for measured, digits in ((self.figure(metric), digits) for metric, (_, digits) in _COLUMNS.items())
        )
        return (self.task + mini, system, str(figure.n), *intervals)


def summary(figures: Iterable[Figure]) -> list[SummaryLine]:
    """Condenses figures of runs to one line a task and run, in their order by task; means last."""
    groups: dict[tuple, dict[str, Figure]] = {}
    run_ids: dict[str, set[str]] = {}
    settings: dict[tuple, set[tuple]] = {}
    for figure in figures:
        in_force = tuple(sorted(figure.settings.items()))
        key = (figure.mini, figure.is_mean, figure.task, figure.label, figure.run_id, in_force)
        groups.setdefault(key, {})[figure.metric] = figure
        run_ids.setdefault(figure.label, set()).add(figure.run_id)
        settings.setdefault(key[:-1], set()).add(in_force)
    lines = []
    for key in sorted(groups):
        *_, task, label, run_id, in_force = key
        marks = [run_id] if len(run_ids[label]) > 1 else []
        # A task decoded under several settings in one run: say in which of them the lines differ.
        always = set.intersection(*map(set, settings[key[:-1]]))
        marks += [f"{name}={value}" for name, value in in_force if (name, value) not in always]
        system = f"{label} ({', '.join(marks)})" if marks else label
        lines.append(SummaryLine(task=task, system=system, figures=groups[key]))
    return lines


def summary_table(lines: Sequence[SummaryLine], *, title: str = "") -> Table:
    """The lines as a table, with what a reader must know below it."""
    rows = [
        TableRow(cells=text_cells(*line.texts()), begins_group=number > 0 and line.task != lines[number - 1].task)
        for number, line in enumerate(lines)
    ]
    columns = ("Task", "System", "n", *(heading for heading, _ in _COLUMNS.values()))
    return Table(title=title, columns=columns, rows=rows, num_left=2, notes=(_caption(lines),))


def _caption(lines: Sequence[SummaryLine]) -> str:
    sentences = ["In brackets: 95% bootstrap interval by item."] if lines else []
    if any(line.any_figure.mini for line in lines):
        sentences.append(MINI_CAPTION)
    if num_errors := sum(line.errors for line in lines if line.task != MEAN_TASK):
        sentences.append(f"{num_errors} samples are errors and in no figure; run the same command again to retry them.")
    if not all(line.isolated for line in lines):
        sentences.append(f"No isolation: {UNISOLATED}.")
    if any(line.figure("tps") is None for line in lines):
        sentences.append("No TPS where no sample was decoded alone after a warm-up, or on several machines.")
    return " ".join(sentences)
