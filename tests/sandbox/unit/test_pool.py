"""Many checks at once: order, faults, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from refusion_eval.errors import SandboxError
from refusion_eval.sandbox import Program, check_program, check_programs, pool, probe
from refusion_eval.sandbox.pool import WorkerProcess

pytestmark = pytest.mark.usefixtures("isolation")


def _program(number: int) -> Program:
    return Program(candidate=f"def f():\n    return {number}", test=f"assert f() == {number // 2 * 2}")


def test_verdicts_keep_the_order_of_the_programs():
    verdicts = check_programs([_program(number) for number in range(20)], workers=3)
    assert [verdict.passed for verdict in verdicts] == [number % 2 == 0 for number in range(20)]


def test_each_end_is_told_as_it_happens():
    told = {}
    verdicts = check_programs([_program(number) for number in range(6)], workers=2, on_done=told.__setitem__)
    assert [told[index] for index in range(6)] == verdicts


def test_an_exception_of_the_caller_reaches_the_caller():
    def fail(index, verdict):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        check_programs([_program(0)], on_done=fail)


def test_no_programs_give_no_verdicts():
    assert check_programs([]) == []


def test_a_verdict_names_its_tier():
    assert check_program("def f():\n    return 1", "assert f() == 1").tier == probe().tier


def test_signals_that_a_background_job_ignores_act_in_a_program():
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        verdict = check_program(
            "import signal", "\n".join(f"assert signal.getsignal({number:d}) != signal.SIG_IGN" for number in numbers)
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert verdict.passed, verdict.detail


def test_without_isolation_the_verdict_says_so():
    verdict = check_program("def f():\n    return 1", "assert f() == 1", sandbox="none")
    assert (verdict.status, verdict.tier) == ("passed", "none")


def test_without_isolation_program_and_test_are_still_apart():
    verdict = check_program("import os\nos._exit(0)", "assert True", sandbox="none")
    assert verdict.reason == "exited"


def test_a_worker_that_starts_slowly_is_started_once_more_and_is_called_slow(monkeypatch):
    profile, receive, slow = probe().profile, pool.wire.receive, [TimeoutError()]

    def once_slow(sock):
        if slow:
            raise slow.pop()
        return receive(sock)

    monkeypatch.setattr(pool.wire, "receive", once_slow)
    worker = WorkerProcess(profile)
    assert worker.alive
    worker.close()
    slow += [TimeoutError()] * 2
    with pytest.raises(SandboxError, match=r"did not start within 90 s \(busy machine\), at 2 attempts"):
        WorkerProcess(profile)


def test_an_unknown_sandbox_is_refused():
    with pytest.raises(SandboxError, match="'auto'"):
        check_program("", "", sandbox="docker")


def test_a_worker_killed_from_outside_is_replaced():
    worker = WorkerProcess(probe().profile)
    os.kill(worker._process.pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="worker"):
        worker.check(_program(0))
    worker.close()
    assert check_programs([_program(0)])[0].passed


@pytest.mark.parametrize("number", [35, 40, 63, 64])
def test_a_program_that_ends_by_a_signal_without_a_name_gets_a_verdict(number):
    verdict = check_program(f"import os\ndef f():\n    os.kill(os.getpid(), {number})", "assert f() == 1")
    assert (verdict.status, verdict.reason) == ("killed", "signal")


def test_whatever_a_check_raises_becomes_a_verdict(monkeypatch):
    def fail(worker, program):
        raise ZeroDivisionError("by design")

    monkeypatch.setattr(WorkerProcess, "check", fail)
    verdict = check_program("def f():\n    return 1", "assert f() == 1")
    assert (verdict.status, verdict.reason) == ("error", "sandbox_error")
    assert "ZeroDivisionError: by design" in verdict.detail


def test_idle_workers_that_died_cost_no_verdict():
    check_programs([_program(0)] * 16, workers=8)
    died = list(pool._idle_workers[probe().profile])
    assert len(died) > pool._ATTEMPTS
    for worker in died:
        os.kill(worker._process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker._process.pid, os.WEXITED | os.WNOWAIT)
    assert check_programs([_program(0)])[0].passed


def test_later_checks_leave_no_more_than_the_first():
    worker = WorkerProcess(probe().profile)
    try:
        worker.check(_program(0))
        before = _footprint(worker._process.pid)
        for _ in range(30):
            worker.check(_program(0))
        after = _footprint(worker._process.pid)
    finally:
        worker.close()
    assert after == before


def _footprint(pid: int) -> list[tuple[int, int]]:
    """Open files of a worker and of its child, and how many processes there are."""
    own = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    return [(len(own), len(os.listdir(f"/proc/{member}/fd"))) for member in own]


def test_nothing_survives_a_killed_harness():
    code = (
        "from refusion_eval.sandbox import check_program\n"
        "check_program('def f():\\n    return 1', 'f()')\n"
        "print('running', flush=True)\n"
        "check_program('import time\\ndef f():\\n    time.sleep(60)', 'f()', timeout_s=60)\n"
    )
    harness = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    )
    assert harness.stdout is not None
    assert harness.stdout.readline() == "running\n"
    time.sleep(0.5)
    below = _descendants(harness.pid)
    assert len(below) >= 3  # worker, judge, guest
    harness.kill()
    harness.wait()
    harness.stdout.close()
    deadline_s = time.monotonic() + 5
    while (alive := [pid for pid in below if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert alive == []


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for member in found:
        path = Path(f"/proc/{member}/task/{member}/children")
        found += [int(word) for word in path.read_text().split()] if path.exists() else []
    return found[1:]
