"""The compact table of runs (command `table`) and the table of fair speed (command `speed`).

TPS = forwards/s x tokens/forward. The first factor is the engine's and the second is the algorithm's, unless forwards
are fused: fusing saves forwards that the paper's algorithm makes, which is the engine's gain again; such rows are
marked. A speed-up over this engine's autoregressive loop is the algorithm's gain (with fusing, if there is any); a
speed-up over transformers' `generate` has both gains together.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from refusion_eval.benchmarks import OTHER, RELEASE, is_mini
from refusion_eval.errors import StoreError
from refusion_eval.metrics import Interval
from refusion_eval.results.measurement import (
    ACCURACY,
    CUT_IN_THOUGHT,
    JOULES,
    JOULES_PER_TOKEN,
    MEAN_TASK,
    PASS_AT_1,
    REFUSED_NOTE,
    SLOWED,
    SPEEDUP,
    SPEEDUP_STOCK,
    UNISOLATED,
    Measurement,
    require_comparable,
)
from refusion_eval.results.render import Table, TableRow, interval_text, text_cells
from refusion_eval.store.records import BY_FILTER

MINI_CAPTION = "mini: tasks of this project's synthetic look-alikes, not the real benchmarks."


class Column(NamedTuple):
    """One column of numbers; the table prints intervals `with_bounds` only, the CSV has all."""

    metric: str
    heading: str
    digits: int = 1
    factor: float = 1.0
    with_bounds: bool = False

    def text(self, measurement: Measurement | None, missing: str = "") -> str:
        """The cell of a measurement, `missing` without one."""
        if measurement is None:
            return missing
        low, high = (measurement.ci_low, measurement.ci_high) if self.with_bounds else (math.nan, math.nan)
        value, low, high = (self.factor * number for number in (measurement.value, low, high))
        return interval_text(Interval(value, low, high, measurement.n), self.digits, missing)


SUMMARY_COLUMNS = (
    Column(ACCURACY, "Accuracy %", with_bounds=True),
    Column("tps", "TPS", with_bounds=True),
    Column("tpf", "TPF", 2, with_bounds=True),
    Column(SPEEDUP, "Speed-up", 2, with_bounds=True),
)
# A column of its own where a text has a thinking block.
_THOUGHT_COLUMN = Column(CUT_IN_THOUGHT, "Cut in thought %")
SPEED_COLUMNS = (
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
ENERGY_COLUMNS = (Column(JOULES, "J/response"), Column(JOULES_PER_TOKEN, "J/token", 3))
_SPEED_NOTES = (
    "In brackets: 95% interval by item. At batch 1; TPS = forwards/s x tokens/forward.",
    "Limit: TPS in percent of bandwidth / weight bytes; above 100 % if weights fit into a processor cache.",
    "Prefill: up to the end of the first forward, which reads the prompt; Decode TPS: of all forwards after it.",
    "x AR: over the autoregressive loop of this engine, and over that of transformers' generate, on the same items.",
)
_ENERGY_NOTE = (
    "J: of the whole GPU, from its own counter, which advances in steps of some tens of milliseconds; rough for one "
    "response, not for the mean of many."
)
_FUSED_NOTE = (
    "Fused: verifications carry likely next plans, so tok/fwd and x AR hold a gain of this engine beside the "
    "algorithm's; fuse=false shows the algorithm's alone."
)
_FEWER_NOTE = "Fewer items: other runs of that task have more, so its rows do not rest on the same items."
_OTHER_ITEMS_NOTE = (
    "Letters at n: rows of one task with different letters rest on different items, so their figures do not compare; "
    "the command compare --common-items compares the items that two runs share."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryLine:
    """One task of one run under one set of settings, with what tells `system` from other lines of its label."""

    task: str
    system: str
    measurements: dict[str, Measurement]

    def measurement(self, metric: str) -> Measurement | None:
        """The measurement of a column, None if there is none; pass@1 stands for the accuracy of code."""
        return self.measurements.get(metric) or (self.measurements.get(PASS_AT_1) if metric == ACCURACY else None)

    @property
    def any_measurement(self) -> Measurement:
        """The score, or any other measurement if there is none."""
        return self.measurement(ACCURACY) or next(iter(self.measurements.values()))

    @property
    def errors(self) -> int:
        """Samples that are in no measurement."""
        return max(entry.errors for entry in self.measurements.values())

    @property
    def isolated(self) -> bool:
        """Whether no program ran without isolation."""
        return all(entry.isolated for entry in self.measurements.values())

    @property
    def hardware(self) -> str:
        """The machine, with its threads, that the speed of the line was measured on; empty without a speed."""
        return self.measurements["tps"].hardware if "tps" in self.measurements else ""

    def texts(
        self, columns: Sequence[Column] = SUMMARY_COLUMNS, *, fewer: bool = False, letter: str = ""
    ) -> tuple[str, ...]:
        """The cells of the line; `letter` stands for its items where another line of the task has as many others."""
        measurement = self.any_measurement
        mini = " (mini)" if measurement.mini and not is_mini(self.task) else ""
        marks = [f"{self.errors} errors"] if self.errors else []
        marks += ["fewer items"] if fewer else []
        marks += [f"same decode as {measurement.same_decode_as}"] if measurement.same_decode_as else []
        marks += [] if self.isolated else ["no isolation"]
        marks += [f"{measurement.num_cut} cut short"] if measurement.num_cut else []
        marks += ["other prompts"] if OTHER in measurement.prompts else []
        system = f"{self.system} [{', '.join(marks)}]" if marks else self.system
        cells = (column.text(self.measurement(column.metric), missing="-") for column in columns)
        return (self.task + mini, system, f"{measurement.n} {letter}".rstrip(), *cells)


def summary(measurements: Iterable[Measurement]) -> list[SummaryLine]:
    """Condenses measurements of runs to one line a task and run, in their order by task; means last."""
    groups: dict[tuple, dict[str, Measurement]] = {}
    run_ids: dict[str, set[str]] = {}
    settings: dict[tuple, set[tuple]] = {}
    for measurement in measurements:
        in_force = tuple(sorted(measurement.settings.items()))
        label = f"{measurement.label}, fused" if measurement.decoded_fused else measurement.label
        key = (measurement.mini, measurement.is_mean, measurement.task, label, measurement.run_id, in_force)
        groups.setdefault(key, {})[measurement.metric] = measurement
        run_ids.setdefault(label, set()).add(measurement.run_id)
        settings.setdefault(key[:-1], set()).add(in_force)
    lines = []
    for key in sorted(groups):
        *_, task, label, run_id, in_force = key
        marks = [run_id] if len(run_ids[label]) > 1 else []
        # A task decoded under several settings in one run: say in which of them the lines differ.
        always = set.intersection(*map(set, settings[key[:-1]]))
        marks += [f"{name}={value}" for name, value in in_force if (name, value) not in always]
        system = f"{label} ({', '.join(marks)})" if marks else label
        lines.append(SummaryLine(task=task, system=system, measurements=groups[key]))
    return lines


def summary_table(lines: Sequence[SummaryLine]) -> Table:
    """The lines as a table, with what a reader must know below it."""
    thinks = any(line.measurement(CUT_IN_THOUGHT) for line in lines)
    by_filter = sorted({metric for line in lines for metric in line.measurements if metric.startswith(BY_FILTER)})
    filter_columns = [Column(name, f"{name.removeprefix(BY_FILTER)} %", with_bounds=True) for name in by_filter]
    shown = (*SUMMARY_COLUMNS, *filter_columns, *([_THOUGHT_COLUMN] if thinks else []))
    columns = ("Task", "System", "n", *(column.heading for column in shown))
    machines = list(dict.fromkeys(line.hardware for line in lines if line.hardware))
    numbers = {machine: str(number) for number, machine in enumerate(machines, start=1)}
    notes = [_caption(lines)]
    if len(machines) > 1:  # no speed stands above another machine's without a word
        columns = (*columns, "Machine")
        listed = "; ".join(f"{number}: {machine}" for machine, number in numbers.items())
        notes.append(f"Speeds compare within one machine and number of threads only. {listed}.")
    most: dict[str, int] = {}
    for line in lines:
        most[line.task] = max(line.any_measurement.n, most.get(line.task, 0))
    fewer = [line.any_measurement.n < most[line.task] for line in lines]
    if any(fewer):
        notes.append(_FEWER_NOTE)
    letters = _letters_of_items(lines)
    if any(letters):
        notes.append(_OTHER_ITEMS_NOTE)
    rows = []
    for number, line in enumerate(lines):
        cells = line.texts(shown, fewer=fewer[number], letter=letters[number])
        cells += (numbers.get(line.hardware, "-"),) if len(machines) > 1 else ()
        begins_group = number > 0 and line.task != lines[number - 1].task
        rows.append(TableRow(cells=text_cells(*cells), begins_group=begins_group))
    return Table(columns=columns, rows=rows, num_left=2, notes=notes)


def _letters_of_items(lines: Sequence[SummaryLine]) -> list[str]:
    """A letter for each line where lines of a task have equally many but not the same items; else empty texts."""
    sets: dict[tuple[str, int], dict[str, str]] = {}
    keys = [((line.task, line.any_measurement.n), line.any_measurement.items) for line in lines]
    for group, items in keys:
        of_group = sets.setdefault(group, {})
        of_group.setdefault(items, chr(ord("a") + len(of_group)))
    return [sets[group][items] if len(sets[group]) > 1 else "" for group, items in keys]


def _caption(lines: Sequence[SummaryLine]) -> str:
    tasks = [line for line in lines if line.task != MEAN_TASK]
    num_refused = sum(line.any_measurement.num_refused for line in tasks)
    num_errors = sum(line.errors for line in tasks) - num_refused
    rounds = {None if (tps := line.measurement("tps")) is None else tps.num_rounds > 1 for line in lines}
    every = [line.any_measurement for line in lines]
    slowed = {one for line in lines for each in line.measurements.values() for one in each.slowed_by.split("|")} - {""}
    sentences = {
        "There are no samples.": not lines,
        "In brackets: 95% interval by item.": bool(lines),
        "Intervals of speed also cover the rounds in which the systems took turns.": True in rounds,
        "A speed of one round has an interval that leaves out changes of the machine's own speed.": False in rounds,
        f"Speed is {SLOWED}{', '.join(sorted(slowed))}.": bool(slowed),
        MINI_CAPTION: any(one.mini for one in every),
        f"{num_errors} samples are errors and in no figure; run the same command again to retry them.": num_errors > 0,
        f"{num_refused} {REFUSED_NOTE}.": num_refused > 0,
        f"No isolation: {UNISOLATED}.": not all(line.isolated for line in lines),
        "Fused: fewer forwards for the same tokens than the paper's algorithm makes.": any(
            one.decoded_fused for one in every
        ),
        "Cut short: responses that reached the length of the settings, and so may lack their answer.": any(
            one.num_cut for one in every
        ),
        "Tasks with _release: asked with the prompts of ReFusion's release, zero-shot.": any(
            one.prompts == RELEASE for one in every
        ),
        "Other prompts: neither those of this project nor those of the release.": any(
            OTHER in one.prompts for one in every
        ),
        "No TPS where no sample was decoded alone after a warm-up, or on several machines.": None in rounds,
    }
    return " ".join(sentence for sentence, holds in sentences.items() if holds)


class SpeedRow(NamedTuple):
    """The speed of one run on one task: the measurements that have a column, by metric; "tps" is always there."""

    measurements: dict[str, Measurement]
    fewer: bool

    @property
    def tps(self) -> Measurement:
        """The measurement that says what the row is about."""
        return self.measurements["tps"]

    @property
    def complete(self) -> bool:
        """Whether no sample that was asked for is missing."""
        return all(entry.complete for entry in self.measurements.values())


def speed_rows(measurements: Sequence[Measurement]) -> list[SpeedRow]:
    """The timed measurements, one row for each task and run, in their order; means last.

    Raises:
        StoreError: nothing was timed, machines or task versions differ, or a run has a task twice.
    """
    metrics = {column.metric for column in (*SPEED_COLUMNS, *ENERGY_COLUMNS)}
    groups: dict[tuple[bool, str, str], dict[str, Measurement]] = {}
    for measurement in measurements:
        group = groups.setdefault((measurement.mini, measurement.benchmark, measurement.run_id), {})
        if measurement.metric in metrics and group.setdefault(measurement.metric, measurement) is not measurement:
            raise StoreError(
                f"{measurement.run_id} has {measurement.metric} of {measurement.benchmark} twice; compare its settings "
                "with table"
            )
    timed = [group for group in groups.values() if "tps" in group]
    if not timed:
        raise StoreError("nothing was timed in these runs; decode at batch size 1, or some of it with tps_samples")
    for mini in (False, True):
        require_comparable([one for group in timed for one in group.values() if one.mini == mini])
    most: dict[tuple[bool, str], int] = defaultdict(int)
    for tps in (group["tps"] for group in timed):
        most[tps.mini, tps.benchmark] = max(tps.n, most[tps.mini, tps.benchmark])
    rows = [SpeedRow(group, group["tps"].n < most[group["tps"].mini, group["tps"].benchmark]) for group in timed]
    return sorted(rows, key=lambda row: (row.tps.mini, row.tps.is_mean, row.tps.benchmark))


def _columns(rows: Sequence[SpeedRow]) -> tuple[Column, ...]:
    """The columns of some rows: those of energy only where it was measured."""
    return SPEED_COLUMNS + tuple(
        column for column in ENERGY_COLUMNS if any(column.metric in row.measurements for row in rows)
    )


def speed_table(rows: Sequence[SpeedRow]) -> Table:
    """The rows as a table."""
    lines, columns = [], _columns(rows)
    for row in rows:
        tps = row.tps
        facts = {
            tps.run_id: any(other.tps.label == tps.label and other.tps.run_id != tps.run_id for other in rows),
            "half-written": not row.complete,
            "fewer items": row.fewer,
            "fused": tps.fused,
        }
        marks = [mark for mark, holds in facts.items() if holds]
        task = f"{tps.benchmark} (mini)" if tps.mini else tps.benchmark
        system = f"{tps.label} [{', '.join(marks)}]" if marks else tps.label
        cells = [column.text(row.measurements.get(column.metric)) for column in columns]
        lines.append((task, system, str(tps.n), *cells))
    explained = [_FEWER_NOTE] if any(row.fewer for row in rows) else []
    explained += [_ENERGY_NOTE] if len(columns) > len(SPEED_COLUMNS) else []
    explained += [_FUSED_NOTE] if any(row.tps.fused for row in rows) else []
    return Table(
        title="Speed of one request at a time",
        columns=("Task", "System", "n", *(column.heading for column in columns)),
        rows=lines,
        num_left=2,
        notes=(*_SPEED_NOTES, *explained, f"Measured on {' and '.join(sorted({row.tps.hardware for row in rows}))}."),
    )


def speed_cells(rows: Sequence[SpeedRow]) -> tuple[list[str], list[list[Any]]]:
    """Column names, and the values of every row in their order."""
    head = ["run_id", "system", "task", "mini", "complete", "n", "fewer", "fused", "hardware"]
    columns = _columns(rows)
    for column in columns:
        head += [column.metric, f"{column.metric}_ci_low", f"{column.metric}_ci_high"]
    lines = []
    for row in rows:
        tps = row.tps
        line = [tps.run_id, tps.label, tps.benchmark, tps.mini, row.complete, tps.n, row.fewer, tps.fused, tps.hardware]
        for column in columns:
            measurement = row.measurements.get(column.metric)
            line += [None] * 3 if measurement is None else [measurement.value, measurement.ci_low, measurement.ci_high]
        lines.append(line)
    return head, lines
