"""Formulas over cells: values by hand, intervals, and nothing but the language."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.claims.formula import MissingCell, evaluate
from refusion_eval.errors import ConfigError, DataError
from refusion_eval.results.figure import TASKS, by_key
from tests.results.conftest import cell

# Ours 2, 4, 8, 16, ... tokens a second, theirs 1 and 2 on every task.
CELLS = by_key(
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
        ("tps('ours', 'gsm8k')", 8.0),
        ("-tps('ours', 'gsm8k') + 3 * 2", -2.0),
        ("mean(tps('ours') / tps('slow'))", 254 / 7),
        ("gmean(tps('ours') / tps('slow'))", 16.0),
        ("median(tps('ours') / tps('slow'))", 16.0),
        ("mean(tps('ours')) / mean(tps('slow slower'))", 254 / 7 / 0.75),
        ("mean(tps('ours') / tps('slow slower'))", 254 / 7 * 1.5),
        ("mean(tps('slow slower') / tps('ours', 'gsm8k'))", None),
        ("max(tps('ours')) - min(tps('ours', 'gsm8k math'))", 120.0),
        ("sum(tps('slow', 'gsm8k math') - tps('slower', 'gsm8k math'))", 1.0),
        ("count(tps('slow') < tps('ours'))", 7.0),
        ("count(tps('ours') > 10 * tps('slow slower'))", 9.0),
        ("score('ours', 'gsm8k') - score('ours', 'humaneval')", None),
        ("mean(score('ours', 'gsm8k humaneval'))", 70.0),
    ],
)
def test_values_by_hand(formula, value):
    if value is None:
        with pytest.raises(ConfigError, match="different tasks"):
            evaluate(formula, CELLS)
    else:
        assert evaluate(formula, CELLS).interval.value == pytest.approx(value)


def test_a_result_names_its_cells():
    found = evaluate("tps('ours', 'gsm8k') / tps('slow', 'gsm8k')", CELLS)
    assert [(one.system, one.benchmark) for one in found.cells] == [("ours", "gsm8k"), ("slow", "gsm8k")]
    assert math.isnan(found.interval.low)


@pytest.mark.parametrize(
    "formula",
    [
        "__import__('os').system('true')",
        "tps('ours', 'gsm8k').real",
        "(lambda: 1)()",
        "[1, 2][0]",
        "tps('ours' + 'x', 'gsm8k')",
        "tps(ours, 'gsm8k')",
        "tps('ours', 'gsm8k', 'math')",
        "tps()",
        "mean()",
        "mean(1, 2)",
        "2 ** 100",
        "1 if 1 else 2",
        "1 < 2 < 3",
        "'text'",
        "True",
        "mean(x=1)",
        "tps('ours'",
        "",
        "tps('ours')",
        "mean(tps('ours slow') / tps('slow slower'))",
    ],
)
def test_everything_else_is_refused(formula):
    with pytest.raises(ConfigError, match="formula"):
        evaluate(formula, CELLS)


def test_a_missing_cell_is_named():
    with pytest.raises(MissingCell, match="there is no score of slow on gsm8k") as caught:
        evaluate("score('slow', 'gsm8k')", CELLS)
    assert caught.value.places == (("slow", "gsm8k", "accuracy"), ("slow", "gsm8k", "pass@1"))


def test_a_ratio_to_zero_is_undefined_not_infinite():
    cells = by_key([cell("ours", value=1.0), cell("none", value=0.0)])
    with pytest.raises(DataError, match="undefined"):
        evaluate("tps('ours', 'gsm8k') / tps('none', 'gsm8k')", cells)


@given(st.floats(1, 1000), st.floats(0.01, 0.2), st.floats(0.01, 0.2))
def test_a_cell_alone_keeps_its_interval(value, below, above):
    low, high = value * (1 - below), value * (1 + above)
    found = evaluate("tps('ours', 'gsm8k')", by_key([cell("ours", value=value, ci_low=low, ci_high=high)])).interval
    assert found.value == value
    assert found.low == pytest.approx(low, abs=0.15 * (value - low) + 1e-9)
    assert found.high == pytest.approx(high, abs=0.15 * (high - value) + 1e-9)


def test_the_interval_of_a_difference_is_that_of_independent_normals():
    cells = by_key([cell("a", value=10, ci_low=7, ci_high=13), cell("b", value=5, ci_low=1, ci_high=9)])
    found = evaluate("tps('a', 'gsm8k') - tps('b', 'gsm8k')", cells).interval
    assert (found.value, found.low, found.high) == (5, pytest.approx(0, abs=0.4), pytest.approx(10, abs=0.4))


def test_draws_never_leave_the_range_of_a_score():
    cells = by_key([cell("a", "humaneval", "pass@1", 50.0, ci_low=0.0, ci_high=100.0)])
    found = evaluate("score('a', 'humaneval')", cells).interval
    assert (found.low, found.high) == (pytest.approx(0, abs=4), pytest.approx(100, abs=4))
    assert found.low >= 0
    assert found.high <= 100


def test_draws_never_leave_the_range_of_a_speed():
    cells = by_key([cell("a", value=1, ci_low=-9, ci_high=2), cell("b", value=1)])
    assert evaluate("tps('a', 'gsm8k') / tps('b', 'gsm8k')", cells).interval.low == 0
