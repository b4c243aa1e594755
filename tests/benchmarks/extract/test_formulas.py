"""Boxed answers, their normal form, and their comparison."""

import threading
from collections import Counter
from typing import Any

import pytest

from refusion_eval import child
from refusion_eval.benchmarks.extract.formulas import first_box, last_box, last_box_or_statement, normalise
from refusion_eval.errors import DataError
from refusion_eval.scoring.math_judge import Comparer, Comparison, Pair


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        ("\\boxed{1} and \\boxed{2}", "2"),
        ("\\boxed{\\left\\{ 1, 2 \\right\\}}", "\\left\\{ 1, 2 \\right\\}"),
        ("\\boxed{1} then \\boxed{2", "1"),
        ("\\fbox{7}", "7"),
        ("\\boxed 5", "5"),
    ],
)
def test_the_last_complete_box_is_the_answer(text: str, answer: str) -> None:
    assert last_box(text).answer == answer


@pytest.mark.parametrize("text", ["", "the answer is 5", "\\boxed{5", "\\boxed{}", "}}}{"])
def test_without_a_complete_box_there_is_no_boxed_answer(text: str) -> None:
    assert last_box(text).answer is None


def test_the_first_box_counts_where_text_runs_on() -> None:
    assert first_box("\\boxed{1}. Problem: ... \\boxed{2}").answer == "1"


def test_without_a_box_the_default_rule_takes_the_last_statement() -> None:
    assert last_box_or_statement("The answer is $x+1$.\nHave fun").answer == "x+1"
    assert last_box_or_statement("The answer is 3. But \\boxed{4}").answer == "4"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("\\frac12", "\\dfrac{1}{2}"),
        ("1,234", "1234"),
        ("2,\\!000", "2000"),
        ("x=5", "5"),
        ("90^\\circ", "90"),
        ("5\\text{ cm}^2", "5"),
        ("\\text{Evelyn}", "Evelyn"),
        (".5", "0.5"),
        ("3.00", "3"),
        ("\\left( 1, 2 \\right)", "(1,2)"),
        ("\\$5", "5"),
        ("\\sqrt2", "\\sqrt{2}"),
        ("10 \\text{ m/s}", "10"),
        ("\\frac{3}{4}\\pi\\text{ inches}", "\\frac{3}{4}\\pi"),
        ("\\langle 1,2 \\rangle", "(1,2)"),
        ("28 percent", "28"),
        ("(3032)_5", "3032_5"),
        ("(3032)_{5}", "3032_5"),
    ],
)
def test_spellings_of_one_answer_have_one_normal_form(left: str, right: str) -> None:
    assert normalise(left) == normalise(right)


EQUAL = [
    ("\\frac12", "0.5"),
    ("x^2+2x+1", "(x+1)^2"),
    ("\\sqrt{8}", "2\\sqrt2"),
    ("1,2", "2,1"),
    ("12_5", "12"),
    ("10\\%", "10"),
    ("2\\pi r", "2r\\pi"),
    ("\\cos x\\,\\sin y", "\\sin y\\cos x"),
    ("(1,4)", "1,4"),
    ("(\\frac12,4)", "0.5, 4"),
    ("(1,2),(3,4)", "(3,4),(1,2)"),
    ("(-\\infty,2)", "x<2"),
]
UNEQUAL = [
    ("10\\%", "0.1"),
    ("(1,2)", "(2,1)"),
    ("[1,2]", "(1,2)"),
    ("12_5", "12_6"),
    ("2\\text{ p.m.}", "2\\text{ a.m.}"),
    ("1/3", "0.333"),
    ("5", "x"),
    ("111", "111, \\! 111, \\! 111"),
    ("(1,4)", "4,1"),
    ("(1,4)", "\\{4,1\\}"),
    ("(1,4)", "\\{1,4\\}"),
    ("(1,4),(2,3)", "(4,1),(2,3)"),
    ("(3032)_5", "3032_6"),
    ("1 \\text{ PM}", "1 \\text{ AM}"),
]


def compared(pairs: list[tuple[str, str]], **options: float) -> list[Comparison]:
    """The comparisons in the order of the pairs, by one child process."""
    comparer = Comparer(**options)
    try:
        return [comparer.compare(*pair) for pair in pairs]
    finally:
        comparer.close()


@pytest.mark.parametrize(("gold", "answer"), [("x^2 + y^2 = 13", "13"), ("x - 3z = 0", "0")])
def test_a_side_of_an_equation_is_not_the_equation(gold: str, answer: str) -> None:
    assert not compared([(gold, answer)])[0].equal


def test_comparing_is_mathematical_and_symmetrical() -> None:
    pairs = EQUAL + UNEQUAL
    expected = [True] * len(EQUAL) + [False] * len(UNEQUAL)
    there = compared(pairs)
    back = compared([(answer, gold) for gold, answer in pairs])
    assert [it.equal for it in there] == expected
    assert [it.equal for it in back] == expected


def test_a_percent_sign_that_only_one_side_has_is_named() -> None:
    assert all("percent" in it.reason for it in compared([("10\\%", "10"), ("10", "10 percent")]))
    assert "percent" not in compared([("10\\%", "10 percent")])[0].reason


def test_a_child_that_is_killed_costs_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [("\\frac12", "0.5"), ("x^2+2x+1", "(x+1)^2"), ("5", "x")]
    ask, number = child.Child._ask, Counter[str]()

    def ask_and_kill(process: Any, *arguments: Any) -> bytes | None:
        number["asked"] += 1
        if number["asked"] in (2, 5):  # the first of each process is its start
            process.kill()
        return ask(process, *arguments)

    monkeypatch.setattr(child.Child, "_ask", staticmethod(ask_and_kill))
    assert [it.equal for it in compared(pairs)] == [True, True, False]
    assert number["asked"] == 8


def test_a_comparison_that_ends_every_child_counts_as_unequal(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = child.Child._ask

    def ask_and_kill(process: Any, pair: Pair, *arguments: Any) -> bytes | None:
        if pair.gold != "1":
            process.kill()
        return ask(process, pair, *arguments)

    monkeypatch.setattr(child.Child, "_ask", staticmethod(ask_and_kill))
    (comparison,) = compared([("\\frac12", "0.5")])
    assert not comparison.equal
    assert "crashed" in comparison.reason


def test_an_endless_comparison_is_killed_and_the_next_one_still_decided() -> None:
    slow, quick = compared([("10^{10^{10}}", "3"), ("\\frac12", "0.5")], timeout_s=3)
    assert not slow.equal
    assert quick.equal


def test_a_comparison_that_is_given_up_says_nothing_about_the_answer() -> None:
    comparer = Comparer(timeout_s=300)
    assert comparer.compare("\\frac12", "0.5").equal  # the process runs
    threading.Timer(0.5, comparer.close).start()
    with pytest.raises(DataError, match="given up"):
        comparer.compare("10^{10^{10}}", "3")
