"""Programs that run until they are stopped; solve(20) never gets an answer."""

import contextlib
import os
from pathlib import Path

import pytest

HOGS = {
    "busy_loop": ("def solve(n):\n    while True:\n        pass", {"timed_out"}),
    "busy_at_import": ("while True:\n    pass", {"timed_out"}),
    "sleep": ("import time\ndef solve(n):\n    time.sleep(1000)", {"timed_out"}),
    "wait_for_lock": ("import threading\ndef solve(n):\n    threading.Event().wait()", {"timed_out"}),
    "backtracking": ("import re\ndef solve(n):\n    return re.match('(a+)+$', 'a' * 40 + 'b')", {"timed_out"}),
    "huge_power": ("def solve(n):\n    return 9 ** 9 ** 9", {"timed_out"}),
    "ignored_signals": (
        "import signal\n"
        "for number in (signal.SIGALRM, signal.SIGXCPU, signal.SIGTERM, signal.SIGINT):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "def solve(n):\n"
        "    while True:\n"
        "        pass",
        {"timed_out"},
    ),
    "stopped_process": (
        "import os, signal, time\ndef solve(n):\n    os.kill(os.getpid(), signal.SIGSTOP)\n    time.sleep(100)",
        {"timed_out"},
    ),
    "endless_stdout": ("def solve(n):\n    while True:\n        print('x' * 10000)", {"timed_out"}),
    "endless_iterator": (
        "def solve(n):\n"
        "    class A:\n"
        "        def __hash__(self):\n"
        "            while True:\n"
        "                pass\n"
        "    return {1: A(), 2: [A()]}.values()",
        {"failed"},
    ),
    "busy_threads": (
        "import threading\n"
        "def spin():\n"
        "    while True:\n"
        "        pass\n"
        "def solve(n):\n"
        "    for _ in range(8):\n"
        "        threading.Thread(target=spin, daemon=True).start()\n"
        "    spin()",
        {"timed_out"},
    ),
    "busy_children": (
        "import os, time\n"
        "def solve(n):\n"
        "    for _ in range(4):\n"
        "        if os.fork() == 0:\n"
        "            while True:\n"
        "                pass\n"
        "    time.sleep(100)",
        {"timed_out"},
    ),
    "fork_bomb": (
        "import os\n"
        "def solve(n):\n"
        "    while True:\n"
        "        try:\n"
        "            os.fork()\n"
        "        except OSError:\n"
        "            pass",
        {"killed", "timed_out"},
    ),
    "thread_bomb": (
        "import threading, time\n"
        "def solve(n):\n"
        "    while True:\n"
        "        try:\n"
        "            threading.Thread(target=time.sleep, args=[100], daemon=True).start()\n"
        "        except RuntimeError:\n"
        "            pass",
        {"killed", "timed_out"},
    ),
    "one_big_array": ("def solve(n):\n    return len(bytearray(4 << 30))", {"killed"}),
    "growing_list": (
        "def solve(n):\n    items = []\n    while True:\n        items.append('x' * 10**6 + str(len(items)))",
        {"killed"},
    ),
    "many_processes_of_memory": (
        "import os, time\n"
        "def solve(n):\n"
        "    for _ in range(6):\n"
        "        if os.fork() == 0:\n"
        "            data = bytearray(b'x') * (60 << 20)\n"
        "            time.sleep(100)\n"
        "    time.sleep(100)",
        {"killed"},
    ),
    "map_without_reserve": (
        "import mmap\ndef solve(n):\n    mmap.mmap(-1, 8 << 30, flags=mmap.MAP_PRIVATE | 0x4000)\n    return 6765",
        {"failed"},
    ),
}
_OWN_LIMIT_S = 0.3


@pytest.mark.parametrize("name", HOGS)
def test_a_hog_is_stopped(judge, name):
    program, statuses = HOGS[name]
    limit_s = 5 if statuses == {"killed"} else _OWN_LIMIT_S
    verdict = judge(program, timeout_s=limit_s)
    assert verdict.status in statuses, verdict


def test_a_sleeping_program_is_stopped_within_a_second_of_its_limit(judge):
    judge("def solve(n):\n    return 1")
    verdict = judge("import time\ndef solve(n):\n    time.sleep(60)", timeout_s=0.5)
    assert (verdict.reason, verdict.status) == ("timeout_wall", "timed_out")
    assert verdict.seconds < 3  # 1.5 on a free machine; the rest is for a busy one


def test_a_daemon_does_not_outlive_its_check(every_judge):
    mark = f"left{os.getpid()}{every_judge.profile[0]}"  # the kernel keeps 15 characters
    program = f"""
import ctypes, os, signal, time
def solve(n):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            ctypes.CDLL(None).prctl(15, b"{mark}", 0, 0, 0)
            time.sleep(100)
        os._exit(0)
    time.sleep(0.2)
    return 0
"""
    assert every_judge(program).reason == "failed_assertion"
    assert mark not in _process_names()


def _process_names() -> set[str]:
    names = set()
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            names.add(path.read_text().strip())
    return names
