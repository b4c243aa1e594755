"""Parts: a record, a table, sums or letters to fill in, one line each; the lines need nothing of each other.

The paper argues with responses whose parts can be written in any order, and none of its benchmarks has them. There are
synthetic items only.
"""

from refusion_eval.benchmarks import Benchmark, Extraction, Prompts
from refusion_eval.benchmarks.rows import TEXT, Row, Source


def _lines(text: str) -> str:
    """The lines that are not blank, with single blanks."""
    return "\n".join(" ".join(line.split()) for line in text.splitlines() if line.strip())


def _all_lines(text: str, _row: Row) -> Extraction:
    found = _lines(text)
    return Extraction(found or None, "all lines" if found else "no line")


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
        filters={"lines": _all_lines},
    ),
)
