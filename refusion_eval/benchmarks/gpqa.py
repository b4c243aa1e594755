"""GPQA: questions of biology, physics and chemistry with four choices, which its authors ask not to publish."""

import hashlib
import random
import re
from functools import cache
from typing import Any

from refusion_eval.benchmarks import LETTERS, Benchmark
from refusion_eval.benchmarks.extract import release
from refusion_eval.benchmarks.multiple_choice import answer_letter, choice_prompts
from refusion_eval.benchmarks.rows import SHORT_ANSWER, TEXT, Row, Source

_RIGHT = "Correct Answer"
_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")

_RELEASE_SYSTEM = (
    "Answer the following multiple-choice question. Your response should be the letter of the correct option, enclosed "
    "in parentheses ((A), (B), (C), or (D)).\n"
)


def normalise(row: Row, _number: int = 0) -> dict[str, Any]:
    """Brings a row into the form of the other choice tasks: the hub has the right and the wrong answers apart."""
    # A hash of the question's id and the choice's column gives the same order on every machine and in every run.
    item_id = _id(row)
    shown = sorted((_RIGHT, *_WRONG), key=lambda column: hashlib.sha256(f"{item_id}/{column}".encode()).digest())
    return _with_choices(row, [str(row[column]).strip() for column in shown], shown.index(_RIGHT))


def release_row(row: Row, number: int) -> dict[str, Any]:
    """The row as in `normalise`, with the texts and the order of the choices that the release shows."""
    # Its lm-eval shuffles row by row with Python's global generator, whose seed is 0, and the first of equal choices is
    # the right one. As in its task, all brackets are cut out of the choices, with what stands in them.
    titled = [str(row[column]).strip().replace(" [title]", ". ") for column in (*_WRONG, _RIGHT)]
    texts = [re.sub(r"\[.*?\]", "", text).replace("  ", " ") for text in titled]
    choices = [texts[index] for index in _shuffled_choices(number)]
    return _with_choices(row, choices, choices.index(texts[-1]))


@cache
def _shuffled_choices(number: int) -> list[int]:
    """The order of the choices of a row: the outcome of that many earlier shuffles and one more."""
    generator = random.Random(0)
    for _ in range(number + 1):
        order = [0, 1, 2, 3]
        generator.shuffle(order)
    return order


def _with_choices(row: Row, choices: list[str], right: int) -> dict[str, Any]:
    return {
        "id": _id(row),
        "question": row["Question"],
        "choices": choices,
        "answer": LETTERS[right],
        "domain": row.get("High-level domain") or "",
    }


def _id(row: Row) -> str:
    return str(row.get("Record ID") or hashlib.sha256(row["Question"].encode()).hexdigest()[:16])


def _release_prompt(row: Row) -> str:
    choices = "".join(f"({letter}) {choice}\n" for letter, choice in zip("ABCD", row["choices"], strict=True))
    return f"Question: {row['question']}\nChoices:\n{choices}Answer:"


BENCHMARK = Benchmark(
    name="gpqa",
    title="GPQA",
    order=5,
    kind="choice",
    source=Source(
        hub="Idavidrein/gpqa",
        configs=("gpqa_main",),
        split="train",
        num_rows=448,
        columns={"Question": TEXT, _RIGHT: SHORT_ANSWER, **dict.fromkeys(_WRONG, SHORT_ANSWER)},
        gated=True,
    ),
    sealed_columns={"question": "question", "choices": "choice"},
    gold=answer_letter,
    ours=choice_prompts(lambda row: row["choices"], answer_letter, normalise=normalise),
    release=release.prompts(
        normalise=release_row,
        system=lambda _row: _RELEASE_SYSTEM,
        user=_release_prompt,
        stop_strings=("</s>", "Question:", "<|im_end|>"),
        gold_text=lambda row: f"({answer_letter(row)})",
        filters={"flexible": release.last_choice, "strict": release.strict_choice},
    ),
    id_column="id",
    stock_tasks=("gpqa_*_generative*", "gpqa_*_cot*"),
)
