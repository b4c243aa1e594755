"""Parts: a record, a table, sums or letters to fill in, one line each; the lines need nothing of each other."""

from refusion_eval.benchmarks import Benchmark, Extraction, Prompts
from refusion_eval.benchmarks.rows import TEXT, Source


def _lines(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.splitlines() if line.strip())


# The paper argues with responses whose parts can be written in any order, and none of its benchmarks has them.
BENCHMARK = Benchmark(
    name="parts",
    title="Parts",
    order=8,
    kind="text",
    source=Source(hub=None, split="test", num_rows=100, columns={"question": TEXT, "answer": TEXT}),
    gold=lambda row: _lines(row["answer"]),
    ours=Prompts(
        user=lambda row: f"{row['question']}\n\nAnswer each part on its own line, in this order.",
        gold_text=lambda row: str(row["answer"]),
        filters={"lines": lambda text, _: Extraction(_lines(text) or None, "all lines" if text.strip() else "no line")},
        version="1.1",
    ),
)
