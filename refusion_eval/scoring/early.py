"""Verdicts on programs that are reached while other requests are still being decoded.

lm-eval's filters, which score a task, run after the last response and are handed nothing but rows and texts. So what
was judged before is kept in one place of the process, under row and text, and the scoring asks there first.
"""

import os
from collections.abc import Callable, Sequence
from typing import Protocol

from refusion_eval.benchmarks import BENCHMARKS, Row
from refusion_eval.runs.job import doc_hash
from refusion_eval.scoring.judge import ERROR, Judged

# "none" runs model-written code without isolation; lm-eval gives a filter no other way to learn of it.
SANDBOX_VARIABLE = "REFUSION_EVAL_SANDBOX"

# Tasks that are scored by this project's filters.
OWN_TASKS = ("mini_", "refusion_")

# Waits for a verdict; None if there is none, for whatever reason: then the program is judged again, here.
Verdict = Callable[[], Judged | None]


class Judge(Protocol):
    """Judges a program somewhere else than in this thread."""

    def submit(self, benchmark: str, row: Row, text: str, sandbox: str) -> Verdict:
        """Begins to judge a text; arguments as those of `judge_texts`."""
        ...


class EarlyVerdicts:
    """Verdicts under way, each for one row and text.

    Args:
        judge: reaches them.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._under_way: dict[tuple[str, str, str, str], Verdict] = {}

    def begin(self, task: str, benchmark: str, row: Row, text: str) -> None:
        """Begins to judge a response, if it is a program that this project will be asked about."""
        known = BENCHMARKS.get(benchmark)
        if known is None or known.kind != "code" or not task.startswith(OWN_TASKS):
            return
        sandbox = sandbox_in_force()
        key = (benchmark, doc_hash(row), text, sandbox)
        if key not in self._under_way:
            self._under_way[key] = self._judge.submit(benchmark, row, text, sandbox)

    def verdicts(self, benchmark: str, items: Sequence[tuple[Row, str]], sandbox: str) -> list[Judged | None]:
        """What was reached for rows and texts, after a wait for what is under way; None where there is nothing."""
        return [self._verdict((benchmark, doc_hash(row), text, sandbox)) for row, text in items]

    def _verdict(self, key: tuple[str, str, str, str]) -> Judged | None:
        verdict = self._under_way[key]() if key in self._under_way else None
        # A sandbox that failed elsewhere says nothing about the program.
        return None if verdict is None or verdict.verdict == ERROR else verdict


_in_force: list[EarlyVerdicts] = []


def keep(verdicts: EarlyVerdicts) -> None:
    """Lets the scoring of this process ask for these verdicts."""
    _in_force.append(verdicts)


def forget(verdicts: EarlyVerdicts) -> None:
    """Ends what `keep` began; harmless if it did not."""
    if verdicts in _in_force:
        _in_force.remove(verdicts)


def known_verdicts(benchmark: str, items: Sequence[tuple[Row, str]], sandbox: str) -> list[Judged | None]:
    """Verdicts on rows and texts as far as any were reached early, by the run that began last."""
    if not _in_force or BENCHMARKS[benchmark].kind != "code":
        return [None] * len(items)
    return _in_force[-1].verdicts(benchmark, items, sandbox)


def sandbox_in_force() -> str:
    """How model-written code is run: "auto" or "none"."""
    return os.environ.get(SANDBOX_VARIABLE, "auto")
