"""Choice questions that chain two to four laws of physics, chemistry or biology (gpqa), with near misses."""

import random
import re
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from miniature.item import Item, key_is_held_out
from miniature.steps import HARDEST_GRADE, LIMITS, Refused, Steps, apply, drawn
from refusion_eval.benchmarks import LETTERS


class _Chain(NamedTuple):
    """Laws of which each needs the result of the one before.

    Attributes:
        domain: GPQA's high-level domain.
        laws: formulas such as "v=a*t", of quantities of one letter each.
        question: text with the given quantities as fields, and the unit of the last result.
    """

    domain: str
    laws: Sequence[str]
    question: str


_CHAINS: Sequence[_Chain] = (
    _Chain(
        "Physics",
        ("a=F/m", "v=a*t"),
        "A net force of {F} N acts on a body of {m} kg at rest. What is its speed in m/s after {t} s?",
    ),
    _Chain(
        "Physics",
        ("F=m*a", "W=F*d"),
        "A body of {m} kg is accelerated by {a} m/s^2 over {d} m. How much work in J is done?",
    ),
    _Chain("Physics", ("W=F*d", "P=W/t"), "A force of {F} N moves a load over {d} m in {t} s. What is the power in W?"),
    _Chain(
        "Physics",
        ("v=d/t", "p=m*v"),
        "A body of {m} kg covers {d} m in {t} s at constant speed. What is its momentum in kg m/s?",
    ),
    _Chain("Physics", ("I=U/R", "Q=I*t"), "A voltage of {U} V is applied to {R} ohm. How many C flow in {t} s?"),
    _Chain(
        "Physics",
        ("U=I*R", "P=U*I"),
        "A current of {I} A flows through a resistor of {R} ohm. What power in W is lost?",
    ),
    _Chain(
        "Chemistry",
        ("n=m/M", "c=n/V"),
        "A solution of {V} L holds {m} g of a salt of {M} g/mol. What is its concentration in mol/L?",
    ),
    _Chain(
        "Chemistry",
        ("n=c*V", "m=n*M"),
        "A flask holds {V} L with {c} mol/L of a salt of {M} g/mol. How many g of the salt does it hold?",
    ),
    _Chain(
        "Chemistry",
        ("n=m/M", "N=n*k"),
        "Each molecule of a compound of {M} g/mol has {k} hydrogen atoms. How many mol of them are in {m} g?",
    ),
    _Chain("Chemistry", ("m=d*V", "n=m/M"), "A liquid of {d} g/mL and {M} g/mol fills {V} mL. How many mol is that?"),
    _Chain(
        "Biology",
        ("N=n*k", "x=N/b"),
        "Each of {n} cells makes {k} copies of a plasmid, which are split evenly over {b} tubes. How many does a tube "
        "get?",
    ),
    _Chain(
        "Biology",
        ("x=n/b", "y=x*k"),
        "A culture of {n} million cells is split evenly over {b} dishes, and each dish grows {k}-fold. How many "
        "million are in a dish?",
    ),
    _Chain(
        "Physics",
        ("F=m*a", "W=F*d", "P=W/t"),
        "A body of {m} kg is accelerated by {a} m/s^2 over {d} m in {t} s. What is the power in W?",
    ),
    _Chain(
        "Physics",
        ("a=F/m", "v=a*t", "p=k*v"),
        "A net force of {F} N acts on a body of {m} kg for {t} s, which then has the speed of a cart of {k} kg. What "
        "is the momentum of the cart in kg m/s?",
    ),
    _Chain(
        "Physics",
        ("I=U/R", "Q=I*t", "n=Q/k"),
        "A voltage of {U} V is applied to {R} ohm for {t} s and charges {k} equal cells. How many C does a cell get?",
    ),
    _Chain(
        "Chemistry",
        ("n=c*V", "m=n*M", "x=m/b"),
        "{V} L with {c} mol/L of a salt of {M} g/mol dry up in {b} equal dishes. How many g of the salt are in a dish?",
    ),
    _Chain(
        "Chemistry",
        ("m=d*V", "n=m/M", "N=n*k"),
        "Each molecule of a liquid of {d} g/mL and {M} g/mol has {k} carbon atoms. How many mol of them are in {V} mL?",
    ),
    _Chain(
        "Biology",
        ("N=n*k", "x=N/b", "y=x*f"),
        "Each of {n} cells makes {k} spores, which are split evenly over {b} plates and grow {f}-fold. How many are on "
        "a plate?",
    ),
    _Chain(
        "Physics",
        ("F=m*a", "W=F*d", "P=W/t", "x=P/b"),
        "A body of {m} kg is accelerated by {a} m/s^2 over {d} m in {t} s by {b} equal motors. What is the power of a "
        "motor in W?",
    ),
    _Chain(
        "Physics",
        ("I=U/R", "Q=I*t", "n=Q/k", "x=n*b"),
        "A voltage of {U} V is applied to {R} ohm for {t} s and charges {k} equal cells. How many C do {b} cells get?",
    ),
    _Chain(
        "Chemistry",
        ("n=c*V", "m=n*M", "x=m/b", "y=x*k"),
        "{V} L with {c} mol/L of a salt of {M} g/mol dry up in {b} equal dishes. How many g of the salt are in {k} "
        "dishes?",
    ),
    _Chain(
        "Chemistry",
        ("m=d*V", "n=m/M", "N=n*k", "x=N/b"),
        "Each molecule of a liquid of {d} g/mL and {M} g/mol has {k} carbon atoms. {V} mL are split evenly over {b} "
        "tubes. How many mol of the atoms are in a tube?",
    ),
    _Chain(
        "Biology",
        ("N=n*k", "x=N/b", "y=x*f", "z=y/c"),
        "Each of {n} cells makes {k} spores, which are split evenly over {b} plates, grow {f}-fold and are moved to "
        "{c} tubes each. How many are in a tube?",
    ),
)

_NUM_LAWS = {1: (2,), 2: (2,), 3: (3,), HARDEST_GRADE: (3, 4)}


def _near_misses(rng: random.Random, result: int, last: str) -> list[int]:
    """Three wrong results: one law left out, another operation in the last one, and neighbours."""
    parts = re.fullmatch(r"(\d+)[*/](\d+)", last)
    assert parts is not None
    left, right = int(parts[1]), int(parts[2])
    pool = {left, *(apply(operation, left, right) for operation in "+-*/")}
    pool |= {result + difference for difference in (-10, -2, -1, 1, 2, 10)}
    return rng.sample(sorted(value for value in pool if 0 < value < 1000 and value != result), 3)


def _make(rng: random.Random, chain: _Chain, grade: int) -> Item:
    given = {name: rng.randint(2, 9 * grade) for name in re.findall(r"\{(\w)\}", chain.question)}
    steps, values, lines = Steps(LIMITS[grade]), dict(given), []
    for number, law in enumerate(chain.laws):
        target, left, operation, right = law[0], law[2], law[3], law[4]
        if number == 0 and operation == "/":
            given[left] = values[left] = values[left] * values[right]
        values[target] = steps(values[left], operation, values[right])
        lines.append(f"{'Then' if number else 'First'} {law}, so {target}={steps.steps[-1].term}={steps.result}.")
    if str(steps.result) in {str(value) for name, value in values.items() if name != target}:
        raise Refused
    question = chain.question.format(**given)
    wrong = [str(value) for value in _near_misses(rng, steps.result, steps.steps[-1].term)]
    right = str(steps.result)
    row = {
        "Question": question,
        "Correct Answer": right,
        **{f"Incorrect Answer {number}": text for number, text in enumerate(wrong, start=1)},
        "High-level domain": chain.domain,
    }
    choices = rng.sample([right, *wrong], 4)
    letter = LETTERS[choices.index(right)]
    held_out = key_is_held_out(f"{' '.join(chain.laws)} {sorted(given.items())}")
    return Item(
        held_out=held_out,
        row=row,
        prompt_row={"question": question, "choices": choices, "answer": letter},
        response=f"{' '.join(lines).removesuffix('.')} ({letter}).\nThe answer is ({letter}).",
    )


def draw_gpqa(rng: random.Random, grades: Sequence[int]) -> Item:
    """Two to four laws; the response ends with the letter of the last result."""
    grade = rng.choice(grades)
    chain = rng.choice([chain for chain in _CHAINS if len(chain.laws) in _NUM_LAWS[grade]])
    return drawn(rng, partial(_make, chain=chain, grade=grade))
