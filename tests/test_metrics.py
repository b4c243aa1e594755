"""Bootstrap intervals, pass@k, majority votes and speed: which samples count, and how they are combined."""

import json
import math
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.errors import DataError
from refusion_eval.metrics import (
    Statistic,
    Timing,
    accuracy,
    bootstrap,
    bootstrap_mean,
    bootstrap_ratio,
    bytes_read,
    latencies,
    majority_passed,
    mean,
    mean_of,
    mean_of_intervals,
    measured,
    pass_at_k,
    rate,
    speedup,
    tpf_release,
)
from refusion_eval.types import Trace
from tests.examples import examples

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


@examples(50)
@given(values)
def test_the_interval_of_a_mean_lies_within_the_values(numbers):
    interval = bootstrap_mean(numbers).interval()
    assert interval.value == pytest.approx(np.mean(numbers))
    assert interval.n == len(numbers)
    if len(numbers) > 1:
        slack = 1e-9 * max(1.0, max(map(abs, numbers)))
        assert min(numbers) - slack <= interval.low <= interval.high <= max(numbers) + slack


@examples(25)
@given(values, st.integers(0, 2**31))
def test_equal_seeds_give_equal_intervals(numbers, seed):
    first, second = (bootstrap_mean(numbers, seed=seed).interval() for _ in range(2))
    assert repr(first) == repr(second)


@pytest.mark.parametrize("rounds", [(), (1, 2, 1, 2, 2)])
def test_statistics_that_share_draws_are_what_each_is_alone(rounds):
    columns = [[1.0, 2.0, 4.0, 8.0, 16.0], [3.0, 1.0, 4.0, 1.0, 5.0]]
    statistics = [Statistic([column], lambda drawn: drawn.sum(axis=1)) for column in columns]
    together = bootstrap(statistics, seed=7, rounds=rounds)
    separate = [bootstrap([statistic], seed=7, rounds=rounds)[0] for statistic in statistics]
    for one, alone in zip(together, separate, strict=True):
        assert one.value == alone.value
        assert np.array_equal(one.replicates, alone.replicates)


def test_one_item_has_a_value_and_no_interval():
    interval = bootstrap_mean([0.25]).interval()
    assert interval.value == 0.25
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)


def test_equal_values_give_an_interval_of_zero_width():
    interval = bootstrap_mean([1.0] * 12).interval()
    assert (interval.low, interval.high) == (1.0, 1.0)


def test_the_interval_of_a_proportion_has_the_binomial_width():
    rng = np.random.default_rng(0)
    passed = rng.random(1000) < 0.7
    interval = bootstrap_mean(passed).interval()
    expected = 1.96 * math.sqrt(passed.mean() * (1 - passed.mean()) / 1000)
    assert interval.high - interval.value == pytest.approx(expected, rel=0.1)
    assert interval.value - interval.low == pytest.approx(expected, rel=0.1)


def test_nominal_coverage_is_reached(monkeypatch):
    monkeypatch.setattr("refusion_eval.metrics.RESAMPLES", 300)
    rng = np.random.default_rng(1)
    hits = 0
    for seed in range(200):
        interval = bootstrap_mean(rng.normal(3.0, 1.0, 60), seed=seed).interval()
        hits += interval.low <= 3.0 <= interval.high
    assert 0.88 <= hits / 200 <= 0.99


def test_drawing_in_chunks_changes_nothing(monkeypatch):
    numbers = np.arange(50.0)
    whole = bootstrap_mean(numbers).interval()
    monkeypatch.setattr("refusion_eval.metrics._MAX_DRAWS_AT_ONCE", 170)
    assert bootstrap_mean(numbers).interval() == whole


def test_a_ratio_sums_before_it_divides():
    assert bootstrap_ratio([10, 90], [1, 1]).value == 50
    assert bootstrap_ratio([10, 90], [1, 9]).value == 10


def test_a_ratio_of_proportional_columns_has_no_spread():
    interval = bootstrap_ratio([2, 4, 6], [1, 2, 3]).interval()
    assert (interval.low, interval.value, interval.high) == (2, 2, 2)


@pytest.mark.parametrize(("top", "bottom"), [([1], [0]), ([], [])])
def test_an_undefined_ratio_is_refused(top, bottom):
    with pytest.raises(DataError):
        bootstrap_ratio(top, bottom)


def test_values_that_are_not_finite_are_refused():
    with pytest.raises(DataError, match="NaN"):
        bootstrap_mean([1.0, math.nan])


def test_a_mean_over_tasks_weighs_tasks_equally_and_is_resampled_within_them():
    small = bootstrap_mean([0.0, 1.0] * 5, seed=1)
    large = bootstrap_mean([1.0] * 1000, seed=2)
    combined = mean_of([small, large]).interval()
    assert combined.value == 0.75
    assert combined.n == 1010
    alone = small.interval()
    assert combined.high - combined.low == pytest.approx((alone.high - alone.low) / 2)


def test_a_mean_over_tasks_that_are_all_right_or_all_wrong_has_a_width():
    right, wrong = accuracy([1.0] * 20), accuracy([0.0] * 20)
    single, both = right.interval(), mean_of([right, right]).interval()
    assert (both.value, both.high) == (1.0, 1.0)
    assert 1 - both.low == pytest.approx((1 - single.low) / math.sqrt(2))
    mixed = mean_of([right, wrong]).interval()
    assert mixed.low < mixed.value == 0.5 < mixed.high


@pytest.mark.parametrize("count", [37, 164, 541])
def test_bounds_of_no_and_of_all_items_are_exact(count):
    none, all_items = accuracy([0.0] * count).interval(), accuracy([1.0] * count).interval()
    assert (none.low, all_items.high) == (0.0, 1.0)
    assert mean_of_intervals([none, none]).low == 0.0


@examples(60)
@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_draws_that_contain_a_correct_sample(num_samples, data):
    num_correct = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    draws = list(combinations(range(num_samples), k))
    expected = sum(any(sample < num_correct for sample in draw) for draw in draws) / len(draws)
    assert pass_at_k([num_samples], [num_correct], k)[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answers", "of_answer", "expected"),
    [
        (["7", None, None, None, "8", "8"], "8", True),  # what was not extracted does not vote
        (["7", "8"], "7", True),  # a tie goes to the answer seen first
        (["7", "8"], "8", False),
        ([None, None], None, False),
        ([], None, False),
    ],
)
def test_the_majority_ignores_missing_answers_and_gives_ties_to_the_first(answers, of_answer, expected):
    assert majority_passed(answers, [answer == of_answer for answer in answers]) == expected


def test_right_answers_are_one_answer_however_they_are_written():
    assert majority_passed(["1/2", "7", "0.5", "7", "\\frac12"], [True, False, True, False, True])


def test_a_majority_passes_with_the_verdict_of_its_answer():
    assert majority_passed(["7", "8", "8"], [False, True, True])
    assert not majority_passed(["7", "7", "8"], [False, False, True])
    assert not majority_passed([None, None], [False, False])


timings = st.lists(
    st.builds(
        Timing, item=st.integers(0, 20), tokens=st.integers(1, 500), forwards=st.just(1), seconds=st.floats(0.01, 10)
    ),
    min_size=1,
    max_size=20,
)


def tps(samples):
    return rate(samples, "tokens", "seconds")


def times(seconds, tokens=10, **fields):
    return [timing(item, tokens, 1, s, **fields) for item, s in enumerate(seconds)]


timing = partial(Timing, turn_of="one command")


def test_a_rate_sums_and_a_mean_averages():
    samples = [Timing("a", 100, 10, 1.0), Timing("b", 100, 10, 4.0)]
    assert tps(samples).value == 40.0
    assert mean(samples, "tps").value == (100 + 25) / 2


@examples(30)
@given(timings)
def test_tps_lies_between_the_slowest_and_the_fastest_sample(samples):
    rates = [sample.tokens / sample.seconds for sample in samples]
    assert min(rates) * (1 - 1e-9) <= tps(samples).value <= max(rates) * (1 + 1e-9)


@examples(30)
@given(timings, st.randoms())
def test_the_order_of_samples_of_different_items_changes_nothing(samples, rng):
    samples = list({sample.item: sample for sample in samples}.values())
    shuffled = list(samples)
    rng.shuffle(shuffled)
    for metric in (tps, lambda given: mean(given, "tps"), lambda given: latencies(given, [0.95])[0]):
        assert repr(metric(samples).interval()) == repr(metric(shuffled).interval())


def test_batched_and_warm_up_samples_do_not_count():
    alone = Timing("a", 10, 1, 1.0)
    others = [Timing("b", 1000, 1, 1.0, batch_size=8), Timing("c", 1000, 1, 1.0, warm=False)]
    assert measured([alone, *others]) == [alone]


def test_samples_of_two_machines_are_refused_unless_one_does_not_count():
    ours, theirs = Timing("a", 1, 1, 1.0, hardware="x"), Timing("b", 1, 1, 1.0, hardware="y")
    with pytest.raises(DataError, match=r"2 different machines \(x, y\)"):
        measured([ours, theirs])
    assert measured([ours, Timing("b", 1, 1, 1.0, hardware="y", warm=False)]) == [ours]


def test_time_that_was_not_recorded_is_refused():
    with pytest.raises(DataError, match="sum to zero"):
        tps([Timing("a", 1, 1, 0.0)])


def test_latency_is_the_quantile_of_all_samples():
    seconds = [1.0, 2.0, 3.0, 4.0, 10.0]
    assert latencies(times(seconds), [0.5])[0].value == 3.0
    assert latencies(times(seconds), [0.95])[0].value == pytest.approx(np.quantile(seconds, 0.95))
    interval = latencies(times(seconds), [0.95])[0].interval()
    assert 1.0 <= interval.low <= interval.value <= interval.high <= 10.0


@pytest.mark.parametrize("quantile", [0.5, 0.95])
def test_the_latency_of_every_resample_is_the_quantile_of_its_seconds(quantile):
    seconds = np.random.default_rng(2).integers(1, 9, 10) / 7  # some of them equal; ten sort alike as numbers and texts
    (expected,) = bootstrap([Statistic([seconds], lambda drawn: np.quantile(drawn, quantile, axis=1))], seed=3)
    assert np.array_equal(latencies(times(seconds), [quantile], seed=3)[0].replicates, expected.replicates)


def test_latency_of_items_with_different_numbers_of_samples_uses_each_sample_once():
    samples = [Timing("a", 1, 1, 1.0), Timing("a", 1, 1, 2.0), Timing("a", 1, 1, 3.0), Timing("b", 1, 1, 10.0)]
    result = latencies(samples, [0.5])[0]
    assert result.value == 2.5
    assert result.n == 2


def test_a_speedup_between_identical_samples_is_one_without_spread():
    samples = times(np.linspace(1, 5, 20))
    interval = speedup(samples, samples)[0].interval()
    assert (interval.value, interval.low, interval.high) == (1.0, 1.0, 1.0)


def test_a_speedup_is_paired_by_item():
    base = times(np.linspace(0.1, 50, 40))
    twice = [timing(t.item, t.tokens, 1, t.seconds / 2) for t in reversed(base)]
    interval = speedup(twice, base)[0].interval()
    assert interval.value == pytest.approx(2.0)
    assert interval.high - interval.low < 1e-9


def test_a_speedup_uses_the_common_items_and_counts_the_others():
    base = [timing("a", 10, 1, 1.0), timing("b", 10, 1, 100.0)]
    ours = [timing("a", 10, 1, 0.5), timing("c", 10, 1, 0.001)]
    ratio, num_left_out = speedup(ours, base)
    assert ratio.value == 2.0
    assert ratio.n == 1
    assert num_left_out == 2
    assert math.isnan(ratio.interval().low)


def test_a_speedup_across_machines_or_without_common_items_is_refused():
    with pytest.raises(DataError, match="different machines"):
        speedup([timing("a", 1, 1, 1.0, hardware="x")], [timing("a", 1, 1, 1.0, hardware="y")])
    with pytest.raises(DataError, match="no measured item in common"):
        speedup([timing("a", 1, 1, 1.0)], [timing("b", 1, 1, 1.0)])


def iteration(trace, chosen, kinds, fixed):
    """One plan and its infill: the forwards behind the plan by kind, then the positions fixed."""
    trace.forward("plan", 8, 0)
    trace.select("slot", range(0, 40, 4), [0.5] * 10, chosen)
    for kind in kinds:
        trace.forward(kind, 8, 0)
    trace.fix(fixed, [7] * len(fixed))


def test_directly_accepted_slots_count_whole_over_two_forwards():
    trace = Trace()
    iteration(trace, [0, 4, 8], ["verify"], range(8))
    assert tpf_release(trace, 4) == 8 / 2


def test_a_slot_cut_by_eos_counts_whole():
    trace = Trace()
    iteration(trace, [0, 4, 8], ["verify"], range(6))
    assert tpf_release(trace, 4) == 8 / 2


def test_completed_slots_all_count_even_those_dropped():
    trace = Trace()
    iteration(trace, [0, 4, 8], ["verify", "predict", "verify", "predict", "verify"], range(8))
    assert tpf_release(trace, 4) == 12 / 6


def test_iterations_weigh_the_same_whatever_their_length():
    trace = Trace()
    iteration(trace, [0, 4], ["verify"], range(8))
    iteration(trace, [8], ["verify", "predict", "verify"], range(8, 12))
    assert tpf_release(trace, 4) == (8 / 2 + 4 / 4) / 2


def test_a_refresh_costs_a_forward_and_is_no_completion():
    trace = Trace()
    iteration(trace, [0], ["verify", "refresh"], range(4))
    assert tpf_release(trace, 4) == 4 / 3


def test_other_decoders_and_fused_plans_have_no_release_figure():
    autoregressive, fused = Trace(), Trace()
    autoregressive.forward("decode", 8, 0)
    autoregressive.fix([0], [7])
    fused.forward("plan", 8, 0)
    fused.select("slot", [0, 4], [0.9, 0.1], [0])
    fused.forward("verify", 8, 0)
    fused.fix([0], [7])
    fused.select("slot", [4], [0.9], [4])
    assert tpf_release(Trace(), 4) is None
    assert tpf_release(autoregressive, 4) is None
    assert tpf_release(fused, 4) is None


@pytest.mark.parametrize("part", ["shortest", pytest.param("rest", marks=pytest.mark.slow)])
def test_the_release_figure_equals_what_the_release_printed(shared, part):
    """Stored decodings of the public release, decoded again with its defects."""
    from refusion_eval.api import load_model
    from tests.decoders.goldens import decode_golden

    model = load_model(shared / "parity" / "tiny", dtype="float32", device="cpu")
    cases = [json.loads(line) for line in (shared / "parity" / "golden.jsonl").open()]
    cases.sort(key=lambda case: case["n_forward"])
    for case in cases[:4] if part == "shortest" else cases[4:]:
        out = decode_golden(model, case, release_compatible=True)
        assert tpf_release(out.trace, case["settings"]["slot_size"]) == pytest.approx(case["tpf"], abs=1e-9)
        assert len(out.tokens) / out.num_forwards == pytest.approx(case["tokens_per_forward_total"])


def test_each_forward_reads_the_weights_and_the_cache_before_it():
    trace = Trace()
    for cached in (0, 10, 20):
        trace.forward("decode", 1, cached)
    assert bytes_read(trace, weight_bytes=1000, cache_bytes_per_row=8) == 3 * 1000 + 30 * 8


@pytest.mark.parametrize(
    ("right", "count", "bounds"),
    # 81 of 263: Newcombe, "Two-sided confidence intervals for the single proportion" (1998), Table I.
    [(0, 6, (0.0, 0.3903)), (6, 6, (0.6097, 1.0)), (81, 263, (0.2553, 0.3662))],
)
def test_a_share_has_wilsons_interval(right, count, bounds):
    interval = accuracy([1.0] * right + [0.0] * (count - right)).scaled(100).interval()
    assert (interval.low / 100, interval.high / 100) == pytest.approx(bounds, abs=5e-5)
    assert interval.value == pytest.approx(100 * right / count)


def test_shares_of_several_samples_are_resampled():
    values = [0.0, 0.5, 1.0, 1.0]
    assert accuracy(values).interval() == bootstrap_mean(values).interval()
    assert math.isnan(accuracy([1.0]).interval().low)


def test_intervals_of_speed_cover_rounds_as_well_as_items():
    # Every item takes as long as the others of its round, and the second of three rounds was slow.
    samples = [
        timing(item, tokens=10, forwards=5, seconds=(1, 3, 1)[item % 3], round=item % 3, created=str(item % 3))
        for item in range(60)
    ]
    by_items, by_rounds = (rate(samples, "tokens", "seconds", timed=timed).interval() for timed in (False, True))
    assert by_items.value == by_rounds.value == pytest.approx(6.0)
    assert by_rounds.low == pytest.approx(10 / 3)  # the slow round was drawn alone
    assert by_rounds.high == pytest.approx(10.0)
    assert by_rounds.high - by_rounds.low > 2 * (by_items.high - by_items.low)
    one_round = [replace(sample, round=2) for sample in samples]
    assert rate(one_round, "tokens", "seconds", timed=True).interval() == by_items
    paired = speedup(samples, [replace(sample, seconds=2 * sample.seconds) for sample in samples])[0].interval()
    assert (paired.low, paired.value, paired.high) == (2.0, 2.0, 2.0)  # what slows both at a time is no difference
