"""The difference of two measurements: paired by item where both rest on the same items, else of independent values."""

from typing import NamedTuple

from refusion_eval.errors import DataError
from refusion_eval.metrics import (
    Bootstrap,
    Interval,
    difference_of_intervals,
    mean_of_intervals,
    paired_difference,
    require_turns,
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


def not_in_turns(speed: Measurement, baseline: Measurement, *, of_sweep: bool = False) -> str:
    """Why two speeds have neither ratio nor difference; empty if the systems took turns, as far as is known.

    Args:
        speed: a speed of one system.
        baseline: that of the other.
        of_sweep: whether both are of one sweep, whose points take turns, so that their file tells it of one round too.
    """
    if speed.by_item is not None and baseline.by_item is not None:
        try:
            require_turns(speed.by_item.timed, baseline.by_item.timed)
        except DataError as error:
            return str(error)
    elif speed.num_rounds != baseline.num_rounds or (speed.num_rounds == 1 and not of_sweep):
        reason = "files of results do not say that the systems took turns, unless each has several rounds, as many"
        return f"{reason}; name the run directories"
    return ""
