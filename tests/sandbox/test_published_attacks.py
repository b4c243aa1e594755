"""Attacks and honest programs that lie beside the checkout get the verdicts that their files say."""

import ast
import json
from typing import Any

import pytest

from refusion_eval.benchmarks import evalplus, livecodebench
from refusion_eval.sandbox import Program, check_programs
from tests.conftest import REFERENCE_DATA

FOLDER = REFERENCE_DATA / "hostile"


def program_of(case: dict[str, Any]) -> Program:
    """The program and the test of a line; what a benchmark adds to them is added as the benchmark does it now."""
    candidate, test, timeout_s = case["candidate"], case["test"], case.get("timeout_s", 10)
    if case.get("category") == "evalplus":
        helpers = evalplus._COMPARISON + _between(test, "evalplus_convert =", "evalplus_compare(f")
        return Program(candidate=candidate, test=_between(test, "evalplus_compare(f"), helpers=helpers)
    if case.get("category") == "livecodebench":
        return Program(
            candidate=ast.literal_eval(candidate.partition("\n")[0].removeprefix("PROGRAM = ")),
            test=_between(test, "livecodebench_check_output(livecodebench_output)"),
            helpers=livecodebench._COMPARISON
            + _between(test, "livecodebench_tests =", "livecodebench_check_output(livecodebench_output)"),
            runner=livecodebench._RUNNER,
            call_s=livecodebench._SECONDS_PER_TEST,
            timeout_s=timeout_s,
        )
    return Program(candidate=candidate, test=test, timeout_s=timeout_s)


def _between(text: str, start: str, end: str = "\0") -> str:
    return text[text.rindex(start) :].partition(end)[0]


@pytest.mark.usefixtures("isolation")
def test_every_program_gets_the_verdict_that_its_file_says() -> None:
    files = sorted(FOLDER.glob("programs*.jsonl")) if FOLDER.is_dir() else []
    if not files:
        pytest.skip(f"needs programs in {FOLDER}, beside the checkout")
    cases = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    results = check_programs(map(program_of, cases))
    wrong = {
        case["id"]: result
        for case, result in zip(cases, results, strict=True)
        # An attack that nothing can tell from an honest program is an error, which does not pass.
        if result.status not in case["expected"]
        and not (case.get("role") == "attack" and result.reason == "inseparable")
    }
    assert wrong == {}
