"""ARC-Challenge: questions of school science with three to five choices."""

from refusion_eval.benchmarks import LETTERS, Benchmark
from refusion_eval.benchmarks.extract import release
from refusion_eval.benchmarks.multiple_choice import choice_prompts
from refusion_eval.benchmarks.rows import CHOICES, ID, TEXT, Row, Source


def _gold(row: Row) -> str:
    # The letter goes by position, because 22 items label their choices 1 2 3 4.
    return LETTERS[list(row["choices"]["label"]).index(row["answerKey"])]


def _release_prompt(row: Row) -> str:
    # The release's task file quotes its line ends, so that the model reads a backslash and an n in their place.
    choices = "".join(rf"\n{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"]["text"], strict=False))
    return (
        "Given the following question and four candidate answers (A, B, C and D), choose the best answer."
        rf"\nQuestion: {row['question'].strip()}{choices}"
        r'\nYour response should end with "The best answer is [the_answer_letter]" where the [the_answer_letter] is '
        "one of A, B, C or D."
    )


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
    gold=_gold,
    ours=choice_prompts(lambda row: row["choices"]["text"], _gold),
    release=release.prompts(
        user=_release_prompt,
        opened="The best answer is",
        stop_strings=("\n\n", "."),
        gold_text=lambda row: f" {_gold(row)}.",
        filters={"whole": release.whole_choice},
    ),
    id_column="id",
    stock_tasks=("arc_challenge_chat*",),
)
