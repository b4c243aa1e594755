"""Tables 1 to 4: systems by benchmark, score above throughput, what the paper prints beside what was measured here."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from refusion_eval.errors import StoreError
from refusion_eval.figures.layout import EMPTY, Emphasis, Entry, Heading, Line, PaperTable, texts
from refusion_eval.figures.names import FUSED_SENTENCE, MINI_SENTENCE, TASK_NAMES, system_label
from refusion_eval.results.figure import AVERAGE, SCORES, TASKS, Figure, Origin, by_key, require_comparable
from refusion_eval.results.published import VARIANTS, beside_published, published_figures, read_published
from refusion_eval.runs.published import published_systems

ORIGIN_NAMES: Mapping[str, str] = {"published": "paper", "measured": "here"}
PUBLISHED_HEADING = "Published, on the benchmarks themselves"
MINI_HEADING = "Measured here, on mini look-alikes of the benchmarks"

_TPS = "tps"
_AUTOREGRESSIVE = ("autoregressive", "autoregressive_sft", "qwen3", "llama3")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What one of these tables compares.

    Attributes:
        number: of the table.
        title: what it shows.
        artefact: whose published cells are in force.
        embedded: published system -> the one of the embedded family that stands in its place on mini tasks.
        with_others: whether other measured systems are listed too.
        notes: what a reader must know of the published figures.
    """

    number: int
    title: str
    artefact: str
    embedded: Mapping[str, str]
    with_others: bool = False
    notes: tuple[str, ...] = ()


COMPARISONS: Mapping[int, Comparison] = {
    1: Comparison(
        number=1,
        title="Accuracy (pass@1 of HumanEval and MBPP) and throughput of all systems",
        artefact="table1",
        embedded={"qwen3": "autoregressive", "llada": "llada", "dream": "dream", "refusion": "refusion"},
        with_others=True,
    ),
    2: Comparison(
        number=2,
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
        number=3,
        title="Controlled comparison with Dream on Qwen2.5-7B",
        artefact="table3",
        embedded={},  # the embedded family has no Dream, and its ReFusion no such backbone
        notes=("Published values are the second version's, as the first prints Dream's throughput in ReFusion's row.",),
    ),
    4: Comparison(
        number=4,
        title="Reuse of keys and values against their recomputation",
        artefact="table4",
        embedded={"refusion+recompute_kv": "refusion+recompute_kv", "refusion": "refusion"},
    ),
}


def comparison_table(number: int, measured: Sequence[Figure]) -> PaperTable:
    """One of Tables 1 to 4.

    Args:
        number: of the table.
        measured: cells of runs, all of the benchmarks or all of mini tasks; none for the published figures alone.

    Raises:
        StoreError: the cells may not stand in one table; says why.
    """
    spec = COMPARISONS[number]
    published = published_figures((spec.artefact,))
    order = list(dict.fromkeys(cell.system for cell in published))
    chosen = _chosen(spec, order, is_mini(measured), measured)
    mini = is_mini(chosen)
    require_comparable(chosen)
    theirs = [(system, by_key(cell for cell in published if cell.system == system)) for system in order]
    ours = [
        (system, by_key(cell for cell in chosen if cell.system == system))
        for system in dict.fromkeys(cell.system for cell in chosen)
    ]
    printed = {(row["system"], row["task"], row["metric"]): row["value"] for row in _printed(spec.artefact)}
    paper_lines = {system: _lines(system, "published", cells, printed) for system, cells in theirs}
    our_lines = {system: _lines(system, "measured", cells, {}) for system, cells in ours}
    _mark_best(paper_lines.values())
    _mark_best(our_lines.values())
    rows: list[Line | Heading] = []
    if mini:
        rows = [Heading(text=PUBLISHED_HEADING), *(line for lines in paper_lines.values() for line in lines)]
        rows += [Heading(text=MINI_HEADING), *(line for lines in our_lines.values() for line in lines)]
    else:
        for system in dict.fromkeys([*paper_lines, *our_lines]):
            both = [*paper_lines.get(system, ()), *our_lines.get(system, ())]
            rows += [replace(line, begins_group=place == 0) for place, line in enumerate(both)]
    not_measured = [] if mini or not ours else [cells_label(theirs, one) for one in order if one not in our_lines]
    return PaperTable(
        name=f"table{number}" + ("_mini" if mini else ""),
        title=f"{spec.title}{', mini' if mini else ''} (Table {number} of the paper)",
        columns=("System", "Origin", "Figure", *TASK_NAMES.values(), "Avg."),
        num_left=3,
        rows=rows,
        caption=[
            *caption(chosen, published),
            "Bold: best, underlined: second best of a column among figures of one origin; (AR): autoregressive.",
            *spec.notes,
            f"Not measured: {', '.join(not_measured)}." if not_measured else "",
        ],
    )


def is_mini(cells: Sequence[Figure]) -> bool:
    """Whether cells are of mini tasks.

    Raises:
        StoreError: some are, and some are not.
    """
    kinds = {cell.mini for cell in cells}
    if len(kinds) > 1:
        runs = sorted({cell.run_id for cell in cells if cell.mini})
        raise StoreError(f"mini look-alikes ({', '.join(runs)}) and benchmarks are in one table; show them in two")
    return kinds == {True}


def caption(measured: Sequence[Figure], published: Sequence[Figure]) -> list[str]:
    """Where the figures come from: n, intervals, hardware, and what is incomplete."""
    sentences = []
    if published:
        machine = next((cell.hardware for cell in published if cell.hardware), "machine not stated")
        sentences.append(f"Paper (italics): {machine}, batch 1; no intervals and no sample counts are published.")
    if not measured:
        return [*sentences, "Nothing was measured."]
    counts: dict[int, list[str]] = {}
    for task in TASKS:
        for number in sorted({cell.n for cell in measured if cell.benchmark == task}):
            counts.setdefault(number, []).append(TASK_NAMES[task])
    if len(counts) == 1:
        shown = f"n = {next(iter(counts))} items a task"
    else:
        shown = "n = " + ", ".join(f"{number} ({', '.join(tasks)})" for number, tasks in counts.items())
    machines = sorted({cell.hardware for cell in measured if cell.metric == _TPS and cell.hardware})
    sentences.append(f"Here: {shown}, in brackets 95% bootstrap intervals.")
    sentences += [f"Speed at batch 1 on {'; '.join(machines)}."] if machines else []
    sentences += [FUSED_SENTENCE] if any(cell.fused for cell in measured) else []
    sentences += [MINI_SENTENCE] if measured[0].mini else []
    if partial := sorted({cell.run_id for cell in measured if not cell.complete}):
        sentences.append(
            f"\u2020 Samples are missing in {', '.join(partial)}: run it again; such figures are never best."
        )
    return sentences


def entry_of(cell: Figure | None, digits: int = 1) -> Entry:
    """A measured figure with its interval; nothing where there is none."""
    if cell is None or math.isnan(cell.value):
        return EMPTY
    bounds = [f"{bound:.{digits}f}" for bound in (cell.ci_low, cell.ci_high)] if cell.has_interval else ["", ""]
    return Entry(text=f"{cell.value:.{digits}f}", low=bounds[0], high=bounds[1], n=cell.n, dagger=not cell.complete)


def label_of(cell: Figure) -> str:
    """A system's name, autoregressive ones marked."""
    label = system_label(cell)
    plain = cell.system.split("+")[0]
    decoders = {name: system.decoder for name, system in published_systems().items()}
    is_ar = plain in _AUTOREGRESSIVE or decoders.get(plain) == "autoregressive"
    return f"{label} (AR)" if is_ar and not label.startswith("AR") else label


def cells_label(systems: Iterable[tuple[str, Mapping]], name: str) -> str:
    """The label of one of some systems."""
    return next(next(iter(cells.values())).label for system, cells in systems if system == name)


def _printed(artefact: str) -> list[dict[str, str]]:
    return [row for row in read_published("published.csv") if row["artefact"] == artefact]


def _chosen(spec: Comparison, order: Sequence[str], mini: bool, measured: Sequence[Figure]) -> list[Figure]:
    """The measured cells that belong into the table, systems in its order."""
    wanted = [spec.embedded[system] for system in order if system in spec.embedded] if mini else list(order)
    metrics = (*SCORES, _TPS)
    fitting = [
        beside_published(cell)
        for cell in measured
        if cell.benchmark in (*TASKS, AVERAGE) and cell.metric in metrics and _is_shown(cell)
    ]
    if spec.with_others:
        others = dict.fromkeys(cell.system for cell in fitting if not set(cell.system.split("+")[1:]) & set(VARIANTS))
        wanted += [system for system in others if system not in wanted]
    return [cell for system in wanted for cell in fitting if cell.system == system]


def _is_shown(cell: Figure) -> bool:
    """A mean is one only if it is over the same seven benchmarks as the paper's."""
    return not cell.is_mean or cell.num_tasks == len(TASKS)


def _lines(
    system: str,
    origin: Origin,
    cells: Mapping[tuple[str, str, str], Figure],
    printed: Mapping[tuple[str, str, str], str],
) -> list[Line]:
    """Score and throughput of one system."""
    lines = []
    for place, (name, metrics) in enumerate((("score", SCORES), ("TPS", (_TPS,)))):
        entries = []
        for task in (*TASKS, AVERAGE):
            key = next(((system, task, metric) for metric in metrics if (system, task, metric) in cells), None)
            entry = EMPTY if key is None else entry_of(cells[key])
            entries.append(replace(entry, text=printed[key]) if key is not None and key in printed else entry)
        if place and not any(entry.text for entry in entries):
            continue  # no speed at all, as of a run in batches
        head = texts(label_of(next(iter(cells.values()))), ORIGIN_NAMES[origin], name)
        repeated = 0 if place == 0 else 2
        lines.append(Line(entries=(*head, *entries), origin=origin, begins_group=place == 0, num_repeated=repeated))
    return lines


def _mark_best(systems: Iterable[list[Line]]) -> None:
    """Marks the best and second best of every column, equal ones alike; nothing where only one system is there."""
    systems = list(systems)
    for name in ("score", "TPS"):
        places = [(of, at) for of in systems for at, line in enumerate(of) if line.entries[2].text == name]
        if len(places) < 2:
            continue
        for column in range(3, 3 + len(TASKS) + 1):
            entries = [of[at].entries[column] for of, at in places]
            values = {float(entry.text) for entry in entries if entry.text and not entry.dagger}
            ranks: Mapping[float, Emphasis] = dict(zip(sorted(values, reverse=True), ("best", "second"), strict=False))
            for (of, at), entry in zip(places, entries, strict=True):
                if entry.text and not entry.dagger and float(entry.text) in ranks:
                    marked = list(of[at].entries)
                    marked[column] = replace(entry, emphasis=ranks[float(entry.text)])
                    of[at] = replace(of[at], entries=tuple(marked))
