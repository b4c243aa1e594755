"""Properties of pass@k, majority votes and bootstrap intervals."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_eval.errors import DataError
from refusion_eval.metrics.accuracy import majority, majority_passed, pass_at_k
from refusion_eval.metrics.bootstrap import (
    bootstrap,
    bootstrap_mean,
    bootstrap_ratio,
    mean_of,
    mean_statistic,
    paired_difference,
)

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


@settings(max_examples=50, deadline=None)
@given(values)
def test_the_interval_of_a_mean_lies_within_the_values(numbers):
    interval = bootstrap_mean(numbers, resamples=100)
    assert interval.value == pytest.approx(np.mean(numbers))
    assert interval.n == len(numbers)
    if len(numbers) > 1:
        slack = 1e-9 * max(1.0, max(map(abs, numbers)))
        assert min(numbers) - slack <= interval.low <= interval.high <= max(numbers) + slack


@settings(max_examples=25, deadline=None)
@given(values, st.integers(0, 2**31))
def test_equal_seeds_give_equal_intervals(numbers, seed):
    first, second = (bootstrap_mean(numbers, seed=seed, resamples=50) for _ in range(2))
    assert repr(first) == repr(second)


def test_one_item_has_a_value_and_no_interval():
    interval = bootstrap_mean([0.25])
    assert interval.value == 0.25
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)


def test_equal_values_give_an_interval_of_zero_width():
    assert bootstrap_mean([1.0] * 12) == bootstrap_mean([1.0] * 12)
    interval = bootstrap_mean([1.0] * 12)
    assert (interval.low, interval.high) == (1.0, 1.0)


def test_the_interval_of_a_proportion_has_the_binomial_width():
    rng = np.random.default_rng(0)
    passed = rng.random(1000) < 0.7
    interval = bootstrap_mean(passed)
    expected = 1.96 * math.sqrt(passed.mean() * (1 - passed.mean()) / 1000)
    assert interval.high - interval.value == pytest.approx(expected, rel=0.1)
    assert interval.value - interval.low == pytest.approx(expected, rel=0.1)


def test_nominal_coverage_is_reached():
    rng = np.random.default_rng(1)
    hits = 0
    for seed in range(200):
        interval = bootstrap_mean(rng.normal(3.0, 1.0, 60), seed=seed, resamples=300)
        hits += interval.low <= 3.0 <= interval.high
    assert 0.88 <= hits / 200 <= 0.99


def test_drawing_in_chunks_changes_nothing(monkeypatch):
    numbers = np.arange(50.0)
    whole = bootstrap_mean(numbers)
    monkeypatch.setattr("refusion_eval.metrics.bootstrap._MAX_DRAWS_AT_ONCE", 170)
    assert bootstrap_mean(numbers) == whole


def test_a_ratio_sums_before_it_divides():
    assert bootstrap_ratio([10, 90], [1, 1]).value == 50
    assert bootstrap_ratio([10, 90], [1, 9]).value == 10


def test_a_ratio_of_proportional_columns_has_no_spread():
    interval = bootstrap_ratio([2, 4, 6], [1, 2, 3])
    assert (interval.low, interval.value, interval.high) == (2, 2, 2)


@pytest.mark.parametrize(("top", "bottom"), [([1], [0]), ([1, 2], [1, -1]), ([1, 2], [1]), ([], [])])
def test_an_undefined_ratio_is_refused(top, bottom):
    with pytest.raises(DataError):
        bootstrap_ratio(top, bottom)


def test_values_that_are_not_finite_are_refused():
    with pytest.raises(DataError, match="NaN"):
        bootstrap_mean([1.0, math.nan])


def test_a_paired_difference_uses_the_pairing():
    rng = np.random.default_rng(0)
    base = rng.normal(0, 100, 80)
    interval = paired_difference(base + 1.0, base)
    assert interval.value == pytest.approx(1.0)
    assert interval.high - interval.low < 1e-9


def test_a_paired_difference_is_antisymmetric():
    a, b = [1, 0, 1, 1, 0, 1], [0, 0, 1, 0, 1, 0]
    one, other = paired_difference(a, b), paired_difference(b, a)
    assert one.value == -other.value
    assert one.low == pytest.approx(-other.high, abs=0.02)


def test_a_mean_over_tasks_weighs_tasks_equally_and_is_resampled_within_them():
    small = bootstrap([[0.0, 1.0] * 5], mean_statistic, seed=1)
    large = bootstrap([[1.0] * 1000], mean_statistic, seed=2)
    combined = mean_of([small, large]).interval()
    assert combined.value == 0.75
    assert combined.n == 1010
    alone = small.interval()
    assert combined.high - combined.low == pytest.approx((alone.high - alone.low) / 2)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_draws_that_contain_a_correct_sample(num_samples, data):
    num_correct = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    draws = list(combinations(range(num_samples), k))
    expected = sum(any(sample < num_correct for sample in draw) for draw in draws) / len(draws)
    assert pass_at_k([num_samples], [num_correct], k)[0] == pytest.approx(expected)


@pytest.mark.parametrize(("samples", "correct", "k"), [([3], [1], 4), ([3], [4], 1), ([3], [1], 0), ([3, 3], [1], 1)])
def test_an_undefined_pass_at_k_is_refused(samples, correct, k):
    with pytest.raises(DataError):
        pass_at_k(samples, correct, k)


def test_the_majority_ignores_missing_answers_and_gives_ties_to_the_first():
    assert majority(["7", None, None, None, "8", "8"]) == "8"
    assert majority(["7", "8"]) == "7"
    assert majority([None, None]) is None
    assert majority([]) is None


def test_a_majority_passes_with_the_verdict_of_its_answer():
    assert majority_passed(["7", "8", "8"], [False, True, True])
    assert not majority_passed(["7", "7", "8"], [False, False, True])
    assert not majority_passed([None, None], [False, False])
