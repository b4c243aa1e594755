"""Boxed answers, their normal form, and their comparison."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from refusion_eval.benchmarks.extract.formulas import box, last_box_or_statement, normalise
from refusion_eval.errors import DataError
from refusion_eval.scoring.judge import Comparer, Comparison
from refusion_eval.untrusted import Child
from tests.examples import examples


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        ("\\boxed{1} and \\boxed{2}", "2"),
        ("\\boxed{\\left\\{ 1, 2 \\right\\}}", "\\left\\{ 1, 2 \\right\\}"),
        ("\\boxed{1} then \\boxed{2", "2"),
        ("\\fbox{7}", "7"),
        ("\\boxed 5", "5"),
        ("\x08oxed{\x0crac12}", "\\frac12"),
    ],
)
def test_the_last_box_is_the_answer(text: str, answer: str) -> None:
    assert box(text).answer == answer


@pytest.mark.parametrize("text", ["", "the answer is 5", "\\boxed{}", "}}}{"])
def test_without_a_box_there_is_no_boxed_answer(text: str) -> None:
    assert box(text).answer is None


@pytest.mark.parametrize(
    "text",
    [
        "$boxed{70}$", "\\\\boxed{70}.", "\x08oxed{70}", "\\boxed{70\\).", "$\\boxed{70$", "\\framebox{70}",
        "\\boxed{70}. As asked, it stands in \\boxed{}.", "\\boxed{70}\n\nFinal Answer: \\boxed{ }",
        "\\boxed{70} (Format: \\boxed{\\text{your answer}})", "The answer is\n\\[\n70\n\\]",
        "$$\n70\n$$\nThe answer is $70$.",
        "### Answer\n\n70", "**Final Answer**\n\n$70$", "<answer>70</answer>", "#### 70",
        "The answer is $70$, as desired.",
        "The answer is 70, i.e. about 70.0.", "We get this.\n\n$70$", "\\boxed{60}. Wait, it should be $70$.",
        "The answer is $60$. Wait, actually $70$.",
        "The answer is\n\\begin{align*}\n70\n\\end{align*}",
        "\\Boxed{70}", "\\bbox[5px]{70}", "\\boxed{70}, in the form \\boxed{<answer>}.",
        "\\boxed{70} in \\boxed{final\\_answer}", "The answer is probably 70.", "The answer is '70'.",
        "The answer is:\n- 70",
        "The answer is 70 - as shown.", "The answer is 70, and we are done.", "The answer equals $70$.", "Answer -> 70",
        "[ANSWER]70[/ANSWER]", '{"answer": "70"}', '{"answer": 70}', "The answer:\n```text\n70\n```",
        "The answer is [[70]].",
        "I would go with $70$.", "My guess is 70.", "Result: 70", "Therefore: $70$.",
        "$70$ is the final answer.", "So 70 is the answer.",
    ],
)  # fmt: skip
def test_boxes_that_were_spelled_badly_and_statements_without_a_box_are_read(text: str) -> None:
    assert last_box_or_statement(text).answer == "70"


@pytest.mark.parametrize("text", ["The answer is between 10 and 20.", "The answer is less than 20.", "It is not 20.",
                                  "The answer is at least $20$."])  # fmt: skip
def test_a_bound_is_no_formula(text: str) -> None:
    assert last_box_or_statement(text).answer is None


def test_a_weaker_statement_is_a_formula_and_goes_behind_one_that_stands_alone() -> None:
    assert last_box_or_statement("So $x^2+1$ is the answer.").answer == "x^2+1"
    assert last_box_or_statement("We choose $k=3$.\n\n$$12$$").answer == "12"
    assert last_box_or_statement("We solve it.\n\nx = 5").answer == "x = 5"
    assert last_box_or_statement("We choose the second of them and go on.").answer is None
    for text in ("We choose a point on it.", "We choose $3$ of the balls.", "We choose $k=3$. Then we go"):
        assert last_box_or_statement(text).answer is None
    assert last_box_or_statement("The answer is $a+b$. Wait, it is ab+cd-ef.").answer == "ab+cd-ef"


def test_the_first_box_counts_where_text_runs_on() -> None:
    assert box("\\boxed{1}. Problem: ... \\boxed{2}", last=False).answer == "1"


def test_without_a_box_the_default_rule_takes_the_last_statement() -> None:
    assert last_box_or_statement("The answer is $x+1$.\nHave fun").answer == "x+1"
    assert last_box_or_statement("The answer is 3. But \\boxed{4}").answer == "4"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("\\frac12", "\\dfrac{1}{2}"),
        ("1,234", "1234"),
        ("2,\\!000", "2000"),
        ("90^\\circ", "90"),
        ("5\\text{ cm}^2", "5"),
        (".5", "0.5"),
        ("\\left( 1, 2 \\right)", "(1,2)"),
        ("\\$5", "5"),
        ("10 \\text{ m/s}", "10"),
        ("\\frac{3}{4}\\pi\\text{ inches}", "\\frac{3}{4}\\pi"),
        ("\\langle 1,2 \\rangle", "(1,2)"),
        ("28 percent", "28"),
        ("(3032)_5", "3032_5"),
        ("(3032)_{5}", "3032_5"),
        ("1\\,500\\,000", "1500000"),
        ("5 2/3", "5\\frac23"),
        ("5⅔", "5\\frac23"),
        ("x¹⁰", "x^{10}"),
        ("2√12", "2\\sqrt{12}"),
        ("[2, ∞)", "[2,\\infty)"),
        ("–12", "-12"),
        ("2·π", "2\\cdot\\pi"),
        ("75°", "75"),
        ("\\begin{pmatrix}1\\\\[4pt]2\\end{pmatrix}", "\\begin{pmatrix}1\\cr 2\\end{pmatrix}"),
        ("2^3 5", "2^{3}5"),
        ("\\text{five}", "5"),
        ("twenty-one", "21"),
        ("\\text{2:15 PM}", "2:15 p.m."),
        ("\\text{The number is } 70", "70"),
        ("]-2;3[", "(-2;3)"),
        ("\\begin{pmatrix}1\\tabularnewline 2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ],
)
def test_spellings_of_one_answer_have_one_normal_form(left: str, right: str) -> None:
    assert normalise(left) == normalise(right)


EQUAL = [
    ("\\frac12", "0.5"),
    ("3.00", "3"),
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
    # Equations, whatever they are solved for; a name before a value.
    ("x=5", "5"),
    ("y = 4x - 9", "4x - 9 = y"),
    ("y = 4x - 9", "y - 4x = -9"),
    ("y = 4x - 9", "4x - 9"),
    ("p(x) = 4x - 9", "y = 4x - 9"),
    ("2x + 7z = 0", "z = -\\frac{2x}{7}"),
    ("y = \\frac{1}{4}x + 2", "x - 4y + 8 = 0"),
    ("k=7", "7 = k"),
    ("7", "7 = k"),
    # Lists and sets of numbers that words join.
    ("2,9", "x=2 \\text{ or } x=9"),
    ("2,9", "x=9\\text{ and }x=2"),
    ("2,9", "x_1 = 2, x_2 = 9"),
    ("2,9", "x=2 \\lor x=9"),
    ("4, -1, \\text{ and } 6", "-1, 4, or 6"),
    ("\\text{B,D}", "B \\text{ and } D"),
    ("\\text{B,D}", "\\text{B and D}"),
    ("(-\\infty,-3)\\cup(4,\\infty)", "x<-3 \\text{ or } x>4"),
    ("(-\\infty,-3)\\cup(4,\\infty)", "x<-3 \\text{ and } x>4"),
    ("(-\\infty,-3)\\cup(4,\\infty)", "x\\in(-\\infty,-3) \\text{ or } x\\in(4,\\infty)"),
    ("[0,2]\\cup[5,7]", "0\\le x\\le 2 \\text{ or } 5\\le x\\le 7"),
    ("(-3,4)", "x>-3 \\text{ and } x<4"),
    ("\\{-1\\}\\cup[0,7)", "x=-1 \\text{ or } 0\\le x<7"),
    ("2,9", "\\{9\\}\\cup\\{2\\}"),
    ("(-\\infty,-3]\\cup[4,\\infty)", "x\\leqslant-3 \\vee x⩾4"),
    ("x^2=3-2i", "x^2=-2i+3"),
    ("60", "60\\,\\text{km}/\\text{h}"),
    # Words, times of day, units.
    ("\\text{Monday}", "monday"),
    ("\\text{Evelyn}", "Evelyn"),
    ("\\text{VW}", "VW"),
    ("\\text{June 20}", "June 20"),
    ("9\\text{ a.m.}", "9\\,\\text{AM}"),
    ("7\\text{ m}", "7 m"),
    ("4,250", "\\$4,250\\text{ per month}"),
    ("3\\text{ cm}, 4\\text{ cm}", "3,4"),
    # Matrices and double signs.
    ("\\begin{pmatrix}4033\\\\2\\end{pmatrix}", "\\begin{bmatrix}4,033\\\\[2pt]2\\end{bmatrix}"),
    ("\\frac{1\\pm\\sqrt5}{2}", "\\frac{1+\\sqrt5}{2},\\frac{1-\\sqrt5}{2}"),
    ("\\frac{1\\pm\\sqrt5}{2}", "x=\\frac12\\pm\\frac{\\sqrt5}{2}"),
    ("\\{2\\pm\\sqrt{3},-2\\}", "-2, 2-\\sqrt3, 2+\\sqrt3"),
    # Numbers.
    ("3-i", "3.0 - 1.0i"),
    ("-i", "\\frac{1}{i}"),
    ("\\frac{1+i}{2}", "0.5+0.5i"),
    ("\\frac13", "0.333333"),
    ("\\sqrt2", "1.414214"),
    ("\\frac{1}{30!}", "\\frac{1}{30\\cdot 29!}"),
    # Degrees of functions, signs and words beside a value, sets, matrices, endless decimals.
    ("\\frac12", "\\sin 30^\\circ"),
    ("\\cos 13^\\circ", "\\sin 77^\\circ"),
    ("2\\cos 15^\\circ", "2\\cos\\frac{\\pi}{12}"),
    ("\\frac34", "\\cos^2 (30^\\circ)"),
    ("42", "\\text{Answer: } 42"),
    ("42", "\\text{The answer is } 42"),
    ("42", "42 \\, \\checkmark"),
    ("42", "\\approx 42"),
    ("42", "42\\quad\\blacksquare"),
    ("[-2,7]", "\\{x \\mid -2 \\le x \\le 7\\}"),
    ("(-\\infty,0)", "\\{x \\in \\mathbb{R} : x < 0\\}"),
    ("[-2,7]", "\\left\\{x \\;\\middle|\\; -2\\le x\\le 7\\right\\}"),
    ("(-\\infty,0)", "\\{x\\in\\mathbf{R}: x < 0\\}"),
    ("(-\\infty,0)", "]-\\infty,0["),
    ("(-\\infty,-3)\\cup(4,\\infty)", "]-\\infty,-3[\\cup]4,\\infty["),
    ("\\frac{1}{\\sqrt n}", "\\sqrt{1/n}"),
    ("\\sqrt{ab}", "\\sqrt{a}\\sqrt{b}"),
    ("\\sqrt{\\frac{n-1}{n}}", "\\frac{\\sqrt{n-1}}{\\sqrt{n}}"),
    (
        "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
        "\\left(\\begin{smallmatrix}1&2\\newline 3&4\\end{smallmatrix}\\right)",
    ),
    ("\\frac13", "0.333\\ldots"),
    ("\\frac16", "0.1\\overline{6}"),
    ("\\frac13", "0.\\bar{3}"),
    ("\\frac13", "0.\\overline3"),
    ("120", "{10 \\choose 3}"),
    ("x^2y", "x**2*y"),
    ("\\frac18", "2**-3"),
    ("1024", "2**10"),
    ("ab", "ba"),
    ("3abc", "3cba"),
]
UNEQUAL = [
    ("10\\%", "0.1"),
    ("\\cos 13^\\circ", "\\cos 13"),
    ("x", "\\sqrt{x^2}"),
    ("[-2,7]", "\\{x \\mid -2 < x \\le 7\\}"),
    ("[0,2]", "\\{x\\in\\mathbb{Z} : 0\\le x\\le 2\\}"),
    ("[1,2]", "]1,2["),
    ("\\frac13", "0.3332\\ldots"),
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
    ("y=2x+3", "x=2x+3"),
    ("y=4", "x=4"),
    ("3x+2y=12", "6x+4y=25"),
    ("2,9", "2 \\text{ or } 8"),
    ("2,9", "9"),
    ("9", "9,9"),
    ("\\text{B,D}", "BD"),
    ("(-\\infty,-3)\\cup(4,\\infty)", "x<-3 \\text{ or } x\\ge4"),
    ("(-3,4)", "x>-3 \\text{ or } x<4"),
    ("37", "3 7"),
    ("37", "3\\quad7"),
    ("21", "3\\ 7"),
    ("10", "3 7"),
    ("10.2", "5 1/5"),
    ("\\frac{51}{5}", "5 1/5"),
    ("\\pm 8", "8"),
    ("\\frac{1\\pm\\sqrt5}{2}", "\\frac{1+\\sqrt5}{2}"),
    ("\\frac{1\\pm\\sqrt5}{2}", "\\frac{2\\pm\\sqrt5}{2}"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\[4pt]3\\end{pmatrix}"),
    ("\\frac{1}{30!}", "\\frac{1}{31!}"),
    ("\\left(\\frac{1}{30!},1\\right)", "\\left(\\frac{1}{31!},1\\right)"),
    ("x+\\frac{1}{30!}", "x+\\frac{1}{31!}"),
    ("e^{-200}", "e^{-201}"),
    ("2^{-60}", "0"),
    ("0.0000001", "0.0000002"),
    ("0.1234567", "0.1234568"),
    ("10^{30}", "10^{30}+1"),
    ("1000000", "1000000.0000001"),
    ("\\sqrt2", "1.4142"),
    *((f"7{letter}", "7") for letter in "cdghlmost"),
    ("7ab", "7"),
    ("7", "7 m"),
    ("\\text{STAR}", "\\text{RATS}"),
    ("STAR", "RATS"),
    ("VW", "WV"),
    ("\\text{east}", "seat"),
    ("\\text{M}", "m"),
    ("R^2", "r^2"),
    ("2^3 5", "2^{35}"),
    ("23", "2**3"),
    ("\\infty", "3"),
    ("\\infty", "-\\infty"),
    ("(-\\infty,2)", "(\\infty,2)"),
    ("\\frac10", "3"),
]


@pytest.fixture(scope="module")
def comparer() -> Iterator[Comparer]:
    comparer = Comparer()
    yield comparer
    comparer.close()


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


# Right answers of several kinds, no two of them equal.
ANSWERS = [
    "-12", "4250", "\\frac{7}{3}", "2\\sqrt{5}", "6\\pi", "0.75", "3 + 4i", "x^2 - 5x + 6", "7t", "(2, -3)", "3, 8",
    "\\left[-\\frac12, 4\\right)", "(-\\infty, -2) \\cup (5, \\infty)", "\\frac{3 \\pm \\sqrt{7}}{2}",
    "\\text{Tuesday}", "\\text{M}", "\\text{A, C}", "\\begin{pmatrix} 4 \\\\ -1 \\end{pmatrix}", "120_5",
    "\\text{2:15 PM}",
]  # fmt: skip
NUMBERS = ["-12", "4250", "\\frac{7}{3}", "2\\sqrt{5}", "6\\pi", "0.75"]

# What people and models put around a right answer.
FRAMES = [
    "{}.", "= {}", "$ {} $", "\\( {} \\)", "**{}**", "`{}`", "{{{}}}", "\\boxed{{{}}}", "\\fbox{{{}}}", "{} \\\\",
    "\\ {}\\,", "{} \\quad", "\\displaystyle {}", "\\color{{blue}}{{{}}}", "{{\\color{{red}} {}}}", "\\color{{red}}{}",
    "\\textcolor{{red}}{{{}}}", "\\large {}", "{{\\Large {}}}", "\\underline{{{}}}", "\\boldsymbol{{{}}}", "\\rm {}",
    "\\text{{{}}}", "\\mathrm{{{}}}", "\\textbf{{{}}}", "\\mbox{{{}}}", "x = {}", "x={}", "y = {}", "{}\\hspace{{2pt}}",
]  # fmt: skip
UNITS = [
    "{}^\\circ", "{}^{{\\circ}}", "{}°", "\\${}", "{}\\%", "{} pct", "{} percent", "{} \\text{{ cm}}", "{} dollars",
    "{}\\text{{ cm}}^2", "{}\\,\\mathrm{{m}}", "{} \\operatorname{{kg}}", "{} \\text{{ (ways)}}", "{} {{\\rm kg}}",
    "{}\\mbox{{ square units}}", "{} \\hspace{{2pt}} \\text{{cm}}", "\\left( {} \\right)", "+{}",
]  # fmt: skip


@examples(80)
@given(
    gold=st.sampled_from(ANSWERS),
    frames=st.lists(st.sampled_from(FRAMES), max_size=2),
    other=st.none() | st.sampled_from(ANSWERS),
)
@example(gold="-12", frames=["{}.", "{{{}}}"], other=None)
@example(gold="-12", frames=["= {}", "\\text{{{}}}"], other=None)
@example(gold="7t", frames=["{} \\\\", "\\ {}\\,"], other=None)
@example(gold="-12", frames=["{} \\\\", "{}\\hspace{{2pt}}"], other=None)
@example(gold="6\\pi", frames=["\\rm {}", "\\mathrm{{{}}}"], other=None)
@example(gold="\\text{A, C}", frames=["{{{}}}", "x = {}"], other=None)
@example(gold="3 + 4i", frames=["\\boxed{{{}}}", "y = {}"], other=None)
def test_a_frame_changes_no_verdict(comparer: Comparer, gold: str, frames: list[str], other: str | None) -> None:
    answer = other or gold
    # Two names are an equation of two letters; a sign of markup stands outside all others or is none.
    assume(sum("=" in frame for frame in frames) < 2 and not any("*" in frame or "`" in frame for frame in frames[:-1]))
    framed = answer
    for frame in frames:
        framed = frame.format(framed)
    assert comparer.compare(gold, framed).equal == (gold == answer)


@examples(60)
@given(gold=st.sampled_from(NUMBERS), answer=st.sampled_from(NUMBERS), frame=st.sampled_from(UNITS))
def test_a_unit_changes_no_verdict_on_a_number(comparer: Comparer, gold: str, answer: str, frame: str) -> None:
    assume(not (answer.startswith("-") and frame.startswith("+")))
    framed = frame.format(answer)
    assert comparer.compare(gold, framed).equal == (gold == answer)
    assert comparer.compare(framed, gold).equal == (gold == answer)


def test_no_two_of_the_framed_answers_are_equal(comparer: Comparer) -> None:
    assert [pair for pair in combinations(ANSWERS, 2) if comparer.compare(*pair).equal] == []


@examples(40)
@given(whole=st.integers(1, 999), part=st.integers(1, 98), parts=st.integers(2, 99), other=st.integers(-3, 3))
def test_a_mixed_number_is_a_sum(comparer: Comparer, whole: int, part: int, parts: int, other: int) -> None:
    assume(part < parts)
    value = whole + Fraction(part + other, parts)
    for mixed in (f"{whole} {part}/{parts}", f"{whole}\\frac{{{part}}}{{{parts}}}", f"{whole}\\ {part}/{parts}"):
        gold = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
        assert comparer.compare(gold, mixed).equal == (other == 0)


@examples(40)
@given(number=st.integers(1_000, 10**12), comma=st.sampled_from([",", " ", "\\,", "{,}", ",\\!", "\\ ", "~"]))
def test_groups_of_three_digits_are_one_number(comparer: Comparer, number: int, comma: str) -> None:
    grouped = f"{number:,}".replace(",", comma)
    assert comparer.compare(str(number), grouped).equal
    assert not comparer.compare(str(number + 1), grouped).equal


@examples(40)
@given(first=st.integers(0, 9_999), second=st.integers(0, 9_999), blank=st.sampled_from([" ", "\\ ", "\\quad ", "~"]))
def test_other_digits_with_a_blank_between_are_not_one_number(
    comparer: Comparer, first: int, second: int, blank: str
) -> None:
    assume(first == 0 or first > 999 or second < 100 or second > 999)
    for value in (int(f"{first}{second}"), first * second, first + second):
        assert not comparer.compare(str(value), f"{first}{blank}{second}").equal


@examples(40)
@given(
    numerator=st.integers(-(10**9), 10**9),
    denominator=st.integers(1, 10**6),
    change=st.fractions(0, 1),
    digits=st.integers(0, 9),
)
def test_rational_numbers_are_compared_exactly(
    comparer: Comparer, numerator: int, denominator: int, change: Fraction, digits: int
) -> None:
    value = Fraction(numerator, denominator)
    other = value + change / 10**30
    written = [f"\\frac{{{number.numerator}}}{{{number.denominator}}}" for number in (value, other)]
    assert comparer.compare(*written).equal == (value == other)
    decimal = Fraction(numerator, 10**digits)
    text = (
        f"{'-' if numerator < 0 else ''}{abs(numerator) // 10**digits}.{abs(numerator) % 10**digits:0{max(digits, 1)}}"
    )
    assert comparer.compare(f"\\frac{{{decimal.numerator}}}{{{decimal.denominator}}}", text).equal


def test_a_percent_sign_that_only_one_side_has_is_named() -> None:
    assert all("percent" in it.reason for it in compared([("10\\%", "10"), ("10", "10 percent")]))
    assert "percent" not in compared([("10\\%", "10 percent")])[0].reason


def test_a_child_that_is_killed_costs_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [("\\frac12", "0.5"), ("x^2+2x+1", "(x+1)^2"), ("5", "x")]
    ask, number = Child._ask, Counter[str]()

    def ask_and_kill(child: Child, process: Any, *arguments: Any) -> bytes | None:
        number["asked"] += 1
        if number["asked"] in (2, 5):  # the first of each process is its start
            process.kill()
        return ask(child, process, *arguments)

    monkeypatch.setattr(Child, "_ask", ask_and_kill)
    assert [it.equal for it in compared(pairs)] == [True, True, False]
    assert number["asked"] == 8


def test_a_comparison_that_ends_every_child_counts_as_unequal(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Child._ask

    def ask_and_kill(child: Child, process: Any, pair: tuple[str, str, bool], *arguments: Any) -> bytes | None:
        if pair[0] != "1":
            process.kill()
        return ask(child, process, pair, *arguments)

    monkeypatch.setattr(Child, "_ask", ask_and_kill)
    (comparison,) = compared([("\\frac12", "0.5")])
    assert not comparison.equal
    assert "crashed" in comparison.reason


def test_an_endless_comparison_is_killed_and_the_next_one_still_decided() -> None:
    slow, quick = compared([("10^{10^{10}}", "3"), ("\\frac12", "0.5")], timeout_s=3)
    assert not slow.equal
    assert quick.equal


def test_every_comparison_ends_within_its_time() -> None:
    comparer = Comparer(timeout_s=1)
    for power in ("9^{9^{9}}", "\\frac{1}{9^{9^{9}}}", "(10^{6})!", "9^{9^{9}}, 9^{9^{8}}, 9^{9^{7}}"):
        assert comparer.compare("\\frac12", "0.5").equal  # the process runs
        started = time.monotonic()
        assert not comparer.compare("3, 4, 5", power).equal
        assert time.monotonic() - started < 10
    comparer.close()


def test_a_comparison_that_is_given_up_says_nothing_about_the_answer() -> None:
    comparer = Comparer(timeout_s=300)
    assert comparer.compare("\\frac12", "0.5").equal  # the process runs
    threading.Timer(0.5, comparer.close).start()
    with pytest.raises(DataError, match="given up"):
        comparer.compare("10^{10^{10}}", "3")
