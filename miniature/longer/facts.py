"""Choice questions about several facts (mmlu_pro) and kinds of things (arc_challenge); options are short lists."""

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from miniature.choice import SOURCE
from miniature.item import Item, key_is_held_out
from miniature.knowledge import KINDS, RELATIONS
from miniature.longer.steps import GRADES
from refusion_eval.benchmarks import LETTERS


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


def _right_and_wrong(rng: random.Random, num_options: int, num_facts: int) -> list[tuple[bool, ...]]:
    """Which facts each option has right: the first option all of them, the others half on average, no two the same.

    Every fact is wrong in at least one option, so that each has to be recalled.
    """
    while True:
        wrong = [tuple(rng.random() < 0.5 for _ in range(num_facts)) for _ in range(num_options - 1)]
        options = [(True,) * num_facts, *wrong]
        if len(set(options)) == num_options and not any(all(column) for column in zip(*options, strict=True)):
            return options


def draw_mmlu_pro(rng: random.Random) -> Item:
    """Three to five facts, and the only option that has all of them right.

    The response says for each fact in which options it stands; only the right option is named each time.
    """
    grade = rng.choice(GRADES)
    facts = draw_facts(rng, grade + 2)
    table = rng.sample(options := _right_and_wrong(rng, rng.choice((4, 5)), len(facts)), len(options))
    texts = [
        ", ".join(fact.value if right else fact.wrong for fact, right in zip(facts, option, strict=True))
        for option in table
    ]
    index = table.index(options[0])
    lines = []
    for number, fact in enumerate(facts):
        places = [place for place, option in enumerate(table) if option[number]]
        lines.append(f"{fact.stem} {fact.value}, in {lettered_places(places)}.")
    row = {
        "question": "Which option completes these sentences? " + " ".join(f"{fact.stem} ..." for fact in facts),
        "options": texts,
        "answer": LETTERS[index],
        "answer_index": index,
        "cot_content": "",
        "category": facts[0].category,
        "src": SOURCE,
    }
    response = f"{' '.join(lines)}\nThe answer is ({LETTERS[index]})."
    held_out = key_is_held_out(" ".join(sorted(fact.stem for fact in facts)))
    return Item(held_out=held_out, row=row, prompt_row=row, response=response)


def lettered_places(places: Iterable[int]) -> str:
    """Places of options by their letters, such as "(A) (C)"."""
    return " ".join(f"({LETTERS[place]})" for place in places)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def draw_arc_challenge(rng: random.Random) -> Item:
    """Two or three kinds, and the only option whose things are of these kinds in this order.

    The response names the kind of every thing of every option and says whether they are those of the question.
    """
    grade = rng.choice(GRADES)
    num_things, num_options = {1: (2, 4), 2: (3, 4), 3: (3, 5)}[grade]
    asked = rng.sample(range(len(KINDS)), num_things)
    options = [tuple(asked)]
    while len(options) < num_options:
        # As often as not a thing of the right kind stands in its place, or the things stand in another order.
        other = tuple(kind if rng.random() < 0.5 else rng.randrange(len(KINDS)) for kind in asked)
        other = other if rng.random() < 0.7 else tuple(rng.sample(other, num_things))
        if other not in options and len(set(other)) == num_things:
            options.append(other)
    table = rng.sample(options, num_options)
    index = table.index(options[0])
    things = [[rng.choice(KINDS[kind].members) for kind in option] for option in table]
    kinds = [[KINDS[kind].name for kind in option] for option in table]
    row = {
        "question": f"Which option lists {_listed([KINDS[kind].name for kind in asked])}, in this order?",
        "choices": {"text": [", ".join(option) for option in things], "label": list(LETTERS[:num_options])},
        "answerKey": LETTERS[index],
    }
    verdicts = ["yes" if place == index else "no" for place in range(num_options)]
    lines = [
        f"In ({letter}) are {_listed(option)}, {verdict}."
        for letter, option, verdict in zip(LETTERS, kinds, verdicts, strict=False)
    ]
    response = f"{' '.join(lines)}\nThe answer is ({LETTERS[index]})."
    held_out = key_is_held_out(" ".join(things[index]))
    return Item(held_out=held_out, row=row, prompt_row=row, response=response)
