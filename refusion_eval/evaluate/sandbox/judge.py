"""The judge's side: run the dataset's test in a process of its own, with the candidate's names bound to handles.

The only way to pass is that this process reaches the end of the test. What the candidate prints, returns as exit code
or sends unasked cannot make it pass.
"""

import ast
import builtins
import contextlib
import importlib
import socket
import sys
import traceback
from typing import Any, NamedTuple

from refusion_eval.evaluate.sandbox import wire
from refusion_eval.evaluate.sandbox.proxy import Broken, Candidate

_TEST_FILE = "<test>"
_MAX_DETAIL_CHARS = 300


class Outcome(NamedTuple):
    """Reason (a key of `verdict.STATUS_OF_REASON`) and one line of detail."""

    reason: str
    detail: str


class Names(NamedTuple):
    """Names that a test reads and does not define itself.

    Attributes:
        wanted: names that only the candidate can supply.
        modules: standard modules used as `module.attribute`.
    """

    wanted: list[str]
    modules: list[str]


def judge(sock: socket.socket, job: dict[str, str]) -> Outcome:
    """Run one test against the candidate at the other end of `sock`.

    Args:
        sock: connection to the candidate's process.
        job: "candidate", "test" and "helpers", all source text.
    """
    if not job["candidate"].strip():
        return Outcome("no_code", "the program is empty")
    try:
        test = ast.parse(job["test"], _TEST_FILE)
        code = compile(test, _TEST_FILE, "exec", dont_inherit=True)
        namespace = _trusted(job["helpers"])
    except Exception as error:  # noqa: BLE001 - any fault in trusted text is ours
        return Outcome("sandbox_error", f"the test or its helpers cannot be used: {_one_line(error)}")
    candidate = Candidate(sock)
    try:
        candidate.wait_until_ready()
    except (RuntimeError, OSError) as error:
        return Outcome("sandbox_error", str(error))
    outcome = _run(candidate, job, code, names_of(test, set(namespace)), namespace)
    if outcome.reason == "passed" and candidate.broken:
        return Outcome(candidate.broken.reason, candidate.broken.detail)
    return outcome


def _run(candidate: Candidate, job: dict[str, str], code: Any, names: Names, namespace: dict[str, Any]) -> Outcome:
    try:
        found = candidate.load(job["candidate"], names.wanted)
    except Broken as broken:
        return Outcome(broken.reason, broken.detail)
    except SyntaxError as error:
        return Outcome("syntax_error", _one_line(error))
    except Exception as error:  # noqa: BLE001 - whatever the candidate's import raised
        return _raised(candidate, error)
    try:
        namespace.update({name: importlib.import_module(name) for name in names.modules})
        namespace.update(found)
        exec(code, namespace)  # the dataset's test, trusted
    except Broken as broken:
        return Outcome(broken.reason, broken.detail)
    except BaseException as error:  # noqa: BLE001 - whatever ends a test early is its verdict
        return _raised(candidate, error)
    return Outcome("passed", "")


def names_of(test: ast.Module, known: set[str]) -> Names:
    """Find what a test must be given.

    A builtin stays the judge's own, or a candidate could redefine abs() and agree with everything. Only a test that
    names nothing else (MBPP 126 tests a function called `sum`) takes builtins from the candidate.

    Args:
        test: parsed test.
        known: names defined by trusted helpers.
    """
    nodes = list(ast.walk(test))
    defined = set(known)
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            defined.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    read = {node.id for node in nodes if isinstance(node, ast.Name)} - defined
    owners = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    modules = read & owners & sys.stdlib_module_names
    wanted = read - modules - set(vars(builtins)) or read & set(vars(builtins))
    return Names(sorted(wanted), sorted(modules))


def _trusted(helpers: str) -> dict[str, Any]:
    """Namespace with the helpers' definitions, less the placeholders (only a docstring, or imports besides)."""
    namespace: dict[str, Any] = {"__name__": "judge"}
    tree = ast.parse(helpers)
    tree.body = [node for node in tree.body if not _is_placeholder(node)]
    exec(compile(tree, "<helpers>", "exec", dont_inherit=True), namespace)  # the dataset's prompt, trusted
    return namespace


def _is_placeholder(node: ast.stmt) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return all(
        isinstance(step, ast.Pass | ast.Import | ast.ImportFrom)
        or (isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant))
        for step in node.body
    )


def _raised(candidate: Candidate, error: BaseException) -> Outcome:
    """Say why a test ended with an exception."""
    for remote, class_name in candidate.remote_errors:
        if remote is error:
            reason = "memory" if isinstance(error, MemoryError) else "raised"
            return Outcome(reason, f"{class_name}: {error}"[:_MAX_DETAIL_CHARS])
    if isinstance(error, AssertionError):
        wrong_type = candidate.compared_with_data
        return Outcome("wrong_type" if wrong_type else "failed_assertion", _where(error))
    if isinstance(error, ImportError):
        return Outcome("sandbox_error", f"the test needs what is not here: {_one_line(error)}")
    if isinstance(error, NameError):
        return Outcome("no_code", f"the program does not define it: {_one_line(error)}")
    if isinstance(error, MemoryError):
        return Outcome("output_limit", "the values are too large for the judge")
    if isinstance(error, TypeError | AttributeError):
        return Outcome("wrong_type", f"{_where(error)}: {_one_line(error)}")
    return Outcome("raised", f"{_where(error)}: {_one_line(error)}")


def _where(error: BaseException) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _TEST_FILE]
    return f"line {lines[-1]} of the test" if lines else "the test"


def _one_line(error: BaseException) -> str:
    text = "?"
    with contextlib.suppress(Exception):  # the message may hold a handle whose text cannot be had
        text = str(error)
    return f"{type(error).__name__}: {text}".replace("\n", " ")[:_MAX_DETAIL_CHARS]


def serve(result_sock: socket.socket, candidate_sock: socket.socket) -> None:
    """Read one job from `result_sock`, judge it, and write its outcome back."""
    job = wire.receive(result_sock)
    wire.send(result_sock, list(judge(candidate_sock, job)))
