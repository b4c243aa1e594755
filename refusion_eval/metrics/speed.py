"""Speed of one request at a time: tokens a second (TPS), latency, and speed-up over another system.

Only samples decoded alone (batch size 1) after the warm-up count, and only of one machine: a figure over two machines
is a figure of neither. Seconds run from the prompt on the device to the last token on the host; tokens are those kept,
up to and including the first EOS.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from refusion_eval.errors import DataError
from refusion_eval.metrics.bootstrap import Bootstrap, bootstrap, check_denominators, mean_statistic, ratio_statistic

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Timing:
    """Cost of one sample.

    Attributes:
        item: identity of the benchmark item; equal for all samples of it, and across systems.
        tokens: tokens kept.
        forwards: model calls.
        seconds: decoding time.
        batch_size: requests that could run at the same time.
        warm: whether the warm-up was over.
        hardware: fingerprint of the machine.
    """

    item: Hashable
    tokens: int
    forwards: int
    seconds: float
    batch_size: int = 1
    warm: bool = True
    hardware: str = ""

    @property
    def counts(self) -> bool:
        """Whether speed may be computed from the sample: decoded alone, after the warm-up."""
        return self.batch_size == 1 and self.warm


class Speedup(NamedTuple):
    """Ratio of two systems' TPS on the items both answered.

    Attributes:
        ratio: TPS / TPS of the baseline; its n is the number of common items.
        num_left_out: items that only one of the two answered.
    """

    ratio: Bootstrap
    num_left_out: int


def measured(timings: Sequence[Timing]) -> list[Timing]:
    """The samples speed may be computed from: decoded alone, after the warm-up.

    Raises:
        DataError: the samples come from more than one machine.
    """
    alone = [timing for timing in timings if timing.counts]
    machines = sorted({timing.hardware for timing in alone})
    if len(machines) > 1:
        raise DataError(
            f"speed over samples of {len(machines)} different machines ({', '.join(machines)}) is a figure of none; "
            "measure all samples on one"
        )
    return alone


def total_tps(timings: Sequence[Timing], *, seed: int = 0) -> Bootstrap:
    """All tokens / all seconds, resampled by item. Raises DataError without a measured sample or time."""
    return rate(*_totals(measured(timings)), seed=seed)


def rate(counts: ArrayLike, seconds: ArrayLike, *, seed: int = 0) -> Bootstrap:
    """All counts / all seconds, [items] each, resampled by item. Raises DataError without items or time."""
    check_denominators(seconds)
    return bootstrap([counts, seconds], ratio_statistic, seed=seed)


def forward_rate(timings: Sequence[Timing], *, seed: int = 0) -> Bootstrap:
    """All forwards / all seconds: the speed of the engine, without the algorithm's part. Raises as `total_tps`."""
    groups = _by_item(measured(timings))
    forwards = [sum(timing.forwards for timing in group) for group in groups]
    return rate(forwards, [sum(timing.seconds for timing in group) for group in groups], seed=seed)


def mean_latency(timings: Sequence[Timing], *, seed: int = 0) -> Bootstrap:
    """Mean over items of the mean seconds of their samples. Raises DataError without a measured sample."""
    values = [np.mean([timing.seconds for timing in group]) for group in _by_item(measured(timings))]
    return bootstrap([values], mean_statistic, seed=seed)


def mean_tps(timings: Sequence[Timing], *, seed: int = 0) -> Bootstrap:
    """Mean over items of the mean TPS of their samples: every request weighs the same, long or short.

    Raises:
        DataError: no measured sample, or one without time.
    """
    groups = _by_item(measured(timings))
    if any(timing.seconds == 0 for group in groups for timing in group):
        raise DataError("a sample took zero seconds, so its tokens per second are undefined; time it")
    values = [np.mean([timing.tokens / timing.seconds for timing in group]) for group in groups]
    return bootstrap([values], mean_statistic, seed=seed)


def latency(timings: Sequence[Timing], quantile: float, *, seed: int = 0) -> Bootstrap:
    """A quantile of the seconds a request takes, resampled by item.

    Args:
        timings: samples; those not measured alone and warm are left out.
        quantile: 0.5 for the median, 0.95 for the 95th percentile (linear interpolation).
        seed: seed of the resampling.

    Raises:
        DataError: no measured sample, or a quantile outside [0, 1].
    """
    if not 0.0 <= quantile <= 1.0:
        raise DataError(f"latency quantile {quantile} is not in [0, 1]")
    groups = _by_item(measured(timings))
    if not groups:
        raise DataError("no sample was decoded alone after the warm-up; run with batch size 1")
    longest = max(len(group) for group in groups)
    # Items may have different numbers of samples: pad with NaN, which nanquantile leaves out.
    padded = np.full((len(groups), longest), np.nan)
    for row, group in zip(padded, groups, strict=True):
        row[: len(group)] = [timing.seconds for timing in group]
    return bootstrap([np.arange(len(groups))], _quantile_of_rows(padded, quantile), seed=seed)


def speedup(timings: Sequence[Timing], baseline: Sequence[Timing], *, seed: int = 0) -> Speedup:
    """TPS / TPS of a baseline on the items both answered, paired: an item is drawn for both systems at once.

    Raises:
        DataError: the machines differ, no item is common, or no time was recorded.
    """
    samples, base_samples = measured(timings), measured(baseline)
    machines = {timing.hardware for timing in (*samples, *base_samples)}
    if len(machines) > 1:
        raise DataError(
            f"a speed-up between different machines ({', '.join(sorted(machines))}) says nothing about the systems; "
            "measure both on one"
        )
    items = {timing.item for timing in samples}
    base_items = {timing.item for timing in base_samples}
    common = items & base_items
    if not common:
        raise DataError("the two systems have no measured item in common; run both on the same items at batch size 1")
    columns = [
        *_totals([timing for timing in samples if timing.item in common]),
        *_totals([timing for timing in base_samples if timing.item in common]),
    ]
    check_denominators(columns[1])
    check_denominators(columns[3])
    return Speedup(bootstrap(columns, _speedup_statistic, seed=seed), len(items ^ base_items))


def _speedup_statistic(tokens: Array, seconds: Array, base_tokens: Array, base_seconds: Array) -> Array:
    tps, base_tps = ratio_statistic(tokens, seconds), ratio_statistic(base_tokens, base_seconds)
    return np.divide(tps, base_tps, out=np.full(tps.shape, np.nan), where=base_tps > 0)


def _quantile_of_rows(padded: Array, quantile: float) -> Callable[[Array], Array]:
    """Statistic that takes item numbers [resamples, items] and returns the quantile of those items' values."""
    of_values = np.nanquantile if np.isnan(padded).any() else np.quantile

    def statistic(drawn: Array) -> Array:
        values = padded[drawn.astype(np.int64)].reshape(len(drawn), -1)
        return np.asarray(of_values(values, quantile, axis=1))

    return statistic


def _by_item(timings: Sequence[Timing]) -> list[list[Timing]]:
    """Samples grouped by item, items in a fixed order so that equal records give equal resamples."""
    groups: dict[Hashable, list[Timing]] = {}
    for timing in timings:
        groups.setdefault(timing.item, []).append(timing)
    return [groups[item] for item in sorted(groups, key=repr)]


def _totals(timings: Sequence[Timing]) -> tuple[Array, Array]:
    """Tokens and seconds of each item, summed over its samples: [items] twice."""
    groups = _by_item(timings)
    tokens = np.array([sum(timing.tokens for timing in group) for group in groups], dtype=np.float64)
    seconds = np.array([sum(timing.seconds for timing in group) for group in groups], dtype=np.float64)
    return tokens, seconds
