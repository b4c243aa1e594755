"""AIME 2024: the problems of both contests, whose answers are whole numbers from 0 to 999."""

from refusion_eval.benchmarks import Benchmark
from refusion_eval.benchmarks.boxed import boxed_prompts
from refusion_eval.benchmarks.rows import ID, SHORT_ANSWER, TEXT, Source

BENCHMARK = Benchmark(
    name="aime_2024",
    title="AIME 2024",
    order=21,
    kind="mathematics",
    source=Source(
        hub="Maxwell-Jia/AIME_2024",
        split="train",
        num_rows=30,
        columns={"ID": ID, "Problem": TEXT, "Answer": SHORT_ANSWER},
    ),
    gold=lambda row: str(row["Answer"]),
    ours=boxed_prompts(lambda row: rf"\boxed{{{row['Answer']}}}", problem="Problem"),
    id_column="ID",
    settings_of="math",
    stock_tasks=("aime24*",),
)
