"""Formulas over figures: values by hand, intervals, and the text that claims.csv has for readers."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.errors import DataError
from refusion_eval.metrics import paired_difference
from refusion_eval.paper import curves
from refusion_eval.paper.formulas import (
    MissingMeasurement,
    Reader,
    compute,
    gmean,
    largest,
    least,
    mean,
    median,
    speedup_averages,
    total,
)
from refusion_eval.paper.statements import read_claims
from refusion_eval.results.differences import difference
from refusion_eval.results.measured import read_measurements
from refusion_eval.results.measurement import TASKS, by_key
from refusion_eval.results.published import published_measurements
from tests.results.conftest import cell, sample

# `ours` has 2, 4, 8, 16, ... tokens a second, `slow` and `slower` have 1 and 0.5 on every task.
FIGURES = by_key(
    [
        *(cell("ours", task, "tps", 2.0 ** (1 + number)) for number, task in enumerate(TASKS)),
        *(cell("slow", task, "tps", 1.0) for task in TASKS),
        *(cell("slower", task, "tps", 0.5) for task in TASKS),
        cell("ours", "gsm8k", "accuracy", 80.0),
        cell("ours", "humaneval", "pass@1", 60.0),
    ]
)


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        (lambda read: read.tps("ours", "gsm8k"), 8.0),
        (lambda read: -read.tps("ours", "gsm8k") + 3 * 2, -2.0),
        (lambda read: mean(read.tps("ours") / read.tps("slow")), 254 / 7),
        (lambda read: gmean(read.tps("ours") / read.tps("slow")), 16.0),
        (lambda read: median(read.tps("ours") / read.tps("slow")), 16.0),
        (lambda read: mean(read.tps("ours")) / mean(read.tps("slow slower")), 254 / 7 / 0.75),
        (lambda read: mean(read.tps("ours") / read.tps("slow slower")), 254 / 7 * 1.5),
        (lambda read: largest(read.tps("ours")) - least(read.tps("ours", "gsm8k math")), 120.0),
        (lambda read: total(read.tps("slow", "gsm8k math") - read.tps("slower", "gsm8k math")), 1.0),
        (lambda read: total(read.tps("slow") < read.tps("ours")), 7.0),
        (lambda read: total(read.tps("ours") > 10 * read.tps("slow slower")), 9.0),
        (lambda read: mean(read.score("ours", "gsm8k humaneval")), 70.0),
    ],
)
def test_values_by_hand(formula, value):
    assert compute(formula, FIGURES).interval.value == pytest.approx(value)


def study():
    """A sweep of each setting, two masking ratios and a case study: three points with given scores, TPS and TPF."""
    figures = []
    swept = {
        "tau_slot": (0.5, 0.7, 0.9),
        "tau_token": (0.1, 0.5, 0.9),
        "slot_size": (8, 16, 32),
        "block_size": (32, 128, 512),
    }
    for setting, values in swept.items():
        baseline = f"qwen3@{setting}"
        figures += [cell(baseline, "mbpp", "pass@1", 50.0), cell(baseline, "mbpp", "tps", 30.0)]
        for value, score, tps in zip(values, (40.0, 60.0, 57.0), (60.0, 50.0, 20.0), strict=True):
            system = f"refusion@{setting}={value}"
            figures += [cell(system, "mbpp", "pass@1", score), cell(system, "mbpp", "tps", tps)]
            figures += [cell(system, "mbpp", "tpf", tps / 10)]
    for system, drop in (("llada", 30.0), ("dream", 20.0)):
        for tpf in (1.0, 2.0):
            point = f"{system}@threshold={tpf}"
            figures += [cell(point, "mbpp", "pass@1", 60.0 - drop * (tpf - 1)), cell(point, "mbpp", "tpf", tpf)]
    for ratio, near, far in ((0.2, 0.8, 0.1), (0.8, 0.4, 0.1)):
        figures += [cell(f"llada@masking_ratio={ratio}", "gsm8k", "divergence_near", near)]
        figures += [cell(f"llada@masking_ratio={ratio}", "gsm8k", "divergence_far", far)]
    counts = {"most_slots_together": 4.0, "most_tokens_of_a_slot": 3.0}
    return [*figures, *(cell("refusion@case_study", "gsm8k", metric, value) for metric, value in counts.items())]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("P15", 100 / 3),  # of three points one is above the baseline in both
        ("P18", 50.0),
        ("P20", 0.788074),
        ("P21", 0.960769),
        ("P22", -0.995885),
        ("P25", 4.0),
        ("P26", 3.0),
        ("P38", 5.0),
        ("P39", 8.0),
        ("P43", np.log(2)),
        ("P44", 20 - 17 / 4),
    ],
)
def test_curves_by_hand(name, value):
    assert compute(curves.ALL_FORMULAS[name], by_key(study())).interval.value == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("claim", [claim for claim in read_claims() if claim.formula], ids=lambda claim: claim.id)
def test_a_function_computes_what_its_text_in_claims_csv_says(claim):
    figures = by_key(published_measurements(claim.artefacts.split()) if claim.artefacts else study())
    read = Reader(figures)
    names = {"score": read.score, "tps": read.tps, "tokens_mean": partial(read.metric, "tokens_mean")}
    names |= {"mean": mean, "gmean": gmean, "min": least, "max": largest, "count": total, "minimum": np.minimum}
    names |= {"first_slot_size": curves.first_slot_size}
    of_curves = ("sweet_spot", "correlation", "loss_from_peak", "steepness", "fading", "in_case_study")
    names |= {name: partial(getattr(curves, name), read) for name in of_curves}
    expected = np.ravel(eval(claim.formula, names))[0]
    result = compute(curves.ALL_FORMULAS[claim.id], figures)
    assert result.interval.value == pytest.approx(expected, rel=1e-12)
    assert {figure.key for figure in result.measurements} == read.used.keys()


def test_every_formula_belongs_to_a_claim():
    assert curves.ALL_FORMULAS.keys() == {claim.id for claim in read_claims() if claim.formula}


def test_total_time_counts_each_slow_system_once():
    figures = [cell(system, "gsm8k", "latency_mean", value) for system, value in (("a", 2.0), ("b", 8.0), ("c", 4.0))]
    formula = speedup_averages("a", "b c", "gsm8k")["total time"]
    assert compute(formula, by_key(figures)).interval.value == pytest.approx(3.0)


def test_a_result_names_its_figures():
    result = compute(lambda read: read.tps("ours", "gsm8k") / read.tps("slow", "gsm8k"), FIGURES)
    assert [(figure.system, figure.benchmark) for figure in result.measurements] == [
        ("ours", "gsm8k"),
        ("slow", "gsm8k"),
    ]
    assert math.isnan(result.interval.low)


def test_a_formula_gives_one_number():
    with pytest.raises(ValueError, match="reshape"):
        compute(lambda read: read.tps("ours"), FIGURES)


def test_a_missing_figure_is_named():
    with pytest.raises(MissingMeasurement, match="there is no score of slow on gsm8k") as caught:
        compute(lambda read: read.score("slow", "gsm8k"), FIGURES)
    assert caught.value.keys == (("slow", "gsm8k", "accuracy"), ("slow", "gsm8k", "pass@1"))


def ratio(read):
    return read.tps("a", "gsm8k") / read.tps("b", "gsm8k")


def test_a_ratio_to_zero_is_undefined_not_infinite():
    with pytest.raises(DataError, match="undefined"):
        compute(ratio, by_key([cell("a", value=1.0), cell("b", value=0.0)]))


@given(st.floats(1, 1000), st.floats(0.01, 0.2), st.floats(0.01, 0.2))
def test_a_figure_alone_keeps_its_interval(value, below, above):
    low, high = value * (1 - below), value * (1 + above)
    figures = by_key([cell("a", value=value, ci_low=low, ci_high=high)])
    result = compute(lambda read: read.tps("a", "gsm8k"), figures).interval
    assert result.value == value
    assert result.low == pytest.approx(low, abs=0.15 * (value - low) + 1e-9)
    assert result.high == pytest.approx(high, abs=0.15 * (high - value) + 1e-9)


def test_the_interval_of_a_difference_is_that_of_independent_normals():
    figures = by_key([cell("a", value=10, ci_low=7, ci_high=13), cell("b", value=5, ci_low=1, ci_high=9)])
    result = compute(lambda read: read.tps("a", "gsm8k") - read.tps("b", "gsm8k"), figures).interval
    assert (result.value, result.low, result.high) == (5, pytest.approx(0, abs=0.4), pytest.approx(10, abs=0.4))


def two_runs(write_run, num_items=100):
    """Scores of a and b, of which b gained 3 items and lost 1, on a number of items, and of c, on other items."""
    wanted = {"a": range(50), "b": [*range(1, 50), 97, 98, 99], "c": range(50)}
    runs = [
        write_run(name, [sample(i + 1000 * (name == "c")) for i in range(num_items)], right={str(i) for i in right})
        for name, right in wanted.items()
    ]
    scores = [one for one in read_measurements(runs) if one.metric == "accuracy"]
    return by_key([replace(one, system=one.run_id) for one in scores])


def test_runs_on_the_same_items_are_paired_in_a_formula_and_others_are_not(write_run):
    figures = two_runs(write_run)

    def width(after, before, measured=figures):
        interval = compute(lambda read: read.score(after, "gsm8k") - read.score(before, "gsm8k"), measured).interval
        return interval.high - interval.low

    paired = difference(figures["a", "gsm8k", "accuracy"], figures["b", "gsm8k", "accuracy"]).interval
    unpaired = by_key([replace(one, by_item=None) for one in figures.values()])
    assert width("b", "a") == pytest.approx(paired.high - paired.low, rel=0.25)
    assert width("b", "a", unpaired) > 1.7 * width("b", "a")
    assert width("b", "c") > 1.7 * width("b", "a")


def test_a_figure_of_a_run_alone_keeps_its_interval(write_run):
    figures = two_runs(write_run)
    found = compute(lambda read: read.score("a", "gsm8k"), figures).interval
    stated = figures["a", "gsm8k", "accuracy"]
    assert (found.low, found.high) == pytest.approx((stated.ci_low, stated.ci_high), abs=0.5)


def test_scores_that_differ_on_no_item_are_not_shown_to_be_equal(write_run):
    figures = two_runs(write_run)
    same = by_key(
        [figures["a", "gsm8k", "accuracy"], replace(figures["a", "gsm8k", "accuracy"], system="again", run_id="z")]
    )
    found = compute(lambda read: read.score("again", "gsm8k") - read.score("a", "gsm8k"), same).interval
    bound = 100 * paired_difference(np.ones(100), np.ones(100)).high
    assert (found.low, found.high) == pytest.approx((-bound, bound), rel=0.25)


@pytest.mark.parametrize("reduce", [least, largest])
def test_the_interval_of_an_extreme_holds_the_extreme(reduce):
    bounds = {"ci_low": 70.0, "ci_high": 88.0}
    figures = by_key([cell(system, task, "accuracy", 80.0, **bounds) for system in ("a", "b") for task in TASKS])
    alone = compute(lambda read: read.score("a", "gsm8k") - read.score("b", "gsm8k"), figures).interval
    found = compute(lambda read: reduce(read.score("a") - read.score("b")), figures).interval
    assert found.low < found.value == 0 < found.high
    assert (found.low, found.high) == pytest.approx((alone.low, alone.high), rel=0.1)


def test_draws_never_leave_the_range_of_a_score():
    figures = by_key([cell("a", "humaneval", "pass@1", 50.0, ci_low=0.0, ci_high=100.0)])
    result = compute(lambda read: read.score("a", "humaneval"), figures).interval
    assert (result.low, result.high) == (pytest.approx(0, abs=4), pytest.approx(100, abs=4))
    assert result.low >= 0
    assert result.high <= 100


def test_draws_never_leave_the_range_of_a_speed():
    figures = by_key([cell("a", value=1, ci_low=-9, ci_high=2), cell("b", value=1)])
    assert compute(ratio, figures).interval.low == 0
