"""MBPP: short programs from a sentence and three assertions."""

from refusion_eval.benchmarks import Benchmark, CodeTest
from refusion_eval.benchmarks.extract.programs import fenced, module_code
from refusion_eval.benchmarks.rows import ID, TEXT, TEXTS, Row, Source


def _prompt(row: Row) -> str:
    tests = "\n".join(test.strip() for test in row["test_list"])
    return (
        f"{row['text'].strip()}\n\nYour code must pass these tests:\n{tests}\n\nReply with the code in a python block."
    )


def _gold(row: Row) -> str:
    return str(row["code"]).replace("\r\n", "\n")


def _test(row: Row) -> CodeTest:
    # The setup runs after the program, because that of 367 uses a class of it. The reference of 123 takes 6 to 10 s.
    parts = [str(row.get("test_setup_code") or ""), *(str(test).strip() for test in row["test_list"])]
    return CodeTest(test="\n".join(parts).replace("\r\n", "\n") + "\n", timeout_s=20)


BENCHMARK = Benchmark(
    name="mbpp",
    title="MBPP",
    order=7,
    kind="code",
    source=Source(
        hub="google-research-datasets/mbpp",
        configs=("full",),
        split="test",
        num_rows=500,
        columns={"task_id": ID, "text": TEXT, "code": TEXT, "test_list": TEXTS, "test_setup_code": TEXT},
    ),
    prompt=_prompt,
    gold=_gold,
    gold_text=lambda row: fenced(_gold(row)),
    filters={"first": lambda text, _: module_code(text)},
    id_column="task_id",
    test=_test,
    stock_tasks=("mbpp*",),
    version="1.1",
)
