"""MMLU-Redux 2.0: questions of MMLU that experts checked, with marks on those that are faulty (arXiv 2406.04127)."""

from dataclasses import replace
from functools import partial
from typing import Any

from refusion_eval.benchmarks import LETTERS, Benchmark
from refusion_eval.benchmarks.multiple_choice import answer_letter, choice_prompts
from refusion_eval.benchmarks.rows import TEXT, TEXTS, ColumnType, Row, Source

_SUBJECTS = """
    abstract_algebra anatomy astronomy business_ethics clinical_knowledge college_biology college_chemistry
    college_computer_science college_mathematics college_medicine college_physics computer_security conceptual_physics
    econometrics electrical_engineering elementary_mathematics formal_logic global_facts high_school_biology
    high_school_chemistry high_school_computer_science high_school_european_history high_school_geography
    high_school_government_and_politics high_school_macroeconomics high_school_mathematics high_school_microeconomics
    high_school_physics high_school_psychology high_school_statistics high_school_us_history high_school_world_history
    human_aging human_sexuality international_law jurisprudence logical_fallacies machine_learning management marketing
    medical_genetics miscellaneous moral_disputes moral_scenarios nutrition philosophy prehistory
    professional_accounting professional_law professional_medicine professional_psychology public_relations
    security_studies sociology us_foreign_policy virology world_religions
"""
_INDEX = ColumnType(lambda value: type(value) is int and value in range(4), "a whole number from 0 to 3")
_CORRECTIONS = {mark: letter for number, letter in enumerate("ABCD") for mark in (str(number), letter)}


def _as_it_is(row: Row, number: int) -> dict[str, Any]:
    answer = LETTERS[row["answer"]]
    return {"id": str(number), "question": row["question"], "choices": row["choices"], "answer": answer}


def _ok(row: Row, number: int) -> dict[str, Any] | None:
    return _as_it_is(row, number) if row["error_type"] == "ok" else None


def _corrected(row: Row, number: int) -> dict[str, Any] | None:
    # Of the marks only this one says that the question has one right choice, and where the annotators named it.
    if row["error_type"] != "wrong_groundtruth":
        return _ok(row, number)
    letter = _CORRECTIONS.get(str(row["correct_answer"]).strip())
    return None if letter is None else {**_as_it_is(row, number), "answer": letter}


_prompts = partial(choice_prompts, lambda row: row["choices"], answer_letter)

# What happens with marked rows changes the score, so each way is a task of its own.
BENCHMARK = Benchmark(
    name="mmlu_redux_ok",
    title="MMLU-Redux, marked rows left out",
    order=24,
    kind="choice",
    source=Source(
        hub="edinburgh-dawg/mmlu-redux-2.0",
        configs=_SUBJECTS.split(),
        split="test",
        num_rows=5700,
        sorted_by="subject",
        columns={"question": TEXT, "choices": TEXTS, "answer": _INDEX, "error_type": TEXT},
    ),
    gold=answer_letter,
    ours=_prompts(normalise=_ok),
    id_column="id",
    rows_of="mmlu_redux",
    settings_of="mmlu_pro",
)
VARIANTS = [
    replace(BENCHMARK, name=f"mmlu_redux_{name}", title=f"MMLU-Redux, {title}", ours=_prompts(normalise=normalise))
    for name, title, normalise in (
        ("corrected", "wrong answers corrected", _corrected),
        ("as_is", "marked rows as they are", _as_it_is),
    )
]
