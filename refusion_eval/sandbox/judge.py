"""The judge: runs the dataset's test in a process of its own, with the candidate's names bound to handles.

A program passes only if this process reaches the end of the test. Nothing that the candidate prints, returns as its
exit code or sends unasked can make it pass.
"""

import ast
import builtins
import contextlib
import decimal
import gc
import importlib
import os
import random
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from refusion_eval.sandbox import linux, wire
from refusion_eval.sandbox.proxy import Broken, Candidate
from refusion_eval.sandbox.watch import GOES_ON

_TEST_FILE = "<test>"
_MAX_DETAIL_CHARS = 300
_MOST_KEPT_KIB = 256 << 10  # peak resident memory; the allocator does not always return that of a large value

# A judge that is kept from check to check must not carry anything from one test to the next. So it runs by itself only
# tests that can be seen to work on their own names alone, and forks for all others.

# Modules whose functions keep no state but caches. The numbers of `random` begin anew with every check.
# fmt: off
_STATELESS_MODULES = frozenset((
    "bisect", "cmath", "collections", "copy", "datetime", "fractions", "functools", "hashlib", "heapq", "itertools",
    "json", "math", "numbers", "operator", "random", "re", "statistics", "string", "typing",
))
# Names that reach further, wherever they are read from and whatever they are called afterwards.
_REACHING_NAMES = frozenset((
    "breakpoint", "compile", "delattr", "eval", "exec", "exit", "getattr", "globals", "help", "input", "locals", "open",
    "quit", "setattr", "vars", "attrgetter", "get_type_hints", "gi_frame", "methodcaller", "register",
    "total_ordering", "update_wrapper", "wraps",
))
# fmt: on
_BUILTINS = frozenset(vars(builtins))


def _shared() -> frozenset[str]:
    """Names under which the stateless modules hold objects that can be changed: other modules, and containers."""
    return frozenset(
        name
        for module in _STATELESS_MODULES
        for name, value in vars(importlib.import_module(module)).items()
        if isinstance(value, ModuleType | list | dict | set) and name not in _STATELESS_MODULES | {"abc"}
    )


_REACHING = _REACHING_NAMES | _shared()


class Names(NamedTuple):
    """Names that a test must be given: those that only the candidate can supply, and standard modules."""

    wanted: list[str]
    modules: list[str]


class Analysis(NamedTuple):
    """Result of the analysis of a test or of its helpers.

    Attributes:
        foreign: names that the source reads and does not define.
        owners: names whose attributes the source reads.
        reaches_out: whether a statement may change more than names of the source, whatever these names are.
    """

    foreign: frozenset[str]
    owners: frozenset[str]
    reaches_out: bool

    @property
    def may_leave_traces(self) -> bool:
        """Whether running the source may change more than its own names."""
        modules = self.foreign & self.owners & sys.stdlib_module_names
        return self.reaches_out or not modules <= _STATELESS_MODULES

    def names(self, known: set[str]) -> Names:
        """Find the names that the test must be given besides those that trusted helpers define (`known`).

        A builtin stays the judge's own, or a candidate could redefine abs() and agree with everything. Only a test that
        names nothing else (MBPP 126 tests a function called `sum`) takes builtins from the candidate.
        """
        read = self.foreign - known
        modules = read & self.owners & sys.stdlib_module_names
        wanted = read - modules - _BUILTINS or read & _BUILTINS
        return Names(sorted(wanted), sorted(modules))


def analyse(tree: ast.Module) -> Analysis:
    """Analyse a parsed test, or its helpers."""
    defined: set[str] = set()
    used: set[str] = set()
    owners: set[str] = set()
    reaches_out = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
            reaches_out |= node.id.startswith("__") or node.id in _REACHING
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name):
                owners.add(node.value.id)
            # An attribute that is changed, or a private one.
            reaches_out |= not isinstance(node.ctx, ast.Load) or node.attr.startswith("_") or node.attr in _REACHING
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.ClassDef | ast.AsyncFunctionDef):
            defined.add(node.name)
            reaches_out = True  # not followed
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
            reaches_out |= not all(map(_is_harmless, _imported(node)))
    return Analysis(frozenset(used - defined), frozenset(owners), reaches_out)


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Dotted names that a statement imports, each from its top-level module on."""
    start = f"{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
    return [start + alias.name for alias in node.names]


def _is_harmless(dotted: str) -> bool:
    module, *parts = dotted.split(".")
    return module in _STATELESS_MODULES and not any(part.startswith("_") or part in _REACHING for part in parts)


class JudgeResult(NamedTuple):
    """Reason (a key of `result.STATUS_OF_REASON`) and one line of detail."""

    reason: str
    detail: str


class Case(NamedTuple):
    """A parsed test and its helpers. Helpers that are placeholders (a docstring and imports only) are left out."""

    test: ast.Module
    helpers: ast.Module
    analysis: Analysis

    @property
    def may_leave_traces(self) -> bool:
        """Whether running the test may change the judge's process."""
        return self.analysis.may_leave_traces or analyse(self.helpers).may_leave_traces


def case_of(job: dict[str, str]) -> Case:
    """Parse a job's trusted texts; any exception is a fault of the dataset."""
    test = ast.parse(job["test"], _TEST_FILE)
    helpers = ast.parse(job["helpers"])
    helpers.body = [node for node in helpers.body if not _is_placeholder(node)]
    return Case(test, helpers, analyse(test))


def judge(sock: socket.socket, program: str, case: Case) -> JudgeResult:
    """Run one test against the process at the other end of `sock`, which is to load the candidate's `program`."""
    namespace: dict[str, Any] = {"__name__": "judge"}
    try:
        code = compile(case.test, _TEST_FILE, "exec", dont_inherit=True)
        exec(compile(case.helpers, "<helpers>", "exec", dont_inherit=True), namespace)  # the dataset's prompt, trusted
    except Exception as error:  # noqa: BLE001 - any fault in trusted text is ours
        return _unusable(error)
    candidate = Candidate(sock)
    try:
        candidate.wait_until_ready()
    except (RuntimeError, OSError) as error:
        return JudgeResult("sandbox_error", str(error))
    outcome = _run(candidate, program, code, case.analysis.names(set(namespace)), namespace)
    if outcome.reason == "passed" and candidate.broken:
        return JudgeResult(candidate.broken.reason, candidate.broken.detail)
    return outcome


def _unusable(error: Exception) -> JudgeResult:
    return JudgeResult("sandbox_error", f"the test or its helpers cannot be used: {_one_line(error)}")


def _run(candidate: Candidate, program: str, code: Any, names: Names, namespace: dict[str, Any]) -> JudgeResult:
    try:
        found = candidate.load(program, names.wanted)
    except Broken as broken:
        return JudgeResult(broken.reason, broken.detail)
    except SyntaxError as error:
        return JudgeResult("syntax_error", _one_line(error))
    except Exception as error:  # noqa: BLE001 - whatever the candidate's import raised
        return _raised(candidate, error)
    try:
        namespace.update({name: importlib.import_module(name) for name in names.modules})
        namespace.update(found)
        exec(code, namespace)  # the dataset's test, trusted
    except Broken as broken:
        return JudgeResult(broken.reason, broken.detail)
    except BaseException as error:  # noqa: BLE001 - whatever ends a test early is its verdict
        return _raised(candidate, error)
    return JudgeResult("passed", "")


def _is_placeholder(node: ast.stmt) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return all(
        isinstance(step, ast.Pass | ast.Import | ast.ImportFrom)
        or (isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant))
        for step in node.body
    )


def _raised(candidate: Candidate, error: BaseException) -> JudgeResult:
    """Say why a test ended with an exception."""
    for remote, class_name in candidate.remote_errors:
        if remote is error:
            reason = "memory" if isinstance(error, MemoryError) else "raised"
            return JudgeResult(reason, f"{class_name}: {error}"[:_MAX_DETAIL_CHARS])
    if isinstance(error, AssertionError):
        wrong_type = candidate.compared_with_data
        return JudgeResult("wrong_type" if wrong_type else "failed_assertion", _where(error))
    if isinstance(error, ImportError):
        return JudgeResult("sandbox_error", f"the test needs what is not here: {_one_line(error)}")
    if isinstance(error, NameError):
        return JudgeResult("no_code", f"the program does not define it: {_one_line(error)}")
    if isinstance(error, MemoryError):
        return JudgeResult("output_limit", "the values are too large for the judge")
    if isinstance(error, TypeError | AttributeError):
        return JudgeResult("wrong_type", f"{_where(error)}: {_one_line(error)}")
    return JudgeResult("raised", f"{_where(error)}: {_one_line(error)}")


def _where(error: BaseException) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _TEST_FILE]
    return f"line {lines[-1]} of the test" if lines else "the test"


def _one_line(error: BaseException) -> str:
    text = "?"
    with contextlib.suppress(Exception):  # the message may hold a handle whose text cannot be had
        text = str(error)
    return f"{type(error).__name__}: {text}".replace("\n", " ")[:_MAX_DETAIL_CHARS]


def serve(control: socket.socket, fork_hooks: list[dict[str, Callable[[], object]]]) -> None:
    """Judge one job after another until `control` is closed, or until this process has grown too large to be kept.

    Each message on `control` is one byte with two descriptors: where the job is read from and its outcome written to,
    and the connection to the candidate. A job done is answered with `GOES_ON`, or by the end of this process. The
    `fork_hooks` of `layout.preload` are for tests that fork.
    """
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            return
        with socket.socket(fileno=fds[0]) as result, socket.socket(fileno=fds[1]) as candidate:
            _serve_one(control, result, candidate, fork_hooks)
        gc.collect()  # an exception holds the frames it passed, and these the test's memory
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > _MOST_KEPT_KIB:
            return
        control.send(GOES_ON)


def _serve_one(
    control: socket.socket,
    result: socket.socket,
    candidate: socket.socket,
    fork_hooks: list[dict[str, Callable[[], object]]],
) -> None:
    job = wire.receive(result)
    random.seed(0)  # the same program gives the same verdict
    decimal.setcontext(decimal.Context())  # reckoning with a program's numbers raises flags in it
    if not job["candidate"].strip():
        wire.send(result, list(JudgeResult("no_code", "the program is empty")))
        return
    try:
        case = case_of(job)
    except Exception as error:  # noqa: BLE001 - any fault in trusted text is ours
        wire.send(result, list(_unusable(error)))
        return
    if not case.may_leave_traces:
        wire.send(result, list(judge(candidate, job["candidate"], case)))
        return
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):  # the worker has to hear of it
            os.kill(os.getpid(), os.WTERMSIG(status))
        return
    try:
        linux.die_with_parent(signal.SIGKILL)
        control.close()  # its end tells that the judge has ended
        for hooks in fork_hooks:  # not in the judge, whose random numbers they would change at the fork above
            os.register_at_fork(**hooks)
        wire.send(result, list(judge(candidate, job["candidate"], case)))
    finally:
        os._exit(0)
