"""HumanEval+ v0.1.10: the functions of HumanEval, judged on many more inputs."""

from refusion_eval.benchmarks import Benchmark, Prompts
from refusion_eval.benchmarks.evalplus import BASE, COLUMNS, Comparison, as_read, code_test, program_of, release_file
from refusion_eval.benchmarks.extract.programs import fenced, function_code
from refusion_eval.benchmarks.humaneval import BENCHMARK as HUMANEVAL
from refusion_eval.benchmarks.rows import Row, Source


def _comparison(row: Row) -> Comparison:
    if row["entry_point"] != "find_zero":
        return Comparison()
    # HumanEval/32: any zero is right.
    value = "sum(factor * evalplus_math.pow(value, power) for power, factor in enumerate(arguments[0]))"
    return Comparison(oracle=f"abs({value}) <= tolerance", close_is_right=False)


BENCHMARK = Benchmark(
    name="humaneval_plus_v0_1_10",
    title="HumanEval+ v0.1.10",
    order=27,
    kind="code",
    source=Source(
        hub=release_file("HumanEvalPlus", "v0.1.10"),
        split="evalplus_v0.1.10",
        num_rows=164,
        columns=COLUMNS,
    ),
    gold=program_of,
    ours=Prompts(
        user=HUMANEVAL.ours.user,
        gold_text=lambda row: fenced(program_of(row)),
        filters={"first": function_code, BASE: function_code},
        normalise=as_read,
    ),
    id_column="task_id",
    test=lambda row: code_test(row, _comparison(row)),
    rows_of="humaneval_plus",
    settings_of="humaneval",
    stock_tasks=("humaneval_plus",),
    other_tests={BASE: lambda row: code_test(row, _comparison(row), [BASE])},
)
