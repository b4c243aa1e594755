"""Every table of the paper by its number; here Tables 5 (designs), 6 (settings) and 7 (closed and other models)."""

from collections.abc import Mapping, Sequence

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.claims.formula import MissingCell, evaluate
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError
from refusion_eval.figures.comparisons import (
    COMPARISONS,
    MINI_HEADING,
    ORIGIN_NAMES,
    PUBLISHED_HEADING,
    caption,
    comparison_table,
    entry_of,
    is_mini,
    label_of,
)
from refusion_eval.figures.layout import EMPTY, Entry, Heading, Line, PaperTable, texts
from refusion_eval.figures.names import TASK_NAMES
from refusion_eval.metrics.bootstrap import Interval
from refusion_eval.paths import tasks_path
from refusion_eval.results.figure import TASKS, Figure, by_key, require_comparable
from refusion_eval.results.published import beside_published, published_figures, read_published
from refusion_eval.runs.settings import load_table

NUMBERS = tuple(range(1, 8))

# Column of Table 6 -> the decoder's name of the setting.
_HYPERPARAMETERS = {
    "Length": "gen_length",
    "tau_slot": "tau_slot",
    "tau_token": "tau_token",
    "k": "slot_size",
    "b": "block_size",
}
_CODE = tuple(name for name, benchmark in BENCHMARKS.items() if benchmark.kind == "code")


def paper_table(number: int, measured: Sequence[Figure] = ()) -> PaperTable:
    """A table of the paper.

    Args:
        number: 1 to 7.
        measured: figures of runs, all of benchmarks or all of mini tasks; none for what is published.

    Raises:
        ConfigError: there is no such table.
        StoreError: the cells may not stand in one table; says why.
    """
    if number in COMPARISONS:
        return comparison_table(number, measured)
    others = {5: _designs, 6: _hyperparameters, 7: _other_models}
    if number not in others:
        raise ConfigError(f"the paper has no Table {number}; its tables are 1 to {NUMBERS[-1]}")
    return others[number](measured)


def _designs(measured: Sequence[Figure]) -> PaperTable:
    """Table 5, which is about no figures."""
    rows = read_published("designs.csv")
    names = ("label", "scope", "attention", "generation_order", "full_kv_cache_reuse", "masking_patterns")
    notes = dict.fromkeys(row["note"].split(";")[0] for row in rows)
    return PaperTable(
        name="table5",
        title="Designs of masked diffusion models (Table 5 of the paper)",
        columns=("Model", "Scope", "Attention", "Generation order", "Full KV cache reuse", "Masking patterns"),
        num_left=6,
        rows=[Line(entries=texts(*(row[name] for name in names)), origin="published") for row in rows],
        caption=["Published; cells that span two rows in the paper are repeated.", f"{'; '.join(notes)}."],
    )


def _hyperparameters(measured: Sequence[Figure]) -> PaperTable:
    """Table 6: what the paper prints, what tasks/settings says, and what runs of ReFusion recorded."""
    mini = is_mini(measured)
    published = {row["task"]: row for row in read_published("hyperparameters.csv") if row["artefact"] == "table6"}
    # The checkpoint brings the mask token; which one it is makes no difference here.
    table = load_table(
        tasks_path() / "settings", "refusion", mini, DECODERS["refusion"].Settings, {"mask_id": 0, "eos_ids": (1,)}
    )
    assert table is not None
    recorded: dict[str, dict[str, Mapping[str, str]]] = {}
    for cell in measured:
        if cell.base_system == "refusion" and cell.benchmark in TASKS:
            recorded.setdefault(cell.benchmark, {})[cell.run_id] = cell.settings
    rows: list[Line | Heading] = []
    for task in TASKS:
        theirs = [published[task][name] for name in _HYPERPARAMETERS.values()]
        name = TASK_NAMES[task]
        rows.append(Line(entries=texts(name, "paper", *theirs), origin="published", begins_group=True))
        ours = [("here", table.benchmarks.get(task, {})), *recorded.get(task, {}).items()]
        for whence, settings in ours:
            values = [_setting(settings.get(name)) for name in _HYPERPARAMETERS.values()]
            marked = [
                Entry(text=value, dagger=bool(value) and float(value) != float(printed))
                for value, printed in zip(values, theirs, strict=True)
            ]
            rows.append(Line(entries=(*texts(name, whence), *marked), origin="measured", num_repeated=1))
    return PaperTable(
        name="table6" + ("_mini" if mini else ""),
        title=f"Settings of ReFusion by benchmark{', mini' if mini else ''} (Table 6 of the paper)",
        columns=("Benchmark", "Origin", *_HYPERPARAMETERS),
        num_left=2,
        rows=rows,
        caption=[
            f"Paper (italics): Table 6. Here: tasks/settings/{table.path.name}; other origins: what that run recorded.",
            "\u2020 differs from the paper.",
        ],
    )


def _setting(value: object) -> str:
    return "" if value is None else f"{float(str(value)):g}"


def _other_models(measured: Sequence[Figure]) -> PaperTable:
    """Table 7: models whose figures come from elsewhere, and ReFusion."""
    mini = is_mini(measured)
    ours = [cell for cell in map(beside_published, measured) if cell.system == "refusion" and cell.benchmark in _CODE]
    ours = [cell for cell in ours if cell.metric in ("pass@1", "tps")]
    require_comparable(ours)
    published = published_figures(("table7",))
    printed = {
        (row["system"], row["task"], row["metric"]): row["value"]
        for row in read_published("published.csv")
        if row["artefact"] == "table7"
    }
    rows: list[Line | Heading] = [Heading(text=PUBLISHED_HEADING)] if mini else []
    category = ""
    for system in dict.fromkeys(cell.system for cell in published):
        of_system = [cell for cell in published if cell.system == system]
        settings = of_system[0].settings
        if settings["category"] != category:
            category = settings["category"]
            rows.append(Heading(text=category.capitalize()))
        sizes = [settings.get(name, "") for name in ("total_params", "activated_params", "system_optimization")]
        shots = {cell.benchmark: cell.settings.get("shots", "") for cell in of_system}
        scores = [f"{printed[system, task, 'pass@1']} ({shots[task]}-shot)" for task in _CODE]
        figures = (*sizes, printed[system, "overall", "tps"], *scores)
        dagger = any(cell.defect == "D11" for cell in of_system)
        entries = (*texts(of_system[0].label, ORIGIN_NAMES["published"]), *texts(*figures))
        if dagger:
            entries = tuple(Entry(text=entry.text, dagger=place == 5) for place, entry in enumerate(entries))
        rows.append(Line(entries=entries, origin="published"))
    if ours:
        rows += [Heading(text=MINI_HEADING)] if mini else []
        rows.append(_measured_refusion(ours))
    return PaperTable(
        name="table7" + ("_mini" if mini else ""),
        title=f"ReFusion beside closed and other models{', mini' if mini else ''} (Table 7 of the paper)",
        columns=("Model", "Origin", "Parameters", "Activated", "System optimised", "TPS", "HumanEval", "MBPP"),
        num_left=5,
        rows=rows,
        caption=[
            "Paper (italics): figures that the paper quotes, from machines and engines of their own.",
            *caption(ours, []),
            "TPS of ReFusion: the mean of HumanEval and MBPP.",
            "\u2020 Seed Diffusion's own paper has 2,146 tokens/s." if any(_has_dagger(row) for row in rows) else "",
        ],
    )


def _measured_refusion(cells: Sequence[Figure]) -> Line:
    placed = by_key(cells)
    scores = [entry_of(placed.get(("refusion", task, "pass@1"))) for task in _CODE]
    try:
        speed = _entry(evaluate("mean(tps('refusion', 'humaneval mbpp'))", placed).interval, cells)
    except MissingCell:
        speed = EMPTY
    head = texts(label_of(cells[0]), ORIGIN_NAMES["measured"], "", "", "no")
    return Line(entries=(*head, speed, *scores), origin="measured", begins_group=True)


def _entry(interval: Interval, cells: Sequence[Figure]) -> Entry:
    low, high = (f"{bound:.1f}" if bound == bound else "" for bound in (interval.low, interval.high))
    incomplete = any(not cell.complete for cell in cells)
    return Entry(
        text=f"{interval.value:.1f}",
        low=low,
        high=high,
        n=sum(c.n for c in cells if c.metric == "tps"),
        dagger=incomplete,
    )


def _has_dagger(row: Line | Heading) -> bool:
    return isinstance(row, Line) and any(entry.dagger for entry in row.entries)
