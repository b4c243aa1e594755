"""The compact table of runs (command `table`) and the table of fair speed (command `speed`)."""

# TPS = forwards/s x tokens/forward. The first factor is the engine's and the second is the algorithm's, unless forwards
# are fused: fusing saves forwards that the paper's algorithm makes, which is the engine's gain again; such rows are
# marked. A speed-up over this engine's autoregressive loop is the algorithm's gain (with fusing, if there is any); a
# speed-up over transformers' `generate` has both gains together.

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from refusion_eval.benchmarks import RELEASE, is_mini
from refusion_eval.errors import StoreError
from refusion_eval.metrics import Interval
from refusion_eval.results.cautions import FEWER, FEWER_SENTENCE, Caution, extent_sentences, that_hold
from refusion_eval.results.measurement import (
    MEAN_TASK,
    NO_PROTOCOL,
    Measurement,
    have_fewer,
    notes_of,
    require_comparable,
    require_one_machine,
    told_apart,
)
from refusion_eval.results.metric_list import ACCURACY, AVG_AT, OF_SAMPLES, PASS_AT_1, SPEED_METRICS, UNSTATED
from refusion_eval.results.render import Table, TableRow, interval_cells, interval_text, text_cells
from refusion_eval.store.records import BY_FILTER, STATED


class Column(NamedTuple):
    """One column of numbers; the table prints the intervals of some columns, and the CSV has all of them."""

    metric: str
    heading: str
    digits: int = 1
    factor: float = 1.0
    with_bounds: bool = False

    def text(self, measurement: Measurement | None, missing: str = "") -> str:
        if measurement is None:
            return missing
        low, high = (measurement.ci_low, measurement.ci_high) if self.with_bounds else (math.nan, math.nan)
        value, low, high = (self.factor * number for number in (measurement.value, low, high))
        if measurement.num_seeds > 1:
            return f"{value:.{self.digits}f} \u00b1 {self.factor * measurement.seed_sd:.{self.digits}f}"
        return interval_text(Interval(value, low, high, measurement.n), self.digits, missing)


SUMMARY_COLUMNS = (
    Column(ACCURACY, "Accuracy %", with_bounds=True),
    Column("tps", "TPS", with_bounds=True),
    Column("tpf", "TPF", 2, with_bounds=True),
    Column("speedup", "Speed-up", 2, with_bounds=True),
)
SPEED_COLUMNS = (
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
# Of texts with a thinking block.
THOUGHT_COLUMNS = (
    Column("thought_tokens_mean", "Thought tokens"),
    Column("answer_tokens_mean", "Answer tokens"),
    Column("cut_in_thought", "Cut in thought %"),
    Column("ended_by_budget", "Ended by budget %"),
)
# Of servers on machines that are not known; they stand in no column with a speed of this engine.
SERVER_TPS = Column("server_tps", "Server TPS", with_bounds=True)
SERVER_COLUMNS = (
    SERVER_TPS,
    Column("server_forwards_per_second", "Server fwd/s"),
    Column("server_first_byte", "First byte ms", 1, 1000.0),
    Column("server_own_tps", "Own TPS"),
    Column("server_queue", "Queue ms", 1, 1000.0),
    Column("draft_acceptance", "Drafts accepted %", 1, 100.0),
)
ENERGY_COLUMNS = (Column("joules_mean", "J/response"), Column("joules_per_token", "J/token", 3))
_SPEED_NOTES = (
    "In brackets: 95% interval by item. At batch 1; TPS of a task = forwards/s x tokens/forward.",
    "Limit: TPS in percent of bandwidth / weight bytes; above 100 % if weights fit into a processor cache.",
    "Prefill: up to the end of the first forward, which reads the prompt; Decode TPS: of all forwards after it.",
    "x AR: over the autoregressive loop of this engine, and over that of transformers' generate, on the same items.",
)
_ENERGY_NOTE = (
    "J: of the whole GPU, from its own counter, which advances in steps of some tens of milliseconds; rough for one "
    "response, not for the mean of many."
)
_TIMED = ("tps", SERVER_TPS.metric)  # a row of speeds has one of them
_SERVER_NOTES = (
    "Server TPS, Server fwd/s, First byte: by the client's clock, on a machine whose threads and dtype are not known.",
    "Own TPS: the server's tokens by its own seconds of prefill and generation, where it tells them.",
    "Tok/fwd of a server is its algorithm's part, what accepted drafts save; forwards/s are its engine's part.",
)
_BUDGET_NOTE = (
    "Ended by budget: texts whose thought was ended after thought_budget tokens; TPS and TPF count tokens of thoughts "
    "and answers, but not those that ended a thought."
)
_SAMPLES_NOTE = (
    "avg@n: the mean over n samples of every item; \u00b1 is the standard deviation of the n scores that each have one "
    "sample of every item. pass@k: the chance that one of k samples is right. majority@n: the most frequent of n "
    "answers is right. An interval draws items, each with all its samples."
)
_OTHER_ITEMS_NOTE = (
    "Letters at n: rows of one task with different letters rest on different items, so their figures do not compare; "
    "the command compare --common-items compares the items that two runs share."
)


def _marked(system: str, marks: Mapping[str, object]) -> str:
    """The label of a system with those marks in brackets that hold."""
    holding = that_hold(marks)
    return f"{system} [{', '.join(holding)}]" if holding else system


def _labels(cautions: Iterable[Caution]) -> dict[str, object]:
    """The marks of a row for cautions that are not about speeds alone, which the sentences below a table say."""
    return {caution.label: caution.scope == "task" for caution in cautions}


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
    def cautions(self) -> list[Caution]:
        """Those of its score, and of its other measurements, once each."""
        entries = (self.any_measurement, *self.measurements.values())
        return list(dict.fromkeys(one for entry in entries for one in entry.cautions))

    @property
    def hardware(self) -> str:
        """The machine, with its threads, that the speed of the line was measured on; empty without a speed."""
        timed = self.measurements.get("tps") or self.measurements.get("server_tps")
        return timed.hardware if timed else ""

    @property
    def machine(self) -> str:
        """The machine of the speed, or of whatever there is without one."""
        return self.hardware or self.any_measurement.hardware

    def texts(self, columns: Sequence[Column], *, fewer: bool, letter: str, elsewhere: bool) -> tuple[str, ...]:
        """The cells of the line; `letter` stands for its items where another line of the task has as many others."""
        measurement = self.any_measurement
        mini = " (mini)" if measurement.mini and not is_mini(self.task) else ""
        marks = {**_labels(self.cautions), FEWER: fewer, "measured on another card": elsewhere}
        cells = (column.text(self.measurement(column.metric), missing="-") for column in columns)
        return (self.task + mini, _marked(self.system, marks), f"{measurement.n} {letter}".rstrip(), *cells)


def summary(measurements: Iterable[Measurement]) -> list[SummaryLine]:
    """Condenses measurements of runs to one line a task and run, by task; then the means, and tasks without rows."""
    groups: dict[tuple, dict[str, Measurement]] = {}
    run_ids: dict[str, set[str]] = {}
    measurements = list(measurements)
    several = len({entry.protocol for entry in measurements}) > 1
    without_rows: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        if measurement.missing:
            without_rows.setdefault(measurement.task, []).append(measurement)
            continue
        protocol = [measurement.protocol or NO_PROTOCOL] if several else []
        label = ", ".join((measurement.full_label, *protocol))
        key = (measurement.mini, measurement.is_mean, measurement.task, label, measurement.run_id, measurement.row)
        groups.setdefault(key, {})[measurement.metric] = measurement
        run_ids.setdefault(label, set()).add(measurement.run_id)
    lines, ordered = [], sorted(groups)
    rows = [(key[:-1], _what_differs(next(iter(groups[key].values())))) for key in ordered]
    for key, apart in zip(ordered, told_apart(rows), strict=True):
        *_, task, label, run_id, _ = key
        marks = [*([run_id] if len(run_ids[label]) > 1 else []), *apart]
        system = f"{label} ({', '.join(marks)})" if marks else label
        lines.append(SummaryLine(task=task, system=system, measurements=groups[key]))
    for task, entries in without_rows.items():  # one line for all runs, because nothing else tells them apart
        system = ", ".join(dict.fromkeys(entry.label for entry in entries))
        lines.append(SummaryLine(task=task, system=system, measurements={entries[0].metric: entries[0]}))
    return lines


def _what_differs(of: Measurement) -> dict[str, str]:
    """The settings and the like by which the row of a number is told from others."""
    return {**of.settings, "prompts": of.prompts, "protocol": of.protocol, "version": of.row.version}


def summary_table(lines: Sequence[SummaryLine], metrics: Sequence[str] = ()) -> Table:
    """The table of some lines, with the columns of some of the metrics of SUMMARY_COLUMNS, by default of all."""
    named = {metric for line in lines for metric in line.measurements}
    by_filter = sorted(metric for metric in named if metric.startswith(BY_FILTER))
    of_samples = [metric for metric in named if metric.startswith(OF_SAMPLES) and metric != PASS_AT_1]
    of_samples.sort(
        key=lambda metric: (OF_SAMPLES.index(f"{metric.partition('@')[0]}@"), int(metric.partition("@")[2]))
    )
    shown = [column for column in SUMMARY_COLUMNS if not metrics or column.metric in metrics]
    with_speed = any(column.metric in SPEED_METRICS for column in shown)
    shown += [SERVER_TPS] if with_speed and any(line.measurement(SERVER_TPS.metric) for line in lines) else []
    shown += [Column(name, f"{name.removeprefix(BY_FILTER)} %", with_bounds=True) for name in (*of_samples, *by_filter)]
    shown += [column for column in THOUGHT_COLUMNS if any(line.measurement(column.metric) for line in lines)]
    machines = list(dict.fromkeys(line.machine for line in lines if line.machine))
    cards = [line.any_measurement.card for line in lines]
    first_card = next(filter(None, cards), "")
    numbers = {machine: str(number) for number, machine in enumerate(machines, start=1)}
    several = len(machines) > 1  # then no speed stands above another machine's without a word
    listed = "; ".join(f"{number}: {machine}" for machine, number in numbers.items())
    fewer = have_fewer((line.any_measurement.row.source, line.any_measurement.n) for line in lines)
    letters = _letters_of_items(lines)
    notes = {
        _caption(lines, shown): True,
        "Speeds compare within one machine and number of threads only.": several and with_speed,
        f"Machine {listed}.": several,
        FEWER_SENTENCE: any(fewer),
        _OTHER_ITEMS_NOTE: any(letters),
    }
    rows = []
    for number, line in enumerate(lines):
        elsewhere = bool(cards[number]) and cards[number] != first_card
        cells = line.texts(shown, fewer=fewer[number], letter=letters[number], elsewhere=elsewhere)
        cells += (numbers.get(line.machine, "-"),) if several else ()
        begins_group = number > 0 and line.task != lines[number - 1].task
        rows.append(TableRow(cells=text_cells(*cells), begins_group=begins_group))
    columns = ("Task", "System", "n", *(column.heading for column in shown), *(["Machine"] if several else []))
    parts = {
        "scores": any(column.metric not in {*SPEED_METRICS, "tpf"} for column in shown),
        "tokens per forward": not with_speed and any(column.metric == "tpf" for column in shown),
        "speeds of one request at a time": with_speed,
    }
    title = " and ".join(that_hold(parts)).capitalize()
    return Table(columns=columns, rows=rows, num_left=2, notes=that_hold(notes), caption_title=title)


def _letters_of_items(lines: Sequence[SummaryLine]) -> list[str]:
    """A letter for each line where lines of a task have equally many but not the same items; else empty texts."""
    sets: dict[tuple[str, int], dict[str, str]] = {}
    keys = [((line.task, line.any_measurement.n), line.any_measurement.items) for line in lines]
    for group, items in keys:
        of_group = sets.setdefault(group, {})
        of_group.setdefault(items, chr(ord("a") + len(of_group)))
    return [sets[group][items] if len(sets[group]) > 1 else "" for group, items in keys]


def _caption(lines: Sequence[SummaryLine], shown: Sequence[Column]) -> str:
    tasks = [line for line in lines if line.task != MEAN_TASK and not line.any_measurement.is_mean_of_seeds]
    every = [line.any_measurement for line in lines]
    seeds = any(entry.num_seeds > 1 for entry in every)
    release = RELEASE in {entry.prompts for entry in every}
    in_columns = [entry for line in lines for column in shown if (entry := line.measurement(column.metric)) is not None]
    known = notes_of([*in_columns, *every])
    untimed = "tps" in {column.metric for column in shown} and any(not line.hardware for line in lines)
    served = SERVER_TPS in shown
    unstated = [
        f"{line.system} {share.value:.1f} % of {line.task}"
        for line in tasks
        if (share := line.measurement(UNSTATED)) is not None and share.value > 0
    ]
    statements = {
        "There are no samples.": not lines,
        "In brackets: 95% interval by item.": bool(lines),
        **dict.fromkeys(known, True),
        "Mean of seeds: \u00b1 is the standard deviation over runs that differ in their seed only.": seeds,
        _BUDGET_NOTE: any(line.measurement("ended_by_budget") for line in lines),
        _SAMPLES_NOTE: any(metric.startswith(AVG_AT) for line in lines for metric in line.measurements),
        "Tasks with _release: asked with the prompts of ReFusion's release, zero-shot.": release,
        "last %: the last box or stated answer counts (this project's rule for MATH), not any formula in a text.": any(
            line.measurement(STATED) for line in tasks
        ),
        f"Right by any formula, but without a box or a stated answer: {', '.join(unstated)}.": unstated,
        "Server TPS: by the client's clock, on a machine whose threads and dtype are not known.": served,
        "No TPS where no sample was decoded alone after a warm-up, or on several machines.": untimed,
    }
    return " ".join(that_hold(statements))


class SpeedRow(NamedTuple):
    """The speed of one run on one task: `of` is its TPS, or any measurement of a task that has no sample yet."""

    of: Measurement
    measurements: dict[str, Measurement]  # those that have a column, by metric
    fewer: bool
    apart: list[str]  # what tells it from other rows of its task and run


def speed_rows(measurements: Sequence[Measurement]) -> list[SpeedRow]:
    """The timed measurements, one row for each task and run, means last; StoreError if they cannot be compared."""
    metrics = {column.metric for column in (*SPEED_COLUMNS, *ENERGY_COLUMNS, *SERVER_COLUMNS)}
    groups: dict[tuple[Any, ...], dict[str, Measurement]] = {}
    first: dict[tuple[Any, ...], Measurement] = {}
    for measurement in measurements:
        key = (measurement.run_id, measurement.row)
        group, _ = groups.setdefault(key, {}), first.setdefault(key, measurement)
        if measurement.metric in metrics and group.setdefault(measurement.metric, measurement) is not measurement:
            twice = f"{measurement.metric} of {measurement.task} of {measurement.run_id} is there twice"
            raise StoreError(f"{twice}; name each source once")
    if not any(metric in group for group in groups.values() for metric in _TIMED):
        known = " ".join(extent_sentences(entry.conditions for entry in measurements))
        advice = known or "decode at batch size 1, or some of it with tps_samples"
        raise StoreError(f"nothing was timed in these runs, or a server did not tell its tokens; {advice}")
    of = {
        key: next((groups[key][name] for name in _TIMED if name in groups[key]), entry) for key, entry in first.items()
    }
    shown = [key for key, entry in of.items() if not {*_TIMED}.isdisjoint(groups[key]) or not entry.samples]
    entries = [entry for key in shown for entry in groups[key].values()]
    for kind in dict.fromkeys((entry.mini, entry.prompts) for entry in entries):  # other prompts have rows of their own
        require_comparable([entry for entry in entries if (entry.mini, entry.prompts) == kind])
    for mini in (False, True):
        require_one_machine(entry for entry in entries if entry.mini == mini)
    fewer = have_fewer((of[key].row.source, of[key].n) for key in shown)
    ordered = [of[key] for key in shown]
    told = told_apart([((one.mini, one.benchmark, one.run_id), _what_differs(one)) for one in ordered])
    rows = [SpeedRow(of[key], groups[key], less, apart) for key, less, apart in zip(shown, fewer, told, strict=True)]
    return sorted(rows, key=lambda row: (row.of.mini, row.of.is_mean, row.of.benchmark))


def _columns(rows: Sequence[SpeedRow]) -> tuple[Column, ...]:
    """The columns of some rows: those of energy and of servers only where there are any, those of servers alone too."""
    measured = {metric for row in rows for metric in row.measurements}
    others = [column for column in (*SERVER_COLUMNS, *ENERGY_COLUMNS) if column.metric in measured]
    own = [column for column in SPEED_COLUMNS if column.metric in measured or "tps" in measured]
    return (*own, *others)


def speed_table(rows: Sequence[SpeedRow]) -> Table:
    lines, columns = [], _columns(rows)
    for row in rows:
        of = row.of
        marks = {
            of.run_id: any(other.of.label == of.label and other.of.run_id != of.run_id for other in rows),
            **dict.fromkeys(row.apart, True),
            **_labels(of.cautions),
            FEWER: row.fewer,
            "fused": of.fused,
        }
        task = f"{of.benchmark} (mini)" if of.mini else of.benchmark
        cells = [column.text(row.measurements.get(column.metric)) for column in columns]
        lines.append((task, _marked(of.label, marks), str(of.n), *cells))
    every = [entry for row in rows for entry in (row.of, *row.measurements.values())]
    notes = {
        **dict.fromkeys((*_SPEED_NOTES, *notes_of(every)), True),
        **dict.fromkeys(_SERVER_NOTES, SERVER_TPS in columns),
        FEWER_SENTENCE: any(row.fewer for row in rows),
        _ENERGY_NOTE: not set(columns).isdisjoint(ENERGY_COLUMNS),
        "Averages are means over tasks, each column by itself, so that TPS is not that product.": any(
            row.of.is_mean for row in rows
        ),
        f"Measured on {' and '.join(sorted({row.of.hardware for row in rows if row.of.metric in _TIMED}))}.": True,
    }
    headings = ("Task", "System", "n", *(column.heading for column in columns))
    title = "Speed of one request at a time"
    return Table(title=title, columns=headings, rows=lines, num_left=2, notes=that_hold(notes))


def speed_cells(rows: Sequence[SpeedRow]) -> tuple[list[str], list[list[Any]]]:
    lines = []
    for row in rows:
        of = row.of
        line: dict[str, Any] = {"run_id": of.run_id, "system": of.label, "task": of.benchmark, "mini": of.mini}
        line["told_apart_by"] = ", ".join(row.apart)
        line |= {name: getattr(of, name) for name in ("complete", "unfinished", "limited", "n")}
        line |= {"fewer": row.fewer, "fused": of.fused, "hardware": of.hardware, "num_rounds": of.num_rounds}
        line["slowed_by"] = of.slowed_by
        for column in _columns(rows):
            measurement = row.measurements.get(column.metric)
            line |= interval_cells(column.metric, None if measurement is None else measurement.interval)
        lines.append(line)
    return list(lines[0]), [list(line.values()) for line in lines]
