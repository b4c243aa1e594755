"""A judge is kept from check to check, and nothing of one check is found in the next."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from refusion_eval.errors import SandboxError
from refusion_eval.sandbox import Program, probe
from refusion_eval.sandbox.analysis import case_of
from refusion_eval.sandbox.jail import PROFILES
from refusion_eval.sandbox.pool import WorkerProcess

_TRY = "import os\ndef f():\n    try:\n        {}\n    except OSError:\n        pass\n    return ['x']"
_ONE = "def f(x=0):\n    return 1"


@pytest.fixture
def worker():
    report = probe()
    if report.tier == "D":
        pytest.skip(f"programs cannot be isolated here: {report.missing}")
    started = WorkerProcess(report.profile)
    yield started
    started.close()


def _check(worker: WorkerProcess, candidate: str, test: str):
    return worker.check(Program(candidate=candidate, test=test, timeout_s=5))


def _judge_pid(worker: WorkerProcess) -> int:
    """The one process of an idle worker that has no child."""
    pid = worker._process.pid
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        assert len(children) == 1
        pid = int(children[0])
    return pid


@pytest.mark.parametrize(
    "text",
    [
        "assert f(1) == 2",
        "def check(candidate):\n    assert candidate([1]) == [2]\ncheck(f)",
        "import math\nassert math.isclose(f(1), 1)",
        "from random import randint\nassert f(randint(1, 2)) > 0",
        "x = [f(i) for i in range(3)]\nx[0] = 1\nassert sorted(x) == x",
        "from collections.abc import Iterable\nfrom math import *\nassert isinstance(f(1), Iterable) or pi",
        "try:\n    f(1)\nexcept ValueError as error:\n    assert str(error)",
    ],
)
def test_tests_on_their_own_names_need_no_process_of_their_own(text):
    assert not case_of(text).may_leave_traces


@pytest.mark.parametrize(
    "text",
    [
        "import os\nassert f(1)",
        "import os.path as math\nassert f(1)",
        "from decimal import getcontext\nassert f(1)",
        "from . import math",
        "assert decimal.getcontext()",
        "math.pi = 3",
        "del f.x",
        "assert f.__globals__",
        "setattr(f, 'x', 1)",
        "exec('x = 1')",
        "run = exec\nrun('x = 1')",
        "def check(candidate):\n    open('x')\ncheck(f)",
        "class A:\n    pass",
        "async def g():\n    pass",
        "from random import _inst",
        "from json.encoder import ESCAPE_DCT",
        "import json.encoder as e\nassert f(e)",
        "import collections.abc as c\nc.Sequence.register(int)",
        "g = (x for x in [1])\ng.gi_frame",
    ],
)
def test_tests_that_may_reach_further_get_one(text):
    assert case_of(text).may_leave_traces


@pytest.mark.parametrize(
    ("meddling", "observing"),
    [
        ("math.pi = 3", "assert math.pi > 3.1"),
        ("import builtins\nbuiltins.abs = None", "assert abs(-1) == 1"),
        ("import decimal\ndecimal.getcontext().prec = 2", "assert str(decimal.Decimal(1) / 3) == '0.' + 28 * '3'"),
        ("import sys\nsys.setrecursionlimit(50)", "import sys\nassert sys.getrecursionlimit() > 50"),
        ("import os\nos.environ['X'] = '1'", "import os\nassert 'X' not in os.environ"),
        ("random.seed(5)", "assert random.getstate() != random.Random(5).getstate()"),
        ("random.gauss(0, 1)", "assert random.getstate()[2] is None"),
        ("f_is_mine = f", "assert 'f_is_mine' not in globals()"),
        ("__builtins__['abs'] = None", "assert abs(-1) == 1"),
        ("def g(eval):\n    pass\neval('math.__dict__.update(pi=3)', {'math': math})\nmath.pi", "assert math.pi > 3.1"),
        ("import math\ngetattr(math, '__dict__')['pi'] = 3", "assert math.pi > 3.1"),
        ("import math\noperator.methodcaller('__setattr__', 'pi', 3)(math)", "assert math.pi > 3.1"),
        ("fractions.sys.setrecursionlimit(120)", "def r(n):\n    return n and r(n - 1)\nassert r(300) == 0"),
        ("hashlib.algorithms_available.clear()", "assert hashlib.algorithms_available"),
        ("numbers.Number.register(str)", "assert not isinstance('', numbers.Number)"),
    ],
)
def test_nothing_of_a_test_is_left_for_the_next(worker, meddling, observing):
    assert _check(worker, _ONE, f"{meddling}\nassert f() == 1").passed
    verdict = _check(worker, _ONE, f"{observing}\nassert f() == 1")
    assert verdict.passed, verdict


def test_the_judge_is_kept(worker):
    _check(worker, _ONE, "assert f() == 1")
    judge_pid = _judge_pid(worker)
    for test in ("assert f() == 2", "assert g()", "import os\nassert f() == 1", "assert", "assert f(1 / 0)"):
        _check(worker, _ONE, test)
    assert _judge_pid(worker) == judge_pid


def test_a_judge_that_grew_large_is_replaced(worker):
    _check(worker, _ONE, "assert f() == 1")
    judge_pid = _judge_pid(worker)
    assert _check(worker, _ONE, "assert len([0] * 60_000_000) > f()").passed
    assert _check(worker, _ONE, "assert f() == 1").passed
    assert _judge_pid(worker) != judge_pid


def test_flags_of_decimal_numbers_are_lowered(worker):
    assert _check(worker, "from decimal import Decimal\ndef f():\n    return Decimal(1)", "assert f() / 3 != 1").passed
    verdict = _check(worker, _ONE, "import decimal\nassert f() not in decimal.getcontext().flags.values()")
    assert verdict.passed, verdict


def test_what_an_exception_held_is_free_again(worker):
    large = "def check(candidate):\n    large = bytes(1200 << 20)\n    assert candidate() == 1\ncheck(f)"
    assert _check(worker, "def f():\n    raise ValueError", large).reason == "raised"
    verdict = _check(worker, _ONE, large)
    assert verdict.passed, verdict


def test_a_judge_that_is_stopped_is_replaced(worker):
    for test in ("while True:\n    f()", "import os\nwhile True:\n    f()"):
        verdict = worker.check(Program(candidate=_ONE, test=test, timeout_s=0.2))
        assert verdict.status == "timed_out"
        assert _check(worker, _ONE, "assert f() == 1").passed


def test_a_judge_killed_while_it_is_idle_costs_no_verdict(worker):
    for _ in range(3):
        assert _check(worker, _ONE, "assert f() == 1").passed
        pid = _judge_pid(worker)
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.001)
        assert _check(worker, _ONE, "assert f() == 1").passed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("first", ["", "import os\n"])
def test_a_judge_killed_at_work_is_no_fault_of_the_program(worker, first, number):
    slow = Program(candidate=_ONE, test=f"{first}while f():\n    pass", timeout_s=60)
    _check(worker, _ONE, "assert f() == 1")
    killer = threading.Timer(0.3, os.kill, (_judge_pid(worker), number))
    killer.start()
    with pytest.raises(SandboxError, match="judge was killed"):
        worker.check(slow)


_ENDLESS = "def f():\n    text = 'x' * (4 << 20)\n    while True:\n        yield text"


def test_what_a_program_makes_its_judge_hold_counts(worker):
    for test in ("assert list(f())", "import os\nassert list(f())"):
        verdict = worker.check(Program(candidate=_ENDLESS, test=test, memory_mb=128, timeout_s=60))
        assert (verdict.status, verdict.reason) == ("killed", "memory"), verdict
        assert _check(worker, _ONE, "assert f() == 1").passed


def test_a_judge_that_the_machine_has_no_memory_for_is_the_programs_fault(worker):
    """A kernel short of memory kills the judge, which the program made large."""
    _check(worker, _ONE, "assert f() == 1")

    def kill(pid: int) -> None:
        while int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") < 300 << 20:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill, args=(_judge_pid(worker),))
    killer.start()
    verdict = worker.check(Program(candidate=_ENDLESS, test="assert list(f())", memory_mb=4096, timeout_s=60))
    killer.join()
    assert (verdict.status, verdict.reason) == ("killed", "memory"), verdict


def test_what_a_program_leaves_in_tmp_is_gone(worker):
    if not PROFILES[probe().profile].namespaces:
        pytest.skip("this machine's isolation has no /tmp for programs")
    observing = """
import os
def f():
    info = os.stat('/tmp')
    times = {info.st_atime_ns, info.st_mtime_ns, info.st_ctime_ns}
    return os.listdir('/tmp'), os.listxattr('/tmp'), oct(info.st_mode), len(times)
"""
    expected = "assert f() == ([], [], '0o40777', 1)"
    assert _check(worker, observing, expected).passed
    for meddling in (
        "import os\ndef f():\n    open('/tmp/x', 'w').write('x')\n    return os.listdir('/tmp')",
        "import os\ndef f():\n    os.makedirs('/tmp/x/y/z')\n    return os.listdir('/tmp')",
        "import os\ndef f():\n    os.symlink('a', '/tmp/x')\n    os.listdir('/tmp')\n    return ['x']",
        _TRY.format("os.setxattr('/tmp', 'user.x', b'1')"),
        _TRY.format("os.chmod('/tmp', 0o500)"),
        _TRY.format("os.listdir('/tmp')"),
    ):
        assert _check(worker, meddling, "assert f() == ['x']").passed
        verdict = _check(worker, observing, expected)
        assert verdict.passed, (meddling, verdict)


def test_a_program_that_forks_has_the_hooks_of_its_modules(worker):
    program = """
import os, random, threading
def f():
    stop = threading.Event()
    threading.Thread(target=stop.wait, daemon=True).start()
    ends = []
    for _ in range(2):
        read, write = os.pipe()
        if os.fork() == 0:
            os.write(write, f"{threading.active_count()} {random.random()}".encode())
            os._exit(0)
        ends.append(os.read(read, 100).decode().split())
    return ends
"""
    test = "(count, number), (again, other) = f()\nassert count == again == '1' and number != other"
    verdict = _check(worker, program, test)
    assert verdict.passed, verdict


def test_a_test_that_forks_has_them_too(worker):
    test = """
import os, random, threading
stop = threading.Event()
threading.Thread(target=stop.wait, daemon=True).start()
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, f"{threading.active_count()} {random.random()}".encode())
    os._exit(0)
count, number = os.read(read, 100).split()
assert count == b"1" and float(number) != random.random() and f() == 1
"""
    verdict = _check(worker, _ONE, test)
    assert verdict.passed, verdict


def test_what_a_test_left_running_is_not_counted_against_the_next(worker):
    leaving = "import os, time\nif os.fork() == 0:\n    large = b'1' * (400 << 20)\n    time.sleep(60)\nassert f() == 1"
    assert _check(worker, _ONE, leaving).passed
    below = [worker._process.pid]
    for pid in below:
        below += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    assert len(below) <= 2, "a worker, and the process that waits for it"
    assert worker.check(
        Program(candidate=_ONE + "\nimport time; time.sleep(0.3)", test="assert f()", memory_mb=256)
    ).passed


def test_what_a_program_left_running_costs_no_verdict(worker):
    leaving = "import os, time\ndef f():\n    if os.fork() == 0:\n        time.sleep(60)\n    return 1"
    for _ in range(3):
        assert _check(worker, leaving, "assert f() == 1").passed
        assert _check(worker, _ONE, "assert f() == 1").passed
