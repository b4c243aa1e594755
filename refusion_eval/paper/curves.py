"""Formulas of the claims about curves and single decodings, which the paper prints no values of; one is arithmetic."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refusion_eval.metrics import RESAMPLES
from refusion_eval.paper.formulas import FORMULAS, Formula, Reader, Values, largest
from refusion_eval.paper.points import is_better
from refusion_eval.paper.studies import CASE_STUDY_SYSTEM, DIVERGENCE_FAR, DIVERGENCE_NEAR, MOST_SLOTS, MOST_TOKENS


def _curve(read: Reader, name: str, system: str, setting: str) -> tuple[NDArray[Any], Values]:
    """The values of a setting, [points], and the figures there, [points, 1 + RESAMPLES]."""
    points = read.points(system, setting)
    return np.array([value for _, value, _ in points]), _figures(read, points, name)


def _figures(read: Reader, points: Sequence[tuple[str, float, str]], name: str) -> Values:
    """The figures of points, [points, 1 + RESAMPLES]."""
    return np.array([read.metric(name, key, benchmark)[0, 0] for key, _, benchmark in points])


def sweet_spot(read: Reader, setting: str, low: float, high: float, against: str = "qwen3") -> Values:
    """Percent of the swept values from `low` to `high` that are shown to be in the sweet spot (`is_better`).

    Against several baselines, separated by spaces, a value has to be better than each. The draws alternate between this
    and the percent that may be in it, so that the interval is from one to the other.
    """
    task = read.points("refusion", setting)[0][2]
    baselines = " ".join(f"{system}@{setting}" for system in against.split())
    bounds = []
    for name in ("score", "tps"):
        values, measurements = _curve(read, name, "refusion", setting)
        inside = (values >= low) & (values <= high)
        above = measurements[inside] - read.metric(name, baselines, task)  # [baselines, values, draws]
        bounds.append(np.quantile(above[..., 1:], (0.025, 0.975), axis=-1))
    score, tps = bounds
    shown, possible = 100 * is_better(score, tps, read.margin).all(axis=1).mean(axis=-1)
    return np.where(np.arange(1 + RESAMPLES) % 2, possible, shown)


def correlation(read: Reader, setting: str, name: str) -> Values:
    values, measurements = _curve(read, name, "refusion", setting)
    x, y = values - values.mean(), measurements - measurements.mean(axis=0)
    return (x @ y) / np.sqrt((x @ x) * (y * y).sum(axis=0))


def loss_from_peak(read: Reader, setting: str, low: float, high: float) -> Values:
    """Percent of its best score that ReFusion loses at the largest swept value of those from `low` to `high`."""
    values, scores = _curve(read, "score", "refusion", setting)
    inside = scores[(values >= low) & (values <= high)]
    return 100 * (1 - inside[-1] / inside.max(axis=0))


def steepness(read: Reader, system: str) -> Values:
    """Points of score that a system loses for each further token a forward, from its slowest to its fastest point."""
    points = read.points(system, metric="tpf")
    tpf, scores = (_figures(read, points, name) for name in ("tpf", "score"))
    slow, fast = tpf[:, 0].argmin(), tpf[:, 0].argmax()
    return (scores[slow] - scores[fast]) / (tpf[fast] - tpf[slow])


def fading(read: Reader, system: str) -> Values:
    """The lesser of two logarithms of how much less far tokens depend on a revealed one than near tokens."""
    # One is the least over the masking ratios, the other the lowest ratio's minus the highest ratio's.
    points = read.points(system, "masking_ratio")
    near, far = (_figures(read, points, name) for name in (DIVERGENCE_NEAR, DIVERGENCE_FAR))
    fade = np.log(near / far)
    return np.minimum(fade.min(axis=0), fade[0] - fade[-1])


def first_slot_size(length: int) -> Values:
    """The least slot size, a power of 2, with which a text of `length` tokens has fewer orderings than 2^length."""
    sizes = (2**power for power in range(length.bit_length()))
    fewer = (k for k in sizes if (math.lgamma(length / k + 1) + 1) / math.log(2) < length)
    return np.full(1 + RESAMPLES, float(next(fewer)))


def in_case_study(read: Reader, metric: str) -> Values:
    """The largest count of a kind in decodings with the settings of the case study."""
    counts = [read.metric(metric, CASE_STUDY_SYSTEM, benchmark) for benchmark in read.benchmarks(CASE_STUDY_SYSTEM)]
    return largest(np.array(counts))


# Claim -> the setting and the range of its values that the paper calls the sweet spot.
SWEET_SPOTS: Mapping[str, tuple[str, float, float]] = {
    "P15": ("tau_slot", 0.5, 1.0),
    "P16": ("tau_token", 0.1, 0.9),
    "P17": ("slot_size", 8, 32),
    "P18": ("block_size", 32, 128),
}


def in_sweet_spot(claim: str, against: str = "qwen3") -> Formula:
    """The formula of a claim about a sweet spot, against these baselines."""
    return lambda read: sweet_spot(read, *SWEET_SPOTS[claim], against)


# By `id` in claims.csv, as `FORMULAS`, which they stand beside.
ALL_FORMULAS: Mapping[str, Formula] = {
    **FORMULAS,
    **{claim: in_sweet_spot(claim) for claim in SWEET_SPOTS},
    "P20": lambda read: correlation(read, "tau_slot", "score"),
    "P21": lambda read: -correlation(read, "tau_token", "tps"),
    "P22": lambda read: np.minimum(correlation(read, "slot_size", "score"), correlation(read, "slot_size", "tps")),
    "P25": lambda read: in_case_study(read, MOST_SLOTS),
    "P26": lambda read: in_case_study(read, MOST_TOKENS),
    "P38": lambda read: loss_from_peak(read, "block_size", 32, 512),
    "P39": lambda read: first_slot_size(4096),
    "P43": lambda read: fading(read, "llada"),
    "P44": lambda read: np.minimum(steepness(read, "llada"), steepness(read, "dream")) - steepness(read, "refusion"),
}
