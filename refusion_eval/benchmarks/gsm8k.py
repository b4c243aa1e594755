"""GSM8K: word problems of school mathematics whose answer is a number."""

import re

from refusion_eval.benchmarks import Benchmark, Prompts
from refusion_eval.benchmarks.extract import answers, release
from refusion_eval.benchmarks.rows import TEXT, Row, Source
from refusion_eval.errors import DataError

_CALCULATOR = re.compile(r"<<[^<>\n]{0,200}>>")  # the data set's annotations, such as <<3*4=12>>


def _release_prompt(row: Row) -> str:
    # The release's task file quotes the first line end, so that the model reads a backslash and an n in its place.
    return (
        "Solve the following math problem. You need to think step-by-step, show your detailed reasoning, and end with "
        rf'"The answer is [result]," where [result] is the answer you get.\nQ: {row["question"]}'
        "\nA:"
    )


def _gold(row: Row) -> str:
    _, marker, number = str(row["answer"]).rpartition("####")
    value = answers.parse_number(number.strip()) if marker else None
    if value is None:
        raise DataError(f"gsm8k: an answer must end in '#### <number>', found {str(row['answer'])[-60:]!r}")
    return answers.show_number(value)


def _gold_text(row: Row) -> str:
    reasoning, _, number = str(row["answer"]).rpartition("####")
    return f"{_CALCULATOR.sub('', reasoning).strip()}\nThe answer is {number.strip()}."


BENCHMARK = Benchmark(
    name="gsm8k",
    title="GSM8K",
    order=3,
    kind="number",
    source=Source(
        hub="openai/gsm8k",
        configs=("main",),
        split="test",
        num_rows=1319,
        columns={"question": TEXT, "answer": TEXT},
    ),
    gold=_gold,
    ours=Prompts(
        user=lambda row: f"{row['question'].strip()}\n\nSolve this step by step. End with: The answer is <number>.",
        gold_text=_gold_text,
        filters={
            "last": lambda text, row: answers.last_number_stated(text, row.get("question", "")),
            "first": lambda text, row: answers.first_number_stated(text, row.get("question", "")),
            "strict": lambda text, _: answers.strict_number(text),
        },
        version="1.3",
    ),
    release=release.prompts(
        user=_release_prompt,
        stop_strings=("Q:", "</s>", "<|im_end|>"),
        gold_text=_gold_text,
        filters={"flexible": release.last_number, "strict": release.strict_number},
        is_right=release.same_number,
    ),
    stock_tasks=("gsm8k", "gsm8k_cot*"),
)
