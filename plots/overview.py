"""Results CSV -> one picture: accuracy, speed and parallelism of every system on every task, with intervals.

python plots/overview.py results/embedded/results.csv --out results/embedded/overview.png

What the bars rest on is written to OUT with the ending .txt.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.paper import style
from refusion_eval.paper.names import mini_sentence, system_label, task_title
from refusion_eval.results.measurement import Measurement, notes_of
from refusion_eval.results.render import read_csv
from refusion_eval.store.atomic_write import prepare_output, write_output

PANELS = (
    (("accuracy", "pass@1"), "Accuracy (%)"),
    (("tps",), "Tokens/s, batch 1"),
    (("tpf",), "Tokens per forward"),
)


def draw(rows: Sequence[Measurement], target: Path) -> None:
    """Writes the picture and its caption. A figure that was not measured has no bar."""
    order = [
        *BENCHMARKS,
        *sorted({row.benchmark for row in rows} - set(BENCHMARKS)),
    ]  # means come last, under no task's name
    named = {(row.is_mean, order.index(row.benchmark), row.task): _title(row) for row in rows}
    tasks = {task: named[place, number, task] for place, number, task in sorted(named)}
    of_label: dict[str, list[Measurement]] = {}
    for row in rows:
        of_label.setdefault(system_label(row), []).append(row)
    by_label = {label: of_system[0].system for label, of_system in of_label.items()}
    in_order = style.in_order(by_label.values())
    labels = sorted(by_label, key=lambda label: (in_order.index(by_label[label]), label))
    with style.paper_style():
        figure = style.new_figure(style.TEXT_WIDTH, 0.5 + 0.1 * len(tasks) * (len(labels) + 1))
        panels = figure.subplots(1, len(PANELS), sharey=True)
        for axes, (metrics, title) in zip(panels, PANELS, strict=True):
            for number, label in enumerate(labels):
                by_task = {row.task: row for row in of_label[label] if row.metric in metrics}
                look = style.style_of(by_label[label], list(by_label.values()))
                hatch = "//////" if of_label[label][0].variants else ""
                _bars(axes, list(tasks), by_task, (number, len(labels)), label, look, hatch)
            axes.set_xlabel(title)
            axes.set_xlim(left=0)
            axes.grid(visible=False, axis="y")
        panels[0].set_yticks(range(len(tasks)), list(tasks.values()))
        panels[0].invert_yaxis()
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=min(len(labels), 5))
        prepare_output(target)
        figure.savefig(target, metadata={"Software": None})
    write_output(target.with_suffix(".txt"), f"{_caption(rows)}\n")


def _title(row: Measurement) -> str:
    return f"{'mini ' if row.mini else ''}mean" if row.is_mean else task_title(row.benchmark, row.mini)


def _bars(
    axes: Axes,
    tasks: Sequence[str],
    rows: Mapping[str, Measurement],
    place: tuple[int, int],
    label: str,
    look: style.Style,
    hatch: str,
) -> None:
    """Draws the bars of one system, the `place[0]`th of `place[1]`; those of a variant are hatched."""
    number, count = place
    height = 0.8 / count
    shown = [(at - 0.4 + height * (number + 0.5), rows[task]) for at, task in enumerate(tasks) if task in rows]
    errors = [
        [max(row.value - row.ci_low, 0) for _, row in shown],
        [max(row.ci_high - row.value, 0) for _, row in shown],
    ]
    axes.barh(
        [centre for centre, _ in shown],
        [row.value for _, row in shown],
        height,
        xerr=errors,
        label=style.in_legend(label),
        color=look.colour,
        hatch=hatch,
        edgecolor="white",
        linewidth=0.4,
        error_kw={"elinewidth": 0.6, "capsize": 1.2, "ecolor": style.GREY},
    )


def _caption(rows: Sequence[Measurement]) -> str:
    measured = [row for row in rows if not row.is_mean]
    items = "\u2013".join(
        str(number) for number in sorted({min(row.n for row in measured), max(row.n for row in measured)})
    )
    hardware = ", ".join(sorted({row.hardware for row in rows if row.hardware}))
    sentences = (
        "Accuracy, tokens per second at batch 1 and tokens per forward of every system on every task "
        f"(n = {items} items a task), with 95% intervals.",
        mini_sentence(rows),
        hardware and f"Hardware: {hardware}.",
        *notes_of(rows),
    )
    return " ".join(filter(None, sentences))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    draw(read_csv(arguments.csv), arguments.out)
    print(f"{arguments.out}\n{arguments.out.with_suffix('.txt')}")


if __name__ == "__main__":
    main()
