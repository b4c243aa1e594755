"""Drills: training-only conversations that practise one step of the tasks many times each.

The steps a tiny model is slowest to find are looking up an option's letter, telling kinds of things apart and knowing
sums and products. A task item holds one of them among twenty other tokens; a drill holds several.
"""

import random
from collections.abc import Mapping, Sequence

from miniature.choice import with_letter
from miniature.item import DrillDraw
from miniature.knowledge import KINDS, RELATIONS
from refusion_eval.benchmarks.multiple_choice import lettered

NUM_SUMS = 6


def _some_options(rng: random.Random) -> list[str]:
    source, count = rng.randrange(3), rng.randint(2, 6)
    if source == 0:
        return rng.sample(list(rng.choice(RELATIONS).facts.values()), count)
    if source == 1:
        return [rng.choice(kind.members) for kind in rng.sample(KINDS, count)]
    digits = rng.sample(range(1, 10), 9)
    return [f"{rng.choice(('', *digits[6:]))}{last}" for last in digits[:count]]


def draw_letters(rng: random.Random) -> tuple[str, str]:
    """Which letters do these options have?"""
    options = _some_options(rng)
    wanted = rng.sample(options, len(options))
    return f"Find all.\n\n{lettered(options)}", f"Found {', '.join(with_letter(option, options) for option in wanted)}."


def draw_kinds(rng: random.Random) -> tuple[str, str]:
    """Which of these is of this kind?"""
    kinds = rng.sample(KINDS, 5)
    members = [rng.choice(kind.members) for kind in kinds]
    options = rng.sample(members, len(members))
    lines = [f"{kind.name}: {with_letter(member, options)}" for kind, member in zip(kinds, members, strict=True)]
    return f"Find {', '.join(kind.name for kind in kinds)}.\n\n{lettered(options)}", "\n".join(lines)


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


DRILLS: Mapping[str, DrillDraw] = {
    "letters": draw_letters,
    "kinds": draw_kinds,
    "sums": draw_sums,
}
