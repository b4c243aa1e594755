"""Starts worker processes, hands programs to them, and turns their answers into results."""

import atexit
import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import threading
import time
import zoneinfo
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, as_completed
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from refusion_eval.errors import SandboxError
from refusion_eval.own_time import longest_wall_s
from refusion_eval.sandbox import wire
from refusion_eval.sandbox.jail import PROFILES
from refusion_eval.sandbox.result import CheckResult, Program, result_of
from refusion_eval.sandbox.watch import JUDGE_KILLED

# The __init__ files of the packages are not run, because the bare interpreter has none of their dependencies.
_START = """
import sys, types
sys.path[:] = [path for path in sys.path if path]
for name, folder in {packages!r}:
    module = types.ModuleType(name)
    module.__path__ = [folder]
    sys.modules[name] = module
from refusion_eval.sandbox.layout import preload
fork_hooks = preload()
from refusion_eval.sandbox.worker import main
main({control_fd}, {profile!r}, fork_hooks)
"""
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # the same order of sets in every run
    "MALLOC_ARENA_MAX": "1",
    # Without these the library of time zones would look into the database of users, and programs could then, too.
    "PYTHONTZPATH": os.pathsep.join(zoneinfo.TZPATH),
    "PYTHONUSERBASE": "/",
}
T = TypeVar("T")

_START_LIMIT_S, _START_ATTEMPTS = 90.0, 2  # a worker starts in a fraction of a second, unless the machine is busy
_WORKERS_PER_PROCESSOR = 2  # a check is a chain of short steps of four processes that wait for each other
_ANSWER_SLACK_S = 15.0
_ATTEMPTS = 3  # a worker may be killed from outside, and so may its replacement
_DETAILS = {
    "timeout_cpu": "the time limit, computing",
    "timeout_wall": "the time limit, waiting",
    "memory": "the memory limit, all processes together",
    "no_time": "the machine was too busy to give the program its time",
}


def _interpreter(profile_name: str) -> str:
    """The Python to run programs with: this one without its virtual environment."""
    own = getattr(sys, "_base_executable", None) or sys.executable
    if os.geteuid() != 0 or profile_name in ("namespaces", "none"):
        return own
    # Root that gives up its uid before the machine's root is replaced needs one that other users can read.
    folders = [Path(sysconfig.get_path("stdlib")), *Path(sysconfig.get_path("stdlib")).parents]
    if all(folder.stat().st_mode & stat.S_IXOTH for folder in folders):
        return own
    return shutil.which("python3", path="/usr/bin:/usr/local/bin") or own


class WorkerProcess:
    """A worker process under one of `jail.PROFILES`, or SandboxError with the reason why it cannot be set up here."""

    def __init__(self, profile_name: str) -> None:
        self._tier = PROFILES[profile_name].tier
        answer: Any = None
        for _ in range(_START_ATTEMPTS):
            self._start(profile_name)
            try:
                answer = wire.receive(self._control)
                break
            except TimeoutError:
                slow = f"did not start within {_START_LIMIT_S:g} s (busy machine), at {_START_ATTEMPTS} attempts"
                answer = ["failed", f"the worker process {slow}"]
                self.close()
            except (wire.WireError, OSError) as error:
                answer = ["failed", f"the worker process did not start: {error}"]
                break
        if answer != ["up"]:
            self.close()
            raise SandboxError(str(answer[-1]))

    def _start(self, profile_name: str) -> None:
        self._control, other = socket.socketpair()
        package = Path(__file__).parents[1]
        packages = [("refusion_eval", str(package)), ("refusion_eval.sandbox", str(package / "sandbox"))]
        code = _START.format(packages=packages, control_fd=other.fileno(), profile=profile_name)
        reading, writing = os.pipe()  # programs can read the command line that they were forked from
        os.write(writing, code.encode())
        os.close(writing)
        with other, open(reading, "rb") as source:
            try:  # a bare interpreter that inherits one descriptor and nothing else
                self._process = subprocess.Popen(
                    [_interpreter(profile_name), "-s", "-S", "-B", "-"],
                    env=_ENVIRONMENT,
                    cwd="/",
                    pass_fds=[other.fileno()],
                    stdin=source,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                self._control.close()
                raise SandboxError(f"the worker process did not start: {error}") from error
        self._control.settimeout(_START_LIMIT_S)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def check(self, program: Program) -> CheckResult:
        """Check one program. Raises SandboxError if the worker broke and cannot be used any more."""
        started_s = time.monotonic()
        try:
            outcome, report = self._exchange(program)
            if outcome is not None and outcome[2] and report["stopped"] is None:
                # Data was taken past methods that its class has for what the test asked of it. They may be honest.
                outcome, report = self._exchange(program, asks_data=True)
        except wire.FrameTooLarge:
            return result_of("output_limit", "the program is too long", time.monotonic() - started_s, self._tier)
        except (wire.WireError, OSError) as error:
            raise SandboxError(f"a sandbox worker broke: {type(error).__name__}: {error}") from error
        if report["stopped"] == JUDGE_KILLED:
            raise SandboxError("a sandbox worker broke: its judge was killed, maybe by a machine out of memory")
        seconds = time.monotonic() - started_s
        return result_of(*_merge(outcome, report), seconds, self._tier, report["waited_s"])

    def _exchange(self, program: Program, asks_data: bool = False) -> tuple[list[Any] | None, dict[str, Any]]:
        job = {"candidate": program.source, "test": program.test, "helpers": program.helpers, "asks_data": asks_data}
        ours, theirs = socket.socketpair()
        with ours, theirs:
            limit_s = longest_wall_s(program.timeout_s) + _ANSWER_SLACK_S
            ours.settimeout(limit_s)
            self._control.settimeout(limit_s)
            limits = [program.timeout_s, program.call_s, program.memory_mb, bool(program.runner)]
            socket.send_fds(self._control, [json.dumps(limits).encode()], [theirs.fileno()])
            theirs.close()
            try:
                wire.send(ours, job, wire.MAX_JOB_BYTES)
                outcome = wire.receive(ours)
            except (wire.PeerGone, BrokenPipeError, ConnectionResetError):
                outcome = None  # the judge was stopped; the report says why
            except wire.FrameTooLarge:
                ours.close()
                wire.receive(self._control)
                raise
            return outcome, wire.receive(self._control)

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _merge(outcome: list[Any] | None, report: dict[str, Any]) -> tuple[str, str]:
    reason, detail = outcome[:2] if outcome is not None else ("protocol_error", "the judge ended without a verdict")
    stopped, status = report["stopped"], report["status"]
    if outcome is not None and reason not in ("exited", "protocol_error"):
        return reason, detail
    if stopped:
        return stopped, _DETAILS.get(stopped, "")
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        names = {member.value: member.name for member in signal.Signals}  # most of the real-time signals have none
        return "signal", f"the program ended by {names.get(number, f'signal {number}')}"
    return reason, detail


# Workers that wait for the next call, because a start takes about a fifth of a second; threads share them.
_idle_workers: defaultdict[str, deque[WorkerProcess]] = defaultdict(deque)
os.register_at_fork(after_in_child=_idle_workers.clear)  # they belong to the parent


def _take_worker(profile_name: str) -> WorkerProcess:
    with contextlib.suppress(IndexError):  # no worker is idle
        while not (worker := _idle_workers[profile_name].pop()).alive:
            worker.close()
        return worker
    return WorkerProcess(profile_name)


@atexit.register
def _close_workers() -> None:
    for worker in [worker for idle in _idle_workers.values() for worker in idle]:
        worker.close()


def default_workers() -> int:
    return _WORKERS_PER_PROCESSOR * len(os.sched_getaffinity(0))


def check_on(profile_name: str, program: Program) -> CheckResult:
    """Check one program under one profile; SandboxError if no worker can be started."""
    # A broken worker is replaced and the check repeated, twice at most; one that says "sandbox_error" or "no_time" is
    # repeated once. Whatever else goes wrong becomes a verdict, because a program may be the cause.
    for attempt in range(_ATTEMPTS):
        worker = _take_worker(profile_name)
        try:
            verdict = worker.check(program)
        except Exception as error:  # noqa: BLE001
            worker.close()
            if isinstance(error, SandboxError):
                reason, detail = "worker_broke", str(error)
            else:
                reason, detail = "sandbox_error", f"{type(error).__name__}: {error}"
            continue
        except BaseException:
            worker.close()
            raise
        _idle_workers[profile_name].append(worker)
        if verdict.reason not in ("sandbox_error", "no_time") or attempt:
            return verdict
    return result_of(reason, detail, 0.0, PROFILES[profile_name].tier)


def check_all(
    programs: Iterable[Program],
    profile_name: str,
    workers: int | None = None,
    on_done: Callable[[int, CheckResult], None] | None = None,
) -> list[CheckResult]:
    threads = DaemonThreads(workers or default_workers())
    try:
        futures = [threads.submit(partial(check_on, profile_name, program)) for program in programs]
        for future in as_completed(futures):
            verdict = future.result()
            if on_done is not None:
                on_done(futures.index(future), verdict)
        return [future.result() for future in futures]
    finally:
        threads.close()  # after an exception of the caller, too


class DaemonThreads:
    """At most `number` threads that work off calls, started when they are needed."""

    # An executor of the standard library joins its threads when the process exits, so a process that a signal ends
    # would wait for a program that takes its whole time limit.

    def __init__(self, number: int) -> None:
        self._number = number
        self._num_started = 0
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        self._calls.put((future, call))
        if self._num_started < self._number:
            self._num_started += 1
            threading.Thread(target=self._work, daemon=True).start()
        return future

    def close(self) -> None:
        """Cancel the calls that no thread has begun; the threads end."""
        with contextlib.suppress(queue.Empty):
            while item := self._calls.get_nowait():
                item[0].cancel()
        for _ in range(self._num_started):
            self._calls.put(None)

    def _work(self) -> None:
        while item := self._calls.get():
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001 - the caller gets it from the future
                    future.set_exception(error)
