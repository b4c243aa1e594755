"""Results CSV -> one picture: accuracy, speed and parallelism of every system on every task, with intervals.

python plots/overview.py results/embedded/results.csv --out results/embedded/overview.png
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from refusion_eval.figures.style import Style, style_of
from refusion_eval.results.figure import MEAN_TASK, Figure
from refusion_eval.results.render import read_csv

PANELS = (
    (("accuracy", "pass@1"), "Accuracy (%)"),
    (("tps",), "Tokens per second, batch 1"),
    (("tpf",), "Tokens per forward"),
)


def draw(rows: Sequence[Figure], target: Path) -> None:
    """Writes the picture. A figure that was not measured has no bar."""
    tasks = sorted({row.task for row in rows if row.task != MEAN_TASK})
    if any(row.task == MEAN_TASK for row in rows):
        tasks.append(MEAN_TASK)
    systems = {row.label: row.system for row in sorted(rows, key=lambda row: row.label, reverse=True)}
    figure, panels = plt.subplots(
        1, len(PANELS), figsize=(13, 0.42 * len(tasks) * len(systems) ** 0.5 + 1.6), sharey=True
    )
    for axes, (metrics, title) in zip(panels, PANELS, strict=True):
        for number, system in enumerate(systems):
            by_task = {row.task: row for row in rows if row.label == system and row.metric in metrics}
            _bars(axes, tasks, by_task, number, len(systems), system, style_of(systems[system], list(systems.values())))
        axes.set_title(title, fontsize=11)
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
    benchmarks = {row.task: f"{'mini ' if row.mini else ''}{row.benchmark}" for row in rows} | {MEAN_TASK: MEAN_TASK}
    panels[0].set_yticks(range(len(tasks)), [benchmarks[task] for task in tasks])
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.text(0.01, 0.008, _caption(rows), fontsize=8, color="#444444")
    figure.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 0.025), ncols=len(systems), frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(target, dpi=150, metadata={"Software": None})
    plt.close(figure)


def _bars(
    axes: Axes, tasks: Sequence[str], rows: dict[str, Figure], number: int, count: int, label: str, style: Style
) -> None:
    height = 0.8 / count
    places = [place for place, task in enumerate(tasks) if task in rows]
    values = [rows[tasks[place]] for place in places]
    centres = [place - 0.4 + height * (number + 0.5) for place in places]
    errors = [
        [max(row.value - row.ci_low, 0) for row in values],
        [max(row.ci_high - row.value, 0) for row in values],
    ]
    bars = [row.value for row in values]
    axes.barh(
        centres,
        bars,
        height,
        xerr=errors,
        label=label,
        color=style.colour,
        edgecolor="white",
        linewidth=0.6,
        error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#303030"},
    )


def _caption(rows: Sequence[Figure]) -> str:
    hardware = ", ".join(sorted({row.hardware for row in rows if row.hardware}))
    mini = "Mini tasks (synthetic), not the real benchmarks. " if any(row.mini for row in rows) else ""
    return f"{mini}Bars: 95% intervals. {hardware}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    draw(read_csv(arguments.csv), arguments.out)


if __name__ == "__main__":
    main()
