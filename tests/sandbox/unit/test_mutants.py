"""Mutants of the reference solutions get the verdict that plain Python gives them."""

import ast
import json
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from sandbox import reference_programs

from refusion_eval.benchmarks import get_task
from refusion_eval.sandbox import Program, check_programs, probe

_TIMEOUT_S = 1
_MOST_WALL_S = 500  # of all programs; the limit of each is on its processor time, which no load changes
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_COMPARISONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
_RETURNED = ("None", "0", "1", "True", "''", "[]", "float('nan')", "object()")
_AROUND = ("list({})", "tuple({})", "set({})", "sorted({})", "iter({})", "dict.fromkeys({})", "str({})", "({},)")
_PLAIN = f"""
import json, os, resource, sys
import collections, functools, heapq, itertools, math, re, string, typing  # which most programs import
null, statuses = os.open(os.devnull, os.O_RDWR), []
for source in json.load(sys.stdin):
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, ({_TIMEOUT_S}, {_TIMEOUT_S}))
        for fd in range(3):
            os.dup2(null, fd)
        status = 1
        try:
            exec(compile(source, "one", "exec"), {{"__name__": "one"}})
            status = 0
        except SystemExit as end:
            status = bool(end.code)
        finally:
            os._exit(status)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(statuses))
"""


def mutant(program: Program, draws: random.Random) -> str:
    """The program with one operator, constant, condition or returned value changed below its helpers."""
    tree = ast.parse(program.candidate)
    first_line = len(program.helpers.splitlines())
    kinds = (ast.BinOp, ast.Compare, ast.Constant, ast.If, ast.Return)
    places = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.lineno > first_line]
    node = draws.choice([place for place in places if not isinstance(place, ast.Return) or place.value] or [tree])
    if isinstance(node, ast.BinOp):
        node.op = draws.choice(_OPERATORS)()
    elif isinstance(node, ast.Compare):
        node.ops = [draws.choice(_COMPARISONS)() for _ in node.ops]
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        node.value += draws.choice((-1, 1))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        node.value += "x"
    elif isinstance(node, ast.If):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Return):
        text = draws.choice((*_RETURNED, *_AROUND)).format(ast.unparse(node.value))
        node.value = ast.parse(text, mode="eval").body
    return ast.unparse(ast.fix_missing_locations(tree))


def _pass_plainly(programs: list[Program]) -> list[bool | None]:
    """Whether program and test pass as one file, in a process of its own each; None where they take too long."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", _PLAIN],
        env={"PYTHONHASHSEED": "0"},  # as in the sandbox
        input=json.dumps([f"{program.candidate}\n{program.test}" for program in programs]),
        text=True,
        capture_output=True,
        timeout=_MOST_WALL_S,
        check=True,
    )
    too_long = (-signal.SIGKILL, -signal.SIGXCPU)
    return [None if status in too_long else status == 0 for status in json.loads(done.stdout)]


@pytest.mark.slow
@pytest.mark.parametrize("benchmark_name", ["humaneval", "mbpp"])
def test_mutants_get_the_verdicts_of_plain_python(benchmark_name, reference_data):
    if probe().tier == "D":
        pytest.skip("programs cannot be isolated here")
    draws = random.Random(0)
    references = reference_programs(benchmark_name, get_task(benchmark_name).rows(reference_data / "benchmarks"))
    programs = [
        Program(candidate=mutant(program, draws), test=program.test, helpers=program.helpers, timeout_s=_TIMEOUT_S)
        for program in references
    ]
    with ThreadPoolExecutor() as executor:
        plainly = executor.submit(_pass_plainly, programs)
        verdicts = check_programs(programs)
    plain = plainly.result()
    differing = [
        (program.candidate, verdict)
        for program, passes, verdict in zip(programs, plain, verdicts, strict=True)
        if passes is not None and passes != verdict.passed and verdict.status != "timed_out"
    ]
    slow = sum(passes is None for passes in plain) + sum(verdict.status == "timed_out" for verdict in verdicts)
    assert slow < len(programs) / 10, "too few are compared"
    passing_here = sum(verdict.passed for _, verdict in differing)
    print(f"{len(programs)} mutants: {passing_here} only pass here, {len(differing) - passing_here} only pass plainly")
    assert 0 < sum(map(bool, plain)) < len(plain) / 2
    assert differing == []
