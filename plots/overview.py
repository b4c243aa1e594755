"""Results CSV -> one picture: accuracy, speed and parallelism of every system on every task, with intervals.

python plots/overview.py results/embedded/family.csv --out results/embedded/overview.png

What the marks rest on is written to OUT with the ending .txt.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.decoders import Style
from refusion_eval.paper import style
from refusion_eval.paper.names import system_label, task_title
from refusion_eval.results.measurement import Measurement, notes_of
from refusion_eval.results.results_file import read_csv
from refusion_eval.store.atomic_write import prepare_output, write_output

TPS = "Tokens/s, batch 1"
PANELS = (
    (("accuracy", "pass@1"), "Accuracy (%)", "linear"),
    (("tpf",), "Tokens per forward", "log"),
    (("tps",), TPS, "linear"),
)
TICKS = [2**power for power in range(10)]
BAND = "#f4f4f4"


def draw(rows: Sequence[Measurement], target: Path) -> None:
    """Writes the picture and its caption. A figure that was not measured has no mark."""
    order = [
        *BENCHMARKS,
        *sorted({row.benchmark for row in rows} - set(BENCHMARKS)),
    ]  # means come last, under no task's name
    all_mini = all(row.mini for row in rows)
    named = {(row.is_mean, order.index(row.benchmark), row.task): _title(row, all_mini) for row in rows}
    tasks = {task: named[place, number, task] for place, number, task in sorted(named)}
    of_label: dict[str, list[Measurement]] = {}
    for row in rows:
        of_label.setdefault(system_label(row), []).append(row)
    by_label = {label: of_system[0].system for label, of_system in of_label.items()}
    in_order = style.in_order(by_label.values())
    labels = sorted(by_label, key=lambda label: (in_order.index(by_label[label]), label))
    with style.paper_style():
        figure = style.new_figure(style.TEXT_WIDTH, 1.75 * len(PANELS) + 0.6)
        panels = figure.subplots(len(PANELS), 1, sharex=True)
        for axes, (metrics, title, scale) in zip(panels, PANELS, strict=True):
            axes.set_yscale(scale)
            for number, label in enumerate(labels):
                by_task = {row.task: row for row in of_label[label] if row.metric in metrics}
                look = style.style_of(by_label[label], list(by_label.values()))
                _marks(axes, list(tasks), by_task, (number, len(labels)), label, look)
            for place in range(0, len(tasks), 2):  # every second task on a band, so that the eye keeps to its task
                axes.axvspan(place - 0.5, place + 0.5, facecolor=BAND, zorder=0)
            axes.axvline(
                sum(not is_mean for is_mean, *_ in named) - 0.5, color=style.GREY, linewidth=0.6
            )  # before means
            axes.set_ylabel(title)
            axes.grid(visible=False, axis="x")
            if scale == "log":
                axes.yaxis.set_major_formatter("{x:g}")
                axes.set_yticks([size for size in TICKS if size <= axes.get_ylim()[1]])
                axes.yaxis.set_minor_formatter(NullFormatter())
            elif title == TPS:
                axes.set_ylim(bottom=0)
        panels[-1].set_xticks(range(len(tasks)), list(tasks.values()))
        panels[-1].tick_params(axis="x", length=0)
        panels[-1].set_xlim(-0.5, len(tasks) - 0.5)
        if all_mini:
            panels[-1].set_xlabel("Mini tasks")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=min(len(labels), 4))
        figure.align_ylabels(panels)
        prepare_output(target)
        figure.savefig(target, metadata={"Software": None})
    write_output(target.with_suffix(".txt"), f"{_caption(rows)}\n")


def _title(row: Measurement, all_mini: bool) -> str:
    mini = row.mini and not all_mini
    return f"{'mini ' if mini else ''}mean" if row.is_mean else task_title(row.benchmark, mini)


def _marks(
    axes: Axes,
    tasks: Sequence[str],
    rows: Mapping[str, Measurement],
    place: tuple[int, int],
    label: str,
    look: Style,
) -> None:
    """Draws the marks and intervals of one system, the `place[0]`th of `place[1]` beside each other on a task."""
    number, count = place
    shown = [(at - 0.42 + 0.84 * (number + 0.5) / count, rows[task]) for at, task in enumerate(tasks) if task in rows]
    errors = [
        [max(row.value - row.ci_low, 0) for _, row in shown],
        [max(row.ci_high - row.value, 0) for _, row in shown],
    ]
    drawn = axes.errorbar(
        [middle for middle, _ in shown],
        [row.value for _, row in shown],
        errors,
        marker=look.marker,
        markersize=4.2,
        linestyle="none",
        color=look.colour,
        markeredgecolor=style.BLACK,
        markeredgewidth=0.3,
        elinewidth=0.9,
    )
    drawn.lines[0].set_label(style.in_legend(label))  # of the mark alone, so that the legend shows no bar


def _caption(rows: Sequence[Measurement]) -> str:
    measured = [row for row in rows if not row.is_mean]
    items = "\u2013".join(
        str(number) for number in sorted({min(row.n for row in measured), max(row.n for row in measured)})
    )
    hardware = ", ".join(sorted({row.hardware for row in rows if row.hardware}))
    sentences = (
        "Accuracy, tokens per forward and tokens per second at batch 1 of every system on every task "
        f"(n = {items} items a task), with 95% intervals as lines.",
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
