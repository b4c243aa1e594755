"""Names beside points, where they hide neither points nor one another."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

_GAP, _ROOM = 2.5, 3.5  # points between marker and text; half the size of a marker
_POINTS = 72.0
_CLEARLY = 1.05  # a name is clearly its point's if any other point is farther away by this factor


@dataclass(frozen=True, slots=True)
class Label:
    """A name and the point it belongs to, in data units."""

    text: str
    x: float
    y: float


def place_labels(axes: Axes, labels: Sequence[Label], *, size: float, lines: Sequence[Bbox] = ()) -> None:
    """Writes each name to the side of its point that costs least; called when nothing else moves the axes any more.

    A name lies nearer to its own point than to any other; where there is no room for that, a line leads to its point.

    Args:
        axes: laid out, with their limits set.
        labels: in any order; the result does not depend on it.
        size: of the font.
        lines: what should not be crossed either, in pixels.
    """
    figure = axes.get_figure()
    assert figure is not None
    pixel = figure.dpi / _POINTS
    frame = axes.get_window_extent()
    at = {label: axes.transData.transform((label.x, label.y)) for label in labels}
    marks = [Bbox.from_extents(*(point - _ROOM * pixel), *(point + _ROOM * pixel)) for point in at.values()]
    written: list[Bbox] = []
    for label in sorted(labels, key=lambda one: (-one.y, one.x)):
        x, y = at[label]
        halo = [withStroke(linewidth=1.5, foreground="w")]
        text = axes.text(0, 0, label.text, size=size, zorder=5, path_effects=halo)
        extent = text.get_window_extent()
        wide, high = extent.width, extent.height
        # Beside, above, below, then the same farther away; each box given by its middle.
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
    """A thin line from a name to its point."""
    ends = axes.transData.inverted().transform([np.clip(point, box.min, box.max), point])
    axes.plot(*ends.T, color="0.35", linewidth=0.5, zorder=2, label="leader")


def _is_misleading(box: Bbox, own: np.ndarray, points: Iterable[np.ndarray]) -> bool:
    """Whether a name stands as near to another point as to its own."""
    others = [_distance(box, point) for point in points if (point != own).any()]
    return any(other < _CLEARLY * _distance(box, own) for other in others)


def _distance(box: Bbox, point: np.ndarray) -> float:
    return float(np.linalg.norm(point - np.clip(point, box.min, box.max)))


def _shared(one: Bbox, other: Bbox) -> float:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return max(width, 0) * max(height, 0)
