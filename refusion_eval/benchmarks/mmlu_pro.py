"""MMLU-Pro: questions of fourteen fields with up to ten choices."""

from refusion_eval.benchmarks import LETTERS, Benchmark
from refusion_eval.benchmarks.multiple_choice import choice_filters, choice_prompt, letter_text
from refusion_eval.benchmarks.rows import ID, TEXT, TEXTS, Row, Source


def _gold(row: Row) -> str:
    # Where `answer_index` disagrees with the letter (question 3983), the letter is the right one.
    return str(row["answer"])


BENCHMARK = Benchmark(
    name="mmlu_pro",
    title="MMLU-Pro",
    order=1,
    kind="choice",
    source=Source(
        hub="TIGER-Lab/MMLU-Pro",
        split="test",
        num_rows=12032,
        columns={"question_id": ID, "question": TEXT, "options": TEXTS, "answer": TEXT, "category": TEXT},
        labelled=("answer", lambda row: LETTERS[: len(row["options"])]),
    ),
    prompt=lambda row: choice_prompt(row["question"], row["options"]),
    gold=_gold,
    gold_text=letter_text(_gold),
    filters=choice_filters(lambda row: row["options"]),
    id_column="question_id",
    stock_tasks=("mmlu_pro*",),
    version="1.1",
)
