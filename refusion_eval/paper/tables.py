"""The tables of the paper, each with the published figures beside measured ones."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError, StoreError
from refusion_eval.metrics import Interval
from refusion_eval.paper.formulas import MissingMeasurement, compute, mean
from refusion_eval.paper.names import system_label
from refusion_eval.paths import tasks_path
from refusion_eval.results.cautions import that_hold
from refusion_eval.results.differences import difference, not_in_turns
from refusion_eval.results.measurement import (
    AVERAGE,
    BESIDE,
    TASKS,
    VARIANTS,
    Measurement,
    MeasurementKey,
    Origin,
    apart_by_protocol,
    by_key,
    have_fewer,
    notes_of,
    require_comparable,
    without_protocol,
)
from refusion_eval.results.metric_list import PASS_AT_1, SCORES, SPEED_METRICS
from refusion_eval.results.published import beside_published, published_measurements, read_published
from refusion_eval.results.render import EMPTY, Emphasis, Section, Table, TableCell, TableRow, markdown_text, text_cells
from refusion_eval.runs.settings_tables import load_table

NUMBERS = tuple(range(1, 8))
PUBLISHED_HEADING = "Published, on the benchmarks themselves"
MINI_HEADING = "Measured here, on mini look-alikes of the benchmarks"

_MARKS_SHOWN = (
    "Figures measured here have these marks only where the 95% interval of the difference from the next best leaves "
    "out 0; it is paired by item for runs on the same items, and unpaired for figures of CSV files."
)
_MARKS = (
    f"Bold: best, underlined: second best of a column among figures of one origin; (AR): autoregressive. {_MARKS_SHOWN}"
)
_MARKS_APART = (
    "Bold: best, underlined: second best diffusion model of a column among figures of one origin, italic: "
    f"autoregressive (AR) and above the best of these. {_MARKS_SHOWN}"
)
PaperVersion = Literal["v1", "v2"]

_ORIGINS: Mapping[Origin, str] = {"published": "paper", "measured": "here"}
_CODE = tuple(task for task in TASKS if BENCHMARKS[task].kind == "code")
# Column of Table 6 -> the decoder's name of the setting.
_HYPERPARAMETERS = {
    "Length": "gen_length",
    "tau_slot": "tau_slot",
    "tau_token": "tau_token",
    "k": "slot_size",
    "b": "block_size",
}


class Comparison(NamedTuple):
    """The systems that one of Tables 1 to 4 compares."""

    title: str
    artefact: str  # table of the paper whose published numbers count
    embedded: Mapping[str, str]  # published system -> that of the embedded family in its place on mini tasks
    with_others: bool = False
    apart: bool = False  # whether autoregressive systems take no part in what is best, as in the paper's Table 1
    notes: tuple[str, ...] = ()


_COMPARISONS: Mapping[int, Comparison] = {
    1: Comparison(
        title="Accuracy (pass@1 of HumanEval and MBPP) and throughput of all systems",
        artefact="table1",
        embedded={"qwen3": "autoregressive", "llada": "llada", "dream": "dream", "refusion": "refusion"},
        with_others=True,
        apart=True,
    ),
    2: Comparison(
        title="Controlled comparison: one backbone, one set of training data",
        artefact="table2_v2",
        embedded={
            "qwen3+retrained": "autoregressive_sft",
            "llada+retrained": "llada",
            "bd3lm+retrained": "bd3lm",
            "refusion+retrained": "refusion",
        },
        notes=("Published values are the second version's; the first has others for Qwen3-8B and LLaDA.",),
    ),
    3: Comparison(
        title="Controlled comparison with Dream on Qwen2.5-7B",
        artefact="table3",
        embedded={},  # the embedded family has no Dream, and no ReFusion of such a backbone
        notes=("Published values are the second version's, as the first prints Dream's throughput in ReFusion's row.",),
    ),
    4: Comparison(
        title="Reuse of keys and values against their recomputation",
        artefact="table4",
        embedded={"refusion+recompute_kv": "refusion+recompute_kv", "refusion": "refusion"},
        notes=("Recomputation takes one more forward an iteration; fused runs leave out those that change nothing.",),
    ),
}


# Table 2 as the first version of the paper has it.
_FIRST_TABLE_2 = _COMPARISONS[2]._replace(
    artefact="table2",
    notes=("Published values are the first version's; the second has others for Qwen3-8B and LLaDA.",),
)


# How LaTeX sets the formulas of Tables 5 and 6.
_FORMULAS = {
    "tau_slot": r"$\tau_{\mathrm{slot}}$",
    "tau_token": r"$\tau_{\mathrm{token}}$",
    "k": "$k$",
    "b": "$b$",
    "sum_{l=1..L} C(L,l) ~ 2^L": r"$\sum_{l=1}^{L} \binom{L}{l} \approx 2^L$",
    "2^k * L/k": r"$2^k \cdot L/k$",
    "sum_{i=1..L/k} C(L/k,i)*i! = floor((L/k)!*e) - 1": (
        r"$\sum_{i=1}^{L/k} \binom{L/k}{i}\, i! = \lfloor (L/k)!\, e \rfloor - 1$"
    ),
}


def paper_table(
    number: int, measured: Sequence[Measurement] = (), paper: PaperVersion = "v2", systems: Sequence[str] = ()
) -> Table:
    """A table of the paper with measurements, all of benchmarks or all of mini tasks, beside the published numbers.

    Raises ConfigError if there is no such table or no such system in it, and StoreError if measurements do not compare.
    """
    if number in _COMPARISONS:
        spec = _FIRST_TABLE_2 if (number, paper) == (2, "v1") else _COMPARISONS[number]
        return _comparison(number, spec, measured, systems)
    if systems:
        raise ConfigError(f"Table {number} compares no systems; rows are chosen in Tables 1 to 4")
    others = {5: _designs, 6: _hyperparameters, 7: _other_models}
    if number not in others:
        raise ConfigError(f"the paper has no Table {number}; its tables are 1 to {NUMBERS[-1]}")
    return others[number](measured)


def _table(*, sentences: Sequence[str], **parts: Any) -> Table:
    """A table whose texts are shown character by character, with one paragraph of sentences below it."""
    return Table(**parts, notes=(" ".join(filter(None, sentences)),), escape=markdown_text, formulas=_FORMULAS)


def _chosen(measurements: Sequence[Measurement], systems: Sequence[str]) -> list[Measurement]:
    """The figures of some systems in their order; without any the figures of all, those of ReFusion last."""
    if not systems:
        return sorted(measurements, key=lambda entry: entry.base_system == "refusion")
    names = [(entry, {entry.system.casefold(), system_label(entry).casefold()}) for entry in measurements]
    return [entry for system in systems for entry, of_entry in names if system.casefold() in of_entry]


def _comparison(number: int, spec: Comparison, measured: Sequence[Measurement], systems: Sequence[str]) -> Table:
    published = published_measurements((spec.artefact,))
    labels = {entry.system: entry.label for entry in reversed(published)}
    order = list(dict.fromkeys(entry.system for entry in published))
    asked = spec._replace(with_others=spec.with_others or bool(systems))
    shown = apart_by_protocol(_shown(asked, order, _is_mini(measured), measured))
    mini = _is_mini(shown)
    require_comparable(shown)
    if missing_rows := [name for name in systems if not _chosen([*published, *shown], [name])]:
        names = ", ".join(dict.fromkeys(system_label(entry) for entry in (*published, *shown)))
        raise ConfigError(f"Table {number} has no system {missing_rows[0]!r}; it has {names}")
    published, shown = _chosen(published, systems), _chosen(shown, systems)
    columns = _columns(shown)
    paper = _rows_by_system(published, columns, _printed(spec.artefact), spec.apart)
    here = _rows_by_system(shown, columns, {}, spec.apart)
    rows: list[TableRow | Section] = []
    if mini:
        for heading, part in ((PUBLISHED_HEADING, paper), (MINI_HEADING, here)):
            rows += [Section(text=heading), *itertools.chain(*part.values())] if part else []
    else:
        for system in dict.fromkeys(entry.system for entry in _chosen([*published, *shown], systems)):
            both = [*paper.get(system, ()), *here.get(system, ())]
            rows += [replace(row, begins_group=at == 0) for at, row in enumerate(both)]
    machine = next((entry.hardware for entry in published if entry.hardware), "machine not stated")
    missing = [labels[system] for system in order if system not in map(without_protocol, here)] if here else []
    return _table(
        name=f"table{number}{'_mini' if mini else ''}",
        title=f"{spec.title}{', mini' if mini else ''} (Table {number} of the paper)",
        columns=("System", "Origin", "Figure", *(BENCHMARKS[name].title for name in columns), "Avg."),
        num_left=3,
        rows=rows,
        published_in_italics=not spec.apart,
        sentences=that_hold(
            {
                f"Paper{'' if spec.apart else ' (italics)'}: {machine}, batch 1; no intervals and no sample counts are "
                "published.": published,
                **dict.fromkeys(_notes(shown, columns), True),
                "Scores here were measured on another card than the paper's, and a score moves with the card.": (
                    published and not mini and any(machine not in entry.hardware for entry in shown)
                ),
                **dict.fromkeys([_MARKS_APART if spec.apart else _MARKS, *spec.notes], True),
                f"Not measured: {', '.join(missing)}.": missing and not (mini or systems),
            }
        ),
    )


def _is_mini(measurements: Sequence[Measurement]) -> bool:
    """Whether figures are of mini tasks. Raises StoreError if only some of them are."""
    kinds = {entry.mini for entry in measurements}
    if len(kinds) > 1:
        runs = sorted({entry.run_id for entry in measurements if entry.mini})
        raise StoreError(f"mini look-alikes ({', '.join(runs)}) and benchmarks are in one table; show them in two")
    return kinds == {True}


def _shown(spec: Comparison, order: Sequence[str], mini: bool, measured: Sequence[Measurement]) -> list[Measurement]:
    """The measurements that belong into the table, systems in its order; a mean has to be over all its benchmarks."""
    systems = [spec.embedded[system] for system in order if system in spec.embedded] if mini else list(order)
    fitting = [
        beside_published(entry)
        for entry in measured
        if (entry.benchmark in BENCHMARKS or entry.benchmark == AVERAGE) and entry.metric in (*SCORES, "tps")
    ]
    num_tasks = len(_columns(fitting))
    fitting = [entry for entry in fitting if not entry.is_mean or entry.num_tasks == num_tasks]
    if spec.with_others:
        elsewhere = set(VARIANTS) - set(BESIDE)  # in tables of their own
        others = dict.fromkeys(entry.system for entry in fitting if not elsewhere.intersection(entry.variants))
        systems += [system for system in others if system not in systems]
    return [entry for system in systems for entry in fitting if entry.system == system]


def _columns(measured: Sequence[Measurement]) -> list[str]:
    """The benchmarks of the paper, and after them others that were measured, in the order of `BENCHMARKS`."""
    benchmarks = {*TASKS, *(entry.benchmark for entry in measured)} - {AVERAGE}
    return sorted(benchmarks, key=lambda name: (BENCHMARKS[name].order, name))


def _rows_by_system(
    measurements: Sequence[Measurement], columns: Sequence[str], printed: Mapping[MeasurementKey, str], apart: bool
) -> dict[str, list[TableRow]]:
    """The rows of each system: scores, and throughput if any is known, by benchmark and in the mean."""
    keyed = by_key(measurements)
    first = {entry.system: entry for entry in reversed(measurements)}
    lines: dict[tuple[str, str], list[_Figure]] = {}
    for system in dict.fromkeys(entry.system for entry in measurements):
        for name, metrics in (("score", SCORES), ("TPS", ("tps",))):
            keys = [[(system, task, metric) for metric in metrics] for task in (*columns, AVERAGE)]
            found = [next((keyed[key] for key in of_task if key in keyed), None) for of_task in keys]
            figures = [_Figure(_cell(measurement, printed), measurement) for measurement in found]
            if name == "score" or any(figure.cell.text for figure in figures):
                lines[system, name] = figures
    for name in ("score", "TPS"):
        kinds: dict[bool, list[list[_Figure]]] = {True: [], False: []}
        for (system, kind), figures in lines.items():
            if kind == name:
                kinds[apart and first[system].is_autoregressive].append(figures)
        _mark_best(kinds[False], apart=kinds[True])
    rows: dict[str, list[TableRow]] = {system: [] for system, _ in lines}
    for (system, name), figures in lines.items():
        origin = first[system].origin
        head = text_cells(_label(first[system]), _ORIGINS[origin], name)
        repeats = bool(rows[system])
        cells = (*head, *(figure.cell for figure in figures))
        row = TableRow(cells=cells, origin=origin, begins_group=not repeats, num_repeated=2 * repeats)
        rows[system].append(row)
    return rows


class _Figure(NamedTuple):
    cell: TableCell
    measurement: Measurement | None

    def is_above(self, other: "_Figure") -> bool:
        """Whether a figure is shown to be above another; published ones, without intervals, compare by their values."""
        if self.measurement is None or other.measurement is None:
            return False
        if self.measurement.origin == "published":
            return float(self.cell.text) > float(other.cell.text)
        if self.measurement.metric in SPEED_METRICS and not_in_turns(self.measurement, other.measurement):
            return False
        return difference(other.measurement, self.measurement).interval.low > 0


def _mark_best(lines: Sequence[list[_Figure]], apart: Sequence[list[_Figure]]) -> None:
    """Marks the best and second best of every column, equal ones alike, where the best are above the second best."""
    for column in range(len(lines[0]) if len(lines) > 1 else 0):
        ranked: dict[float, list[list[_Figure]]] = {}
        for line in lines:
            if line[column].cell.text and not line[column].cell.dagger:
                ranked.setdefault(float(line[column].cell.text), []).append(line)
        best, second = ([*(ranked[value] for value in sorted(ranked, reverse=True)[:2]), [], []])[:2]
        for line in apart:
            if best and not line[column].cell.dagger and all(line[column].is_above(one[column]) for one in best):
                _emphasise(line, column, "above")
        if all(one[column].is_above(other[column]) for one in best for other in second) and second:
            for line in best:
                _emphasise(line, column, "best")
            for line in second:
                _emphasise(line, column, "second")


def _emphasise(line: list[_Figure], column: int, emphasis: Emphasis) -> None:
    line[column] = line[column]._replace(cell=replace(line[column].cell, emphasis=emphasis))


def _cell(measurement: Measurement | None, printed: Mapping[MeasurementKey, str]) -> TableCell:
    if measurement is None or math.isnan(measurement.value):
        return EMPTY if measurement is None else TableCell(text="-", dagger=True)
    cell = _interval_cell(measurement.interval, printed.get(measurement.key), dagger=not measurement.complete)
    return replace(cell, spread=f"{measurement.seed_sd:.1f}" if measurement.seed_sd else "")


def _interval_cell(interval: Interval, printed: str | None = None, *, dagger: bool) -> TableCell:
    low, high = (f"{bound:.1f}" if math.isfinite(bound) else "" for bound in (interval.low, interval.high))
    return TableCell(text=printed or f"{interval.value:.1f}", low=low, high=high, n=interval.n, dagger=dagger)


def _notes(measured: Sequence[Measurement], columns: Sequence[str]) -> list[str]:
    """Where measured figures come from: items, intervals, hardware, and what is incomplete."""
    if not measured:
        return ["Nothing was measured."]
    counts: dict[int, list[str]] = {}
    for task in columns:
        for number in sorted({entry.n for entry in measured if entry.benchmark == task}):
            counts.setdefault(number, []).append(BENCHMARKS[task].title)
    items = ", ".join(f"{number} ({', '.join(tasks)})" for number, tasks in counts.items())
    if len(counts) == 1:
        items = f"{next(iter(counts))} items a task"
    scores = [entry for entry in measured if entry.metric in SCORES and entry.benchmark in columns]
    num_items = have_fewer((entry.benchmark, entry.n) for entry in scores)
    fewer = [
        f"{system_label(entry)} ({BENCHMARKS[entry.benchmark].title})"
        for entry, is_less in zip(scores, num_items, strict=True)
        if is_less
    ]
    machines = sorted({entry.hardware for entry in measured if entry.metric == "tps" and entry.hardware})
    statements = {
        f"Here: n = {items}, in brackets 95% intervals.": True,
        "±: standard deviation of the scores that each have one sample of every item, or one seed.": any(
            entry.seed_sd for entry in measured
        ),
        f"Fewer items than in another row: {', '.join(fewer)}.": fewer,
        f"Speed at batch 1 on {'; '.join(machines)}.": machines,
        **dict.fromkeys(notes_of(measured), True),
        f"The averages measured here are over {len(columns)} tasks.": len(columns) > len(TASKS),
        "\u2020 Samples are missing; such figures are never best.": not all(entry.complete for entry in measured),
    }
    return that_hold(statements)


def _label(measurement: Measurement) -> str:
    """Label of a system; autoregressive systems are marked unless their label begins with the decoder's."""
    label, autoregressive = system_label(measurement), DECODERS["autoregressive"].label
    is_marked = measurement.is_autoregressive and not label.startswith(autoregressive)
    return f"{label} ({autoregressive})" if is_marked else label


def _printed(artefact: str) -> dict[MeasurementKey, str]:
    rows = read_published("published.csv")
    return {(row["system"], row["task"], row["metric"]): row["value"] for row in rows if row["artefact"] == artefact}


def _designs(measured: Sequence[Measurement]) -> Table:
    """Table 5, which holds no figures."""
    rows = read_published("designs.csv")
    names = ("label", "scope", "attention", "generation_order", "full_kv_cache_reuse", "masking_patterns")
    notes = dict.fromkeys(f"{row['label']}: {row['note'].split(';')[0]}" for row in rows)
    return _table(
        name="table5",
        title="Designs of masked diffusion models (Table 5 of the paper)",
        columns=("Model", "Scope", "Attention", "Generation order", "Full KV cache reuse", "Masking patterns"),
        num_left=6,
        rows=[TableRow(cells=text_cells(*(row[name] for name in names)), origin="published") for row in rows],
        sentences=["Published; cells that span two rows in the paper are repeated.", f"{'; '.join(notes)}."],
    )


def _hyperparameters(measured: Sequence[Measurement]) -> Table:
    """Table 6: the settings that the paper prints, those of tasks/settings, and those that runs recorded."""
    mini = _is_mini(measured)
    published = {row["task"]: row for row in read_published("hyperparameters.csv") if row["artefact"] == "table6"}
    # The checkpoint brings the mask token; which token it is makes no difference here.
    table = load_table(
        tasks_path() / "settings", "refusion", mini, DECODERS["refusion"].Settings, {"mask_id": 0, "eos_ids": (1,)}
    )
    assert table is not None
    recorded: dict[str, dict[str, Mapping[str, str]]] = {}
    for measurement in measured:
        if measurement.decoded_by == "refusion" and measurement.benchmark in TASKS:
            recorded.setdefault(measurement.benchmark, {})[measurement.run_id] = measurement.settings
    rows: list[TableRow] = []
    for task in TASKS:
        title = BENCHMARKS[task].title
        printed = [published[task][name] for name in _HYPERPARAMETERS.values()]
        rows.append(TableRow(cells=text_cells(title, "paper", *printed), origin="published", begins_group=True))
        for origin, settings in (("here", table.benchmarks.get(task, {})), *recorded.get(task, {}).items()):
            values = [_setting_text(settings.get(name)) for name in _HYPERPARAMETERS.values()]
            marked = [
                TableCell(text=value, dagger=value not in ("", _setting_text(paper)))
                for value, paper in zip(values, printed, strict=True)
            ]
            rows.append(TableRow(cells=(*text_cells(title, origin), *marked), origin="measured", num_repeated=1))
    return _table(
        name=f"table6{'_mini' if mini else ''}",
        title=f"Settings of ReFusion by benchmark{', mini' if mini else ''} (Table 6 of the paper)",
        columns=("Benchmark", "Origin", *_HYPERPARAMETERS),
        num_left=2,
        rows=rows,
        sentences=[
            f"Paper (italics): Table 6. Here: {table.label}; other origins: what that run recorded.",
            "\u2020 differs from the paper.",
        ],
    )


def _setting_text(value: object) -> str:
    """A setting of the paper as the paper writes it, any other as it is."""
    try:
        return "" if value is None else f"{float(str(value)):g}"
    except ValueError:
        return str(value)


def _other_models(measured: Sequence[Measurement]) -> Table:
    """Table 7: models whose figures come from elsewhere, and ReFusion."""
    mini = _is_mini(measured)
    of_refusion = [entry for entry in map(beside_published, measured) if entry.system == "refusion"]
    of_refusion = [entry for entry in of_refusion if entry.benchmark in _CODE and entry.metric in (PASS_AT_1, "tps")]
    require_comparable(of_refusion)
    printed = _printed("table7")
    published = published_measurements(("table7",))
    rows: list[TableRow | Section] = [Section(text=PUBLISHED_HEADING)] if mini else []
    category = ""
    for system in dict.fromkeys(entry.system for entry in published):
        measurements = [entry for entry in published if entry.system == system]
        first = measurements[0]
        if first.settings["category"] != category:
            category = first.settings["category"]
            rows.append(Section(text=category.capitalize()))
        sizes = [first.settings.get(name, "") for name in ("total_params", "activated_params", "system_optimization")]
        shots = {entry.benchmark: entry.settings.get("shots", "") for entry in measurements}
        scores = [f"{printed[system, task, PASS_AT_1]} ({shots[task]}-shot)" for task in _CODE]
        tps = TableCell(
            text=printed[system, "overall", "tps"], dagger=any(entry.defect == "D11" for entry in measurements)
        )
        cells = (*text_cells(first.label, _ORIGINS["published"], *sizes), tps, *text_cells(*scores))
        rows.append(TableRow(cells=cells, origin="published"))
    has_defect = any(entry.defect == "D11" for entry in published)
    if of_refusion:
        rows += [Section(text=MINI_HEADING)] if mini else []
        rows.append(_measured_refusion(of_refusion))
    return _table(
        name=f"table7{'_mini' if mini else ''}",
        title=f"ReFusion beside closed and other models{', mini' if mini else ''} (Table 7 of the paper)",
        columns=("Model", "Origin", "Parameters", "Activated", "System optimised", "TPS", "HumanEval", "MBPP"),
        num_left=5,
        rows=rows,
        sentences=[
            "Paper (italics): figures that the paper quotes, from machines and engines of their own.",
            *_notes(of_refusion, _CODE),
            "TPS of ReFusion: the mean of HumanEval and MBPP.",
            "\u2020 Seed Diffusion's own paper has 2,146 tokens/s." if has_defect else "",
        ],
    )


def _measured_refusion(measurements: Sequence[Measurement]) -> TableRow:
    """The row of ReFusion in Table 7. Its throughput is the mean of the code benchmarks; empty if one is missing."""
    keyed = by_key(measurements)
    scores = [_cell(keyed.get(("refusion", task, PASS_AT_1)), {}) for task in _CODE]
    try:
        interval = compute(lambda read: mean(read.tps("refusion", " ".join(_CODE))), keyed).interval
    except MissingMeasurement:
        tps = EMPTY
    else:
        num_items = sum(entry.n for entry in measurements if entry.metric == "tps")
        tps = _interval_cell(replace(interval, n=num_items), dagger=any(not entry.complete for entry in measurements))
    head = text_cells(_label(measurements[0]), _ORIGINS["measured"], "", "", "no")
    return TableRow(cells=(*head, tps, *scores), origin="measured", begins_group=True)
