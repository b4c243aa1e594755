"""The difference of two measurements: paired by item where both rest on the same items, else of independent values."""

from typing import NamedTuple

from refusion_eval.metrics import (
    Bootstrap,
    Interval,
    difference_of_intervals,
    mean_of_intervals,
    paired_difference,
    scaled,
)
from refusion_eval.results.measured import seed_of
from refusion_eval.results.measurement import Measurement
from refusion_eval.results.metric_list import SCORES


class Difference(NamedTuple):
    interval: Interval
    paired: bool


def difference(before: Measurement, after: Measurement) -> Difference:
    """`after` minus `before`, in their unit; no bounds where one of them has none."""
    a, b = before.by_item, after.by_item
    if a is None or b is None or a.items != b.items:
        return Difference(difference_of_intervals(before.interval, after.interval), paired=False)
    if before.metric in SCORES and after.metric in SCORES:
        tasks = [paired_difference(a.scores[task], b.scores[task], seed=seed_of(task)) for task in a.scores]
        return Difference(scaled(mean_of_intervals(tasks), 100), paired=True)
    replicates = b.replicates - a.replicates
    return Difference(Bootstrap(after.value - before.value, replicates, after.n).interval(), paired=True)
