"""Choice questions about several facts (mmlu_pro) and kinds of things (arc_challenge); options are lists of three."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from miniature.item import Item, key_is_held_out
from miniature.knowledge import KINDS, RELATIONS
from refusion_eval.benchmarks import LETTERS

SOURCE = "refusion_eval synthetic"
_WIDTH = 3  # values of an option
# Number of right values -> how many of them each option has, the right option first.
_SHARES = {5: (3, 1, 1, 0), 6: (3, 2, 1, 0), 7: (3, 2, 2, 0), 8: (3, 2, 2, 1)}


def with_letter(option: str, options: Sequence[str]) -> str:
    """An option followed by its letter, which a response looks up before it answers."""
    return f"{option} ({LETTERS[options.index(option)]})"


class Fact(NamedTuple):
    """A fact of the little world.

    Attributes:
        category: the MMLU-Pro category of its relation.
        stem: the sentence that the value ends, such as "The capital of France is".
        value: the right value.
        wrong: another value of the relation.
    """

    category: str
    stem: str
    value: str
    wrong: str


def draw_facts(rng: random.Random, count: int) -> list[Fact]:
    """Facts of distinct relations."""
    facts = []
    for relation in rng.sample(RELATIONS, count):
        entity, value = rng.choice(list(relation.facts.items()))
        wrong = rng.choice([other for other in relation.facts.values() if other != value])
        facts.append(Fact(relation.category, relation.statement.format(entity=entity), value, wrong))
    return facts


def _table(rng: random.Random, right: Sequence[str], others: Sequence[str]) -> list[list[str]]:
    """Options of three values each; the first one has most of the right values, each of which stands in one option."""
    shares = _SHARES[len(right)]
    remaining, fillers = rng.sample(right, len(right)), iter(others)
    options = []
    for count in shares:
        option = [remaining.pop() for _ in range(count)]
        option += [next(fillers) for _ in range(_WIDTH - count)]
        options.append(rng.sample(option, _WIDTH))
    return options


def _with_letters(rng: random.Random, right: Sequence[str], others: Sequence[str]) -> tuple[list[str], int, list[str]]:
    """The options as texts, the index of the right one, and the letter of the option that holds each right value."""
    options = _table(rng, right, others)
    table = rng.sample(options, len(options))
    letters = [next(LETTERS[place] for place, option in enumerate(table) if value in option) for value in right]
    return [", ".join(option) for option in table], table.index(options[0]), letters


def draw_mmlu_pro(rng: random.Random, grades: Sequence[int]) -> Item:
    """Five to eight facts, and the option that has most of them right.

    The response names the option of each fact; the right one is named most often.
    """
    facts = draw_facts(rng, len(RELATIONS))
    asked, others = facts[: (number := rng.choice(grades) + 4)], facts[number:]
    right = [fact.value for fact in asked]
    fillers = [*(fact.wrong for fact in facts), *(fact.value for fact in others)]
    texts, index, letters = _with_letters(rng, right, rng.sample(fillers, len(fillers)))
    lines = [f"{fact.stem} {fact.value} ({letter})." for fact, letter in zip(asked, letters, strict=True)]
    row = {
        "question": "Which option completes most of these sentences? " + " ".join(f"{fact.stem} ..." for fact in asked),
        "options": texts,
        "answer": LETTERS[index],
        "answer_index": index,
        "cot_content": "",
        "category": facts[0].category,
        "src": SOURCE,
    }
    response = f"{' '.join(lines)}\nThe answer is ({LETTERS[index]})."
    held_out = key_is_held_out(" ".join(sorted(fact.stem for fact in asked)))
    return Item(held_out=held_out, row=row, prompt_row=row, response=response)


def draw_arc_challenge(rng: random.Random, grades: Sequence[int]) -> Item:
    """Five to eight kinds of things, and the option that has things of most of them.

    The response names for each kind the thing and its option; the right one is named most often.
    """
    kinds = rng.sample(KINDS, len(KINDS))
    asked, others = kinds[: (number := rng.choice(grades) + 4)], kinds[number:]
    things = [rng.choice(kind.members) for kind in asked]
    fillers = [thing for kind in others for thing in rng.sample(kind.members, 2)]
    texts, index, letters = _with_letters(rng, things, rng.sample(fillers, len(fillers)))
    named = [kind.name for kind in asked]
    row = {
        "question": f"Which option has most of these: {', '.join(named[:-1])} and {named[-1]}?",
        "choices": {"text": texts, "label": list(LETTERS[: len(texts)])},
        "answerKey": LETTERS[index],
    }
    lines = [
        f"{name[0].upper()}{name[1:]} is {thing}, found in ({letter})."
        for name, thing, letter in zip(named, things, letters, strict=True)
    ]
    response = f"{' '.join(lines)}\nThe answer is ({LETTERS[index]})."
    held_out = key_is_held_out(" ".join(sorted(things)))
    return Item(held_out=held_out, row=row, prompt_row=row, response=response)
