"""MATH-500: the 500 test problems of MATH that were chosen for "Let's Verify Step by Step" (arXiv 2305.20050)."""

from refusion_eval.benchmarks import Benchmark
from refusion_eval.benchmarks.boxed import boxed_prompts
from refusion_eval.benchmarks.rows import TEXT, Source

BENCHMARK = Benchmark(
    name="math_500",
    title="MATH-500",
    order=20,
    kind="mathematics",
    source=Source(
        hub="HuggingFaceH4/MATH-500",
        split="test",
        num_rows=500,
        columns={"problem": TEXT, "solution": TEXT, "answer": TEXT, "unique_id": TEXT},
    ),
    gold=lambda row: str(row["answer"]),
    ours=boxed_prompts(lambda row: str(row["solution"])),
    id_column="unique_id",
    settings_of="math",
    stock_tasks=("minerva_math500*", "hendrycks_math500*", "math_500*"),
)
