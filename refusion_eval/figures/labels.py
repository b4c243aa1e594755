"""Places labels beside points so that they hide neither points nor each other.

The placement is deterministic: every label takes the cheapest of a fixed set of places. adjustText, which moves labels
iteratively, does not guarantee that a label is nearest to its own point.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

_GAP, _ROOM = 2.5, 3.5  # printer's points between marker and text; half the size of a marker
_POINTS = 72.0
_CLEARLY = 1.05  # a label clearly belongs to its point if all other points are farther away by this factor


@dataclass(frozen=True, slots=True)
class Label:
    """A text and the point it belongs to, in data units."""

    text: str
    x: float
    y: float


def place_labels(axes: Axes, labels: Sequence[Label], *, size: float, lines: Sequence[Bbox] = ()) -> None:
    """Writes each label at the cheapest place near its point.

    A label lies nearer to its own point than to any other. Where there is no room for that, a line leads to its point.

    Args:
        axes: axes after layout, with their limits set; they must not change afterwards.
        labels: labels; the result does not depend on their order.
        size: font size.
        lines: boxes of lines that labels should not cross, in pixels.
    """
    figure = axes.get_figure()
    assert figure is not None
    pixel = figure.dpi / _POINTS
    frame = axes.get_window_extent()
    at = {label: axes.transData.transform((label.x, label.y)) for label in labels}
    marks = [Bbox.from_extents(*(point - _ROOM * pixel), *(point + _ROOM * pixel)) for point in at.values()]
    written: list[Bbox] = []
    for label in sorted(labels, key=lambda label: (-label.y, label.x)):
        x, y = at[label]
        halo = [withStroke(linewidth=1.5, foreground="w")]
        text = axes.text(0, 0, label.text, size=size, zorder=5, path_effects=halo)
        extent = text.get_window_extent()
        wide, high = extent.width, extent.height
        # Middles of boxes beside, above and below the point, then farther away.
        choices = [
            (x + right * (wide / 2 + (_GAP + _ROOM) * pixel), y + up * (high * 0.75 + _ROOM * pixel * (abs(right) < 1)))
            for up in (0, 1, -1, 1.7, -1.7, 2.8, -2.8)
            for right in (1, -1, 0, 0.5, -0.5)
            if up or abs(right) == 1
        ]
        boxes = [Bbox.from_bounds(cx - wide / 2, cy - high / 2, wide, high) for cx, cy in choices]

        def cost(number: int, boxes: list[Bbox] = boxes, own: np.ndarray = at[label]) -> float:
            box = boxes[number]
            outside = box.width * box.height - _shared(box, frame)
            hidden = sum(_shared(box, other) for other in (*marks, *written))
            crossed = sum(_shared(box, other.padded(2 * pixel)) for other in lines)
            misleading = box.width * box.height * _is_misleading(box, own, at.values())
            return 20 * outside + 10 * hidden + 10 * misleading + 4 * crossed + number * pixel

        best = min(range(len(boxes)), key=cost)
        written.append(boxes[best])
        place = axes.transData.inverted().transform(choices[best])
        text.set(position=tuple(place), ha="center", va="center")
        if _is_misleading(boxes[best], at[label], at.values()):
            _lead(axes, boxes[best], at[label])


def _lead(axes: Axes, box: Bbox, point: np.ndarray) -> None:
    """Draws a thin line from a label to its point."""
    ends = axes.transData.inverted().transform([np.clip(point, box.min, box.max), point])
    axes.plot(*ends.T, color="0.35", linewidth=0.5, zorder=2, label="leader")


def _is_misleading(box: Bbox, own: np.ndarray, points: Iterable[np.ndarray]) -> bool:
    """Whether a label is about as near to another point as to its own."""
    others = [_distance(box, point) for point in points if (point != own).any()]
    return any(other < _CLEARLY * _distance(box, own) for other in others)


def _distance(box: Bbox, point: np.ndarray) -> float:
    return float(np.linalg.norm(point - np.clip(point, box.min, box.max)))


def _shared(a: Bbox, b: Bbox) -> float:
    """Area of the intersection."""
    width = min(a.x1, b.x1) - max(a.x0, b.x0)
    height = min(a.y1, b.y1) - max(a.y0, b.y0)
    return max(width, 0) * max(height, 0)
