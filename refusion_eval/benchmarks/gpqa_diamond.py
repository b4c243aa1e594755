"""GPQA-Diamond: the 198 questions of GPQA on which its experts agree, in the same form."""

from dataclasses import replace

from refusion_eval.benchmarks import gpqa

# It has this project's prompts only, because the release asks the questions of the main set.
BENCHMARK = replace(
    gpqa.BENCHMARK,
    name="gpqa_diamond",
    title="GPQA-D",
    order=23,
    source=replace(gpqa.BENCHMARK.source, configs=("gpqa_diamond",), num_rows=198),
    release=None,
    settings_of="gpqa",
    stock_tasks=("gpqa_diamond_generative*", "gpqa_diamond_cot*"),
)
