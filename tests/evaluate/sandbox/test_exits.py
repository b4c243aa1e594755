"""Programs that end before they have answered; each would be called as solve(20) == 6765."""

import pytest

EXITS = {
    "sys_exit_at_import": "import sys\nsys.exit(0)",
    "system_exit_raised": "raise SystemExit(0)",
    "exit_in_function": "def solve(n):\n    raise SystemExit(0)",
    "keyboard_interrupt": "def solve(n):\n    raise KeyboardInterrupt",
    "os_exit_at_import": "import os\nos._exit(0)",
    "os_exit_in_function": "import os\ndef solve(n):\n    os._exit(0)",
    "posix_exit": "import posix\ndef solve(n):\n    posix._exit(0)",
    "exit_in_thread": "import os, threading, time\n"
    "threading.Timer(0.1, os._exit, [0]).start()\n"
    "def solve(n):\n"
    "    time.sleep(5)",
    "atexit_exit": "import atexit, os, sys\natexit.register(os._exit, 0)\ndef solve(n):\n    sys.exit(0)",
    "exit_by_ctypes": "import ctypes\ndef solve(n):\n    ctypes.CDLL(None)._exit(0)",
    "null_pointer": "import ctypes\ndef solve(n):\n    ctypes.string_at(0)",
    "abort": "import os\ndef solve(n):\n    os.abort()",
    "stack_overflow": "import sys\n"
    "sys.setrecursionlimit(10**8)\n"
    "def solve(n):\n"
    "    class A:\n"
    "        def __repr__(self):\n"
    "            return repr([self])\n"
    "    return repr(A())",
    "deep_recursion": "def solve(n):\n    return solve(n + 1)",
}


@pytest.mark.parametrize("name", EXITS)
def test_an_early_end_is_not_a_pass(every_judge, name):
    verdict = every_judge.all(EXITS)[name]
    assert verdict.status in ("failed", "killed"), verdict


def test_a_worker_survives_all_exits(every_judge):
    every_judge.all(EXITS)
    assert every_judge("def solve(n):\n    return 6765").passed


def test_exit_code_zero_is_reported_as_an_exit(judge):
    assert judge("import os\ndef solve(n):\n    os._exit(0)").reason == "exited"


def test_a_signal_is_named(judge):
    verdict = judge(EXITS["null_pointer"])
    assert (verdict.reason, verdict.status) == ("signal", "killed")
    assert "SIGSEGV" in verdict.detail
