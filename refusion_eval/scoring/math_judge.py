"""Decides whether two mathematical answers are equal: item by item, by spelling and then by the math-verify library.

The library guards itself with SIGALRM, which works in a main thread only and cannot interrupt everything. Here it runs
without, in child processes that are killed when a comparison takes too long.
"""

import json
import re
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from refusion_eval.benchmarks.extract.formulas import equal_answers
from refusion_eval.errors import DataError

_WORKER = Path(__file__).with_name("math_worker.py")
_PERCENT = re.compile(r"%|\bper ?cent\b|\bpct\b")
# The first comparison of a child also waits for its imports.
_START_SECONDS = 60.0


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


class _Child:
    """One worker process, started when first asked and again after each kill."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_given_up = False

    def equal(self, pair: Pair, timeout_s: float) -> tuple[bool | None, float]:
        """The library's verdict, None if it took too long or if two processes died; and the seconds without a start."""
        seconds = 0.0
        for _ in range(2):
            if self._is_given_up:
                break
            process = self._process or self._start()
            started = time.monotonic()
            line = self._ask(process, pair, timeout_s)
            seconds += time.monotonic() - started
            if line is not None and line.endswith(b"\n"):
                return bool(json.loads(line)), seconds
            self.close()
            if line is None:
                break
        return None, seconds

    @staticmethod
    def _ask(process: subprocess.Popen[bytes], pair: Pair, timeout_s: float) -> bytes | None:
        """The answer's line, not a whole one if the process died; None if there is none in time."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(pair).encode() + b"\n")
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
        if self._ask(self._process, Pair("1", "1"), _START_SECONDS) != b"true\n":
            raise DataError("math-verify does not run; install it: pip install 'math-verify[antlr4_11_0]'")
        return self._process

    def kill(self) -> None:
        """Kills the process while another thread waits for its answer; that thread sees the end of the pipe."""
        self._is_given_up = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Kills the process, if there is one, and frees its pipes."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


class Comparer:
    """Compares answers, by child processes that are kept from one comparison to the next. Threads may share it.

    Args:
        timeout_s: seconds for one comparison; a slower one counts as unequal, with that reason.
    """

    def __init__(self, timeout_s: float = 10.0) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()
        self._is_closed = False

    def compare(self, gold: str, answer: str, whole: bool = False) -> Comparison:
        """Compares two answers as found in their boxes, by the values that they list; or two whole texts.

        Raises:
            DataError: the library is not installed, or `close` came first.
        """
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
        with self._lock:
            child = self._idle.pop() if self._idle else _Child()
            self._busy.add(child)
        try:
            answered = child.equal(pair, timeout_s)
        finally:
            with self._lock:
                self._busy.discard(child)
                self._idle.append(child)
        if self._is_closed:
            self.close()
            raise DataError("the comparison was given up")  # the child's death says nothing about the answer
        return answered

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
