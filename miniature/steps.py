"""Chains of calculations with results in bounds, and the grades of difficulty."""

import random
import re
from collections.abc import Callable
from typing import NamedTuple, TypeVar

GRADES = (1, 2, 3)  # drawn uniformly for each training item; more steps or parts, and larger numbers
HARDEST_GRADE = 4  # goes beyond all that is trained on
LIMITS = {1: 60, 2: 120, 3: 240, HARDEST_GRADE: 300}  # largest number of a calculation, by grade
_LARGEST_DIGIT, _LARGEST_FACTOR = 9, 99

T = TypeVar("T")


class Refused(Exception):
    """The drawn numbers make no valid item."""


def drawn(rng: random.Random, make: Callable[[random.Random], T]) -> T:
    """The first item that is not refused."""
    while True:
        try:
            return make(rng)
        except Refused:
            continue


def apply(operation: str, left: int, right: int) -> int:
    """Integer result of one of + - * / (exact division)."""
    return {"+": left + right, "-": left - right, "*": left * right, "/": left // max(right, 1)}[operation]


def between(rng: random.Random, low: int, high: int) -> int:
    """A number of a range; raises Refused if the range is empty."""
    if low > high:
        raise Refused
    return rng.randint(low, high)


def factors(rng: random.Random, limit: int) -> tuple[int, int]:
    """A digit and another factor whose product is at most `limit`; raises Refused if there are none."""
    digit = between(rng, 2, min(_LARGEST_DIGIT, limit // 2))
    return digit, between(rng, 2, min(_LARGEST_FACTOR, limit // digit))


class Step(NamedTuple):
    """A calculation: "35+12" and 47."""

    term: str
    value: int


class Steps:
    """Calculations that build on each other.

    A product has one factor of a digit and one of at most 99, a quotient is exact and its divisor a digit; every result
    is positive and at most `limit`.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.steps: list[Step] = []

    def __call__(self, left: int, operation: str, right: int) -> int:
        """Adds a calculation and returns its result; raises Refused if it is out of bounds."""
        value = apply(operation, left, right)
        factors = {"*": (left, right), "/": (right, value)}.get(operation)
        if factors is not None and not (2 <= min(factors) <= _LARGEST_DIGIT and max(factors) <= _LARGEST_FACTOR):
            raise Refused
        if operation == "/" and (left % right or right > _LARGEST_DIGIT):
            raise Refused
        if not (0 < value <= self.limit and 0 < left <= self.limit and 0 < right <= self.limit):
            raise Refused
        self.steps.append(Step(f"{left}{operation}{right}", value))
        return value

    @property
    def result(self) -> int:
        """The result of the last calculation."""
        return self.steps[-1].value

    def check_result_is_new(self, question: str) -> None:
        """Raises Refused if the last result stands in the question or in the calculations, where it could be copied."""
        terms = " ".join(step.term for step in self.steps)
        if str(self.result) in re.findall(r"\d+", f"{question} {terms}"):
            raise Refused
