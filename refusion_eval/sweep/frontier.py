"""Chooses where to measure next, so that a curve of accuracy against tokens per forward is known evenly."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from refusion_eval.sweep.spec import Frontier


class TaskResult(NamedTuple):
    """Result of one task at one value of the setting."""

    tpf: float
    accuracy: float


def next_value(measured: Mapping[float, Sequence[TaskResult]], frontier: Frontier) -> float | None:
    """The next value of the setting, or None when there are enough values.

    The two ends come first, then always the middle of the two neighbouring values whose results lie farthest apart. The
    distance is Euclidean in the plane of TPF and accuracy, each divided by its range over all measured values, and is
    averaged over the tasks. The choice depends on the results alone, so that a resumed sweep makes the same choices.

    Args:
        measured: value -> the result of each task, in one order of tasks.
        frontier: setting, ends and number of values.
    """
    for end in (frontier.low, frontier.high):
        if end not in measured:
            return end
    if len(measured) >= frontier.points:
        return None
    values = sorted(measured)
    spans = [_spans([measured[value][task] for value in values]) for task in range(len(measured[values[0]]))]
    largest, next_middle = 0.0, None
    for left, right in itertools.pairwise(values):
        middle = _middle(left, right, frontier)
        distances = [
            math.hypot(*((b - a) / span for a, b, span in zip(a_task, b_task, span_pair, strict=True) if span))
            for a_task, b_task, span_pair in zip(measured[left], measured[right], spans, strict=True)
        ]
        distance = sum(distances) / max(len(distances), 1)
        if left < middle < right and distance > largest:
            largest, next_middle = distance, middle
    return next_middle


def _spans(results: Sequence[TaskResult]) -> tuple[float, float]:
    tpf, accuracy = zip(*results, strict=True)
    return max(tpf) - min(tpf), max(accuracy) - min(accuracy)


def _middle(left: float, right: float, frontier: Frontier) -> float:
    middle = math.sqrt(left * right) if frontier.scale == "log" else (left + right) / 2
    if frontier.multiple_of:
        return float(round(middle / frontier.multiple_of) * frontier.multiple_of)
    # Four digits, because the value is written into the name of the run directory.
    return float(f"{middle:.4g}")
