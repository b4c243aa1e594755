"""A benchmark of one's own: asked of the embedded autoregressive model, extracted and judged by the project's rules.

python examples/own_benchmark.py

In the project such a file lies in refusion_eval/benchmarks/ and ends with BENCHMARK; every command then knows it.
"""

import refusion_eval
from refusion_eval.benchmarks import Benchmark, Prompts
from refusion_eval.benchmarks.extract import answers
from refusion_eval.benchmarks.rows import ID, TEXT, Source
from refusion_eval.scoring.judge import judge_texts

ROWS = [
    {
        "id": "a",
        "text": "Omar has 6 boxes with 4 apples each. A friend brings 9 apples. Then 8 of them break.",
        "total": "25",
    },
    {
        "id": "b",
        "text": "There are 12 books on a shelf and 5 in a bag. Then Ben gets 4 more. Ben sells 8 of them.",
        "total": "13",
    },
    {
        "id": "c",
        "text": "On each of 7 days Anna finds 4 balls. Then Anna gets 9 more. Anna sells 5 of them.",
        "total": "32",
    },
]
INSTRUCTION = "How many are there in the end?\n\nSolve this step by step. End with: The answer is <number>."

BENCHMARK = Benchmark(
    name="sums",
    title="Sums",
    kind="number",
    source=Source(hub="", split="test", num_rows=len(ROWS), columns={"id": ID, "text": TEXT, "total": TEXT}),
    gold=lambda row: row["total"],
    ours=Prompts(
        user=lambda row: f"{row['text']} {INSTRUCTION}",
        gold_text=lambda row: f"The answer is {row['total']}.",
        filters={"last": lambda text, _: answers.last_number_stated(text)},
    ),
    id_column="id",
)

BENCHMARK.check_gold(ROWS)
model = refusion_eval.load_model("embedded:autoregressive")
prompts = [BENCHMARK.turns(row).user for row in ROWS]
outs = refusion_eval.generate_many(model, prompts, decoder="autoregressive", gen_length=96)
texts = [out.text for out in outs]

for row, text, verdict in zip(ROWS, texts, judge_texts(BENCHMARK, list(zip(ROWS, texts, strict=True))), strict=True):
    print(f"{row['id']}: {verdict.verdict:8} right: {row['total']:4} text: {text}")
