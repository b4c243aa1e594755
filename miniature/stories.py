"""Word problems of three to five steps (gsm8k): an opening, and events that change the number of things."""

import random
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from miniature.item import Item, key_is_held_out
from miniature.knowledge import NAMES, THINGS
from miniature.steps import HARDEST_GRADE, LIMITS, Steps, between, drawn, factors

_NUM_STEPS = {1: 3, 2: 4, 3: 5, HARDEST_GRADE: 5}


class _Event(NamedTuple):
    """Something that gives or changes the number of things.

    Attributes:
        text: a sentence of the question with `{name}`, `{things}`, `{c}` and, of two steps, `{d}`.
        says: how the response begins the sentence of each calculation, four words each, so that lengths are bounded.
        operations: what is calculated: of the number so far and c, or of c and d and then of the number so far and
            their product.
    """

    text: str
    says: Sequence[str]
    operations: str


_OPENINGS: Sequence[_Event] = (
    _Event("{name} has {c} boxes with {d} {things} each.", ("All the boxes hold",), "*"),
    _Event("On each of {c} days {name} finds {d} {things}.", ("All the days bring",), "*"),
    _Event("There are {c} {things} on a shelf and {d} in a bag.", ("Both the places hold",), "+"),
)

_EVENTS: Sequence[_Event] = (
    _Event("Then {name} gets {c} more.", ("The new ones make",), "+"),
    _Event("A friend brings {c} {things}.", ("The gift then makes",), "+"),
    _Event("Then {c} of them break.", ("The broken ones leave",), "-"),
    _Event("{name} sells {c} of them.", ("The sale then leaves",), "-"),
    _Event("A week later there are {c} times as many.", ("The next week brings",), "*"),
    _Event("{name} puts them into {c} equal bags and keeps one bag.", ("One bag then holds",), "/"),
    _Event("{name} buys {c} packs of {d} {things}.", ("All the packs hold", "The packs then make"), "*+"),
    _Event("Then {c} children take {d} {things} each.", ("All the children take", "The children then leave"), "*-"),
)


def _numbers(rng: random.Random, operations: str, have: int, limit: int) -> tuple[int, ...]:
    """Draws c, or c and d, so that the number of things stays in bounds; raises Refused if that is impossible."""
    if operations[0] == "*" and len(operations) == 2:
        return factors(rng, limit - have if operations[1] == "+" else have - 1)
    if operations == "/":
        divisors = [digit for digit in range(2, 10) if have % digit == 0]
        return (divisors[between(rng, 0, len(divisors) - 1)],)
    low, high = {"+": (2, limit - have), "-": (2, have - 1), "*": (2, limit // have)}[operations]
    return (between(rng, low, high),)


def _make(rng: random.Random, grade: int) -> Item:
    steps, limit = Steps(LIMITS[grade]), LIMITS[grade]
    opening = rng.choice(_OPENINGS)
    c, d = factors(rng, limit) if opening.operations == "*" else (between(rng, 4, limit // 2) for _ in range(2))
    have, says, key = steps(c, opening.operations, d), [*opening.says], [opening.says[0], str(c), str(d)]
    things, name = rng.choice(THINGS), rng.choice(NAMES)
    sentences = [opening.text.format(name=name, things=things, c=c, d=d)]
    while len(steps.steps) < _NUM_STEPS[grade]:
        event = rng.choice(_EVENTS)
        if len(steps.steps) + len(event.operations) > _NUM_STEPS[grade]:
            continue
        numbers = _numbers(rng, event.operations, have, limit)
        amount = steps(*numbers[:1], "*", *numbers[1:]) if len(numbers) == 2 else numbers[0]
        have = steps(have, event.operations[-1], amount)
        sentences.append(event.text.format(name=name, things=things, c=numbers[0], d=numbers[-1]))
        says += event.says
        key += [event.says[0], *map(str, numbers)]
    question = f"{' '.join(sentences)} How many {things} are there in the end?"
    steps.check_result_is_new(question)
    *first, last = steps.steps
    working = " ".join(f"{say} {term}={value}." for say, (term, value) in zip(says, first, strict=False))
    calculator = "\n".join(f"{term} = <<{term}={value}>>{value}" for term, value in steps.steps)
    row = {"question": question, "answer": f"{calculator}\n#### {steps.result}"}
    response = f"{working} {says[-1]} {last.term}. The answer is {steps.result}."
    return Item(held_out=key_is_held_out(" ".join(key)), row=row, prompt_row=row, response=response)


def draw_gsm8k(rng: random.Random, grades: Sequence[int]) -> Item:
    """A word problem of three to five steps; the last result stands in the last sentence only."""
    grade = rng.choice(grades)
    return drawn(rng, partial(_make, grade=grade))
