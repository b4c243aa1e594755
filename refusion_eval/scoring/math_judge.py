"""Decides whether two mathematical answers are equal: by normal form first, then by the math-verify library.

The library guards itself with SIGALRM, which works in a main thread only and cannot interrupt everything. Here it runs
without, in child processes that are killed when a comparison takes too long.
"""

import re
import threading
from pathlib import Path
from typing import NamedTuple

from refusion_eval.benchmarks.extract.formulas import equal_by_form, in_one_order, normalise
from refusion_eval.child import Child
from refusion_eval.errors import DataError

_WORKER = Path(__file__).with_name("math_worker.py")
_LONGEST_ANSWER = 1000
_PERCENT = re.compile(r"%|\bper ?cent\b")


class Comparison(NamedTuple):
    """Whether two answers are equal, and what decided it."""

    equal: bool
    reason: str


class Pair(NamedTuple):
    """A right answer and a given one as found in their boxes; with `whole`, a solution and a response as they are."""

    gold: str
    answer: str
    whole: bool = False


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
        """Compares two answers as found in their boxes, by their normal forms first; or two whole texts.

        Raises:
            DataError: the library is not installed, or `close` came first.
        """
        if whole:
            return self._compare_by_library(Pair(gold, answer, whole))
        form = (normalise(gold), normalise(answer))
        ordered = in_one_order(*form)
        if ordered is None:
            return Comparison(False, "a tuple and a set")
        equal = equal_by_form(*ordered)
        if equal is None:
            comparison = self._compare_forms(Pair(*ordered))
        else:
            comparison = Comparison(
                equal, "the same after normalisation" if equal else "another number base or half of the day"
            )
        # A percent sign is read as a unit, so answers may be equal although only one of them has it.
        if comparison.equal and bool(_PERCENT.search(gold)) != bool(_PERCENT.search(answer)):
            return Comparison(True, f"{comparison.reason}, but for a percent sign")
        return comparison

    def _compare_forms(self, form: Pair) -> Comparison:
        r"""Asks about the normal forms: as written, "111, \!111" would be read as a set that holds 111 once."""
        if max(len(form.gold), len(form.answer)) > _LONGEST_ANSWER:
            return Comparison(False, f"longer than {_LONGEST_ANSWER} characters")
        return self._compare_by_library(form)

    def _compare_by_library(self, pair: Pair) -> Comparison:
        with self._lock:
            child = self._idle.pop() if self._idle else Child(_WORKER, Pair("1", "1"))
            self._busy.add(child)
        try:
            equal = child.ask(pair, self._timeout_s)
        except ChildProcessError as error:
            raise DataError("math-verify does not run; install it: pip install 'math-verify[antlr4_11_0]'") from error
        finally:
            with self._lock:
                self._busy.discard(child)
                self._idle.append(child)
        if self._is_closed:
            self.close()
            raise DataError("the comparison was given up")  # the child's death says nothing about the answer
        if equal is None:
            return Comparison(False, f"the comparison took more than {self._timeout_s:g} s or crashed")
        return Comparison(equal, "equal by math-verify" if equal else "not equal")

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
