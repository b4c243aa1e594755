"""Items of the three choice tasks: facts (mmlu_pro), kinds of things (arc_challenge), short calculations (gpqa)."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from miniature.item import Item, fact_is_held_out, key_is_held_out
from miniature.knowledge import COMMON_CLUES, KINDS, RELATIONS
from refusion_eval.benchmarks import LETTERS

SOURCE = "refusion_eval synthetic"


def with_letter(option: str, options: Sequence[str]) -> str:
    """An option followed by its letter, which a response looks up before it answers."""
    return f"{option} ({LETTERS[options.index(option)]})"


def answer(sentence: str, option: str, options: Sequence[str]) -> str:
    """A sentence that leads to an option, the option's letter, and the answer."""
    return f"{sentence} {with_letter(option, options)}.\nThe answer is ({LETTERS[options.index(option)]})."


def draw_mmlu_pro(rng: random.Random) -> Item:
    """A fact asked for in one of four phrasings, among 4 to 6 options of the same relation."""
    relation = rng.choice(RELATIONS)
    entities = list(relation.facts)
    number = rng.randrange(len(entities))
    phrasing_number = rng.randrange(len(relation.phrasings))
    entity, value = entities[number], relation.facts[entities[number]]
    others = [other for other in relation.facts.values() if other != value]
    options = [*rng.sample(others, rng.randint(3, 5)), value]
    rng.shuffle(options)
    index = options.index(value)
    question = relation.phrasings[phrasing_number].format(entity=entity)
    question = question[0].upper() + question[1:]
    row = {
        "question": question,
        "options": options,
        "answer": LETTERS[index],
        "answer_index": index,
        "cot_content": "",
        "category": relation.category,
        "src": SOURCE,
    }
    response = answer(relation.statement.format(entity=entity), value, options)
    held_out = fact_is_held_out(number, phrasing_number, len(relation.phrasings))
    return Item(held_out=held_out, row=row, prompt_row=row, response=response)


def draw_arc_challenge(rng: random.Random) -> Item:
    """One thing of the kind asked for, by name or by a clue, among three things of other kinds."""
    kinds = rng.sample(KINDS, 4)
    kind = kinds[0]
    number = rng.randrange(len(kind.members))
    phrasings = COMMON_CLUES + kind.clues
    phrasing_number = rng.randrange(len(phrasings))
    member = kind.members[number]
    options = [member, *(rng.choice(other.members) for other in kinds[1:])]
    rng.shuffle(options)
    question = phrasings[phrasing_number].format(kind=kind.name)
    row = {
        "question": question,
        "choices": {"text": options, "label": list(LETTERS[: len(options)])},
        "answerKey": LETTERS[options.index(member)],
    }
    response = answer(f"{kind.name[0].upper()}{kind.name[1:]}:", member, options)
    held_out = fact_is_held_out(number, phrasing_number, len(phrasings))
    return Item(held_out=held_out, row=row, prompt_row=row, response=response)


class Law(NamedTuple):
    """A product or quotient asked for in words.

    Attributes:
        domain: GPQA's high-level domain.
        working: the formula as the response quotes it.
        operation: "*" (answer a*b) or "/" (answer a/b).
        question: text with `{a}` and `{b}` that names the unit of the answer.
    """

    domain: str
    working: str
    operation: str
    question: str


LAWS: tuple[Law, ...] = (
    Law(
        "Physics",
        "a=F/m",
        "/",
        "A net force of {a} N acts on a body of mass {b} kg. What is its acceleration in m/s^2?",
    ),
    Law(
        "Physics",
        "U=I*R",
        "*",
        "A current of {a} A flows through a resistor of {b} ohm. What is the voltage across it in V?",
    ),
    Law("Physics", "v=d/t", "/", "A particle covers {a} m in {b} s at constant speed. What is the speed in m/s?"),
    Law(
        "Physics",
        "W=F*d",
        "*",
        "A force of {a} N moves a load over {b} m along its direction. How much work in J is done?",
    ),
    Law("Physics", "E=P*t", "*", "A lamp of {a} W runs for {b} s. How many J of energy does it use?"),
    Law("Chemistry", "c=n/V", "/", "A solution holds {a} mol of salt in {b} L. What is its concentration in mol/L?"),
    Law(
        "Chemistry", "N=n*k", "*", "Each molecule of a compound has {b} hydrogen atoms. How many are in {a} molecules?"
    ),
    Law("Chemistry", "d=m/V", "/", "A sample of {a} g fills {b} mL. What is its density in g/mL?"),
    Law("Biology", "N=n*k", "*", "Each of {a} cells makes {b} copies of a plasmid. How many copies are there?"),
    Law(
        "Biology",
        "x=n/k",
        "/",
        "A culture of {a} million cells is split evenly over {b} dishes. How many million does a dish get?",
    ),
)


def _near_misses(rng: random.Random, answer: int, a: int, b: int) -> list[int]:
    """Three wrong results: the other operations on the same numbers, and neighbours of the answer.

    None holds the answer's last digit, so that its digits alone tell the answer from them.
    """
    pool = {a + b, abs(a - b), a * b, a, b, *range(answer - 4, answer + 5)}
    last = str(answer)[-1]
    return rng.sample(sorted(value for value in pool if 0 < value < 100 and last not in str(value)), 3)


def draw_gpqa(rng: random.Random) -> Item:
    """A product or quotient from a law of physics, chemistry or biology, among near misses."""
    law = rng.choice(LAWS)
    small, other = rng.randint(2, 9), rng.randint(2, 9)
    a, b, result = (small * other, other, small) if law.operation == "/" else (small, other, small * other)
    question = law.question.format(a=a, b=b)
    wrong = [str(value) for value in _near_misses(rng, result, a, b)]
    right = str(result)
    row = {
        "Question": question,
        "Correct Answer": right,
        **{f"Incorrect Answer {number}": text for number, text in enumerate(wrong, start=1)},
        "High-level domain": law.domain,
    }
    choices: Sequence[str] = rng.sample([right, *wrong], 4)
    prompt_row = {"question": question, "choices": choices, "answer": LETTERS[choices.index(right)]}
    response = answer(f"{law.working} and {a}{law.operation}{b}={result}:", right, choices)
    held_out = key_is_held_out(f"{law.domain} {law.working} {a} {b}")
    return Item(held_out=held_out, row=row, prompt_row=prompt_row, response=response)
