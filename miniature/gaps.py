"""Texts in which a part follows from what stands behind it, so that only a system that sees the suffix can fill it.

Their queries say nothing of what they hold. They are trained on as whole texts and have gaps in tests alone.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from miniature.item import DrillDraw, key_is_held_out
from miniature.knowledge import NAMES
from miniature.parts import FIELDS
from miniature.programs import VERBS
from miniature.steps import GRADES, LIMITS, Refused, Steps, between, drawn

NUM_CALCULATIONS = 5
_NUM_FIELDS = 4


@dataclass(frozen=True, kw_only=True)
class Gapped:
    """A conversation whose response has a gap.

    Attributes:
        query: the user turn.
        prefix: the response before the gap.
        middle: what stood in the gap.
        suffix: the response behind the gap.
        key: what makes it this item, for `key_is_held_out`: no names and no order of what has none.
    """

    query: str
    prefix: str
    middle: str
    suffix: str
    key: str

    @property
    def response(self) -> str:
        """The whole response."""
        return self.prefix + self.middle + self.suffix


def _split(query: str, parts: list[str], first: int, end: int, key: str) -> Gapped:
    """The conversation whose gap holds the parts from `first` to before `end`.

    A part begins with the blanks before it, so that its tokens are those of the whole text.
    """
    prefix, middle, suffix = ("".join(chosen) for chosen in (parts[:first], parts[first:end], parts[end:]))
    return Gapped(query=query, prefix=prefix, middle=middle, suffix=suffix, key=key)


def _chain(rng: random.Random, grade: int) -> Gapped:
    """Calculations of which each continues with the result before it.

    The gap of grade 1 is the last calculation but one, with a known number on both sides; that of grade 2 is the first
    one, whose numbers may be any that give the result behind it; that of grade 3 is two calculations between numbers.
    """
    steps = Steps(LIMITS[GRADES[-1]])
    value = between(rng, 12, 99)
    for operation in rng.choices("++--*/", k=NUM_CALCULATIONS):
        right = {"+": rng.randint(2, 99), "-": rng.randint(2, 99), "*": rng.randint(2, 9), "/": rng.randint(2, 9)}
        value = steps(value, operation, right[operation])
    parts = [f"{' ' * (number > 0)}{step.term}={step.value}." for number, step in enumerate(steps.steps)]
    first, end = {1: (NUM_CALCULATIONS - 2, NUM_CALCULATIONS - 1), 2: (0, 1), 3: (1, 3)}[grade]
    query = f"Write a chain of {NUM_CALCULATIONS} calculations."
    return _split(query, [*parts, f" The answer is {value}."], first, end, "".join(parts))


def _program(rng: random.Random, grade: int) -> Gapped:
    """A function and two calls whose results stand behind it.

    The gap of grade 1 is the line with the function's name, which the calls repeat; that of grade 2 is a body that adds
    or subtracts; that of grade 3 is a body that multiplies and adds.
    """
    name, parameter = rng.choice(VERBS), rng.choice("nxk")
    inputs = rng.sample(range(2, 10), 2)
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    body, outputs = {
        1: (f"{parameter} * {a}", [x * a for x in inputs]),
        2: (f"{parameter} + {a * b}", [x + a * b for x in inputs]),
        3: (f"{parameter} * {a} + {b}", [x * a + b for x in inputs]),
    }[grade]
    calls = "\n".join(f"assert {name}({x}) == {output}" for x, output in zip(inputs, outputs, strict=True))
    lines = [f"\ndef {name}({parameter}):", f"\n    return {body}", f"\n\n{calls}"]
    place = 1 if grade == 1 else 2
    parts = ["```python", *lines, "\n```"]
    key = f"{body.replace(parameter, 'p')} {sorted(inputs)}"
    return _split("Write a function and two asserts of it.", parts, place, place + 1, key)


def _text(rng: random.Random, grade: int) -> Gapped:
    """A description of a person and a list of what it said; the gap is as many of its sentences as the grade says."""
    person = rng.choice(NAMES)
    values = {field: rng.choice(choices) for field, (_, choices) in rng.sample(list(FIELDS.items()), _NUM_FIELDS)}
    sentences = [
        " " * (number > 0) + FIELDS[field][0].format(name=person, value=value)
        for number, (field, value) in enumerate(values.items())
    ]
    listed = [f" The {field} is {value}." for field, value in values.items()]
    first = rng.randint(0, _NUM_FIELDS - grade)
    query = f"Describe {person} and list what you said: {', '.join(values)}."
    return _split(query, [*sentences, *listed], first, first + grade, "".join(sorted(listed)))


KINDS: Mapping[str, Callable[[random.Random, int], Gapped]] = {"math": _chain, "program": _program, "text": _text}


def draw_gapped(rng: random.Random, kind: str, grade: int, *, test: bool) -> Gapped:
    """A conversation with a gap of one of the kinds "math", "program" and "text" and of a grade from 1 to 3.

    Args:
        rng: source of all choices.
        kind: what the text is.
        grade: difficulty, whose meaning the kind decides.
        test: whether it belongs to the test split; the two splits share no chain, no body with its calls and no facts.
    """

    def make(rng: random.Random) -> Gapped:
        found = KINDS[kind](rng, grade)
        if key_is_held_out(found.key) != test:
            raise Refused
        return found

    return drawn(rng, make)


def _drill(kind: str) -> DrillDraw:
    def draw(rng: random.Random) -> tuple[str, str]:
        found = draw_gapped(rng, kind, rng.choice(GRADES), test=False)
        return found.query, found.response

    return draw


GAPS: Mapping[str, DrillDraw] = {f"gap_{kind}": _drill(kind) for kind in KINDS}


def test_rows(kind: str, count: int, seed: int) -> list[dict[str, str]]:
    """The first rows of the test split with distinct responses, whose grades take turns, as tasks read them."""
    rng = random.Random(f"infill {kind} test {seed}")
    found: dict[str, dict[str, str]] = {}
    while len(found) < count:
        grade = GRADES[len(found) % len(GRADES)]
        item = draw_gapped(rng, kind, grade, test=True)
        texts = {"query": item.query, "prefix": item.prefix, "middle": item.middle, "suffix": item.suffix}
        found.setdefault(item.response, {**texts, "grade": str(grade)})
    return list(found.values())
