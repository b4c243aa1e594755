"""School mathematics of three to five steps (math): seven subjects, each intermediate value with a name."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from miniature.item import Item, key_is_held_out
from miniature.steps import LIMITS, Steps, between, drawn

_NAMES = ("p", "q", "r", "s", "t")


class _Numbers:
    """Draws the numbers of a problem: digits, and larger ones that suit the grade."""

    def __init__(self, rng: random.Random, grade: int) -> None:
        self._rng, self._grade = rng, grade

    def digits(self, count: int) -> list[int]:
        """Digits from 2."""
        return [self._rng.randint(2, 9) for _ in range(count)]

    def number(self) -> int:
        """A digit, or a number of two digits in the upper grades."""
        return self._rng.randint(2, 9 * self._grade)

    def below(self, limit: int) -> int:
        """A number from 2 that is less than `limit`."""
        return between(self._rng, 2, limit - 1)


_Problem = Callable[[_Numbers, Steps, int], str]


def _algebra(draw: _Numbers, steps: Steps, grade: int) -> str:
    x, b, (c, m) = draw.number(), draw.number(), draw.digits(2)
    a = c + draw.below(10)
    d = (a - c) * x + b
    steps(steps(d, "-", b), "/", steps(a, "-", c))
    if grade == 1:
        return f"Solve ${a}x + {b} = {c}x + {d}$ for $x$."
    product = steps(x, "*", m)
    if grade == 2:
        return f"Let ${a}x + {b} = {c}x + {d}$. What is ${m}x$?"
    n = draw.number()
    steps(product, "+", n)
    return f"Let ${a}x + {b} = {c}x + {d}$. What is ${m}x + {n}$?"


def _prealgebra(draw: _Numbers, steps: Steps, grade: int) -> str:
    (a, c), b, d, e, f = draw.digits(2), *(draw.number() for _ in range(4))
    total = steps(steps(a, "*", b), "+", steps(c, "*", d))
    text = f"{a} \\cdot {b} + {c} \\cdot {d}"
    if grade >= 2:
        total, text = steps(total, "-", e), f"{text} - {e}"
    if grade >= 3:
        total, text = steps(total, "+", f), f"{text} + {f}"
    return f"Evaluate ${text}$."


def _precalculus(draw: _Numbers, steps: Steps, grade: int) -> str:
    dimension = 3 if grade >= 3 else 2
    left, right = draw.digits(dimension), [draw.number() for _ in range(dimension)]
    products = [steps(a, "*", b) for a, b in zip(left, right, strict=True)]
    total = steps(products[0], "+", products[1])
    vectors = [", ".join(map(str, vector)) for vector in (left, right)]
    if grade == 2:
        n = draw.number()
        steps(total, "-", n)
        return f"Let $u = ({vectors[0]})$ and $v = ({vectors[1]})$. What is $u \\cdot v - {n}$?"
    if grade >= 3:
        steps(total, "+", products[2])
    return f"What is the dot product of $({vectors[0]})$ and $({vectors[1]})$?"


def _number_theory(draw: _Numbers, steps: Steps, grade: int) -> str:
    (divisor, a), b, c = draw.digits(2), draw.number(), draw.number()
    if grade == 1:
        text, total = f"{10 * a + b} + {c}", steps(10 * a + b, "+", c)
    else:
        text, total = f"{a} \\cdot {b} + {c}", steps(steps(a, "*", b), "+", c)
    if grade >= 3:
        d = draw.number()
        text, total = f"{text} + {d}", steps(total, "+", d)
    steps(total, "-", steps(divisor, "*", total // divisor))
    return f"Find the remainder when ${text}$ is divided by ${divisor}$."


def _counting(draw: _Numbers, steps: Steps, grade: int) -> str:
    a, b, c, d = draw.digits(4)
    menus = steps(steps(a, "*", b), "*", c) if grade == 1 else steps(a, "*", b)
    if grade == 1:
        bad = draw.number()
        steps(menus, "-", bad)
        return (
            f"A menu has {a} soups, {b} meals and {c} cakes. Of all choices of one of each, {bad} are sold out. "
            "How many are left?"
        )
    text = f"One shop sells {a} hats and {b} coats, another one {c} hats and {d} coats."
    total = steps(menus, "+", steps(c, "*", d))
    bad = draw.below(total)
    rest = steps(total, "-", bad)
    if grade >= 3:
        more = draw.number()
        steps(rest, "+", more)
        return (
            f"{text} Of all pairs of a hat and a coat from one shop, {bad} are ugly and not counted, and {more} pairs "
            "from a third shop are added. How many pairs are there?"
        )
    return f"{text} Of all pairs of a hat and a coat from one shop, {bad} are ugly. How many are not?"


def _geometry(draw: _Numbers, steps: Steps, grade: int) -> str:
    (a, c, d, e), b = draw.digits(4), draw.number()
    text = f"From a rectangle with sides ${a}$ and ${b}$ one cuts another with sides ${c}$ and ${d}$."
    area = steps(steps(a, "*", b), "-", steps(c, "*", d))
    if grade == 1:
        return f"{text} What area is left?"
    if grade == 2:
        steps(area, "/", e)
        return f"{text} The rest is split into ${e}$ equal parts. What is the area of a part?"
    steps(area, "-", steps(e, "*", e))
    return f"{text} Then one cuts a square of side ${e}$. What area is left?"


def _intermediate_algebra(draw: _Numbers, steps: Steps, grade: int) -> str:
    x, a, b = draw.digits(3)
    c = draw.number()
    if grade == 1:
        steps(steps(a, "*", steps(x, "*", x)), "+", c)
        return f"If $f(x) = {a}x^2 + {c}$, what is $f({x})$?"
    if grade == 2:
        d = draw.number()
        steps(steps(b, "*", steps(steps(a, "*", x), "+", c)), "-", d)
        return f"If $f(x) = {a}x + {c}$ and $g(x) = {b}x - {d}$, what is $g(f({x}))$?"
    square = steps(a, "*", steps(x, "*", x))
    steps(steps(square, "+", steps(b, "*", x)), "-", c)
    return f"If $f(x) = {a}x^2 + {b}x - {c}$, what is $f({x})$?"


_SUBJECTS: Sequence[tuple[str, _Problem]] = (
    ("Algebra", _algebra),
    ("Prealgebra", _prealgebra),
    ("Precalculus", _precalculus),
    ("Number Theory", _number_theory),
    ("Counting & Probability", _counting),
    ("Geometry", _geometry),
    ("Intermediate Algebra", _intermediate_algebra),
)


class _Worked(NamedTuple):
    problem: str
    solution: str


def _make(rng: random.Random, problem: _Problem, grade: int) -> _Worked:
    steps = Steps(LIMITS[grade])
    text = problem(_Numbers(rng, grade), steps, grade)
    steps.check_result_is_new(text)
    *first, last = zip(_NAMES, steps.steps, strict=False)
    working = "".join(f"Then let ${name}={step.term}={step.value}$. " for name, step in first)
    name, step = last
    solution = f"{working}Last let ${name}={step.term}$. The answer is $\\boxed{{{steps.result}}}$."
    return _Worked(text, solution.replace("Then", "First", 1))


def draw_math(rng: random.Random, grades: Sequence[int]) -> Item:
    """A problem of one of MATH's seven subjects; the last result stands in the box only."""
    (subject, problem), grade = rng.choice(_SUBJECTS), rng.choice(grades)
    worked = drawn(rng, partial(_make, problem=problem, grade=grade))
    row = {
        "problem": worked.problem,
        "level": f"Level {min(grade + 2, 5)}",
        "type": subject,
        "solution": worked.solution,
    }
    return Item(held_out=key_is_held_out(worked.problem), row=row, prompt_row=row, response=worked.solution)
