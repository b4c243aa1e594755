"""Texts in forms that users of harnesses reported, which lie beside the checkout, get the verdicts of their files."""

import json
from typing import Any

import pytest

from refusion_eval.benchmarks import get_task
from refusion_eval.scoring.judge import judge_texts
from tests.conftest import REFERENCE_DATA

FOLDER = REFERENCE_DATA / "cases"
NAMES = {"livecodebench": "livecodebench_v6_2025_02_2025_05"}
CODE = "def twice_plus(x, y):\n    return 2 * x + y\n"
PROMPT = f'{CODE.splitlines()[0]}\n    """Return twice x, plus y."""\n'
TESTS = ["assert twice_plus(2, 3) == 7", "assert twice_plus(0, 0) == 0", "assert twice_plus(-4, 1) == -7"]


def row_of(case: dict[str, Any]) -> dict[str, Any]:
    """The row of a case: its own, or one that has its right answer, as the file's README says."""
    gold = case["gold"]
    invented = {
        "gsm8k": {"question": "How many?", "answer": f"#### {gold}"},
        "math": {"problem": "Find it.", "solution": f"It is $\\boxed{{{gold}}}$."},
        "mmlu_pro": {"question": "Which?", "options": [f"option {number}" for number in range(10)], "answer": gold},
        "humaneval": {
            "prompt": PROMPT,
            "canonical_solution": CODE.partition("\n")[2],
            "test": "\n    ".join(["def check(twice_plus):", *TESTS]),
            "entry_point": "twice_plus",
        },
        "mbpp": {"text": "Twice x, plus y.", "code": CODE, "test_list": TESTS[:2], "test_setup_code": ""},
    }
    return case["row"] if "row" in case else invented[case["task"]]


def cases() -> dict[str, list[dict[str, Any]]]:
    lines = (json.loads(line) for file in sorted(FOLDER.glob("cases*.jsonl")) for line in file.open(encoding="utf-8"))
    by_task: dict[str, list[dict[str, Any]]] = {}
    for case in lines:
        name = case.get("task") or case.get("benchmark")
        if name and case["right"] != "unclear":
            by_task.setdefault(name, []).append(case)
    return by_task


CASES = cases() if FOLDER.is_dir() else {}


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize("name", CASES or [pytest.param("", marks=pytest.mark.skip(reason=f"needs cases in {FOLDER}"))])
def test_every_text_gets_the_verdict_that_its_file_says(name: str) -> None:
    benchmark = get_task(NAMES.get(name, name)).benchmark
    of_task = CASES[name]
    rows = [row_of(case) for case in of_task]
    if normalise := benchmark.prompts.normalise:
        rows = [normalise(row, number) for number, row in enumerate(rows)]
    verdicts = judge_texts(benchmark, [(row, case["text"]) for row, case in zip(rows, of_task, strict=True)])
    wrong = {
        case["id"]: verdict
        for case, verdict in zip(of_task, verdicts, strict=True)
        if verdict.passed != (case["right"] == "correct")
    }
    assert wrong == {}
