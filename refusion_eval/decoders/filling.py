"""The denoising loop: forward after forward fills masks of a region of the response, as many as a rule says."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

from refusion_eval.decoders import above_or_best, at_least_or_best, most_confident, rounded_threshold
from refusion_eval.decoders.canvas import Canvas, Filling
from refusion_eval.decoders.drafts import Drafts, MakeForward, fill_by_drafts
from refusion_eval.types import ProbArray, Readout

# The scores of the candidates, their readout and the quota of the step -> indices of those that are filled, ascending.
Accept = Callable[[ProbArray, Readout, int], Sequence[int]]


def by_quota(scores: ProbArray, readout: Readout, quota: int) -> list[int]:
    return most_confident(scores, quota)


def above(threshold: float) -> Accept:
    """Accepts all above the threshold (strictly), or the best one."""
    return lambda scores, readout, quota: above_or_best(scores, rounded_threshold(threshold, readout))


def at_least(threshold: float) -> Accept:
    """Accepts all that reach the threshold, and always the best one."""
    return lambda scores, readout, quota: at_least_or_best(scores, threshold, readout)


class Rule(NamedTuple):
    """Which masks of a region the steps fill, one forward each.

    Attributes:
        accept: chooses among the masks, at least one of them.
        quotas: how many masks the first steps fill; the others fill one. With a quota of 0 nothing is read and filled.
        fewest: steps that are made even if no mask is left.
    """

    accept: Accept = by_quota
    quotas: Iterable[int] = ()
    fewest: int = 0


def fill(
    canvas: Canvas, regions: Iterable[range], steps: Iterator[int], forward: MakeForward, rule: Rule | Drafts
) -> Filling:
    """Fills response indices, region after region; returns why decoding ends with them, or None.

    Args:
        canvas: its settings say what a forward reads and how candidates are scored.
        regions: the indices that are filled.
        steps: numbers the forwards of the whole decoding.
        forward: makes the forward of a step, which reads some response indices.
        rule: which masks a forward fills.
    """
    for region in regions:
        if isinstance(rule, Drafts):
            filling = fill_by_drafts(canvas, region, forward, rule)
        else:
            filling = _fill_region(canvas, region, steps, forward, rule)
        if reason := (yield from filling):
            return reason
    return None


def _fill_region(canvas: Canvas, region: range, steps: Iterator[int], forward: MakeForward, rule: Rule) -> Filling:
    quotas = iter(rule.quotas)
    for number in count():
        masked = canvas.masked(region)
        if not masked and number >= rule.fewest:
            break
        step, quota = next(steps), next(quotas, 1)
        candidates = masked if quota else []
        for readout in (yield forward(candidates, step)):
            scores = canvas.settings.scores(readout, step, candidates)
            canvas.fix_chosen(candidates, readout, scores, rule.accept(scores, readout, quota))
        if reason := canvas.settled():
            return reason
    return None
