"""Parts that all plots of points share: curves with intervals, rings around operating points, and captions."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from refusion_eval.decoders.decoder import Style
from refusion_eval.figures import style
from refusion_eval.figures.names import fused_sentence, mini_sentence, task_title
from refusion_eval.figures.rows import OPERATING_POINT, Point

SCORES = {"accuracy": "Accuracy (%)", "pass@1": "pass@1 (%)", "tps": "Tokens/s"}
NO_PUBLISHED = "The paper's values are not public."

RING: Mapping = {
    "marker": "o",
    "markersize": 8.5,
    "markerfacecolor": "none",
    "markeredgecolor": style.BLACK,
    "markeredgewidth": 0.9,
    "linestyle": "none",
}


def ring(axes: Axes, points: Sequence[Point]) -> None:
    """Draws a ring around every operating point."""
    for point in points:
        if point.mark == OPERATING_POINT:
            axes.plot([point.x], [point.y], zorder=4, **RING)


def line(
    axes: Axes, points: Sequence[Point], xs: Sequence[float], look: Style, label: str, *, x_bars: bool = False
) -> None:
    """Draws a curve with its intervals; every point is a filled marker, and a dagger stands above points with a note.

    Args:
        axes: axes to draw in.
        points: points in order; nothing is drawn if there are none.
        xs: where the points stand on the axis.
        look: style of the system.
        label: entry of the legend; empty for none.
        x_bars: whether the intervals of x are drawn, too.
    """
    if not points:
        return
    drawn = axes.errorbar(
        xs,
        [point.y for point in points],
        xerr=bars(points, "x") if x_bars else None,
        yerr=bars(points, "y"),
        marker=look.marker,
        linestyle=look.line,
        color=look.colour,
        markeredgecolor=style.BLACK,
        markeredgewidth=0.4,
        elinewidth=0.7,
        capsize=1.6,
        zorder=3,
    )
    if label:
        drawn.lines[0].set_label(label)  # of the curve alone, so that the legend shows no bars
    for x, point in zip(xs, points, strict=True):
        if point.note:
            axes.annotate("\u2020", (x, point.y), (0, 4), textcoords="offset points", ha="center", size=8)


def bars(points: Sequence[Point], axis: str) -> np.ndarray:
    """Lengths of error bars, [2, points]; NaN, which draws nothing, where there is no interval."""
    intervals = [point.interval(axis) for point in points]
    return np.maximum([[i.value - i.low for i in intervals], [i.high - i.value for i in intervals]], 0)


def row_of_axes(figure: Figure, columns: int) -> list[Axes]:
    """Axes side by side."""
    return list(figure.subplots(1, columns, squeeze=False)[0])


def benchmark_title(points: Sequence[Point]) -> str:
    """Title of the benchmark that the points belong to."""
    return task_title(points[0].task, points[0].mini)


def mini_note(points: Sequence[Point]) -> str:
    """The sentence that mini tasks come with; empty if there are none."""
    return mini_sentence(any(point.mini for point in points))


def caption(points: Sequence[Point], unit: str = "items") -> list[str]:
    """Sentences about intervals, items, hardware, and what is incomplete."""
    if not points:
        return []
    counts = sorted({point.n for point in points if point.n})
    with_bars = any(not math.isnan(point.y_low) for point in points)
    shown = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}" if counts else "not stated"
    machines = sorted({point.hardware for point in points if point.hardware})
    notes = sorted({point.note for point in points if point.note})
    return [
        f"Filled: measured, n = {shown} {unit} a point{', bars: 95% bootstrap intervals' if with_bars else ''}.",
        f"Hardware: {', '.join(machines)}." if machines else "",
        fused_sentence(points),
        f"\u2020 {'; '.join(notes)}." if notes else "",
    ]
