"""AIME 2025: the problems of both contests, whose answers are whole numbers from 0 to 999."""

from refusion_eval.benchmarks import Benchmark
from refusion_eval.benchmarks.boxed import boxed_prompts
from refusion_eval.benchmarks.rows import ID, SHORT_ANSWER, TEXT, Source

BENCHMARK = Benchmark(
    name="aime_2025",
    title="AIME 2025",
    order=22,
    kind="mathematics",
    source=Source(
        hub="math-ai/aime25",
        split="test",
        num_rows=30,
        columns={"id": ID, "problem": TEXT, "answer": SHORT_ANSWER},
    ),
    gold=lambda row: str(row["answer"]),  # the answer 336^\circ has its unit, which does not count
    ours=boxed_prompts(lambda row: rf"\boxed{{{row['answer']}}}"),
    id_column="id",
    settings_of="math",
    stock_tasks=("aime25*",),
)
