"""Differences of two measurements: paired by item where the items are at hand, else of independent values."""

import math
from dataclasses import astuple, replace

import numpy as np
import pytest

from refusion_eval.metrics import paired_difference
from refusion_eval.results.compare import compare_runs, holm
from refusion_eval.results.differences import difference
from refusion_eval.results.measured import run_measurements
from tests.results.conftest import cell, sample


def right(*numbers):
    return {str(number) for number in numbers}


def of(measurements, run_id, metric="accuracy", task="mini_gsm8k"):
    keys = ((one.run_id, one.metric, one.task) for one in measurements)
    return measurements[list(keys).index((run_id, metric, task))]


@pytest.fixture
def two_tasks(write_run):
    """Runs a and b on 20 and 10 items, b being twice as fast."""
    samples = [sample(i, task=task) for task, n in (("mini_gsm8k", 20), ("mini_math", 10)) for i in range(n)]
    faster = [replace(one, seconds=0.25) for one in samples]
    return [write_run("a", samples, right=right(*range(5))), write_run("b", faster, right=right(*range(1, 9)))]


def test_a_difference_of_runs_is_that_of_compare(two_tasks):
    measured = run_measurements(two_tasks)
    for line in compare_runs(*two_tasks).lines:
        found = difference(of(measured, "a", task=line.task), of(measured, "b", task=line.task))
        assert found.paired
        assert astuple(found.interval) == pytest.approx(astuple(line.difference))


def test_figures_without_items_or_of_other_items_are_unpaired(write_run, two_tasks):
    a, b = (of(run_measurements(two_tasks), name) for name in "ab")
    paired = difference(a, b)
    without = difference(replace(a, by_item=None), b)
    other = write_run("c", [sample(i) for i in range(1, 21)], right=right(*range(1, 9)))
    of_other_items = difference(a, of(run_measurements([other]), "c"))
    assert [one.paired for one in (paired, without, of_other_items)] == [True, False, False]
    assert without.interval.value == paired.interval.value
    assert without.interval.high - without.interval.low > paired.interval.high - paired.interval.low
    assert math.isnan(difference(cell(value=1.0), cell(value=2.0)).interval.low)


def test_speeds_in_the_same_rounds_are_paired(write_run):
    lengths = np.random.default_rng(0).integers(1, 60, 40)
    runs = [
        write_run(
            name,
            [
                sample(i, num_tokens=int(n), seconds=float(factor * n), prefill_seconds=None)
                for i, n in enumerate(lengths)
            ],
        )
        for name, factor in (("a", 0.1), ("b", 0.05))
    ]
    measured = run_measurements(runs)
    found = difference(of(measured, "a", "tps"), of(measured, "b", "tps"))
    assert found.paired
    assert (found.interval.value, found.interval.low, found.interval.high) == pytest.approx((10, 10, 10))


def outcomes(gained, lost, equal):
    """Verdicts of two systems on items that the second one gained, lost, or answered as the first one."""
    return [0.0] * gained + [1.0] * (lost + equal), [1.0] * gained + [0.0] * lost + [1.0] * equal


def test_the_score_interval_of_pairs_by_hand():
    # At a bound the statistic (gained - lost - n * d) / sqrt(n * (2 * q + d * (1 - d))) is 1.96, with q, the share of
    # lost items, the most likely one if d is the difference, which is searched for on a grid here.
    gained, lost, equal = 9, 2, 39
    n = gained + lost + equal
    found = paired_difference(*outcomes(gained, lost, equal))
    assert found.value == pytest.approx(0.14)
    for bound, sign in ((found.low, 1), (found.high, -1)):
        q = np.linspace(max(0.0, -bound), (1 - bound) / 2, 200_001)[1:-1]
        likelihood = gained * np.log(q + bound) + lost * np.log(q) + equal * np.log(1 - 2 * q - bound)
        lost_share = q[likelihood.argmax()]
        statistic = (gained - lost - n * bound) / math.sqrt(n * (2 * lost_share + bound * (1 - bound)))
        assert statistic == pytest.approx(sign * 1.96, abs=1e-3)


@pytest.mark.parametrize(("gained", "lost"), [(0.1, 0.1), (0.02, 0.02), (0.2, 0.05), (0.01, 0.1), (0.4, 0.1)])
def test_the_interval_of_pairs_covers_the_truth_nineteen_times_in_twenty(gained, lost):
    n, covered = 30, 0.0
    for g in range(n + 1):
        for lost_items in range(n + 1 - g):
            interval = paired_difference(*outcomes(g, lost_items, n - g - lost_items))
            if interval.low <= gained - lost <= interval.high:
                ways = math.comb(n, g) * math.comb(n - g, lost_items)
                covered += ways * gained**g * lost**lost_items * (1 - gained - lost) ** (n - g - lost_items)
    assert covered > 0.94


def test_an_interval_of_several_samples_is_no_narrower_than_that_without_a_change():
    before, after = np.zeros(20), np.array([0.5, 0.25, *np.zeros(18)])  # only gains, so that no resample is below 0
    bound = paired_difference(before, before).high
    found = paired_difference(before, after)
    assert found.low == pytest.approx(0.0375 - bound)
    assert found.high >= 0.0375 + bound
    assert math.isnan(paired_difference([0.5], [0.75]).low)


def test_swapping_the_systems_swaps_the_bounds():
    there, back = paired_difference(*outcomes(3, 1, 6)), paired_difference(*reversed(outcomes(3, 1, 6)))
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))


def test_holms_rule_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]


def test_compare_adjusts_for_the_number_of_tasks_and_states_what_the_mean_could_show(two_tasks):
    comparison = compare_runs(*two_tasks)
    *tasks, mean = comparison.lines
    assert comparison.adjusted == [*holm([task.p_value for task in tasks]), mean.p_value]
    assert mean.detectable == pytest.approx(math.hypot(*(task.detectable for task in tasks)) / 2)
