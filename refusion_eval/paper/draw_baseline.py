"""Figure 1: score and throughput against the autoregressive baseline, each point with its name beside it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from refusion_eval.paper import style
from refusion_eval.paper.names import benchmark_title, caption, count, mini_sentence
from refusion_eval.paper.rows import BASELINE, Point

Boxes = NDArray[Any]  # [boxes, 4]: left, lower, right and upper edge in pixels

_LEAST_RANGE = 12.0  # points of score, so that differences of single items look small
_GAP, _ROOM = 2.5, 3.5  # printer's points between marker and text; half the size of a marker
_POINTS = 72.0
_CLEARLY = 1.05  # a label clearly belongs to its point if all other points are farther away by this factor


def draw_against_baseline(points: Sequence[Point], width: style.Width | None = None) -> style.Drawing:
    """Figure 1: score and throughput minus the baseline's, published and measured points in separate axes."""
    published = [point for point in points if point.origin == "published"]
    measured = [point for point in points if point.origin == "measured"]
    groups = [group for group in (published, measured) if group]
    with style.paper_style():
        inches = style.page_width(width, "two" if len(groups) > 1 else "one")
        shape = (len(groups), 1) if inches == style.COLUMN_WIDTH else (1, len(groups))
        figure = style.new_figure(inches, 2.6 * shape[0])
        panels = list(zip(figure.subplots(*shape, squeeze=False).flat, groups, strict=True))
        for number, (axes, group) in enumerate(panels):
            _quadrants(axes, group)
            for point in group:
                _dot(axes, point, [other.series for other in group])
            title = f"published, MBPP ({group[0].hardware})"
            style.panel_title(
                axes,
                number if len(panels) > 1 else None,
                title if group is published else f"measured, {benchmark_title(group)}",
            )
            axes.set_xlabel("Throughput minus AR baseline (tokens/s)")
            axes.set_ylabel("Score minus AR baseline (points)" if number == 0 or shape[1] == 1 else "")
        figure.draw_without_rendering()  # labels are placed in the final layout
        for axes, group in panels:
            labels = [Label(point.label + ("\u2020" if point.note else ""), point.x, point.y) for point in group]
            lines = [line.get_window_extent() for line in axes.get_lines() if line.get_label() == "baseline"]
            # The collections of error bars know no extent of their own.
            ends = [ends for bar in axes.collections if isinstance(bar, LineCollection) for ends in bar.get_segments()]
            bars = [Bbox(axes.transData.transform(of_bar)) for of_bar in ends if len(of_bar)]
            place_labels(axes, labels, size=6.5, lines=lines, bars=bars)
    return style.drawing(figure, [_plotted(measured), mini_sentence(measured), _note(published), *caption(measured)])


def _plotted(measured: Sequence[Point]) -> str:
    """The sentence that a caption begins with."""
    where, baseline = "MBPP", "AR, Qwen3-8B"
    if measured:
        label = next(point.label for point in measured if point.mark == BASELINE)
        where = f"{benchmark_title(measured)}, {count((point.n for point in measured), 'items a system')}"
        baseline = label if label == "AR" else f"AR, {label}"
    return (
        "Score in points (vertical axis) and throughput in tokens per second (horizontal axis) of each system minus "
        f"those of the autoregressive baseline ({baseline}; dashed lines) on {where}."
    )


def _quadrants(axes: Axes, points: Sequence[Point]) -> None:
    """Draws the two lines of the baseline and shades the quadrant in which a system is better in both."""
    for axis, set_limits, least in (("x", axes.set_xlim, 1.0), ("y", axes.set_ylim, _LEAST_RANGE)):
        values = [getattr(point, f"{axis}{end}") for point in points for end in ("", "_low", "_high")]
        defined = [0.0, *(value for value in values if not math.isnan(value))]
        middle = (min(defined) + max(defined)) / 2
        room = 0.62 * max(max(defined) - min(defined), least)
        set_limits(middle - room, middle + room)
    left, right = axes.get_xlim()
    axes.axhspan(0, axes.get_ylim()[1], xmin=(0.0 - left) / (right - left), facecolor=style.SWEET_SPOT, zorder=0)
    for line in (axes.axhline, axes.axvline):
        line(0, color=style.BLACK, linewidth=0.6, linestyle=(0, (4, 2)), zorder=1, label="baseline")
    axes.text(
        0.985, 0.98, "faster and better", transform=axes.transAxes, ha="right", va="top", size=6.5, style="italic"
    )


def _dot(axes: Axes, point: Point, others: Sequence[str]) -> None:
    look = style.style_of(point.series, others)
    published = point.origin == "published"
    axes.errorbar(
        point.x,
        point.y,
        xerr=style.bars([point], "x"),
        yerr=style.bars([point], "y"),
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


def _note(points: Sequence[Point]) -> str:
    if not points:
        return ""
    return (
        f"Hollow: published (Figure 1, Table 1; {points[0].hardware or 'machine not stated'}, batch 1, no intervals or "
        "sample counts; Qwen3-4B, -1.7B, -0.6B and ReFusion left-to-right read off the image)."
    )


class Label(NamedTuple):
    text: str
    x: float  # in data units, as y
    y: float


# Places for the middle of a label, in widths and heights of it: beside, above and below the point, then farther away.
_PLACES = [
    (right, up)
    for up in (0, 1, -1, 1.7, -1.7, 2.8, -2.8, 4, -4, 5.5, -5.5, 7, -7, 9, -9)
    for right in (1, -1, 0, 0.5, -0.5, 0.75, -0.75, 1.3, -1.3, 1.6, -1.6, 2.4, -2.4)
    if up or abs(right) == 1
]


def place_labels(
    axes: Axes, labels: Sequence[Label], *, size: float, lines: Sequence[Bbox] = (), bars: Sequence[Bbox] = ()
) -> None:
    """Writes each label at the cheapest of a fixed set of places near its point.

    A line leads to its point where a label is far from it, near another one or on the bar of another one.

    Args:
        axes: in their final layout.
        labels: what to write, and the points.
        size: of the letters, in printer's points.
        lines: lines that labels had better not cross, in pixels.
        bars: error bars, in pixels.
    """
    figure = axes.get_figure()
    assert figure is not None
    pixel = figure.dpi / _POINTS
    frame = np.array([axes.get_window_extent().padded(-_ROOM * pixel).extents])
    points = axes.transData.transform([(label.x, label.y) for label in labels])
    marks = np.hstack([points - _ROOM * pixel, points + _ROOM * pixel])
    crossed = np.array([box.padded(2 * pixel).extents for box in (*lines, *bars)]).reshape(-1, 4)
    padded_bars = crossed[len(lines) :]
    written = np.array([text.get_window_extent().extents for text in axes.texts]).reshape(-1, 4)
    for number in sorted(range(len(labels)), key=lambda number: (-labels[number].y, labels[number].x)):
        own = points[number]
        halo = [withStroke(linewidth=1.5, foreground="w")]
        text = axes.text(0, 0, labels[number].text, size=size, zorder=5, path_effects=halo)
        extent = text.get_window_extent()
        half = np.array([extent.width, extent.height]) / 2
        middles = np.array(
            [
                (right * (half[0] + (_GAP + _ROOM) * pixel), up * (1.5 * half[1] + _ROOM * pixel * (abs(right) < 1)))
                for right, up in _PLACES
            ]
        )
        boxes = np.hstack([own + middles - half, own + middles + half])
        area = extent.width * extent.height
        nearest = np.clip(own, boxes[:, :2], boxes[:, 2:])
        in_the_way = np.vstack([marks[(points != own).any(axis=1)], written])
        other_bars = padded_bars[~((padded_bars[:, :2] <= own) & (own <= padded_bars[:, 2:])).all(axis=1)]
        misleading = _is_misleading(boxes, own, points) | (_shared(boxes, other_bars) > 0).any(axis=1)
        across = _are_joined_across(nearest, own, in_the_way)
        hidden = _shared(boxes, np.vstack([marks, written])).sum(axis=1) / area
        outside = 1 - _shared(boxes, frame)[:, 0] / area
        num_crossed = (_shared(boxes, crossed) > 0).sum(axis=1)
        far = np.linalg.norm(own - nearest, axis=1)
        costs = (
            20 * outside
            + 9 * (outside > 1e-6)
            + 10 * hidden
            + 3 * (hidden > 0)
            + 2 * misleading
            + 8 * across
            + num_crossed
            + 0.2 * far / extent.height
        )
        best = int(np.argmin(costs + 0.01 * np.arange(len(boxes))))
        written = np.vstack([written, boxes[best] + _GAP * pixel * np.array([-1, 0, 1, 0])])
        to_data = axes.transData.inverted().transform
        text.set(position=tuple(to_data(own + middles[best])), ha="center", va="center")
        if misleading[best] or far[best] > 3 * _ROOM * pixel:
            axes.plot(*to_data([nearest[best], own]).T, color="0.35", linewidth=0.5, zorder=2, label="leader")
            # Later names and lines avoid this line as they avoid a text: by boxes along it.
            along = nearest[best] + np.linspace(0.1, 0.9, 25)[:, np.newaxis] * (own - nearest[best])
            written = np.vstack([written, np.hstack([along - _GAP * pixel, along + _GAP * pixel])])


def _is_misleading(boxes: Boxes, own: NDArray[Any], points: NDArray[Any]) -> NDArray[Any]:
    """Whether a label, at each of some places, is about as near to another point as to its own, [places]."""

    def distances(to: NDArray[Any]) -> NDArray[Any]:
        nearest = np.clip(to, boxes[:, np.newaxis, :2], boxes[:, np.newaxis, 2:])
        return np.asarray(np.linalg.norm(to - nearest, axis=2))

    others = points[(points != own).any(axis=1)]
    return np.asarray((distances(others) < _CLEARLY * distances(own[np.newaxis])).any(axis=1))


def _are_joined_across(starts: NDArray[Any], end: NDArray[Any], boxes: Boxes) -> NDArray[Any]:
    """Whether the line from each start, [starts, 2], to the end leads through one of the boxes, [starts]."""
    steps = np.linspace(0.05, 0.95, 20)[:, np.newaxis, np.newaxis]
    along = (starts + steps * (end - starts))[:, :, np.newaxis]
    inside = (along >= boxes[:, :2]).all(axis=3) & (along <= boxes[:, 2:]).all(axis=3)
    return np.asarray(inside.any(axis=(0, 2)))


def _shared(boxes: Boxes, others: Boxes) -> NDArray[Any]:
    """The areas that boxes have in common with others, [boxes, others]."""
    low = np.maximum(boxes[:, np.newaxis, :2], others[:, :2])
    high = np.minimum(boxes[:, np.newaxis, 2:], others[:, 2:])
    return np.asarray(np.prod(np.maximum(high - low, 0), axis=2))
