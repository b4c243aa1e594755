"""Texts get the verdicts of an idle machine beside twenty busy processes."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.errors import SandboxError
from refusion_eval.own_time import Work
from refusion_eval.sandbox import Program, check_programs, watch
from refusion_eval.sandbox.result import result_of
from refusion_eval.sandbox.watch import Watched
from refusion_eval.scoring import judge
from refusion_eval.scoring.judge import Judge, judge_texts
from tests.benchmarks.test_livecodebench import BENCHMARK as CONTESTS
from tests.benchmarks.test_livecodebench import published

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("isolation")]

SPINS = """
import os, threading, time
def spin(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
def fork(seconds):
    if not (pid := os.fork()):
        spin(seconds)
        os._exit(0)
    os.waitpid(pid, 0)
"""
# 0.4 s of processor time each.
WAYS = {
    "main": "spin(0.4)",
    "thread": "thread = threading.Thread(target=spin, args=(0.4,)); thread.start(); thread.join()",
    "child": "fork(0.4)",
    "children": "for _ in range(20): fork(0.02)",
}
PROGRAMS = {name: f"{SPINS}\ndef f(x):\n    {way}\n    return x" for name, way in WAYS.items()}
INSTRUCTIONS = {
    "key": 1,
    "prompt": "p",
    "instruction_id_list": ["language:response_language", "length_constraints:number_sentences"],
    "kwargs": [{"language": "de"}, {"relation": "at least", "num_sentences": 2}],
}
SURDS = {
    "problem": "p",
    "solution": "\\boxed{\\frac{\\sqrt{2+\\sqrt{3}}}{\\sqrt[3]{5}}}",
    "level": "Level 1",
    "type": "Algebra",
}

TEXTS = (
    ("math", SURDS, "\\boxed{\\frac{\\sqrt{6}+\\sqrt{2}}{2\\sqrt[3]{5}}}"),
    ("math", SURDS, "\\boxed{\\frac{3}{2}}"),
    ("ifeval", INSTRUCTIONS, "Das ist ein Satz. Das ist noch einer."),
    ("ifeval", INSTRUCTIONS, "This is one sentence."),
)


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    spinning = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def verdicts(checks: Judge) -> dict[str, Any]:
    assert CONTESTS.test is not None
    assert CONTESTS.prompts.normalise is not None
    test = CONTESTS.test(CONTESTS.prompts.normalise(published([("1", "1")] * 2), 0) or {})
    contest = f"{SPINS}\n{WAYS['thread']}\n{WAYS['child']}\nprint(input())"
    of_contest = Program(candidate=contest, **{**asdict(test), "call_s": 1.5})
    programs = [Program(candidate=text, test="assert f(1) == 1", timeout_s=1.5) for text in PROGRAMS.values()]
    programs.append(of_contest)
    found: dict[str, Any] = {
        name: result.reason
        for name, result in zip([*PROGRAMS, "contest"], check_programs(programs, workers=4), strict=True)
    }
    for name, row, text in TEXTS:
        told = found.setdefault(name, [])
        extract = partial(BENCHMARKS[name].extract, text, row)
        checks.submit(BENCHMARKS[name], row, extract, lambda verdict, told=told: told.append(verdict.verdict))
        checks.wait()
    return found


@pytest.mark.slow
def test_no_caller_gets_another_verdict_beside_twenty_busy_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_TIMEOUT_S", 2.0)
    monkeypatch.setattr(judge.Comparer.__init__, "__defaults__", (2.0,))
    with Judge(workers=1) as checks:
        idle = verdicts(checks)
        of_texts = {"math": ["correct", "wrong"], "ifeval": ["correct", "wrong"]}
        assert idle == {**dict.fromkeys([*PROGRAMS, "contest"], "passed"), **of_texts}
        with busy(20):
            assert verdicts(checks) == idle


def test_a_program_that_got_no_time_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"task_id": 7, "text": "t", "code": "", "test_list": ["f(1)"], "test_setup_code": ""}
    got_none = partial(result_of, "no_time", "the machine was too busy", 1.0, "A")
    monkeypatch.setattr(judge, "check_program", lambda *given, **more: got_none())
    with pytest.raises(SandboxError, match="the machine was too busy; run the same command again"):
        judge_texts(BENCHMARKS["mbpp"], [(row, "```python\ndef f(x):\n    pass\n```")])


def test_a_check_that_waits_for_too_long_is_given_up_without_a_word_about_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nobody: Any = None
    watched = Watched(nobody, nobody, 0, 0, 0, timeout_s=1, call_s=1, memory_bytes=1, num_calls=[0])
    waits = Work(cpu_s=0.5, is_ready=True, num_tasks=9), 0, Work(), 0
    assert watched._over(*waits) is None
    monkeypatch.setattr(watch, "longest_wall_s", lambda limit_s: 0)
    assert watched._over(*waits) == "no_time"
