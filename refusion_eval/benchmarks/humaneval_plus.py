"""HumanEval+ v0.1.10: the functions of HumanEval, judged on many more inputs."""

from refusion_eval.benchmarks.evalplus import Comparison, plus_benchmark
from refusion_eval.benchmarks.extract.programs import function_code
from refusion_eval.benchmarks.humaneval import BENCHMARK as HUMANEVAL
from refusion_eval.benchmarks.rows import Row


def _comparison(row: Row) -> Comparison:
    if row["entry_point"] != "find_zero":
        return Comparison()
    # HumanEval/32: any zero is right.
    value = "sum(factor * evalplus_math.pow(value, power) for power, factor in enumerate(arguments[0]))"
    return Comparison(oracle=f"abs({value}) <= tolerance", close_is_right=False)


BENCHMARK = plus_benchmark(
    "humaneval",
    title="HumanEval+",
    order=27,
    release="HumanEvalPlus",
    version="v0.1.10",
    num_rows=164,
    user=HUMANEVAL.ours.user,
    extract=function_code,
    comparison=_comparison,
    stock_tasks=("humaneval_plus",),
)
