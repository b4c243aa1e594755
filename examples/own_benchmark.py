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
        "text": "Omar buys 6 packs of 6 apples and finds 9 more. How many apples does Omar have?",
        "total": "45",
    },
    {"id": "b", "text": "A shelf has 7 rows of 4 balls. Anna adds 9. How many balls are on it now?", "total": "37"},
    {"id": "c", "text": "There are 9 bags of 5 books. Ben loses 4 of them. How many books remain?", "total": "41"},
]

BENCHMARK = Benchmark(
    name="sums",
    title="Sums",
    kind="number",
    source=Source(hub="", split="test", num_rows=len(ROWS), columns={"id": ID, "text": TEXT, "total": TEXT}),
    gold=lambda row: row["total"],
    ours=Prompts(
        user=lambda row: f"{row['text']}\n\nSolve this step by step. End with: The answer is <number>.",
        gold_text=lambda row: f"The answer is {row['total']}.",
        filters={"last": lambda text, _: answers.last_number_stated(text)},
    ),
    id_column="id",
)

BENCHMARK.check_gold(ROWS)
model = refusion_eval.load_model("embedded:autoregressive")
prompts = [BENCHMARK.turns(row).user for row in ROWS]
outs = refusion_eval.generate_many(model, prompts, decoder="autoregressive", gen_length=64)
texts = [out.text for out in outs]

for row, text, verdict in zip(ROWS, texts, judge_texts(BENCHMARK, list(zip(ROWS, texts, strict=True))), strict=True):
    print(f"{row['id']}: {verdict.verdict:8} right: {row['total']:4} text: {text}")
