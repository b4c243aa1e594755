"""Drills: training-only conversations that practise one step of the tasks many times each.

The steps a tiny model is slowest to find are looking up the letter of an option, telling kinds of things apart and
knowing sums and products. A task item holds one of them among twenty other tokens; a drill holds four to six.
"""

import random
from collections.abc import Callable, Mapping, Sequence

from refusion_eval.evaluate.prompts import lettered
from refusion_eval.training.mini.choice import LAWS, option_sentence
from refusion_eval.training.mini.knowledge import KINDS, RELATIONS

NUM_SUMS = 6
NUM_LOOKUPS = 5


def _some_options(rng: random.Random) -> list[str]:
    source = rng.randrange(3)
    if source == 0:
        values = list(rng.choice(RELATIONS).facts.values())
        return rng.sample(values, rng.randint(4, 10))
    if source == 1:
        return [rng.choice(kind.members) for kind in rng.sample(KINDS, 4)]
    unit = rng.choice(LAWS).unit
    return [f"{number} {unit}" for number in rng.sample(range(1, 82), 4)]


def draw_letters(rng: random.Random) -> tuple[str, str]:
    """Which letters do these options have?"""
    options = _some_options(rng)
    asked = rng.sample(options, min(NUM_LOOKUPS, len(options)))
    query = f"Give the letters of: {', '.join(asked)}.\n\n{lettered(options)}"
    return query, " ".join(option_sentence(text, options.index(text)) for text in asked)


def draw_kinds(rng: random.Random) -> tuple[str, str]:
    """Which option is of which kind?"""
    kinds = rng.sample(KINDS, 4)
    options = [rng.choice(kind.members) for kind in kinds]
    shuffled = rng.sample(options, 4)
    query = f"Find {', '.join(kind.name for kind in kinds)}.\n\n{lettered(shuffled)}"
    found = (
        f"{kind.name[0].upper()}{kind.name[1:]}: {option}. {option_sentence(option, shuffled.index(option))}"
        for kind, option in zip(kinds, options, strict=True)
    )
    return query, " ".join(found)


def _sum(rng: random.Random) -> tuple[str, int]:
    operation = rng.choice("+-**/")
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    if operation == "*":
        return (f"{a}*{b}", a * b) if rng.random() < 0.9 else (f"2*{a + b}", 2 * (a + b))
    if operation == "/":
        return f"{a * b}/{b}", a
    large = rng.choice((rng.randint(2, 81), a, a * b))
    if operation == "+":
        return f"{large}+{b}", large + b
    return (f"{large}-{b}", large - b) if large >= b else (f"{b}-{large}", b - large)


def draw_sums(rng: random.Random) -> tuple[str, str]:
    """What are these sums, differences, products and quotients?"""
    sums: Sequence[tuple[str, int]] = [_sum(rng) for _ in range(NUM_SUMS)]
    query = f"Calculate {', '.join(term for term, _ in sums)}."
    return query, " ".join(f"{term}={value}." for term, value in sums)


DRILLS: Mapping[str, Callable[[random.Random], tuple[str, str]]] = {
    "letters": draw_letters,
    "kinds": draw_kinds,
    "sums": draw_sums,
}


def drill_pairs(drill: str, *, seed: int, count: int) -> list[tuple[str, str]]:
    """The first `count` (query, response) pairs of one drill; the same arguments give the same pairs."""
    rng = random.Random(f"{drill} {seed}")
    return [DRILLS[drill](rng) for _ in range(count)]
