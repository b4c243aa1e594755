"""Judges texts: an extraction rule, then the comparison of the benchmark's kind. A function of rows and texts alone.

`judge_texts` judges a list at once; a `Judge` takes texts one by one while others are generated. Both serve texts that
a run generates, the records of a run, and texts that were generated elsewhere.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

from refusion_eval.benchmarks import Benchmark, Extraction, Row
from refusion_eval.benchmarks.extract import answers
from refusion_eval.errors import DataError
from refusion_eval.sandbox import CheckResult, Program, check_programs, default_workers
from refusion_eval.scoring.math_judge import Comparer, Comparison, compare_all

log = logging.getLogger(__name__)

CORRECT, WRONG, NO_ANSWER, MISSING, ERROR = "correct", "wrong", "no_answer", "missing", "error"

_VERDICT_OF_STATUS = {"passed": CORRECT, "failed": WRONG, "timed_out": "timed_out", "killed": "killed", "error": ERROR}


class Verdict(NamedTuple):
    """The judgement of one text.

    Attributes:
        extracted: the answer that was judged, or None.
        verdict: "correct", "wrong", "no_answer" (nothing extracted), "missing" (no text for the item); for code also
            "timed_out", "killed" and "error" (the sandbox failed: says nothing about the text, never counts as wrong).
        reason: what decided, in words.
        tier: for code, the isolation it ran under: "A", "B", "C" or "none"; else empty.
    """

    extracted: str | None
    verdict: str
    reason: str
    tier: str = ""

    @property
    def passed(self) -> bool:
        """Whether the text is right."""
        return self.verdict == CORRECT


OnVerdict = Callable[[int, Verdict], None]


def judge_texts(
    benchmark: Benchmark,
    items: Sequence[tuple[Row, str]],
    *,
    filter_name: str | None = None,
    workers: int | None = None,
    sandbox: str = "auto",
    on_verdict: OnVerdict | None = None,
) -> list[Verdict]:
    """Extracts and judges texts; code and formulas go through pools of processes.

    Args:
        benchmark: extracts the answers and knows the right ones.
        items: (row, text).
        filter_name: another extraction rule than the benchmark's first.
        workers: processes for code and for formulas; a number that suits the machine if None.
        sandbox: "auto", or "none" for no isolation (code of people you trust only).
        on_verdict: called with an item's index and verdict as each becomes known, by one thread at a time.

    Returns:
        One verdict an item, in order.

    Raises:
        DataError: there is no such filter, or a right answer is malformed.
        SandboxError: code cannot be run in isolation on this machine.
    """
    extractions = [benchmark.extract(text, row, filter_name) for row, text in items]
    rows = [row for row, _ in items]
    return judge_extractions(benchmark, rows, extractions, workers=workers, sandbox=sandbox, on_verdict=on_verdict)


def judge_extractions(
    benchmark: Benchmark,
    rows: Sequence[Row],
    extractions: Sequence[Extraction],
    *,
    workers: int | None = None,
    sandbox: str = "auto",
    on_verdict: OnVerdict | None = None,
) -> list[Verdict]:
    """Judges what any rule extracted; `extractions` goes with `rows`, the rest is as in `judge_texts`."""
    verdicts: dict[int, Verdict] = {}

    def settle(index: int, verdict: Verdict) -> None:
        verdicts[index] = verdict
        if on_verdict is not None:
            on_verdict(index, verdict)

    answered = []  # indices of the texts that have an answer
    for index, extraction in enumerate(extractions):
        if extraction.answer is None:
            settle(index, Verdict(None, NO_ANSWER, extraction.how))
        elif benchmark.kind in ("number", "choice"):
            settle(index, _judge_value(benchmark, rows[index], extraction))
        else:
            answered.append(index)
    if benchmark.kind == "code":
        programs = [_program(benchmark, rows[index], extractions[index]) for index in answered]
        check_programs(
            programs,
            workers=workers,
            sandbox=sandbox,
            on_done=lambda number, result: settle(
                answered[number], _verdict_of_check(extractions[answered[number]], result)
            ),
        )
    elif benchmark.kind == "mathematics":
        golds = [benchmark.gold(rows[index]) for index in answered]
        compare_all(
            [(gold, str(extractions[index].answer)) for gold, index in zip(golds, answered, strict=True)],
            workers=workers,
            on_done=lambda number, comparison: settle(
                answered[number], _verdict_of_comparison(extractions[answered[number]], golds[number], comparison)
            ),
        )
    return [verdicts[index] for index in range(len(rows))]


class _DaemonThreads:
    """Threads that work off calls, started when they are needed.

    An executor of the standard library joins its threads when the process exits, so a process that a signal ends would
    wait for a program that takes its whole time limit.

    Args:
        number: largest number of threads; None is `default_workers()`.
    """

    def __init__(self, number: int | None) -> None:
        self._number = number
        self._num_started = 0
        self._calls: SimpleQueue[tuple[Future[Verdict], Callable[[], Verdict]] | None] = SimpleQueue()

    def submit(self, call: Callable[[], Verdict]) -> Future[Verdict]:
        """Begins a call; the future takes its result or its exception."""
        self._number = self._number or default_workers()
        future: Future[Verdict] = Future()
        self._calls.put((future, call))
        if self._num_started < self._number:
            self._num_started += 1
            threading.Thread(target=self._work, name=f"judge-{self._num_started}", daemon=True).start()
        return future

    def close(self) -> None:
        """Cancels the calls that no thread has begun; the threads end."""
        with suppress(Empty):
            while True:
                item = self._calls.get_nowait()
                if item is not None:
                    item[0].cancel()
        for _ in range(self._num_started):
            self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001 - the caller gets it from the future
                    future.set_exception(error)


class Judge:
    """Judges texts in threads while others are generated; a text that cannot be judged gets the verdict "error".

    Args:
        sandbox: as in `judge_texts`.
        workers: programs or formulas that are judged at a time.
    """

    def __init__(self, *, sandbox: str = "auto", workers: int | None = None) -> None:
        self._sandbox = sandbox
        self._threads = _DaemonThreads(workers)
        self._comparer = Comparer()
        self._reported: set[str] = set()

    def submit(self, benchmark: Benchmark, row: Row, text: str, filter_name: str | None = None) -> Future[Verdict]:
        """Begins to judge a text.

        Args:
            benchmark: as in `judge_texts`.
            row: the item's row.
            text: the response.
            filter_name: as in `judge_texts`.

        Returns:
            The verdict to come. Numbers and letters are judged at once, which costs microseconds.
        """
        if benchmark.kind in ("code", "mathematics"):
            return self._threads.submit(partial(self._judge, benchmark, row, text, filter_name))
        verdict: Future[Verdict] = Future()
        verdict.set_result(self._judge(benchmark, row, text, filter_name))
        return verdict

    def close(self) -> None:
        """Cancels the texts that no thread has begun to judge, and ends the processes."""
        self._threads.close()
        self._comparer.close()

    def _judge(self, benchmark: Benchmark, row: Row, text: str, filter_name: str | None) -> Verdict:
        try:
            extraction = benchmark.extract(text, row, filter_name)
            if benchmark.kind == "mathematics" and extraction.answer is not None:
                gold = benchmark.gold(row)
                return _verdict_of_comparison(extraction, gold, self._comparer.compare(gold, extraction.answer))
            return judge_extractions(benchmark, [row], [extraction], workers=1, sandbox=self._sandbox)[0]
        except Exception as problem:  # one text that cannot be judged must not cost the run its other texts
            reason = f"{type(problem).__name__}: {problem}"
            if reason not in self._reported:
                self._reported.add(reason)
                log.exception("%s: a text cannot be judged", benchmark.name)
            return Verdict(None, ERROR, reason)


def _judge_value(benchmark: Benchmark, row: Row, extraction: Extraction) -> Verdict:
    """Compares a number or a letter."""
    gold, answer = benchmark.gold(row), str(extraction.answer)
    if benchmark.kind == "number":
        is_right = answers.parse_number(answer) == answers.parse_number(gold)
    else:
        is_right = answer == gold
    return _verdict(extraction, CORRECT if is_right else WRONG, f"expected {gold}")


def _program(benchmark: Benchmark, row: Row, extraction: Extraction) -> Program:
    if benchmark.test is None:
        raise DataError(f"{benchmark.name} is a code benchmark without tests")
    test = benchmark.test(row)
    return Program(candidate=str(extraction.answer), test=test.test, helpers=test.helpers, timeout_s=test.timeout_s)


def _verdict_of_check(extraction: Extraction, result: CheckResult) -> Verdict:
    reason = f"{result.reason} {result.detail}".strip()
    return _verdict(extraction, _VERDICT_OF_STATUS[result.status], reason, result.tier)


def _verdict_of_comparison(extraction: Extraction, gold: str, comparison: Comparison) -> Verdict:
    return _verdict(extraction, CORRECT if comparison.equal else WRONG, f"expected {gold}: {comparison.reason}")


def _verdict(extraction: Extraction, verdict: str, reason: str, tier: str = "") -> Verdict:
    return Verdict(extraction.answer, verdict, f"{extraction.how}; {reason}", tier)
