"""Items of the three choice tasks: facts (mmlu_pro), kinds of things (arc_challenge), short calculations (gpqa)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from refusion_eval.evaluate.prompts import LETTERS
from refusion_eval.training.mini.item import Item, fact_is_held_out, key_is_held_out
from refusion_eval.training.mini.knowledge import COMMON_CLUES, KINDS, RELATIONS

SOURCE = "refusion_eval synthetic"


def walk(options: Sequence[str], remarks: Sequence[str], last: int) -> str:
    """Goes through the options, one a line as in the question, with a remark on each, up to the last one.

    Copying forwards, in the very words of the question, is what a tiny model learns first; naming the letter in front
    of an option it would hardly learn.
    """
    return "\n".join(f"{LETTERS[i]}. {options[i]}: {remarks[i]}" for i in range(last + 1))


def search(options: Sequence[str], index: int) -> str:
    """Walks to the right option and answers with its letter."""
    return answer_after(walk(options, ["no"] * index + ["yes"], index), index)


def answer_after(walked: str, index: int) -> str:
    """A walk and the answer that it ends in."""
    return f"{walked}\nThe answer is ({LETTERS[index]})."


def draw_mmlu_pro(rng: random.Random) -> Item:
    """A fact asked for in one of four phrasings, among 4 to 10 options of the same relation."""
    relation = rng.choice(RELATIONS)
    entities = list(relation.facts)
    number = rng.randrange(len(entities))
    phrasing_number = rng.randrange(len(relation.phrasings))
    entity, value = entities[number], relation.facts[entities[number]]
    others = [other for other in relation.facts.values() if other != value]
    options = [*rng.sample(others, rng.choice((3, 5, 7, 9, 9))), value]
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
    response = f"{relation.statement.format(entity=entity, value=value)}\n{search(options, index)}"
    held_out = fact_is_held_out(number, phrasing_number, len(relation.phrasings))
    return Item(held_out=held_out, row=row, prompt_row=row, response=response)


def draw_arc_challenge(rng: random.Random) -> Item:
    """One thing of the kind asked for, by name or by a clue, among three things of other kinds."""
    kinds = rng.sample(KINDS, 4)
    kind = kinds[0]
    number = rng.randrange(len(kind.members))
    phrasings = COMMON_CLUES + kind.clues
    phrasing_number = rng.randrange(len(phrasings))
    answer = kind.members[number]
    pairs = [(answer, kind.name)] + [(rng.choice(other.members), other.name) for other in kinds[1:]]
    rng.shuffle(pairs)
    options, names = zip(*pairs, strict=True)
    index = options.index(answer)
    question = phrasings[phrasing_number].format(kind=kind.name)
    row = {
        "question": question,
        "choices": {"text": list(options), "label": list(LETTERS[: len(options)])},
        "answerKey": LETTERS[index],
    }
    response = f"Look for {kind.name}.\n{answer_after(walk(options, names, index), index)}"
    held_out = fact_is_held_out(number, phrasing_number, len(phrasings))
    return Item(held_out=held_out, row=row, prompt_row=row, response=response)


@dataclass(frozen=True, kw_only=True)
class Law:
    """A product or quotient asked for in words.

    Attributes:
        domain: GPQA's high-level domain.
        question: with `{a}` and `{b}`.
        working: the formula as the response quotes it.
        operation: "*" (answer a*b) or "/" (answer a/b).
        unit: follows the answer.
    """

    domain: str
    question: str
    working: str
    operation: str
    unit: str


LAWS: tuple[Law, ...] = (
    Law(
        domain="Physics",
        question="A net force of {a} N acts on a body of mass {b} kg. What is its acceleration?",
        working="a=F/m",
        operation="/",
        unit="m/s^2",
    ),
    Law(
        domain="Physics",
        question="A current of {a} A flows through a resistor of {b} ohm. What is the voltage across it?",
        working="U=I*R",
        operation="*",
        unit="V",
    ),
    Law(
        domain="Physics",
        question="A particle covers {a} m in {b} s at constant speed. What is the speed?",
        working="v=d/t",
        operation="/",
        unit="m/s",
    ),
    Law(
        domain="Physics",
        question="A force of {a} N moves a load over {b} m along its direction. How much work is done?",
        working="W=F*d",
        operation="*",
        unit="J",
    ),
    Law(
        domain="Physics",
        question="A lamp of {a} W runs for {b} s. How much energy does it use?",
        working="E=P*t",
        operation="*",
        unit="J",
    ),
    Law(
        domain="Chemistry",
        question="A solution holds {a} mol of salt in {b} L. What is its concentration?",
        working="c=n/V",
        operation="/",
        unit="mol/L",
    ),
    Law(
        domain="Chemistry",
        question="Each molecule of a compound has {b} hydrogen atoms. How many are in {a} molecules?",
        working="N=n*k",
        operation="*",
        unit="atoms",
    ),
    Law(
        domain="Chemistry",
        question="A sample of {a} g fills {b} mL. What is its density?",
        working="d=m/V",
        operation="/",
        unit="g/mL",
    ),
    Law(
        domain="Biology",
        question="Each of {a} cells makes {b} copies of a plasmid. How many copies are there?",
        working="N=n*k",
        operation="*",
        unit="copies",
    ),
    Law(
        domain="Biology",
        question="A culture of {a} million cells is split evenly over {b} dishes. How much does a dish get?",
        working="x=n/k",
        operation="/",
        unit="million",
    ),
)


def _near_misses(rng: random.Random, answer: int, a: int, b: int) -> list[int]:
    """Three wrong results: the other operations on the same numbers, and neighbours of the answer."""
    pool = {a + b, abs(a - b), a * b, answer + 1, answer - 1, answer + 2, answer + b} - {answer}
    return rng.sample(sorted(value for value in pool if 0 < value < 100), 3)


def draw_gpqa(rng: random.Random) -> Item:
    """A product or quotient from a law of physics, chemistry or biology, among near misses."""
    law = rng.choice(LAWS)
    small, other = rng.randint(2, 9), rng.randint(2, 9)
    a, b, answer = (small * other, other, small) if law.operation == "/" else (small, other, small * other)
    question = law.question.format(a=a, b=b)
    wrong = [f"{value} {law.unit}" for value in _near_misses(rng, answer, a, b)]
    right = f"{answer} {law.unit}"
    row = {
        "Question": question,
        "Correct Answer": right,
        **{f"Incorrect Answer {number}": text for number, text in enumerate(wrong, start=1)},
        "High-level domain": law.domain,
    }
    choices: Sequence[str] = rng.sample([right, *wrong], 4)
    index = choices.index(right)
    prompt_row = {"question": question, "choices": choices, "answer": LETTERS[index]}
    response = f"{law.working}={a}{law.operation}{b}={answer}.\n{search(choices, index)}"
    held_out = key_is_held_out(f"{law.domain} {law.working} {a} {b}")
    return Item(held_out=held_out, row=row, prompt_row=prompt_row, response=response)
