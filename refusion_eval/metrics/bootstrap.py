"""Bootstrap intervals by item, from one small core: a value and its resampled replicates.

Items (benchmark questions) are what is drawn with replacement; everything measured on an item stays together, so a
ratio of sums, a quantile or a paired comparison is resampled correctly. The percentile interval of the replicates is
reported. Two properties matter to readers: values that are all equal (10 of 10 correct) give an interval of zero
width, and a single item gives none (NaN bounds), because one draw says nothing about the spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from refusion_eval.errors import DataError

# Index draws held in memory at once (int32): bounds memory on large benchmarks without changing any result.
_MAX_DRAWS_AT_ONCE = 2_000_000

RESAMPLES = 2000

Array = NDArray[Any]


@dataclass(frozen=True)
class Interval:
    """A value with its bootstrap interval.

    Attributes:
        value: the statistic on all items.
        low: lower bound, NaN when one item gives no spread.
        high: upper bound, NaN in the same case.
        n: number of items the value rests on.
    """

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Bootstrap:
    """A statistic and its replicates, kept so that means over strata (tasks) can be formed afterwards.

    Attributes:
        value: the statistic on all items.
        replicates: [resamples], the statistic on each resample; NaN where it is undefined.
        n: number of items.
    """

    value: float
    replicates: Array
    n: int

    def interval(self, level: float = 0.95) -> Interval:
        """Percentile interval of the replicates at `level`."""
        defined = self.replicates[np.isfinite(self.replicates)]
        if defined.size == 0:
            return Interval(self.value, math.nan, math.nan, self.n)
        tail = (1.0 - level) / 2.0
        low, high = np.quantile(defined, [tail, 1.0 - tail])
        return Interval(self.value, float(low), float(high), self.n)

    def scaled(self, factor: float) -> Bootstrap:
        """The same statistic in another unit."""
        return Bootstrap(self.value * factor, self.replicates * factor, self.n)


def bootstrap(
    columns: Sequence[ArrayLike],
    statistic: Callable[..., Array],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Bootstrap:
    """Resample items and evaluate a statistic on each resample.

    Args:
        columns: arrays of equal length, first axis = items; more axes stay attached to their item.
        statistic: takes the columns with a leading resample axis ([resamples, items, ...] each), returns [resamples].
        seed: seed of the item draws; the same seed and number of items give the same draws.
        resamples: number of resamples.

    Returns:
        The statistic on the items themselves and on every resample. With one item the replicates are NaN.

    Raises:
        DataError: no items, columns of different lengths, a non-finite input value, or fewer than one resample.
    """
    arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    _check(arrays, resamples)
    num_items = len(arrays[0])
    value = float(statistic(*(array[np.newaxis] for array in arrays))[0])
    if num_items == 1:
        return Bootstrap(value, np.full(resamples, np.nan), 1)
    rng = np.random.default_rng(seed)
    rows_at_once = max(1, _MAX_DRAWS_AT_ONCE // num_items)
    replicates = np.empty(resamples)
    for start in range(0, resamples, rows_at_once):
        stop = min(start + rows_at_once, resamples)
        draws = rng.integers(0, num_items, size=(stop - start, num_items), dtype=np.int32)
        replicates[start:stop] = statistic(*(array[draws] for array in arrays))
    return Bootstrap(value, replicates, num_items)


def mean_of(parts: Sequence[Bootstrap]) -> Bootstrap:
    """Unweighted mean over strata, resampled within each (stratified bootstrap).

    Args:
        parts: one bootstrap for each stratum, all with the same number of resamples, drawn with different seeds.

    Raises:
        DataError: no strata.
    """
    if not parts:
        raise DataError("the mean over tasks needs at least one task with values; none was given")
    return Bootstrap(
        value=float(np.mean([part.value for part in parts])),
        replicates=np.mean([part.replicates for part in parts], axis=0),
        n=sum(part.n for part in parts),
    )


def mean_statistic(values: Array) -> Array:
    """Mean over items, [resamples, items] -> [resamples]."""
    return np.asarray(values.mean(axis=1))


def difference_statistic(left: Array, right: Array) -> Array:
    """Mean of left - right over items, [resamples, items] twice -> [resamples]."""
    return mean_statistic(left - right)


def ratio_statistic(numerators: Array, denominators: Array) -> Array:
    """Sum over sum, [resamples, items] twice -> [resamples]; NaN where the denominators sum to zero."""
    total = denominators.sum(axis=1)
    return np.divide(numerators.sum(axis=1), total, out=np.full(total.shape, np.nan), where=total != 0)


def bootstrap_mean(values: ArrayLike, *, seed: int = 0, resamples: int = RESAMPLES, level: float = 0.95) -> Interval:
    """Mean of one number per item, with its interval. Raises DataError without values."""
    return bootstrap([values], mean_statistic, seed=seed, resamples=resamples).interval(level)


def bootstrap_ratio(
    numerators: ArrayLike, denominators: ArrayLike, *, seed: int = 0, resamples: int = RESAMPLES, level: float = 0.95
) -> Interval:
    """Sum of numerators / sum of denominators (tokens / seconds, tokens / forwards), resampled by item.

    Raises:
        DataError: no items, different lengths, a negative denominator, or denominators that sum to zero.
    """
    check_denominators(denominators)
    return bootstrap([numerators, denominators], ratio_statistic, seed=seed, resamples=resamples).interval(level)


def paired_difference(
    a: ArrayLike, b: ArrayLike, *, seed: int = 0, resamples: int = RESAMPLES, level: float = 0.95
) -> Interval:
    """Mean of a - b over items both systems answered, in the same order; a positive value favours `a`.

    Raises:
        DataError: no items, or a different number of items in `a` and `b`.
    """
    return bootstrap([a, b], difference_statistic, seed=seed, resamples=resamples).interval(level)


def check_denominators(denominators: ArrayLike) -> None:
    """Raise DataError for a negative denominator, or denominators that sum to zero."""
    array = np.asarray(denominators, dtype=np.float64)
    if array.size and array.min() < 0:
        raise DataError(
            f"a ratio has the negative denominator {array.min():g}; forwards and seconds are never negative"
        )
    if array.size and array.sum() == 0:
        raise DataError(f"the {array.size} denominators of a ratio sum to zero; no forward or no time was recorded")


def _check(arrays: Sequence[Array], resamples: int) -> None:
    lengths = [len(array) for array in arrays]
    if len(set(lengths)) != 1:
        raise DataError(f"columns of {lengths} items cannot be resampled together; align them on the common items")
    if lengths[0] == 0:
        raise DataError("no values to resample; a metric over zero items is undefined")
    if resamples < 1:
        raise DataError(f"resamples is {resamples}; it must be at least 1")
    if not all(np.isfinite(array).all() for array in arrays):
        raise DataError("a value to resample is NaN or infinite; leave out items without a value")
