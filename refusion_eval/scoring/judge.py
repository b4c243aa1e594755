"""Judges texts: an extraction rule, then the comparison of the benchmark's kind. A function of rows and texts alone.

`judge_texts` judges a list at once: the records of a run, or texts that were generated elsewhere. A `Judge` takes texts
one by one while others are generated, and a `ScoreWriter` also writes its verdicts to the run store.
"""

import logging
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

import refusion_eval
from refusion_eval.benchmarks import Benchmark, Extraction, Row, Task
from refusion_eval.benchmarks.extract import answers
from refusion_eval.errors import DataError
from refusion_eval.sandbox import CheckResult, DaemonThreads, Program, check_programs
from refusion_eval.scoring.math_judge import Comparer, Comparison, compare_all
from refusion_eval.store.records import PASSED, Sample, ScoreRow
from refusion_eval.store.run_store import RunStore

log = logging.getLogger(__name__)

STRICT = "strict"  # the filter, and the metric, of answers in exactly the form that the prompt asks for

CORRECT, WRONG, NO_ANSWER, MISSING, ERROR = "correct", "wrong", "no_answer", "missing", "error"

# Comparisons of (right answer, answer) that take microseconds; those of the other kinds take processes.
_COMPARISONS: Mapping[str, Callable[[str, str], bool]] = {
    "number": lambda gold, answer: answers.parse_number(answer) == answers.parse_number(gold),
    "choice": operator.eq,
}
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


def judge_texts(
    benchmark: Benchmark,
    items: Sequence[tuple[Row, str]],
    *,
    filter_name: str | None = None,
    workers: int | None = None,
    sandbox: str = "auto",
) -> list[Verdict]:
    """Extracts and judges texts; code and formulas go through pools of processes.

    Args:
        benchmark: extracts the answers and knows the right ones.
        items: (row, text).
        filter_name: another extraction rule than the benchmark's first.
        workers: processes for code and for formulas; a number that suits the machine if None.
        sandbox: "auto", or "none" for no isolation (code of people you trust only).

    Raises:
        DataError: there is no such filter, or a right answer is malformed.
        SandboxError: code cannot be run in isolation on this machine.
    """
    extractions = [benchmark.extract(text, row, filter_name) for row, text in items]
    return judge_extractions(benchmark, [row for row, _ in items], extractions, workers=workers, sandbox=sandbox)


def judge_extractions(
    benchmark: Benchmark,
    rows: Sequence[Row],
    extractions: Sequence[Extraction],
    *,
    workers: int | None = None,
    sandbox: str = "auto",
    on_verdict: Callable[[int, Verdict], None] = lambda index, verdict: None,
    is_right: Callable[[str, str], bool] | None = None,
) -> list[Verdict]:
    """Judges what any rule extracted from the texts of `rows`; the rest is as in `judge_texts`.

    `on_verdict` is called with an item's index and verdict as each becomes known. `is_right` compares (right answer,
    extracted answer) in place of the benchmark's own comparison.
    """
    verdicts: dict[int, Verdict] = {}

    def record(index: int, verdict: Verdict) -> None:
        verdicts[index] = verdict
        on_verdict(index, verdict)

    compare = is_right or _COMPARISONS.get(benchmark.kind)
    answered = []  # indices of the texts whose answer takes a process to judge
    for index, extraction in enumerate(extractions):
        if extraction.answer is None:
            record(index, Verdict(None, NO_ANSWER, extraction.how))
        elif compare is not None:
            gold = benchmark.gold(rows[index])
            verdict = CORRECT if compare(gold, extraction.answer) else WRONG
            record(index, _verdict(extraction, verdict, f"expected {gold}"))
        else:
            answered.append(index)
    if benchmark.kind == "code":
        check_programs(
            [_program(benchmark, rows[index], extractions[index]) for index in answered],
            workers=workers,
            sandbox=sandbox,
            on_done=lambda number, result: record(
                answered[number], _verdict_of_check(extractions[answered[number]], result)
            ),
        )
    elif benchmark.kind == "mathematics":
        golds = [benchmark.gold(rows[index]) for index in answered]
        pairs = [(gold, str(extractions[index].answer)) for gold, index in zip(golds, answered, strict=True)]
        for number, comparison in compare_all(pairs, workers=workers):
            found = extractions[answered[number]]
            record(answered[number], _verdict_of_comparison(found, golds[number], comparison))
    return [verdicts[index] for index in range(len(rows))]


class Judge:
    """Judges texts in threads while others are generated; a text that cannot be judged gets the verdict "error".

    Args:
        sandbox: as in `judge_texts`.
        workers: programs or formulas that are judged at a time.
    """

    def __init__(self, *, sandbox: str = "auto", workers: int = 1) -> None:
        self._sandbox = sandbox
        self._workers = workers
        self._threads: DaemonThreads | None = None  # needed for programs and formulas only
        self._comparer: Comparer | None = None
        self._reported: set[str] = set()

    def submit(
        self, benchmark: Benchmark, row: Row, text: str, on_verdict: Callable[[Verdict], None] = lambda verdict: None
    ) -> Future[Verdict]:
        """Begins to judge a text. Numbers and letters are judged at once, which costs microseconds.

        Args:
            benchmark: extracts the answer and knows the right one.
            row: the item's row.
            text: the response.
            on_verdict: called with the verdict, by the thread that reached it, before the future has it. What it raises
                is raised here for a number or a letter, else by the future.
        """

        def judge() -> Verdict:
            verdict = self._judge(benchmark, row, text)
            on_verdict(verdict)
            return verdict

        if benchmark.kind not in ("code", "mathematics"):
            verdict: Future[Verdict] = Future()
            verdict.set_result(judge())
            return verdict
        if benchmark.kind == "mathematics" and self._comparer is None:
            self._comparer = Comparer()
        if self._threads is None:
            self._threads = DaemonThreads(self._workers)
        return self._threads.submit(judge)

    def close(self) -> None:
        """Cancels the texts that no thread has begun to judge, and ends the processes."""
        if self._threads is not None:
            self._threads.close()
        if self._comparer is not None:
            self._comparer.close()

    def _judge(self, benchmark: Benchmark, row: Row, text: str) -> Verdict:
        try:
            extraction = benchmark.extract(text, row)
            if self._comparer is not None and benchmark.kind == "mathematics" and extraction.answer is not None:
                gold = benchmark.gold(row)
                return _verdict_of_comparison(extraction, gold, self._comparer.compare(gold, extraction.answer))
            return judge_extractions(benchmark, [row], [extraction], workers=1, sandbox=self._sandbox)[0]
        except Exception as problem:  # one text that cannot be judged must not cost the run its other texts
            reason = f"{type(problem).__name__}: {problem}"
            if reason not in self._reported:
                self._reported.add(reason)
                log.exception("%s: a text cannot be judged", benchmark.name)
            return Verdict(None, ERROR, reason)


class ScoreWriter:
    """Judges texts, and writes every verdict to the run store as soon as it is reached; a context manager.

    Numbers and choices are judged at once, which takes microseconds. Formulas and programs take other processes and
    milliseconds to seconds. Where decoding is not timed (in a batch), or does not need the processors (on a GPU, on
    workers of a cluster), they are judged while decoding goes on. On a CPU a request that is decoded alone is timed,
    and the next request waits until the text is judged: on two cores a program that was judged at the same time made
    decoding take 1.13 times as long, two programs 1.42 times, and programs between the requests 0.99 times. A judge of
    low priority is no way out, because a formula is given up after ten seconds of wall-clock time.

    The end of the block waits for all verdicts; an exception drops those that are not reached.

    Args:
        store: has the samples, and gets the scores. What it has a verdict on is not judged again.
        sandbox: "auto", or "none" to run model-written code without isolation.
        waits: whether `judge` returns only when the text of a request that was decoded alone is judged.
    """

    def __init__(self, store: RunStore, *, sandbox: str, waits: bool) -> None:
        self.num_unscored = 0  # texts that could not be judged; the next run judges them
        self._store = store
        self._waits = waits
        # Half of the processors, as far as a program takes one: decoding on a GPU or in a batch needs the others.
        self._judge = Judge(sandbox=sandbox, workers=max(1, (os.cpu_count() or 1) // 2))
        self._judged = {(score.key, score.scorer) for score in store.scores() if score.metric == PASSED}
        self._pending: list[Future[Verdict]] = []  # each is done when its verdict is on the disk

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish(wait_for_all=True)
        finally:
            self._judge.close()

    def judge(self, task: Task, row: Row, sample: Sample) -> None:
        """Begins to judge the text of a sample, unless it failed or has a verdict.

        Raises:
            StoreError: the verdict on this or an earlier text could not be written.
        """
        benchmark = task.benchmark
        scorer = f"{task.name}/{benchmark.default_filter} {refusion_eval.__version__}"
        if sample.error is not None or (sample.key, scorer) in self._judged:
            return
        self._judged.add((sample.key, scorer))
        # A verdict is written by the thread that reached it: the main thread may be decoding for minutes.
        write = partial(self._write, benchmark, row, sample, scorer)
        self._pending.append(self._judge.submit(benchmark, row, sample.text, write))
        self._finish(wait_for_all=self._waits and sample.batch_size == 1)

    def _finish(self, *, wait_for_all: bool) -> None:
        """Forgets the verdicts that are written. Raises StoreError for one that could not be."""
        done, unfinished = wait(self._pending, timeout=None if wait_for_all else 0)
        self.num_unscored += sum(verdict.result().verdict == ERROR for verdict in done)
        self._pending = list(unfinished)

    def _write(self, benchmark: Benchmark, row: Row, sample: Sample, scorer: str, verdict: Verdict) -> None:
        if verdict.verdict == ERROR:
            log.error("%s item %s is not scored: %s", sample.key.task, sample.item_id, verdict.reason)
            return
        row_of = partial(ScoreRow, key=sample.key, item_id=sample.item_id, scorer=scorer)
        rows = [
            row_of(
                metric=PASSED,
                value=float(verdict.passed),
                extracted=verdict.extracted,
                verdict=verdict.verdict,
                reason=verdict.reason,
                tier=verdict.tier,
            )
        ]
        if benchmark.has_strict_score:
            (strict,) = judge_texts(benchmark, [(row, sample.text)], filter_name=STRICT)
            rows.append(row_of(metric=STRICT, value=float(strict.passed)))
        self._store.append_scores(rows)


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
