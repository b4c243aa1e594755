"""MATH (Hendrycks et al.): competition problems whose answer is a formula in a box."""

from refusion_eval.benchmarks import Benchmark
from refusion_eval.benchmarks.boxed import boxed_prompts
from refusion_eval.benchmarks.extract import formulas, release
from refusion_eval.benchmarks.rows import TEXT, Row, Source
from refusion_eval.errors import DataError

SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip


def _gold(row: Row) -> str:
    answer = formulas.box(str(row["solution"])).answer
    if answer is None:
        raise DataError(f"math: a solution must hold a box with the answer, found {str(row['solution'])[-60:]!r}")
    return answer


BENCHMARK = Benchmark(
    name="math",
    title="MATH",
    order=4,
    kind="mathematics",
    source=Source(
        hub="EleutherAI/hendrycks_math",
        configs=SUBJECTS,
        split="test",
        num_rows=5000,
        sorted_by="subject",
        columns={"problem": TEXT, "level": TEXT, "type": TEXT, "solution": TEXT},
    ),
    gold=_gold,
    ours=boxed_prompts(lambda row: str(row["solution"])),
    # Of the task's two metrics this is math_verify. The other one, exact_match, reads "Final Answer: The final answer
    # is", of which a prompt without examples says nothing.
    release=release.prompts(
        user=lambda row: f"Problem:\n{row['problem']}\n\nSolution:",
        stop_strings=("Problem:",),
        gold_text=lambda row: str(row["solution"]),
        filters={"math_verify": release.whole_text},
        reads_solution=True,
    ),
    stock_tasks=("minerva_math*", "hendrycks_math*"),
)
