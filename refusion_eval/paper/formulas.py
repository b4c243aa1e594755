"""The formulas of the paper's claims as Python functions, and their computation with intervals.

A formula is a function of a `Reader`, which picks figures by metric, systems and tasks:

    mean(read.tps("refusion") / read.tps("llada dream"))          mean of 14 ratios: 7 tasks, 2 systems

A pick is an array [systems, tasks, draws], so that numpy's broadcasting compares one system with each of several, task
by task. Draw 0 is the figure itself. Intervals are propagated by simulation: every figure with a 95% interval is drawn
from a normal distribution whose two sides have different spreads, so that its 2.5 and 97.5 percentiles are the bounds,
and the percentiles of the formula's results are its interval. Figures of runs are paired by item: their draws are in
the order of their resamples, in which figures of the same items rise and fall together. Other figures are drawn
independently of each other, so that the interval of their comparison is too wide rather than too narrow.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refusion_eval.errors import DataError
from refusion_eval.metrics import RESAMPLES, Z_95, Bootstrap, Interval
from refusion_eval.paper.rows import number
from refusion_eval.results.measurement import TASKS, ByItem, Measurement, MeasurementKey
from refusion_eval.results.metric_list import SCORES

Values = NDArray[Any]  # [..., 1 + RESAMPLES]: the value itself, then its draws


class MissingMeasurement(DataError):
    def __init__(self, message: str, keys: tuple[MeasurementKey, ...]) -> None:
        super().__init__(message)
        self.keys = keys


def setting_number(text: str, where: str) -> float:
    """The value of a setting on an axis: infinite if it is off (`null`), NaN if empty. Raises DataError for a word."""
    return math.inf if text == "null" else number(text, where)


MARGIN = 2.0  # points of score that a system may lose and still count as no worse


class Reader:
    """Picks figures for one computation of a formula and remembers which ones it picked."""

    def __init__(self, measurements: Mapping[MeasurementKey, Measurement], margin: float = MARGIN) -> None:
        self.margin = margin
        self._figures = measurements
        self._drawn: dict[str, Values] = {}
        self.used: dict[MeasurementKey, Measurement] = {}

    def score(self, systems: str, tasks: str = "") -> Values:
        """Accuracy in percent, or pass@1 of a code task."""
        return self.metric("score", systems, tasks)

    def tps(self, systems: str, tasks: str = "") -> Values:
        return self.metric("tps", systems, tasks)

    def points(self, system: str, setting: str = "", metric: str = "") -> list[tuple[str, float, str]]:
        """The points of a system in a sweep: keys of their systems, values of the setting, and benchmarks, ascending.

        Without a setting the points of all settings; with a metric those that have it. Raises MissingMeasurement.
        """
        points = set()
        for key, benchmark, name_of_figure in self._figures:
            base, _, pair = key.partition("@")
            name, equals, value = pair.partition("=")
            if base == system and equals and setting in ("", name) and metric in ("", name_of_figure):
                points.add((setting_number(value, key), key, benchmark))
        if not points:
            raise MissingMeasurement(f"there is no sweep of {setting or 'any setting'} by {system}", ())
        return [(key, value, benchmark) for value, key, benchmark in sorted(points)]

    def benchmarks(self, system: str) -> list[str]:
        """The benchmarks that a system has any figure on. Raises MissingMeasurement if there is none."""
        if benchmarks := sorted({benchmark for key, benchmark, _ in self._figures if key == system}):
            return benchmarks
        raise MissingMeasurement(f"there is no run of {system}", ())

    def metric(self, name: str, systems: str, tasks: str = "") -> Values:
        """[systems, tasks, 1 + RESAMPLES]; both are names separated by spaces, and no tasks means all benchmarks."""
        names = tasks.split() or TASKS
        return np.array([[self._values(name, system, task) for task in names] for system in systems.split()])

    def _values(self, name: str, system: str, task: str) -> Values:
        keys = tuple((system, task, metric) for metric in (SCORES if name == "score" else (name,)))
        key = next((key for key in keys if key in self._figures), None)
        if key is None:
            raise MissingMeasurement(f"there is no {name} of {system} on {task}", keys)
        measurement = self.used[key] = self._figures[key]
        identity = "|".join((measurement.run_id, *key))
        if identity not in self._drawn:
            self._drawn[identity] = _draws(identity, measurement)
        return self._drawn[identity]


def _draws(identity: str, measurement: Measurement) -> Values:
    """A figure and its draws, seeded by its identity: a score stays within 0 and 100, a speed above 0."""
    is_score = measurement.metric in SCORES
    values = np.full(1 + RESAMPLES, float(measurement.value))
    if measurement.has_interval:
        normal = np.random.default_rng(zlib.crc32(identity.encode())).standard_normal(RESAMPLES)
        if measurement.by_item is not None and np.isfinite(measurement.by_item.replicates).all():
            normal = _in_order_of(measurement.by_item, normal, measurement.n if is_score else None)
        below, above = measurement.value - measurement.ci_low, measurement.ci_high - measurement.value
        values[1:] += normal * np.where(normal > 0, above, below) / Z_95
        if measurement.value >= 0:
            np.clip(values, 0, 100 if is_score else None, out=values)
    return values


def _in_order_of(by_item: ByItem, normal: Values, num_scored: int | None) -> Values:
    """Normal draws in the order of the resamples of a figure."""
    replicates = by_item.replicates
    if num_scored is not None:
        # A score that changed on no item would never change in a resample. A noise of this size gives the difference of
        # two such scores the score interval's width.
        replicates = replicates + normal * 100 * Z_95 / (math.sqrt(2) * num_scored)
    places = np.argsort(np.argsort(replicates, kind="stable"))
    # Other items of equal number are drawn by the same numbers, so their resamples are shuffled apart.
    shuffled = np.random.default_rng(zlib.crc32(by_item.items.encode())).permutation(RESAMPLES)
    return np.asarray(np.sort(normal)[places][shuffled])


Formula = Callable[[Reader], Values]

_NO_INTERVAL = Interval(math.nan, math.nan, math.nan, 0)


@dataclass(frozen=True, kw_only=True)
class Computed:
    """Result of a formula; its interval's `n` counts measurements, and bounds or value are NaN where there are none."""

    interval: Interval = _NO_INTERVAL
    measurements: tuple[Measurement, ...] = ()
    reason: str = ""

    @property
    def is_defined(self) -> bool:
        return not math.isnan(self.interval.value)

    @property
    def fewest_items(self) -> int:
        """Benchmark items of the figure that has fewest; 0 if no figure states a number."""
        return min((entry.n for entry in self.measurements), default=0)

    @property
    def prompts(self) -> str:
        return "|".join(sorted({entry.prompts for entry in self.measurements}))

    @property
    def fused(self) -> bool:
        return any(entry.fused for entry in self.measurements)


NOTHING = Computed()  # without a formula, or where it has no direction


def compute(formula: Formula, measurements: Mapping[MeasurementKey, Measurement], margin: float = MARGIN) -> Computed:
    """Computes a formula to one number. Raises MissingMeasurement, or DataError if it is undefined."""
    reader = Reader(measurements, margin)
    with np.errstate(all="ignore"):
        values = np.asarray(formula(reader), dtype=np.float64).reshape(1 + RESAMPLES)
    if not np.isfinite(values[0]):
        raise DataError(f"the formula is undefined on these cells ({values[0]})")
    used = tuple(reader.used.values())
    replicates = values[1:] if any(entry.has_interval for entry in used) else np.full(RESAMPLES, np.nan)
    return Computed(interval=Bootstrap(float(values[0]), replicates, len(used)).interval(), measurements=used)


def _summary(reduce: Callable[..., Values]) -> Callable[[Values], Values]:
    """A function that reduces all systems and tasks of a pick to one number, draw by draw."""
    return lambda values: reduce(values.reshape(-1, values.shape[-1]), axis=0)


def _extreme(reduce: Callable[..., Values]) -> Callable[[Values], Values]:
    """The least or the largest value of a pick, whose bounds are the least or the largest of the bounds.

    The least of several draws lies below the least value even where all values are equal, so that an interval of such
    draws would leave out what it is the interval of. Values are therefore drawn in one order.
    """
    ordered = _summary(reduce)
    return lambda values: ordered(np.concatenate([values[..., :1], np.sort(values[..., 1:])], axis=-1))


mean, median, total = (_summary(reduce) for reduce in (np.mean, np.median, np.sum))
least, largest = _extreme(np.min), _extreme(np.max)


def gmean(values: Values) -> Values:
    return np.exp(mean(np.log(values)))


OTHERS = "llada dream fast_dllm_llada fast_dllm_dream d2f_llada d2f_dream"
_QWEN2_5, _RECOMPUTED = "refusion+retrained_qwen2.5", "refusion+recompute_kv"


def _retrained_margin(read: Reader) -> Values:
    return read.score("refusion+retrained", "humaneval") - read.score("qwen3+retrained", "humaneval")


# By `id` in claims.csv, whose column `formula` says the same for readers (a test compares the two).
FORMULAS: Mapping[str, Formula] = {
    "P01": lambda read: 100 * (mean(read.score("refusion") / read.score("llada dream")) - 1),
    "P02": lambda read: gmean(read.tps("refusion") / read.tps("llada dream")),
    "P02-mean": lambda read: mean(read.tps("refusion") / read.tps("llada dream")),
    "P03": lambda read: mean(read.tps("refusion") / read.tps("qwen3")),
    "P04": lambda read: mean(read.score("refusion", "gsm8k mbpp") - read.score("qwen3", "gsm8k mbpp")),
    "P05": lambda read: read.score("refusion", "humaneval"),
    "P06": lambda read: least(read.score("refusion", "humaneval") - read.score(OTHERS, "humaneval")),
    "P07": lambda read: read.tps("refusion", "mbpp"),
    "P08": lambda read: least(read.tps("refusion", "mbpp") / read.tps(OTHERS, "mbpp")),
    "P09-score": lambda read: total(read.score("refusion") > read.score(OTHERS)),
    "P09-tps": lambda read: total(read.tps("refusion") > read.tps(OTHERS)),
    "P10": _retrained_margin,
    "P11": _retrained_margin,
    "P12": lambda read: read.tps("refusion+retrained", "humaneval") / read.tps("qwen3+retrained", "humaneval"),
    "P13": lambda read: 100 * (mean(read.score(_QWEN2_5)) / mean(read.score("dream")) - 1),
    "P13-points": lambda read: mean(read.score(_QWEN2_5)) - mean(read.score("dream")),
    "P14": lambda read: mean(read.tps(_QWEN2_5)) / mean(read.tps("dream")),
    "P23-min": lambda read: least(read.tps("refusion") / read.tps(_RECOMPUTED)),
    "P23-max": lambda read: largest(read.tps("refusion") / read.tps(_RECOMPUTED)),
    "P24-min": lambda read: least(read.score("refusion") - read.score(_RECOMPUTED)),
    "P24-max": lambda read: largest(read.score("refusion") - read.score(_RECOMPUTED)),
    "P33": lambda read: read.tps("refusion", "overall") / read.tps("gpt_4o_mini", "overall"),
    "P34": lambda read: read.score("refusion", "mbpp") - read.score("nova_micro", "mbpp"),
    "P45-ours": lambda read: read.metric("tokens_mean", "refusion", "mmlu_pro"),
    "P45-theirs": lambda read: read.metric("tokens_mean", "qwen3", "mmlu_pro"),
    "P45-score": lambda read: read.score("refusion", "mmlu_pro") - read.score("qwen3", "mmlu_pro"),
}


def speedup_averages(fast: str, slow: str, tasks: str) -> Mapping[str, Formula]:
    """The ways to average a speed-up over tasks and over slow systems, both separated by spaces, by name."""
    num_slow = len(slow.split())

    def ratios(read: Reader) -> Values:
        return read.tps(fast, tasks) / read.tps(slow, tasks)

    def latencies(read: Reader, systems: str) -> Values:
        return read.metric("latency_mean", systems, tasks)

    return {
        "mean of ratios": lambda read: mean(ratios(read)),
        "ratio of means": lambda read: mean(read.tps(fast, tasks)) / mean(read.tps(slow, tasks)),
        "geometric mean": lambda read: gmean(ratios(read)),
        "median of ratios": lambda read: median(ratios(read)),
        "total time": lambda read: total(latencies(read, slow)) / num_slow / total(latencies(read, fast)),
    }
