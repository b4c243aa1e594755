"""Verdicts by value are those of plain execution: program and test as one file, run by Python."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

_CASES = {
    block.split(maxsplit=1)[0]: block.partition("\n")
    for block in re.split(
        r"^=== ", (Path(__file__).parents[1] / "as_plain.txt").read_text(encoding="utf-8"), flags=re.MULTILINE
    )[1:]
}


@pytest.mark.parametrize("name", _CASES)
def test_a_program_and_its_test_end_as_in_one_process(judge, name):
    head, _, body = _CASES[name]
    program, _, test = body.partition("--- test\n")
    passes = "passes=no" not in head
    code = "import sys\nexec(compile(sys.argv[1], 'one', 'exec'), {'__name__': 'one'})"
    plain = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, program + test], capture_output=True, text=True, check=False
    )
    assert (plain.returncode == 0) == passes, plain.stderr
    verdict = judge(program, test)
    assert verdict.status == ("passed" if passes else "failed"), verdict
