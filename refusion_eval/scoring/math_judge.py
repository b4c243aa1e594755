"""Decides whether two mathematical answers are equal: by normal form first, then by the math-verify library.

The library guards itself with SIGALRM, which works in a main thread only and cannot interrupt everything. Here it runs
without, in child processes that are killed when a comparison takes too long.
"""

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from refusion_eval.benchmarks.extract.formulas import equal_by_form, normalise
from refusion_eval.errors import DataError

_WORKER = Path(__file__).with_name("math_worker.py")
_LONGEST_ANSWER = 1000
# The first comparison of a child also waits for its imports.
_START_SECONDS = 60.0


class Comparison(NamedTuple):
    """Whether two answers are equal, and what decided it."""

    equal: bool
    reason: str


class _Child:
    """One worker process, started when first asked and again after each kill."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def equal(self, gold: str, answer: str, timeout_s: float) -> bool | None:
        """The library's verdict; None if it took too long, or if the process died and another one as well."""
        for _ in range(2):
            process = self._process or self._start()
            line = self._ask(process, gold, answer, timeout_s)
            if line is not None and line.endswith(b"\n"):
                return bool(json.loads(line))
            self.close()
            if line is None:
                return None
        return None

    @staticmethod
    def _ask(process: subprocess.Popen[bytes], gold: str, answer: str, timeout_s: float) -> bytes | None:
        """The answer's line, not a whole one if the process died; None if there is none in time."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return b""
        ready, _, _ = select.select([process.stdout], [], [], timeout_s)
        return process.stdout.readline() if ready else None

    def _start(self) -> subprocess.Popen[bytes]:
        """Starts the script and waits until it answers; -P keeps this folder's modules from shadowing others."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        if self._ask(self._process, "1", "1", _START_SECONDS) != b"true\n":
            raise DataError("math-verify does not run; install it: pip install 'math-verify[antlr4_11_0]'")
        return self._process

    def close(self) -> None:
        """Kills the process, if there is one, and frees its pipes."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def compare_all(
    pairs: Sequence[tuple[str, str]],
    *,
    workers: int | None = None,
    timeout_s: float = 10.0,
    on_done: Callable[[], None] | None = None,
) -> list[Comparison]:
    """Compares gold answers with given answers.

    Args:
        pairs: (gold, answer), as found in their boxes.
        workers: child processes at most; the number of processors if None. None is started while forms are equal.
        timeout_s: seconds for one comparison; a slower one counts as unequal, with that reason.
        on_done: called after each distinct pair that needed the library.

    Returns:
        One comparison a pair, in order. Comparing is symmetrical.

    Raises:
        DataError: the library is not installed.
    """
    forms = {pair: (normalise(pair[0]), normalise(pair[1])) for pair in pairs}
    by_form = {pair: equal_by_form(*form) for pair, form in forms.items()}
    decided = {
        pair: Comparison(equal, "the same after normalisation" if equal else "another number base or half of the day")
        for pair, equal in by_form.items()
        if equal is not None
    }
    left = {pair: form for pair, form in forms.items() if by_form[pair] is None}
    decided.update(_compare_by_library(left, workers or os.cpu_count() or 1, timeout_s, on_done))
    return [_name_percent(decided[pair], pair) for pair in pairs]


def _name_percent(comparison: Comparison, pair: tuple[str, str]) -> Comparison:
    """Says so where answers are equal although only one has a percent sign, which is read as a unit."""
    if comparison.equal and ("%" in pair[0]) != ("%" in pair[1]):
        return Comparison(True, f"{comparison.reason}, but for a percent sign")
    return comparison


def _compare_by_library(
    forms: dict[tuple[str, str], tuple[str, str]],
    workers: int,
    timeout_s: float,
    on_done: Callable[[], None] | None,
) -> dict[tuple[str, str], Comparison]:
    local = threading.local()
    children: list[_Child] = []

    def compare(pair: tuple[str, str]) -> Comparison:
        if not hasattr(local, "child"):
            local.child = _Child()
            children.append(local.child)
        verdict = _library_verdict(local.child, forms[pair], timeout_s)
        if on_done is not None:
            on_done()
        return verdict

    if not forms:
        return {}
    try:
        with ThreadPoolExecutor(max_workers=min(workers, len(forms))) as pool:
            return dict(zip(forms, pool.map(compare, forms), strict=True))
    finally:
        for child in children:
            child.close()


def _library_verdict(child: _Child, form: tuple[str, str], timeout_s: float) -> Comparison:
    r"""Asks about the normal forms: as written, "111, \!111" would be read as a set that holds 111 once."""
    if max(map(len, form)) > _LONGEST_ANSWER:
        return Comparison(False, f"longer than {_LONGEST_ANSWER} characters")
    equal = child.equal(*form, timeout_s)
    if equal is None:
        return Comparison(False, f"the comparison took more than {timeout_s:g} s or crashed")
    return Comparison(equal, "equal by math-verify" if equal else "not equal")
