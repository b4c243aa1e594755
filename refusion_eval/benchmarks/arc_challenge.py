"""ARC-Challenge: questions of school science with three to five choices."""

from refusion_eval.benchmarks import LETTERS, Benchmark
from refusion_eval.benchmarks.multiple_choice import choice_filters, choice_prompt, letter_text
from refusion_eval.benchmarks.rows import CHOICES, ID, TEXT, Row, Source


def _gold(row: Row) -> str:
    # The letter goes by position, because 22 items label their choices 1 2 3 4.
    return LETTERS[list(row["choices"]["label"]).index(row["answerKey"])]


BENCHMARK = Benchmark(
    name="arc_challenge",
    title="ARC-C",
    order=2,
    kind="choice",
    source=Source(
        hub="allenai/ai2_arc",
        configs=("ARC-Challenge",),
        split="test",
        num_rows=1172,
        columns={"id": ID, "question": TEXT, "choices": CHOICES, "answerKey": TEXT},
        labelled=("answerKey", lambda row: row["choices"]["label"]),
    ),
    prompt=lambda row: choice_prompt(row["question"], row["choices"]["text"]),
    gold=_gold,
    gold_text=letter_text(_gold),
    filters=choice_filters(lambda row: row["choices"]["text"]),
    id_column="id",
    stock_tasks=("arc_challenge_chat*",),
    version="1.1",
)
