"""A task of independent parts: a record, a table of products, sums, or letters of options, one line a part.

An answer counts as right when all of its lines are right (`refusion_eval.benchmarks.parts`).
"""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from miniature.facts import draw_facts, with_letter
from miniature.item import Item, key_is_held_out
from miniature.knowledge import NAMES, RELATIONS, THINGS
from miniature.steps import GRADES, LIMITS, Steps, between, drawn, factors
from refusion_eval.benchmarks.multiple_choice import lettered

_CAPITALS = tuple(next(relation for relation in RELATIONS if "capital" in relation.statement).facts.values())

# Field of a record -> the sentence of the text that gives it, and its values.
FIELDS: dict[str, tuple[str, Sequence[str]]] = {
    "age": ("{name} is {value} years old.", tuple(map(str, range(11, 100)))),
    "city": ("{name} lives in {value}.", _CAPITALS),
    "job": ("{name} works as a {value}.", ("baker", "pilot", "nurse", "farmer", "lawyer", "painter", "singer", "cook")),
    "pet": ("{name} keeps a {value}.", ("dog", "cat", "horse", "rabbit", "parrot", "gecko", "turtle", "duck")),
    "colour": ("{name} wears {value} shoes.", ("red", "blue", "green", "black", "white", "brown", "yellow", "grey")),
    "hobby": ("{name} plays the {value}.", ("piano", "violin", "guitar", "flute", "drum", "harp", "organ", "cello")),
    "month": ("{name} was born in {value}.", ("March", "April", "May", "June", "July", "August", "October", "January")),
    "prize": ("{name} has won some {value}.", THINGS),
}


class _Drawn(NamedTuple):
    """A question, the lines of its answer, and what makes it this item: no names, letters or order."""

    question: str
    lines: Sequence[str]
    key: str


def _record(rng: random.Random, grade: int) -> _Drawn:
    """A record of one of one to three persons of a text."""
    persons = rng.sample(NAMES, min(grade, GRADES[-1]))
    values = {person: {field: rng.choice(choices) for field, (_, choices) in FIELDS.items()} for person in persons}
    order = rng.sample(list(FIELDS), len(FIELDS))
    sentences = [
        FIELDS[field][0].format(name=person, value=values[person][field]) for person in persons for field in order
    ]
    fields = order[:7] if grade == 1 else order
    question = f"{' '.join(sentences)}\n\nFill the record of {persons[0]}: {', '.join(fields)}."
    lines = [f"The {field} is {values[persons[0]][field]}." for field in fields]
    return _Drawn(question, lines, " ".join(sorted(lines)))


def draw_step(rng: random.Random, steps: Steps, operation: str) -> None:
    """Adds one calculation with numbers of its own."""
    if operation in "*/":
        left, right = factors(rng, steps.limit)
        if operation == "*":
            steps(left, "*", right)
        else:
            steps(left * right, "/", left)
    else:
        total = between(rng, 12, steps.limit)
        right = between(rng, 2, total - 2)
        steps(*((total - right, "+", right) if operation == "+" else (total, "-", right)))


def _sums(rng: random.Random, grade: int) -> _Drawn:
    """Six sums and differences."""
    steps = Steps(LIMITS[grade])
    for _ in range(6):
        draw_step(rng, steps, rng.choice("+-"))
    question = f"Calculate {', '.join(step.term for step in steps.steps)}."
    return _Drawn(question, [f"{term}={value}" for term, value in steps.steps], question)


def _products(rng: random.Random, grade: int) -> _Drawn:
    """A table of two times four products."""
    limit = max(LIMITS[grade], 60)  # a row of nine has four columns
    steps, rows = Steps(limit), rng.sample(range(2, 10), 2)
    columns = rng.sample(range(2, min(99, limit // max(rows)) + 1), 4)
    for row in rows:
        for column in columns:
            steps(row, "*", column)
    question = f"Make a table of {rows[0]} and {rows[1]} times {', '.join(map(str, columns))}."
    return _Drawn(question, [f"{term}={value}" for term, value in steps.steps], question)


def _letters(rng: random.Random, grade: int) -> _Drawn:
    """Five to seven facts whose values are among lettered options."""
    facts = draw_facts(rng, min(grade, GRADES[-1]) + 4)
    others = [fact.wrong for fact in facts if fact.wrong not in {other.value for other in facts}][:1]
    options = rng.sample(values := [*(fact.value for fact in facts), *others], len(values))
    question = "Complete each sentence with an option and its letter: " + " ".join(f"{fact.stem} ..." for fact in facts)
    lines = [f"{fact.stem} {with_letter(fact.value, options)}." for fact in facts]
    return _Drawn(f"{question}\n\n{lettered(options)}", lines, " ".join(sorted(fact.stem for fact in facts)))


_KINDS: Sequence[Callable[[random.Random, int], _Drawn]] = (_record, _sums, _products, _letters)


def draw_parts(rng: random.Random, grades: Sequence[int]) -> Item:
    """Five to eight parts that need nothing of each other."""
    kind, grade = rng.choice(_KINDS), rng.choice(grades)
    question, lines, key = drawn(rng, lambda rng: kind(rng, grade))
    row = {"question": question, "answer": "\n".join(lines)}
    return Item(held_out=key_is_held_out(key), row=row, prompt_row=row, response=row["answer"])
