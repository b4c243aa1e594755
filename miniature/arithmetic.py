"""Items of the two calculation tasks: word problems (gsm8k) and school mathematics (math)."""

import random
from collections.abc import Callable
from typing import NamedTuple

from miniature.item import Item, key_is_held_out

NAMES = ("Tom", "Anna", "Ben", "Lucy", "Max", "Sara", "Leo", "Nina", "Paul", "Ella", "Omar", "Rosa")
THINGS = ("pens", "books", "coins", "cards", "eggs", "apples", "stamps", "shells", "stones", "plums", "cups", "balls")


class _Story(NamedTuple):
    """A two-step word problem.

    Attributes:
        steps: the two operations; the first takes a and b, the second its result and c.
        numbers: draws (a, b, c).
        text: question with `{name}`, `{things}` and the numbers `{a}`, `{b}`, `{c}`.
    """

    steps: tuple[str, str]
    numbers: Callable[[random.Random], tuple[int, int, int]]
    text: str


def _digits(rng: random.Random) -> tuple[int, int, int]:
    return rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)


def _take_few(rng: random.Random) -> tuple[int, int, int]:
    a, b, c = _digits(rng)
    return a, b, min(c, a * b - 1)


def _take_few_of_sum(rng: random.Random) -> tuple[int, int, int]:
    a, b = rng.randint(4, 29), rng.randint(2, 9)
    return a, b, rng.randint(2, min(9, a + b - 1))


def _sum_times(rng: random.Random) -> tuple[int, int, int]:
    a = rng.randint(1, 6)
    return a, rng.randint(1, 9 - a), rng.randint(2, 9)


def _share(rng: random.Random) -> tuple[int, int, int]:
    quotient, b, c = _digits(rng)
    return quotient * b, b, c


_STORIES: tuple[_Story, ...] = (
    _Story(
        ("*", "-"),
        _take_few,
        "{name} has {a} boxes with {b} {things} each. {name} gives away {c} {things}. How many are left?",
    ),
    _Story(
        ("*", "-"),
        _take_few,
        "There are {a} bags of {b} {things}. {name} loses {c} of them. How many {things} remain?",
    ),
    _Story(
        ("*", "+"),
        _digits,
        "{name} buys {a} packs of {b} {things} and finds {c} more. How many {things} does {name} have?",
    ),
    _Story(
        ("*", "+"),
        _digits,
        "A shelf has {a} rows of {b} {things}. {name} adds {c}. How many {things} are on the shelf now?",
    ),
    _Story(
        ("+", "-"),
        _take_few_of_sum,
        "{name} has {a} {things}, gets {b} more and then sells {c}. How many {things} does {name} still have?",
    ),
    _Story(
        ("+", "*"),
        _sum_times,
        "Each day {name} finds {a} {things} at home and {b} outside. How many {things} is that in {c} days?",
    ),
    _Story(
        ("/", "+"),
        _share,
        "{name} shares {a} {things} among {b} friends. Each friend already has {c}. How many does each have now?",
    ),
)


def apply(operation: str, left: int, right: int) -> int:
    """Integer result of one of + - * / (exact division)."""
    return {"+": left + right, "-": left - right, "*": left * right, "/": left // max(right, 1)}[operation]


def draw_gsm8k(rng: random.Random) -> Item:
    """A two-step word problem with small whole numbers."""
    number = rng.randrange(len(_STORIES))
    story = _STORIES[number]
    a, b, c = story.numbers(rng)
    first, second = story.steps
    middle = apply(first, a, b)
    result = apply(second, middle, c)
    question = story.text.format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b, c=c)
    lines = (f"{a}{first}{b}", middle), (f"{middle}{second}{c}", result)
    answer = "\n".join(f"{term} = <<{term}={value}>>{value}" for term, value in lines) + f"\n#### {result}"
    response = f"First {a}{first}{b}={middle}. Then {middle}{second}{c}={result}. The answer is {result}."
    row = {"question": question, "answer": answer}
    return Item(held_out=key_is_held_out(f"story {number} {a} {b} {c}"), row=row, prompt_row=row, response=response)


class _Problem(NamedTuple):
    problem: str
    working: str
    answer: str


def _linear(rng: random.Random) -> _Problem:
    x, a, b = _digits(rng)
    right = a * x + b
    return _Problem(
        problem=f"Solve ${a}x + {b} = {right}$ for $x$.",
        working=f"${a}x={right}-{b}={a * x}$, so $x={a * x}/{a}={x}$.",
        answer=str(x),
    )


def _precedence(rng: random.Random) -> _Problem:
    a, b, c = _digits(rng)
    return _Problem(
        problem=f"Evaluate ${a} + {b} \\cdot {c}$.",
        working=f"${b}*{c}={b * c}$ and ${b * c}+{a}={a + b * c}$.",
        answer=str(a + b * c),
    )


def _fractions(rng: random.Random) -> _Problem:
    bottom = rng.choice((5, 7, 11, 13))
    a = rng.randint(1, min(9, bottom - 2))
    b = rng.randint(1, min(9, bottom - 1 - a))
    return _Problem(
        problem=f"What is $\\frac{{{a}}}{{{bottom}}} + \\frac{{{b}}}{{{bottom}}}$ in lowest terms?",
        working=f"The top is ${a}+{b}={a + b}$ and the bottom is ${bottom}$.",
        answer=f"\\frac{{{a + b}}}{{{bottom}}}",
    )


def _remainder(rng: random.Random) -> _Problem:
    divisor, quotient = rng.randint(3, 9), rng.randint(2, 9)
    rest = rng.randint(1, divisor - 1)
    number = divisor * quotient + rest
    return _Problem(
        problem=f"Find the remainder when {number} is divided by {divisor}.",
        working=f"${divisor}*{quotient}={divisor * quotient}$ and ${number}-{divisor * quotient}={rest}$.",
        answer=str(rest),
    )


def _outfits(rng: random.Random) -> _Problem:
    a, b, _ = _digits(rng)
    return _Problem(
        problem=f"A menu has {a} soups and {b} desserts. In how many ways can one choose one of each?",
        working=f"${a}*{b}={a * b}$.",
        answer=str(a * b),
    )


def _perimeter(rng: random.Random) -> _Problem:
    a, b, _ = _digits(rng)
    return _Problem(
        problem=f"A rectangle has sides ${a}$ and ${b}$. What is its perimeter?",
        working=f"${a}+{b}={a + b}$ and $2*{a + b}={2 * (a + b)}$.",
        answer=str(2 * (a + b)),
    )


def _function_value(rng: random.Random) -> _Problem:
    a, b, x = _digits(rng)
    return _Problem(
        problem=f"If $f(x) = {a}x + {b}$, what is $f({x})$?",
        working=f"${a}*{x}={a * x}$ and ${a * x}+{b}={a * x + b}$.",
        answer=str(a * x + b),
    )


_SUBJECTS: tuple[tuple[str, int, Callable[[random.Random], _Problem]], ...] = (
    ("Algebra", 3, _linear),
    ("Prealgebra", 2, _precedence),
    ("Precalculus", 2, _fractions),
    ("Number Theory", 3, _remainder),
    ("Counting & Probability", 1, _outfits),
    ("Geometry", 2, _perimeter),
    ("Intermediate Algebra", 2, _function_value),
)


def draw_math(rng: random.Random) -> Item:
    """A short problem of one of MATH's seven subjects."""
    subject, level, draw = rng.choice(_SUBJECTS)
    drawn = draw(rng)
    response = f"{drawn.working} The answer is $\\boxed{{{drawn.answer}}}$."
    row = {"problem": drawn.problem, "level": f"Level {level}", "type": subject, "solution": response}
    return Item(held_out=key_is_held_out(drawn.problem), row=row, prompt_row=row, response=response)
