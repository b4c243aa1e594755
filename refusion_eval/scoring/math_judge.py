"""Decides whether two mathematical answers are equal: item by item, by spelling and then by the math-verify library.

The library guards itself with SIGALRM, which works in a main thread only and cannot interrupt everything. Here it runs
in child processes that are killed when a comparison takes too long.
"""

import re
import threading
from pathlib import Path
from typing import NamedTuple

from refusion_eval.benchmarks.extract.formulas import equal_answers
from refusion_eval.errors import DataError
from refusion_eval.untrusted import Child

_WORKER = Path(__file__).with_name("math_worker.py")
_PERCENT = re.compile(r"%|\bper ?cent\b|\bpct\b")


class Comparison(NamedTuple):
    """Whether two answers are equal, and what decided it."""

    equal: bool
    reason: str


class Pair(NamedTuple):
    """A right answer and a given one as found in their boxes; with `whole`, a solution and a response as they are."""

    gold: str
    answer: str
    whole: bool = False


class _Undecided(Exception):
    """The library gave no verdict."""


class Comparer:
    """Compares answers, by child processes that are kept from one comparison to the next. Threads may share it.

    Args:
        timeout_s: seconds for one comparison; a slower one counts as unequal, with that reason.
    """

    def __init__(self, timeout_s: float = 10.0) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._is_closed = False

    def compare(self, gold: str, answer: str, whole: bool = False) -> Comparison:
        """Compares two answers as found in their boxes, by the values that they list; or two whole texts."""
        seconds_left = self._timeout_s
        num_asked = 0

        def ask(gold: str, answer: str) -> bool:
            nonlocal seconds_left, num_asked
            equal, seconds = self._ask(Pair(gold, answer, whole), max(seconds_left, 0))
            if equal is None:
                raise _Undecided
            seconds_left -= seconds
            num_asked += 1
            return equal

        try:
            equal = ask(gold, answer) if whole else equal_answers(gold, answer, ask)
        except _Undecided:
            return Comparison(False, f"the comparison took more than {self._timeout_s:g} s or crashed")
        if not equal:
            return Comparison(False, "not equal")
        reason = "equal by math-verify" if num_asked else "the same in another spelling"
        # A percent sign is read as a unit, so answers may be equal although only one of them has it.
        if not whole and bool(_PERCENT.search(gold)) != bool(_PERCENT.search(answer)):
            reason += ", but for a percent sign"
        return Comparison(True, reason)

    def _ask(self, pair: Pair, timeout_s: float) -> tuple[bool | None, float]:
        """The library's verdict or None, and its seconds without those of a process that starts."""
        with self._lock:
            child = self._idle.pop() if self._idle else Child(_WORKER, Pair("1", "1"))
            self._busy.add(child)
        before_s = child.seconds
        try:
            equal = child.ask(pair, timeout_s)
        except ChildProcessError as error:
            raise DataError("math-verify does not run; install it: pip install 'math-verify[antlr4_11_0]'") from error
        finally:
            with self._lock:
                self._busy.discard(child)
                self._idle.append(child)
        if self._is_closed:
            self.close()
            raise DataError("the comparison was given up")  # the child's death says nothing about the answer
        return equal, child.seconds - before_s

    def close(self) -> None:
        """Ends the child processes; comparisons under way are given up."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for child in idle:
            child.close()
        for child in busy:
            child.kill()
