"""The judge: runs the dataset's test in its own process, with the candidate's names bound to stand-ins (`mirror`)."""

# A program passes only if this process reaches the end of the test. Nothing that the candidate prints, returns as its
# exit code or sends unasked can make it pass.

import contextlib
import decimal
import errno
import gc
import importlib
import os
import random
import resource
import socket
import sys
import traceback
import types
import zoneinfo
from typing import Any, NamedTuple

from refusion_eval.sandbox import wire
from refusion_eval.sandbox.analysis import HELPERS_FILE, TEST_FILE, Case, case_of
from refusion_eval.sandbox.layout import ForkHooks
from refusion_eval.sandbox.proxy import Broken, Candidate, place_in_test
from refusion_eval.sandbox.watch import GOES_ON, KEPT_JUDGE_BYTES

_MAX_DETAIL_CHARS = 300
_BY_VALUE = ("failed_assertion", "wrong_type", "raised", "no_code", "protocol_error")  # where one process may differ


class JudgeResult(NamedTuple):
    reason: str  # a key of `result.STATUS_OF_REASON`
    detail: str = ""
    passed_over: bool = False  # as `Candidate.passed_over`, without success


def judge(sock: socket.socket, job: dict[str, Any], case: Case, num_calls: memoryview) -> JudgeResult:
    random.seed()  # what a test draws, no program can know
    decimal.setcontext(decimal.Context())  # reckoning with a program's numbers raises flags in it
    if not job["candidate"].strip():
        return JudgeResult("no_code", "the program is empty")
    main = sys.modules["__main__"] = types.ModuleType("__main__")  # in which `unittest.main` looks for tests
    namespace = vars(main)
    try:
        code = compile(case.test, TEST_FILE, "exec", dont_inherit=True)
        exec(compile(case.helpers, HELPERS_FILE, "exec", dont_inherit=True), namespace)  # the dataset's prompt, trusted
    except Exception as error:  # noqa: BLE001 - any fault in trusted text is one of the dataset
        return _unusable(error)
    if case.runs_texts:
        return JudgeResult("inseparable", f"the test may run a text of the program by {case.runs_texts}")
    wanted, modules = case.names(set(namespace))
    candidate = Candidate(sock, case, wanted, namespace, job["asks_data"], num_calls)
    outcome = _run(candidate, job["candidate"], code, modules, namespace)
    sys.modules.pop("__main__", None)
    if candidate.broken:  # which a framework of tests may have noted and passed over
        outcome = JudgeResult(*candidate.broken.args)
    elif outcome.reason == "passed":
        if not candidate.failed_inside:
            return outcome
        outcome = JudgeResult("failed_assertion", f"{candidate.failed_inside}, called by the program")
    needs = case.needs_one_process if outcome.reason in _BY_VALUE else ""
    if why := needs or candidate.inseparable:
        return JudgeResult("inseparable", f"{why} ({outcome.detail})")
    return outcome._replace(passed_over=candidate.passed_over)


def _unusable(error: Exception) -> JudgeResult:
    return JudgeResult("sandbox_error", f"the test or its helpers cannot be used: {_one_line(error)}")


def _run(candidate: Candidate, program: str, code: Any, modules: list[str], namespace: dict[str, Any]) -> JudgeResult:
    try:
        candidate.load(program)
    except Broken as broken:
        return JudgeResult(*broken.args)
    except SyntaxError as error:
        return JudgeResult("syntax_error", _one_line(error))
    except BaseException as error:  # noqa: BLE001 - whatever the candidate's import raised
        return _raised(candidate, error)
    try:
        namespace.update({name: importlib.import_module(name) for name in modules})
        exec(code, namespace)  # the dataset's test, trusted
    except Broken as broken:
        return JudgeResult(*broken.args)
    except BaseException as error:  # noqa: BLE001 - whatever ends a test early is its verdict
        return _raised(candidate, error)
    return JudgeResult("passed")


def _raised(candidate: Candidate, error: BaseException) -> JudgeResult:
    for remote, text in candidate.remote_errors:
        if remote is error:
            if isinstance(error, zoneinfo.ZoneInfoNotFoundError) and not any(map(os.path.isdir, zoneinfo.TZPATH)):
                return JudgeResult("inseparable", "this machine has no time zones (tzdata)")
            kinds = {"memory": MemoryError, "raised": Exception, "exited": BaseException}
            return JudgeResult(next(reason for reason, kind in kinds.items() if isinstance(error, kind)), text)
    if isinstance(error, SystemExit) and not error.code:
        # A test that ends by itself may have been made to, before its last assertion; `unittest.main` ends behind all.
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        is_end = frame.f_globals.get("__name__") == "unittest.main"
        return JudgeResult("passed") if is_end else JudgeResult("inseparable", "the test ends its process by itself")
    place = place_in_test(error)
    if isinstance(error, AssertionError):
        return JudgeResult("wrong_type" if candidate.compared_with_data else "failed_assertion", place)
    if isinstance(error, MemoryError):
        return JudgeResult("output_limit", "the values are too large for the judge")
    text = _one_line(error)
    if isinstance(error, ImportError):
        return JudgeResult("sandbox_error", f"the test needs what is not here: {text}")
    if isinstance(error, OSError) and error.errno in (errno.EPERM, errno.EACCES, errno.EROFS):
        return JudgeResult("inseparable", f"the test needs what no program has here: {text}")
    if isinstance(error, NameError):
        return JudgeResult("no_code", f"the program does not define it: {text}")
    return JudgeResult("wrong_type" if isinstance(error, TypeError | AttributeError) else "raised", f"{place}: {text}")


def _one_line(error: BaseException) -> str:
    text = "?"
    with contextlib.suppress(BaseException):  # the message may hold an object of the program
        text = str(error)
    return f"{type(error).__name__}: {text}".replace("\n", " ")[:_MAX_DETAIL_CHARS]


def serve(control: socket.socket, fork_hooks: ForkHooks, folder: str, num_calls: memoryview) -> None:
    """Judge one job after another until `control` is closed, or until this process has grown too large to be kept."""
    # `fork_hooks` are for tests that fork, tests that use files run in `folder`, and the watchdog reads `num_calls`.
    while True:
        # Two descriptors: the job is read from the first and its outcome is written to it; the candidate has the other.
        message, fds, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            return
        with socket.socket(fileno=fds[0]) as result, socket.socket(fileno=fds[1]) as candidate:
            _serve_one(control, result, candidate, fork_hooks, folder, num_calls)
        gc.collect()  # an exception holds the frames it passed, and these the test's memory
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 > KEPT_JUDGE_BYTES:
            return
        control.send(GOES_ON)


def _serve_one(
    control: socket.socket,
    result: socket.socket,
    candidate: socket.socket,
    fork_hooks: ForkHooks,
    folder: str,
    num_calls: memoryview,
) -> None:
    job = wire.receive(result, wire.MAX_JOB_BYTES)
    try:
        case = case_of(job["test"], job["helpers"])
    except Exception as error:  # noqa: BLE001 - any fault in trusted text is one of the dataset
        wire.send(result, _unusable(error))
        return
    if not case.may_leave_traces:
        wire.send(result, judge(candidate, job, case, num_calls))
        return
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):  # the worker has to hear of it
            os.kill(os.getpid(), os.WTERMSIG(status))
        return
    try:
        control.close()  # its end tells that the judge has ended
        for hooks in fork_hooks:  # not in the judge, whose random numbers they would change at the fork above
            os.register_at_fork(**hooks)
        os.chdir(folder)  # not in the judge, which would hold the files of the last program there
        os.umask(0)  # the program may have another uid, and may change what the test has written for it
        wire.send(result, judge(candidate, job, case, num_calls))
    finally:
        os._exit(0)
