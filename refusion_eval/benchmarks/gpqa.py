"""GPQA: questions of biology, physics and chemistry with four choices, which its authors ask not to publish."""

import hashlib
from typing import Any

from refusion_eval.benchmarks import LETTERS, Benchmark
from refusion_eval.benchmarks.multiple_choice import choice_filters, choice_prompt, letter_text
from refusion_eval.benchmarks.rows import SHORT_ANSWER, TEXT, Row, Source

_RIGHT = "Correct Answer"
_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def normalise(row: Row) -> dict[str, Any]:
    """Brings a row into the form of the other choice tasks: the hub has the right and the wrong answers apart.

    The order of the choices follows a hash of the question's id and the choice's column: it is the same on every
    machine and in every run, whatever the random state.

    Returns:
        `id` (Record ID, else a hash of the question), `question`, `choices` (4), `answer` (letter), `domain`.
    """
    question = row["Question"]
    item_id = str(row.get("Record ID") or hashlib.sha256(question.encode()).hexdigest()[:16])
    shown = sorted((_RIGHT, *_WRONG), key=lambda column: hashlib.sha256(f"{item_id}/{column}".encode()).digest())
    return {
        "id": item_id,
        "question": question,
        "choices": [str(row[column]).strip() for column in shown],
        "answer": LETTERS[shown.index(_RIGHT)],
        "domain": row.get("High-level domain") or "",
    }


def _gold(row: Row) -> str:
    return str(row["answer"])


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
    normalise=normalise,
    sealed_columns={"question": "question", "choices": "choice"},
    prompt=lambda row: choice_prompt(row["question"], row["choices"]),
    gold=_gold,
    gold_text=letter_text(_gold),
    filters=choice_filters(lambda row: row["choices"]),
    id_column="id",
    stock_tasks=("gpqa_*_generative*", "gpqa_*_cot*"),
    version="1.1",
)
