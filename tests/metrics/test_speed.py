"""TPS, latency and speed-up: which samples count, and how they are combined."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_eval.errors import DataError
from refusion_eval.metrics.speed import Timing, latency, mean_tps, measured, speedup, total_tps

timings = st.lists(
    st.builds(
        Timing, item=st.integers(0, 20), tokens=st.integers(1, 500), forwards=st.just(1), seconds=st.floats(0.01, 10)
    ),
    min_size=1,
    max_size=20,
)


def times(seconds, tokens=10, **fields):
    return [Timing(item=item, tokens=tokens, forwards=1, seconds=s, **fields) for item, s in enumerate(seconds)]


def test_total_tps_sums_and_mean_tps_averages():
    samples = [Timing("a", 100, 10, 1.0), Timing("b", 100, 10, 4.0)]
    assert total_tps(samples).value == 40.0
    assert mean_tps(samples).value == (100 + 25) / 2


@settings(max_examples=30, deadline=None)
@given(timings)
def test_total_tps_lies_between_the_slowest_and_the_fastest_sample(samples):
    rates = [sample.tokens / sample.seconds for sample in samples]
    assert min(rates) * (1 - 1e-9) <= total_tps(samples).value <= max(rates) * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(timings, st.randoms())
def test_the_order_of_samples_of_different_items_changes_nothing(samples, rng):
    samples = list({sample.item: sample for sample in samples}.values())
    shuffled = list(samples)
    rng.shuffle(shuffled)
    for metric in (total_tps, mean_tps, lambda given: latency(given, 0.95)):
        assert repr(metric(samples).interval()) == repr(metric(shuffled).interval())


def test_batched_and_warm_up_samples_do_not_count():
    alone = Timing("a", 10, 1, 1.0)
    others = [Timing("b", 1000, 1, 1.0, batch_size=8), Timing("c", 1000, 1, 1.0, warm=False)]
    assert measured([alone, *others]) == [alone]
    assert total_tps([alone, *others]).value == 10.0


def test_samples_of_two_machines_are_refused_unless_one_does_not_count():
    ours, theirs = Timing("a", 1, 1, 1.0, hardware="x"), Timing("b", 1, 1, 1.0, hardware="y")
    with pytest.raises(DataError, match=r"2 different machines \(x, y\)"):
        total_tps([ours, theirs])
    assert total_tps([ours, Timing("b", 1, 1, 1.0, hardware="y", warm=False)]).value == 1.0


def test_without_a_measured_sample_speed_is_undefined():
    batched = [Timing("a", 1, 1, 1.0, batch_size=2)]
    for metric in (total_tps, mean_tps, lambda given: latency(given, 0.5)):
        with pytest.raises(DataError):
            metric(batched)


def test_time_that_was_not_recorded_is_refused():
    with pytest.raises(DataError):
        total_tps([Timing("a", 1, 1, 0.0)])
    with pytest.raises(DataError, match="zero seconds"):
        mean_tps([Timing("a", 1, 1, 0.0), Timing("b", 1, 1, 1.0)])


def test_latency_is_the_quantile_of_all_samples():
    seconds = [1.0, 2.0, 3.0, 4.0, 10.0]
    assert latency(times(seconds), 0.5).value == 3.0
    assert latency(times(seconds), 0.95).value == pytest.approx(np.quantile(seconds, 0.95))
    interval = latency(times(seconds), 0.95).interval()
    assert 1.0 <= interval.low <= interval.value <= interval.high <= 10.0


def test_latency_of_items_with_different_numbers_of_samples_uses_each_sample_once():
    samples = [Timing("a", 1, 1, 1.0), Timing("a", 1, 1, 2.0), Timing("a", 1, 1, 3.0), Timing("b", 1, 1, 10.0)]
    result = latency(samples, 0.5)
    assert result.value == 2.5
    assert result.n == 2


def test_a_speedup_between_identical_samples_is_one_without_spread():
    samples = times(np.linspace(1, 5, 20))
    interval = speedup(samples, samples).ratio.interval()
    assert (interval.value, interval.low, interval.high) == (1.0, 1.0, 1.0)


def test_a_speedup_is_paired_by_item():
    base = times(np.linspace(0.1, 50, 40))
    twice = [Timing(t.item, t.tokens, 1, t.seconds / 2) for t in reversed(base)]
    interval = speedup(twice, base).ratio.interval()
    assert interval.value == pytest.approx(2.0)
    assert interval.high - interval.low < 1e-9


def test_a_speedup_uses_the_common_items_and_counts_the_others():
    base = [Timing("a", 10, 1, 1.0), Timing("b", 10, 1, 100.0)]
    ours = [Timing("a", 10, 1, 0.5), Timing("c", 10, 1, 0.001)]
    result = speedup(ours, base)
    assert result.ratio.value == 2.0
    assert result.ratio.n == 1
    assert result.num_left_out == 2
    assert math.isnan(result.ratio.interval().low)


def test_a_speedup_across_machines_or_without_common_items_is_refused():
    with pytest.raises(DataError, match="different machines"):
        speedup([Timing("a", 1, 1, 1.0, hardware="x")], [Timing("a", 1, 1, 1.0, hardware="y")])
    with pytest.raises(DataError, match="no measured item in common"):
        speedup([Timing("a", 1, 1, 1.0)], [Timing("b", 1, 1, 1.0)])
