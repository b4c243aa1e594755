"""Drills of the single steps that a tiny model is slowest to find: calculations to three digits, facts and letters."""

import random
from collections.abc import Mapping
from functools import partial

from miniature.facts import draw_facts, with_letter
from miniature.item import DrillDraw
from miniature.knowledge import KINDS
from miniature.parts import draw_step
from miniature.steps import GRADES, LIMITS, Steps, drawn
from refusion_eval.benchmarks import LETTERS
from refusion_eval.benchmarks.multiple_choice import lettered

NUM_STEPS = 8


def _calculations(rng: random.Random, grade: int) -> Steps:
    steps = Steps(LIMITS[grade])
    for _ in range(NUM_STEPS):
        draw_step(rng, steps, rng.choice("++--*/"))
    return steps


def draw_calculations(rng: random.Random) -> tuple[str, str]:
    """What are these sums, differences, products and quotients? Half of the results have the form of an answer."""
    steps = drawn(rng, partial(_calculations, grade=rng.choice(GRADES))).steps
    query = f"Calculate {', '.join(term for term, _ in steps)}, each in a sentence."
    forms = ("{term}={value}.", "{term}. The answer is {value}.")
    return query, " ".join(rng.choice(forms).format(term=term, value=value) for term, value in steps)


def draw_recall(rng: random.Random) -> tuple[str, str]:
    """Which option completes each of these facts, and which ones are of these kinds?"""
    facts, kinds = draw_facts(rng, 3), rng.sample(KINDS, 4)
    things = [rng.choice(kind.members) for kind in kinds]
    options = rng.sample(values := [*(fact.value for fact in facts), *things], len(values))
    known = " ".join(f"{fact.stem} {with_letter(fact.value, options)}." for fact in facts)
    sorts = " ".join(
        f"{kind.name[0].upper()}{kind.name[1:]} is {thing}, found in ({LETTERS[options.index(thing)]})."
        for thing, kind in zip(things, kinds, strict=True)
    )
    asked = f"{' '.join(f'{fact.stem} ...' for fact in facts)} Which are {', '.join(kind.name for kind in kinds)}?"
    return f"Recall with letters. {asked}\n\n{lettered(options)}", f"{known} {sorts}"


def draw_letters(rng: random.Random) -> tuple[str, str]:
    """Which letters have these words and numbers?"""
    words = [rng.choice(kind.members) for kind in rng.sample(KINDS, rng.randint(2, 4))]
    numbers = rng.sample(range(1, 200), rng.randint(3, 4))
    options = rng.sample(values := [*words, *map(str, numbers)], len(values))
    asked = rng.sample(options, len(options))
    lines = " ".join(f"{with_letter(option, options)}." for option in asked)
    return f"Which letters have {', '.join(asked)}?\n\n{lettered(options)}", lines


DRILLS: Mapping[str, DrillDraw] = {
    "calculations": draw_calculations,
    "recall": draw_recall,
    "letters": draw_letters,
}
