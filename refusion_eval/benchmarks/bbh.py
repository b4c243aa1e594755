"""BBH: 27 tasks of BIG-Bench that were hard for models of 2022 (arXiv 2210.09261)."""

import re

from refusion_eval.benchmarks import Benchmark, Extraction, Prompts
from refusion_eval.benchmarks.extract import answers, letters
from refusion_eval.benchmarks.rows import TEXT, Row, Source

_TASKS = """
    boolean_expressions causal_judgement date_understanding disambiguation_qa dyck_languages formal_fallacies
    geometric_shapes hyperbaton logical_deduction_five_objects logical_deduction_seven_objects
    logical_deduction_three_objects movie_recommendation multistep_arithmetic_two navigate object_counting
    penguins_in_a_table reasoning_about_colored_objects ruin_names salient_translation_error_detection snarks
    sports_understanding temporal_sequences tracking_shuffled_objects_five_objects
    tracking_shuffled_objects_seven_objects tracking_shuffled_objects_three_objects web_of_lies word_sorting
"""
_OPTION = re.compile(r"^\(([A-R])\)", re.MULTILINE)
_WORDS = ("true", "false", "yes", "no", "valid", "invalid")
_FRAME = " \t*_`$\"'\u201c\u201d\u2018\u2019:"  # quotes, emphasis, and what stands between "is" and an answer
_WORD = re.compile(r"\w+")


def _answer(text: str, row: Row) -> Extraction:
    """The last stated answer, read in the form of the right one: a choice, a number, one of two words, or a text."""
    right = str(row["target"])
    if _OPTION.fullmatch(right):
        found = letters.last_letter_stated(text, len(set(_OPTION.findall(row["input"]))))
        return Extraction(f"({found.answer})", found.how) if found.answer else found
    if answers.parse_number(right) is not None:
        return answers.last_number_stated(text, row["input"])
    for start in answers.last_statements(answers.ANSWER_LEAD, text):
        line = text[start:].lstrip(f"{_FRAME}\n").partition("\n")[0].strip(_FRAME).removesuffix(".").strip(_FRAME)
        if right.lower() in _WORDS:
            word = _WORD.match(line)
            line = word[0] if word else ""
        if line:
            return Extraction(line, "statement")
    return answers.NOTHING


def _form(answer: str) -> str:
    """Words without case, commas and spacing; brackets, of which some answers consist, without spacing."""
    words = answer.lower().replace(",", " ").split()
    return (" " if _WORD.search(answer) else "").join(words)


BENCHMARK = Benchmark(
    name="bbh",
    title="BBH",
    order=25,
    kind="text",
    source=Source(
        hub="SaylorTwift/bbh",
        configs=_TASKS.split(),
        split="test",
        num_rows=6511,
        columns={"input": TEXT, "target": TEXT},
    ),
    gold=lambda row: str(row["target"]),
    ours=Prompts(
        user=lambda row: f"{row['input'].strip()}\n\nThink step by step, then end with: The answer is <answer>.",
        gold_text=lambda row: f"The answer is {row['target']}.",
        filters={"last": _answer},
        is_right=lambda right, answer: _form(right) == _form(answer),
    ),
    settings_of="gsm8k",
    stock_tasks=("bbh_*",),
)
