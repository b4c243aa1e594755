"""Where to measure next so that a curve of accuracy against tokens per forward is known evenly."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from refusion_eval.sweep.spec import Frontier


class Outcome(NamedTuple):
    """One task at one value of the setting."""

    tpf: float
    accuracy: float


def next_value(measured: Mapping[float, Sequence[Outcome]], frontier: Frontier) -> float | None:
    """The next value of the setting, or None when there are enough.

    First the two ends, then always the middle of the two neighbouring values whose outcomes lie farthest apart: the
    Euclidean distance in the plane of TPF and accuracy, each in units of its range over what was measured, averaged
    over the tasks. The choice depends on the outcomes alone, so that a resumed sweep takes the same way.

    Args:
        measured: value -> the outcome of each task, in one order of tasks.
        frontier: what is wanted.
    """
    for end in (frontier.low, frontier.high):
        if end not in measured:
            return end
    if len(measured) >= frontier.points:
        return None
    values = sorted(measured)
    spans = [_spans([measured[value][task] for value in values]) for task in range(len(measured[values[0]]))]
    best, chosen = 0.0, None
    for left, right in itertools.pairwise(values):
        middle = _middle(left, right, frontier)
        distances = [
            math.hypot(*((b - a) / span for a, b, span in zip(one, other, of_task, strict=True) if span))
            for one, other, of_task in zip(measured[left], measured[right], spans, strict=True)
        ]
        distance = sum(distances) / max(len(distances), 1)
        if left < middle < right and distance > best:
            best, chosen = distance, middle
    return chosen


def _spans(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    tpf, accuracy = zip(*outcomes, strict=True)
    return max(tpf) - min(tpf), max(accuracy) - min(accuracy)


def _middle(left: float, right: float, frontier: Frontier) -> float:
    middle = math.sqrt(left * right) if frontier.scale == "log" else (left + right) / 2
    if frontier.multiple_of:
        return float(round(middle / frontier.multiple_of) * frontier.multiple_of)
    # Four digits: a value that can be written down is the same value when the sweep is resumed.
    return float(f"{middle:.4g}")
