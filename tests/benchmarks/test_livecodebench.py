"""LiveCodeBench: programs are judged as by the public checker, and no row runs anything. All rows are invented."""

import base64
import json
import os
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from refusion_eval.benchmarks import BENCHMARKS, SUITES, Benchmark, Task, find_task, get_task
from refusion_eval.benchmarks.extract.programs import fenced
from refusion_eval.errors import ConfigError, DataError
from refusion_eval.evaluation.tasks import find_tasks, task_names
from refusion_eval.lm_eval_plugin import hooks
from refusion_eval.paper.names import task_title
from refusion_eval.scoring.filters import OTHER_FORMS, OWN_RULES
from refusion_eval.scoring.judge import Verdict, judge_texts

NAME = "livecodebench_v6_2025_02_2025_05"
BENCHMARK = BENCHMARKS[NAME]

Tests = Sequence[tuple[str, str]]  # input and right output

SUMS = (("3\n1 2 3\n", "6\n"), ("1\n7\n", "7\n"), ("2\n0.5 0.25\n", "0.75"), ("0\n\n", "0"))
DOUBLES = (("[1, 2, 3]", "[2, 4, 6]"), ("[]", "[]"), ("[5]", "[10]"))
PAIRS = (('1\n"a"', '[1, "a"]'), ("[2]\nnull", "[[2], null]"))

SUM = "n = int(input())\nnumbers = list(map(float, input().split()))\nprint(sum(numbers))"
DOUBLE = (
    "class Solution:\n    def double(self, numbers: List[int]) -> List[int]:\n        return [2 * x for x in numbers]"
)
PAIR = "class Solution:\n    def pair(self, one, other):\n        return one, other"


def packed(tests: Tests, func_name: str = "", protocol: int | None = None) -> str:
    return _packed(pickle.dumps(_json(tests, func_name), protocol=protocol))


def _packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


def _json(tests: Tests, func_name: str) -> str:
    kind = "functional" if func_name else "stdin"
    return json.dumps([{"input": given, "output": right, "testtype": kind} for given, right in tests])


def published(tests: Tests, func_name: str = "", **changes: Any) -> dict[str, Any]:
    """A row as it is published; the first test is public."""
    row = {
        "question_title": "Invented",
        "question_content": "Given numbers, do what the tests want.\n",
        "platform": "leetcode" if func_name else "atcoder",
        "question_id": "invented_a",
        "contest_id": "invented",
        "contest_date": "2025-03-01T00:00:00",
        "starter_code": f"class Solution:\n    def {func_name}(self, numbers):\n        " if func_name else "",
        "difficulty": "easy",
        "public_test_cases": _json(tests[:1], func_name),
        "private_test_cases": packed(tests[1:], func_name),
        "metadata": json.dumps({"func_name": func_name} if func_name else {}),
    }
    return {**row, **changes}


def write(folder: Path, split: str, *rows: dict[str, Any]) -> Path:
    (folder / "livecodebench").mkdir(exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "livecodebench" / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return folder


def verdicts(row: dict[str, Any], *programs: str, benchmark: Benchmark = BENCHMARK) -> list[Verdict]:
    assert benchmark.prompts.normalise is not None
    item = benchmark.prompts.normalise(row, 0)
    assert item is not None
    return judge_texts(benchmark, [(item, fenced(program)) for program in programs])


def passed(row: dict[str, Any], *programs: str) -> list[bool]:
    return [verdict.passed for verdict in verdicts(row, *programs)]


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize(
    ("tests", "func_name", "right", "wrong"),
    [
        (SUMS, "", SUM, [("sum", "max"), ("print(sum", "print('Sum:', sum"), ("float", "int"), ("n = int(", "print(")]),
        (DOUBLES, "double", DOUBLE, [("2 *", "3 *"), ("[2 * x for x in numbers]", "(2 * x for x in numbers)")]),
        (PAIRS, "pair", PAIR, [("one, other\n", "other, one\n"), ("return one, other", "return [(one, other)]")]),
    ],
)
def test_right_programs_pass_and_changed_ones_do_not(
    tests: Tests, func_name: str, right: str, wrong: list[tuple[str, str]]
) -> None:
    changed = [f"{right}\n".replace(*change) for change in wrong]
    assert f"{right}\n" not in changed
    assert passed(published(tests, func_name), right, *changed) == [True, *([False] * len(wrong))]


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_tests_are_read_from_every_kind_of_pickle(protocol: int) -> None:
    row = published(SUMS, private_test_cases=packed(SUMS[1:], protocol=protocol))
    assert passed(row, SUM, "print(6)") == [True, False]


@pytest.mark.usefixtures("isolation")
def test_private_tests_may_be_json() -> None:
    assert passed(published(SUMS, private_test_cases=_json(SUMS[1:], "")), SUM, "print(6)") == [True, False]


@pytest.mark.usefixtures("isolation")
def test_lines_are_compared_without_blanks_around_them_and_as_decimals() -> None:
    right = {
        "3": "3\n",
        " 3 \n\n": "3",
        "1  2": "1 2.0",
        "1e3": "1000",
        "a b ": "a b",
        "1\n\n2": "1\n\n2",
        "nan": "nan",
    }
    wrong = {
        "1\n\n2": "1\n2",
        "a  b": "a b",
        "0.333333333": "0.333333334",
        "50000000000000000": "50000000000000001",
        "Yes": "YES",
        "nan 1": "nan 1.0",
        "1 2": "1",
        "x": "",
    }
    for cases, verdict in ((right, True), (wrong, False)):
        for printed, expected in cases.items():
            row = published([("", expected), ("", expected)])
            assert passed(row, f"print({printed!r}, end='')") == [verdict], (printed, expected)


READS = (
    """
import sys; print(sum(map(float, sys.stdin.read().split()[1:])))
import sys; input(); print(sum(map(float, sys.stdin.readline().split())))
from sys import stdin; stdin.readline(); print(sum(map(float, stdin.readline().split())))
import sys; print(sum(map(float, [*sys.stdin][1].split())))
import sys; print(sum(map(float, sys.stdin.buffer.read().split()[1:])))
print(sum(map(float, open(0).read().split()[1:])))
print(sum(map(float, open("/dev/stdin", "rb").read().split()[1:])))
input(); sys.stdout.write(str(fsum(map(float, input().split()))))
import sys; input(); sys.stdout.buffer.write(str(TOTAL).encode()); sys.stdout.close()
input(); print(TOTAL); exit(1)
input(); print(TOTAL); quit()
input(); total = TOTAL; print(total if __name__ == "__main__" else None)
import os; print(sum(map(float, os.read(0, 10**6).split()[1:])))
import io, os; input = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline; input(); print(TOTAL)
import os, sys; print(sum(map(float, os.read(sys.stdin.fileno(), 10**6).split()[1:])))
import os; print(sum(map(float, os.fdopen(0).read().split()[1:])))
import io, os, sys; sys.stdin = io.TextIOWrapper(os.fdopen(0, "rb")); input(); print(TOTAL)
import sys; print(sum(map(float, sys.__stdin__.read().split()[1:])))
from pathlib import Path; print(sum(map(float, Path("/dev/stdin").read_text().split()[1:])))
import os; print(sum(map(float, os.read(os.open("/dev/fd/0", os.O_RDONLY), 10**6).split()[1:])))
import mmap; print(sum(map(float, mmap.mmap(0, 0, access=mmap.ACCESS_READ).read().split()[1:])))
import fileinput; print(sum(map(float, list(fileinput.input())[1].split())))
input(); import os; os.write(1, str(TOTAL).encode())
input(); import os; out = os.fdopen(1, "w"); out.write(str(TOTAL))
input(); out = open("/dev/stdout", "w"); out.write(str(TOTAL))
input(); import sys; print(TOTAL, file=sys.__stdout__)
input(); import os; print(TOTAL, flush=True); os._exit(0)
input(); import atexit; o = sys.stdout; sys.stdout = StringIO(); atexit.register(o.write, str(TOTAL))
input(); import os; pid = os.fork(); pid and os.waitpid(pid, 0); pid or print(TOTAL)
input(); from multiprocessing import Process; child = Process(target=print, args=(TOTAL,)); child.start()
input(); from concurrent.futures import ThreadPoolExecutor; ThreadPoolExecutor().submit(print, TOTAL)
import os; print(sum(map(float, open(0).read().split()[1:]))); os.closerange(3, 99)
""".replace("TOTAL", "sum(map(float, input().split()))")
    .strip()
    .splitlines()
)


@pytest.mark.usefixtures("isolation")
def test_programs_read_write_and_end_in_any_usual_way() -> None:
    in_a_function = (
        "total = 0\ndef add(x):\n    global total\n    total += x\nif __name__ == '__main__':\n    input()\n"
        "    for x in map(float, input().split()):\n        add(x)\n    print(total)\nadd(1)"
    )
    in_a_thread = "import threading\ndef main():\n    input()\n    print(sum(map(float, input().split())))\n"
    in_a_thread += "threading.Thread(target=main).start()"
    deep = f"def dive(n):\n    return n and dive(n - 1)\ndive(20_000)\n{SUM}"
    programs = [*READS, in_a_function, in_a_thread, deep]
    row = published(SUMS)
    assert dict(zip(programs, passed(row, *programs), strict=True)) == dict.fromkeys(programs, True)


@pytest.mark.usefixtures("isolation")
def test_each_test_has_names_of_its_own_and_an_exception_is_wrong() -> None:
    counting = "try:\n    seen += 1\nexcept NameError:\n    seen = 1\nprint(seen)"
    failing = [
        "print(1); raise ValueError",
        "print(1); input()",
        "import os; print(1); os.closerange(0, 99); raise ValueError",
        "import os; print(1, flush=True); os.kill(os.getpid(), 9)",
    ]
    assert passed(published([("", "1")] * 3), counting, *failing) == [True, *[False] * len(failing)]


@pytest.mark.usefixtures("isolation")
def test_a_program_that_knows_the_names_of_the_test_gains_nothing() -> None:
    cheat = (
        "import sys, candidate\ncandidate.livecodebench_output = lambda text: '6'\n"
        "candidate.livecodebench_tests = []\nclass Same(str):\n    __eq__ = lambda *_: True\n"
        "candidate.Output.getvalue = lambda self: Same()\nprint(6)\n"
    )
    assert passed(published(SUMS), cheat) == [False]


@pytest.mark.usefixtures("isolation")
def test_an_output_is_a_text_because_methods_of_an_object_would_have_time_of_their_own() -> None:
    cheat = """
import sys
class Output:
    def strip(self):
        return "1"
frame = sys._getframe()
while "nonce" not in frame.f_locals:
    frame = frame.f_back
guest = frame.f_locals["self"]
guest._send(frame.f_locals["nonce"], "ok", Output())
while True:
    guest._answer(*guest._receive())
"""
    assert passed(published([("", "1")]), cheat) == [False]


@pytest.mark.usefixtures("isolation")
def test_the_time_limit_is_that_of_one_test_and_no_except_goes_on_after_it() -> None:
    def shortened(row: Any) -> Any:
        assert BENCHMARK.test is not None
        return replace(BENCHMARK.test(row), call_s=0.3)

    quick = replace(BENCHMARK, test=shortened)
    works = "import time\nend = time.process_time() + 0.1\nwhile time.process_time() < end:\n    pass\nprint(1)"
    for_ever = "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass"
    in_one_call = "print(1)\n10 ** 10 ** 9"
    unarmed = f"import signal\nsignal.signal(signal.SIGPROF, signal.SIG_IGN)\nsignal.setitimer(2, 0)\n{for_ever}"
    row = published([("", "1")] * 4)  # 0.4 s in all
    several, *endless = verdicts(row, works, for_ever, in_one_call, unarmed, benchmark=quick)
    assert several.passed
    assert [verdict.verdict for verdict in endless] == ["timed_out"] * 3
    method = f"class Solution:\n    def double(self, numbers):\n        {for_ever.replace(chr(10), chr(10) + ' ' * 8)}"
    (of_method,) = verdicts(published(DOUBLES, "double"), method, benchmark=quick)
    assert of_method.verdict == "timed_out"


class Command:
    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


def _hostile(command: str) -> dict[str, bytes]:
    text = pickle.dumps("[]", protocol=4)[:-1]
    return {
        "protocol 4": pickle.dumps(Command(command)),
        "protocol 0": pickle.dumps(Command(command), protocol=0),
        "in a list": pickle.dumps(["[]", Command(command)]),
        "behind a text": text + b"0" + pickle.dumps(Command(command), protocol=2)[2:],
        "as an instance": f"(S'{command}'\nios\nsystem\n.".encode(),
        "of its own name": b"Panything\n.",
    }


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize("kind", _hostile(""))
def test_a_hostile_pickle_does_nothing_and_is_named(kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    row = published(SUMS, private_test_cases=_packed(_hostile(f"touch {mark}")[kind]))
    with pytest.raises(DataError, match=r"row 0 .*private_test_cases of invented_a: .*more than a text"):
        get_task(NAME).items(write(tmp_path, "test6", row))
    (verdict,) = verdicts(row, SUM)  # as if nobody had looked at it
    assert (verdict.verdict, "cannot be used" in verdict.reason) == ("error", True)
    assert not mark.exists()


@pytest.mark.parametrize("text", ["no base64!", "AAAA", packed(SUMS)[:-8], _packed(b"\x80\x04X")])
def test_tests_that_are_cut_off_or_no_tests_are_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 0 .*private_test_cases of invented_a"):
        get_task(NAME).items(write(tmp_path, "test6", published(SUMS, private_test_cases=text)))


@pytest.mark.parametrize("metadata", ["[]", "no JSON", '{"func_name": ["f"]}'])
def test_metadata_must_be_an_object(metadata: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="invented_a: metadata is no JSON object"):
        get_task(NAME).rows(write(tmp_path, "test6", published(SUMS, metadata=metadata)))


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize("private", ["[{}]", '[{"input": "1"}]', "[", '[{"input": "[", "output": "1"}]'])
def test_malformed_tests_are_no_fault_of_a_program(private: str) -> None:
    row = published(DOUBLES[:1], "double", private_test_cases=private)
    assert [verdict.verdict for verdict in verdicts(row, DOUBLE)] == ["error"]


@pytest.mark.usefixtures("isolation")
def test_without_tests_no_program_passes() -> None:
    assert [verdict.verdict for verdict in verdicts(published(()), SUM)] == ["error"]


def test_a_window_has_the_contests_from_its_first_date_up_to_its_last_without_it(tmp_path: Path) -> None:
    days = ["2024-12-31T23:59:59", "2025-01-01T00:00:00", "2025-01-31", "2025-02-01T00:00:00"]
    rows = [published(SUMS, question_id=f"q{day}", contest_date=day) for day in days]
    write(tmp_path, "test5", *rows[:2])
    write(tmp_path, "test6", *rows[2:])

    def asked(window: str) -> list[str]:
        return [item.id for item in get_task(f"livecodebench_{window}").items(tmp_path)]

    assert asked("v6_2025_01_2025_02") == ["q2025-01-01T00:00:00", "q2025-01-31"]
    assert asked("v5_2025_01_2025_02") == ["q2025-01-01T00:00:00"]
    assert asked("v6_2025_01_02_2025_02_02") == ["q2025-01-31", "q2025-02-01T00:00:00"]
    with pytest.raises(DataError, match="no row that livecodebench_v6_2025_03_2025_04 asks"):
        asked("v6_2025_03_2025_04")


def test_only_files_that_may_have_a_contest_of_the_window_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert BENCHMARK.source.split == "test6"
    window = get_task("livecodebench_v6_2024_12_2025_04")
    assert window.benchmark.source.split == "test5+test6"
    write(tmp_path, "test6", published(SUMS))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: (_ for _ in ()).throw(OSError("offline")))
    with pytest.raises(DataError, match=r"test5.jsonl\[.gz\], test6.jsonl\[.gz\] \(no such file\)"):
        window.rows(tmp_path)


def test_the_files_of_the_hub_are_read_without_its_loading_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "test5", published(SUMS, question_id="a", contest_date="2025-01-05"))
    write(tmp_path, "test6", published(SUMS, question_id="b"))

    def download(hub: str, name: str, repo_type: str) -> str:
        assert (hub, repo_type) == ("livecodebench/code_generation_lite", "dataset")
        return str(tmp_path / "livecodebench" / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert [row["question_id"] for row in get_task("livecodebench_v6_2025_01_2025_04").rows()] == ["a", "b"]


@pytest.mark.parametrize(
    "window", ["v7_2025_02_2025_05", "v6_2025_05_2025_02", "v6_2025_13_2026_01", "v6", "v4_2025_02_2025_05"]
)
def test_a_name_without_such_a_window_is_unknown(window: str) -> None:
    name = f"livecodebench_{window}"
    assert name not in BENCHMARKS
    assert find_task(f"refusion_{name}") is None
    with pytest.raises(ConfigError, match="unknown task"):
        get_task(name)


def test_every_window_is_a_task_that_records_tables_and_lm_eval_know(tmp_path: Path) -> None:
    name = "livecodebench_v5_2024_10_15_2025_02"
    (task,) = find_tasks(task_names([name], "some/model"))
    assert (task.name, task.benchmark.name) == (f"refusion_{name}", name)
    assert task_title(task.name, mini=False) == "LiveCodeBench v5, 2024-10-15 to 2025-02-01"
    assert find_task(task.name) == get_task(name) == task
    assert pickle.loads(pickle.dumps(task)) == task
    assert name in BENCHMARKS
    assert name not in [*BENCHMARKS]
    assert OWN_RULES[0].rule_of(name) is not None
    assert OTHER_FORMS[0].rule_of(name) is None
    row = published(DOUBLES, "double", contest_date="2024-11-01T00:00:00")
    rows = getattr(hooks, f"{name}_rows")(write(tmp_path, "test5", row))["test"]
    assert getattr(hooks, f"{name}_prompt")(rows[0]) == task.benchmark.prompts.user(rows[0])


def test_a_longer_name_of_a_window_is_that_window() -> None:
    assert find_task(f"refusion_{NAME}_02") == Task(BENCHMARKS[f"{NAME}_02"])
    assert find_task(f"refusion_{NAME}_mine") == Task(BENCHMARK)
    assert SUITES["2026"][-1] is BENCHMARK


def test_prompts_have_the_question_and_the_starter_code(tmp_path: Path) -> None:
    rows = [published(SUMS), published(DOUBLES, "double", question_id="b")]
    program, method = (item.turns.user for item in get_task(NAME).items(write(tmp_path, "test6", *rows)))
    question = "Given numbers, do what the tests want.\n\n"
    assert program == (
        f"{question}Write a program that reads standard input and writes the answer to standard output. Reply with the "
        "whole program in a python block."
    )
    assert method == (
        f"{question}Complete this class. Reply with the whole class in a python block.\n\n"
        "```python\nclass Solution:\n    def double(self, numbers):\n```"
    )


@pytest.mark.parametrize(
    ("func_name", "text", "found"),
    [
        ("", "```python\nprint(1)\n```\nIts output:\n```\n1\n```", "print(1)\n"),
        ("", "```python\nprint(1)\n```\nBetter:\n```python\nprint(2)\n```", "print(2)\n"),
        ("", "```python\nprint(1)\n```\nTry `f`:\n```python\nassert f(1) == 2\n```", "print(1)\n"),
        ("", "```\nprint(1)\n```", "print(1)\n"),
        ("", "```python\nprint(1)\n", "print(1)\n"),
        ("", "```python\nprint(1)\n```\n```python\nprint(", "print(1)\n"),
        ("", "print(1)", "print(1)"),
        ("", "I do not know.", None),
        ("f", "```python\nclass Solution:\n    pass\n```\n```python\nprint(1)\n```", "class Solution:\n    pass\n"),
        ("f", "```python\ndef f():\n    return 1\n```\n```python\nf()\n```", "def f():\n    return 1\n"),
        (
            "",
            f"```python\nx = 1\n{'# ' + 'long ' * 3000}\nprint(x)\n```",
            "x = 1\n# " + "long " * 3000 + "\nprint(x)\n",
        ),
    ],
)
def test_the_last_program_of_a_text_is_taken_whole(func_name: str, text: str, found: str | None) -> None:
    assert BENCHMARK.extract(text, {"func_name": func_name}).answer == found
