"""Runs -> one picture: throughput and latency of every system by the number of requests at once.

python plots/concurrency.py results/runs/server results/runs/embedded-refusion --out concurrency.png

What was measured where is written to OUT with the ending .txt.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from refusion_eval.paper import style
from refusion_eval.results.concurrency import LoadPoint, load_points
from refusion_eval.store.atomic_write import prepare_output, write_output


def draw(points: Sequence[LoadPoint], target: Path) -> None:
    """Writes the picture and its caption."""
    series = list(dict.fromkeys((point.system, point.where) for point in points))
    with style.paper_style():
        figure = style.new_figure(style.TEXT_WIDTH, 2.4)
        in_sum, latency = figure.subplots(1, 2)
        band = {"alpha": 0.15, "linewidth": 0}
        for (system, where), look in zip(series, style.ORDERED * len(series), strict=False):
            own = [point for point in points if (point.system, point.where) == (system, where)]
            numbers = [point.concurrency for point in own]
            line = {"color": look.colour, "marker": look.marker, "linestyle": look.line}
            in_sum.plot(numbers, [point.tokens_per_second for point in own], label=style.in_legend(system), **line)
            latency.plot(numbers, [point.latency_p50 for point in own], **line)
            latency.fill_between(
                numbers, [p.latency_p50 for p in own], [p.latency_p95 for p in own], color=look.colour, **band
            )
        for axes, title in ((in_sum, "Tokens/s of all requests"), (latency, "Seconds of a request")):
            _label(axes, title, sorted({point.concurrency for point in points}))
        figure.legend(*in_sum.get_legend_handles_labels(), loc="outside upper center", ncols=min(len(series), 4))
        marks = [Line2D([], [], color="black"), Patch(color="black", **band)]
        latency.legend(marks, ["median", "up to the 95th percentile"], loc="upper left")
        prepare_output(target)
        figure.savefig(target, metadata={"Software": None})
    write_output(target.with_suffix(".txt"), f"{_caption(points)}\n")


def _label(axes: Axes, title: str, numbers: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, list(map(str, numbers)))
    axes.set_xlabel("Requests at once")
    axes.set_ylabel(title)
    axes.set_ylim(bottom=0)


def _caption(points: Sequence[LoadPoint]) -> str:
    places = "; ".join(dict.fromkeys(f"{point.system}: {point.where}" for point in points))
    sizes = sorted({point.n for point in points})
    numbers = " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))
    return (
        "Left: tokens of all requests by the seconds in which at least one was in flight, against the number of "
        "requests at once. Right: seconds of a request, the median as a line, up to the 95th percentile as a band. "
        f"n = {numbers} requests a point. Measured on {places}; curves of different machines, or of a server on a "
        "machine that is not known, show a shape and no order."
    )


def main() -> None:
    """Reads the runs and draws them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="+", type=Path, help="RUN_DIR of `run --concurrency`, a folder of such runs, or run directories"
    )
    parser.add_argument("--out", type=Path, default=Path("concurrency.png"))
    arguments = parser.parse_args()
    draw(load_points(arguments.runs), arguments.out)
    print(f"{arguments.out} {arguments.out.with_suffix('.txt')}")


if __name__ == "__main__":
    main()
