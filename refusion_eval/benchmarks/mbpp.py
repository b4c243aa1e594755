"""MBPP: short programs from a sentence and three assertions."""

from refusion_eval.benchmarks import Benchmark, CodeTest, Prompts
from refusion_eval.benchmarks.extract import release
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


def _release_prompt(row: Row) -> str:
    tests = "\n".join(row["test_list"][:3])
    return (
        "You are an expert Python programmer. Your task is to write a single Python function to solve the problem "
        f"described below, and here is your task: {row['text']}\n\nDirectly after the '[BEGIN]' marker, you must write "
        "only the Python code for the function. Do not provide any explanations, comments, or introductory text. The "
        "function must include the 'def' line, its arguments, the function body, and a 'return' statement. Your code "
        f"should pass these tests:\n\n{tests}\n[BEGIN]\n"
    )


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
    gold=_gold,
    ours=Prompts(
        user=_prompt,
        gold_text=lambda row: fenced(_gold(row)),
        filters={"first": module_code},
        version="1.4",
    ),
    release=release.prompts(
        user=_release_prompt,
        stop_strings=("[DONE]",),
        gold_text=_gold,
        filters={"whole": release.whole_text},
        test=lambda row: _test({"test_list": row["test_list"][:3]}),  # without setup
        version="1.1",
    ),
    id_column="task_id",
    test=_test,
    stock_tasks=("mbpp", "mbpp_instruct*"),
)
