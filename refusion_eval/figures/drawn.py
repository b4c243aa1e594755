"""What the drawings of points share: curves with intervals, the operating point's ring, names, and captions."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from refusion_eval.figures import style
from refusion_eval.figures.names import FUSED_SENTENCE, MINI_SENTENCE, task_name
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
    """Rings what is an operating point."""
    for point in points:
        if point.mark == OPERATING_POINT:
            axes.plot([point.x], [point.y], zorder=4, **RING)


def line(
    axes: Axes, points: Sequence[Point], places: Sequence[float], look: style.Look, label: str, *, x_bars: bool = False
) -> None:
    """A curve with its intervals, each point a filled marker; nothing where there are no points."""
    if not points:
        return
    drawn = axes.errorbar(
        places,
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
    for place, point in zip(places, points, strict=True):
        if point.note:
            axes.annotate("\u2020", (place, point.y), (0, 4), textcoords="offset points", ha="center", size=8)


def bars(points: Sequence[Point], axis: str) -> np.ndarray:
    """Lengths of error bars, [2, points]; nothing is drawn where there is no interval."""
    middle = np.array([getattr(point, axis) for point in points])
    low, high = (np.array([getattr(point, f"{axis}_{side}") for point in points]) for side in ("low", "high"))
    return np.maximum(np.stack([middle - low, high - middle]), 0)


def row_of_axes(figure: Figure, columns: int) -> list[Axes]:
    """Axes side by side."""
    return list(figure.subplots(1, columns, squeeze=False)[0])


def benchmark(points: Sequence[Point]) -> str:
    """The benchmark that points are about."""
    return task_name(points[0].task, points[0].mini)


def only_mini(points: Sequence[Point]) -> str:
    """The sentence that mini tasks come with."""
    is_mini = any(point.mini for point in points)
    return MINI_SENTENCE if is_mini else ""


def caption(points: Sequence[Point], unit: str = "items") -> list[str]:
    """Intervals, n, hardware, and what is incomplete."""
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
        FUSED_SENTENCE if any(point.fused for point in points) else "",
        f"\u2020 {'; '.join(notes)}." if notes else "",
    ]
