"""Figure 1: score and throughput against the autoregressive baseline."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from refusion_eval.figures import drawn, style
from refusion_eval.figures.labels import Label, place_labels
from refusion_eval.figures.rows import Point

_LEAST_RANGE = 12.0  # points of score, so that differences of single items look small


def draw_against_baseline(points: Sequence[Point]) -> Figure:
    """Figure 1: score and throughput minus the baseline's, published and measured points in separate axes."""
    published = [point for point in points if point.origin == "published"]
    measured = [point for point in points if point.origin == "measured"]
    groups = [group for group in (published, measured) if group]
    with style.paper_style():
        figure = style.new_figure(style.TEXT_WIDTH if len(groups) > 1 else style.COLUMN_WIDTH, 2.75)
        panels = list(zip(drawn.row_of_axes(figure, len(groups)), groups, strict=True))
        for number, (axes, group) in enumerate(panels):
            is_published = group[0].origin == "published"
            title = (
                f"published, MBPP ({group[0].hardware})"
                if is_published
                else f"measured, {drawn.benchmark_title(group)}"
            )
            _quadrants(axes, group)
            for point in group:
                _dot(axes, point, [other.series for other in group])
            style.panel_title(axes, number, title)
            axes.set_xlabel("Throughput minus AR baseline (tokens/s)")
            axes.set_ylabel("Score minus AR baseline (points)" if number == 0 else "")
        style.add_caption(figure, [drawn.mini_note(measured), _published_note(published), *drawn.caption(measured)])
        figure.draw_without_rendering()  # labels are placed in the final layout
        for axes, group in panels:
            labels = [Label(point.label + ("\u2020" if point.note else ""), point.x, point.y) for point in group]
            lines = [line.get_window_extent() for line in axes.get_lines() if line.get_label() == "baseline"]
            place_labels(axes, labels, size=6.5, lines=lines)
    return figure


def _quadrants(axes: Axes, points: Sequence[Point]) -> None:
    """Draws the two lines of the baseline and shades the quadrant in which a system is better in both."""
    for low, high, set_limits, least in (
        (*_extent(points, "x"), axes.set_xlim, 1.0),
        (*_extent(points, "y"), axes.set_ylim, _LEAST_RANGE),
    ):
        span = max(high - low, least)
        middle = (low + high) / 2
        room = 0.62 * span
        set_limits(middle - room, middle + room)
    axes.axhspan(0, axes.get_ylim()[1], xmin=_share(axes, 0.0), facecolor=style.SWEET_SPOT, zorder=0)
    for line in (axes.axhline, axes.axvline):
        line(0, color=style.BLACK, linewidth=0.6, linestyle=(0, (4, 2)), zorder=1, label="baseline")
    axes.text(
        0.985, 0.98, "faster and better", transform=axes.transAxes, ha="right", va="top", size=6.5, style="italic"
    )


def _extent(points: Sequence[Point], axis: str) -> tuple[float, float]:
    """Least and greatest of all values and bounds, 0 included."""
    values = [getattr(point, f"{axis}{end}") for point in points for end in ("", "_low", "_high")]
    defined = [0.0, *(value for value in values if not math.isnan(value))]
    return min(defined), max(defined)


def _share(axes: Axes, value: float) -> float:
    low, high = axes.get_xlim()
    return (value - low) / (high - low)


def _dot(axes: Axes, point: Point, others: Sequence[str]) -> None:
    look = style.style_of(point.series, others)
    published = point.origin == "published"
    axes.errorbar(
        point.x,
        point.y,
        xerr=drawn.bars([point], "x"),
        yerr=drawn.bars([point], "y"),
        fmt=look.marker,
        color=style.GREY if published else look.colour,
        markerfacecolor="white" if published else look.colour,
        markeredgecolor=style.GREY if published else style.BLACK,
        markeredgewidth=0.9 if published else 0.4,
        markersize=5,
        elinewidth=0.8,
        capsize=1.8,
        zorder=3,
    )


def _published_note(points: Sequence[Point]) -> str:
    if not points:
        return ""
    return (
        f"Hollow: published (Figure 1, Table 1; {points[0].hardware or 'machine not stated'}, batch 1, no intervals or "
        "sample counts; Qwen3-4B, -1.7B, -0.6B and ReFusion left-to-right read off the image)."
    )
