"""BBH: 27 tasks of BIG-Bench that were hard for models of 2022 (arXiv 2210.09261)."""

import re

from refusion_eval.benchmarks import Benchmark, Extraction, Prompts
from refusion_eval.benchmarks.extract import answers, letters, words
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


def _answer(text: str, row: Row) -> Extraction:
    """The last stated answer, read as the right one is: a choice, a number, one of two words, a list, or brackets."""
    right = str(row["target"])
    if _OPTION.fullmatch(right):
        found = letters.last_letter_stated(text, len(set(_OPTION.findall(row["input"]))))
        return Extraction(f"({found.answer})", found.how) if found.answer else found
    if answers.parse_number(right) is not None:
        return answers.last_number_stated(text, row["input"])
    if pair := words.pair_of(right):
        return words.last_word_stated(text, pair)
    return words.last_list_stated(text, brackets=not re.search(r"\w", right))


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
        sorted_by="task",
        columns={"input": TEXT, "target": TEXT},
    ),
    gold=lambda row: str(row["target"]),
    ours=Prompts(
        user=lambda row: f"{row['input'].strip()}\n\nThink step by step, then end with: The answer is <answer>.",
        gold_text=lambda row: f"The answer is {row['target']}.",
        filters={"last": _answer},
        version="1.1",
        is_right=lambda right, answer: words.form(right) == words.form(answer),
    ),
    settings_of="gsm8k",
    stock_tasks=("bbh_*",),
)
