"""Judges texts: an extraction rule, then the comparison of the benchmark's kind.

`ScoreWriter` judges what a decoder gives and writes to the run store; `judge_extractions` judges texts that are all at
hand, for `score` and `rescore`.
"""

import hashlib
import json
import logging
import operator
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

from refusion_eval.benchmarks import Benchmark, Extraction, Row, Task
from refusion_eval.benchmarks.extract.numerals import parse_number
from refusion_eval.errors import DataError, SandboxError
from refusion_eval.runs.job import response
from refusion_eval.runs.terminal import RunningScore
from refusion_eval.sandbox import DaemonThreads, check_program, default_workers
from refusion_eval.scoring.math_judge import Comparer
from refusion_eval.store.records import PASSED, Sample, SampleKey, ScoreRow
from refusion_eval.store.run_store import RunStore
from refusion_eval.version import __version__

log = logging.getLogger(__name__)

STRICT = "strict"  # the filter, and the metric, of answers in exactly the form that the prompt asks for

CORRECT, WRONG, NO_ANSWER, MISSING, ERROR = "correct", "wrong", "no_answer", "missing", "error"

IsRight = Callable[[str, str], bool]  # compares (right answer, extracted answer)

# Comparisons that take microseconds; those of the other kinds take processes.
_COMPARISONS: Mapping[str, IsRight] = {
    "number": lambda gold, answer: parse_number(answer) == parse_number(gold),
    "choice": operator.eq,
    "text": operator.eq,
}
_VERDICT_OF_STATUS = {"passed": CORRECT, "failed": WRONG, "timed_out": "timed_out", "killed": "killed", "error": ERROR}


class Verdict(NamedTuple):
    """The judgement of one text.

    Attributes:
        verdict: "correct", "wrong", "no_answer" (nothing extracted), "missing" (no text for the item); for code also
            "timed_out", "killed" and "error" (no verdict was possible at a second try either; counts as wrong).
    """

    extracted: str | None
    verdict: str
    reason: str
    tier: str = ""

    @property
    def passed(self) -> bool:
        """Whether the text is right."""
        return self.verdict == CORRECT

    def score(self, key: SampleKey, item_id: str, rule: str, metric: str = PASSED) -> ScoreRow:
        """The row of a record; its scorer is the rule (task, filter and version of the prompts) in this version."""
        scorer = f"{rule} {__version__}"
        return ScoreRow(
            key=key, item_id=item_id, scorer=scorer, metric=metric, value=float(self.passed), **self._asdict()
        )


def judge_texts(
    benchmark: Benchmark,
    items: Sequence[tuple[Row, str]],
    *,
    filter_name: str | None = None,
    workers: int | None = None,
    sandbox: str = "auto",
    kept: MutableMapping[str, Verdict] | None = None,
) -> list[Verdict]:
    """Extracts the answers of (row, text) pairs with a filter (None: the benchmark's first) and judges them.

    The rest is as in `judge_extractions`. Raises DataError also if the benchmark has no such filter.
    """
    extractions = [benchmark.extract(text, row, filter_name) for row, text in items]
    rows = [row for row, _ in items]
    return judge_extractions(benchmark, rows, extractions, workers=workers, sandbox=sandbox, kept=kept)


def judge_extractions(
    benchmark: Benchmark,
    rows: Sequence[Row],
    extractions: Sequence[Extraction],
    *,
    workers: int | None = None,
    sandbox: str = "auto",
    kept: MutableMapping[str, Verdict] | None = None,
    on_verdicts: Callable[[int], None] = lambda number: None,
    is_right: IsRight | None = None,
) -> list[Verdict]:
    """Judges what any rule extracted from the texts of `rows`; equal answers to a row are judged once.

    Args:
        workers: programs or formulas that are judged at a time; a number that suits the machine if None.
        kept: verdicts by a key of row and answer; each new verdict is put into it at once, by the thread that has it.
        on_verdicts: called with the number of texts that a verdict decides about, as each becomes known.

    Raises:
        DataError: a right answer is malformed.
        SandboxError: code cannot be run in isolation on this machine.
    """
    kept = {} if kept is None else kept
    keys = [_key(benchmark, row, extraction) for row, extraction in zip(rows, extractions, strict=True)]
    positions: dict[str, list[int]] = {}
    for position, key in enumerate(keys):
        positions.setdefault(key, []).append(position)

    def keep(key: str, verdict: Verdict) -> None:
        kept[key] = verdict
        on_verdicts(len(positions[key]))

    with Judge(sandbox=sandbox, workers=workers) as judge:
        for key, (position, *others) in positions.items():
            if key in kept:
                on_verdicts(1 + len(others))
            else:
                extract = partial(extractions.__getitem__, position)
                judge.submit(benchmark, rows[position], extract, partial(keep, key), is_right=is_right)
    return [kept[key] for key in keys]


def _key(benchmark: Benchmark, row: Row, extraction: Extraction) -> str:
    values = [benchmark.name, benchmark.prompts_name, row, extraction.answer, extraction.how]
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode("ascii")).hexdigest()


class Judge:
    """Judges texts, and tells each verdict as soon as it is reached; a context manager.

    The end of the block waits for all verdicts; an exception drops those that are not reached.

    Args:
        judges_again: whether a text whose sandbox workers were ended from outside, again and again, gets an exception
            in place of a verdict, because a later judge will get it.
    """

    def __init__(self, *, sandbox: str = "auto", workers: int | None = None, judges_again: bool = False) -> None:
        self._sandbox = sandbox
        self._workers = workers
        self._judges_again = judges_again
        self._threads: DaemonThreads | None = None  # needed for programs and formulas only
        self._comparer: Comparer | None = None
        self._pending: list[Future[None]] = []  # each is done when its verdict is told

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            if self._threads is not None:
                self._threads.close()
            if self._comparer is not None:
                self._comparer.close()

    def submit(
        self,
        benchmark: Benchmark,
        row: Row,
        extract: Callable[[], Extraction],
        on_verdict: Callable[[Verdict], None],
        *,
        is_right: IsRight | None = None,
        on_failure: Callable[[Exception], None] | None = None,
    ) -> None:
        """Begins to judge a text; what makes a verdict impossible goes to `on_failure`, or is raised at the end."""

        def judge() -> None:
            try:
                verdict = self._verdict(benchmark, row, extract, compare)
            except Exception as problem:
                if on_failure is None:
                    raise
                on_failure(problem)
            else:
                on_verdict(verdict)

        compare = is_right or benchmark.prompts.is_right or _COMPARISONS.get(benchmark.kind)
        if compare is not None:  # microseconds; formulas and programs take other processes, so threads wait for them
            judge()
            return
        if benchmark.kind == "mathematics" and self._comparer is None:
            self._comparer = Comparer()
        if self._threads is None:
            suitable = default_workers() if benchmark.kind == "code" else os.cpu_count() or 1
            self._threads = DaemonThreads(self._workers or suitable)
        self._pending.append(self._threads.submit(judge))

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the verdicts on all texts; raises what made a verdict, or telling it, impossible."""
        done, unfinished = wait(self._pending, timeout_s, return_when=FIRST_EXCEPTION)
        self._pending = list(unfinished)
        for future in done:
            future.result()

    def _verdict(
        self, benchmark: Benchmark, row: Row, extract: Callable[[], Extraction], compare: IsRight | None
    ) -> Verdict:
        extraction = extract()
        if extraction.answer is None:
            return Verdict(None, NO_ANSWER, extraction.how)
        if compare is None and benchmark.kind == "code":
            return self._verdict_on_program(benchmark, row, extraction)
        gold = benchmark.gold(row)
        reason = f"{extraction.how}; expected {gold}"
        if compare is not None:
            equal = compare(gold, extraction.answer)
        else:
            assert self._comparer is not None
            whole = benchmark.prompts.reads_solution
            right = benchmark.prompts.gold_text(row) if whole else gold
            equal, why = self._comparer.compare(right, extraction.answer, whole)
            reason += f": {why}"
        return Verdict(extraction.answer, CORRECT if equal else WRONG, reason)

    def _verdict_on_program(self, benchmark: Benchmark, row: Row, extraction: Extraction) -> Verdict:
        test_of = benchmark.prompts.test or benchmark.test
        if test_of is None:
            raise DataError(f"{benchmark.name} is a code benchmark without tests")
        test = test_of(row)
        program = str(extraction.answer)
        result = check_program(program, test.test, test.timeout_s, helpers=test.helpers, sandbox=self._sandbox)
        if result.reason == "worker_broke" and self._judges_again:
            raise SandboxError(result.detail)
        reason = f"{extraction.how}; {f'{result.reason} {result.detail}'.strip()}"
        return Verdict(program, _VERDICT_OF_STATUS[result.status], reason, result.tier)


class ScoreWriter(Judge):
    """Judges samples of a run, and writes every verdict to the run store as soon as it is reached.

    Args:
        store: has the samples, and gets the scores. What it has a verdict on is not judged again.
        waits: whether `judge` returns only when the text of a request that was decoded alone is judged.
    """

    # On a CPU a request that is decoded alone is timed: on two cores a program that was judged at the same time made
    # decoding take 1.13 times as long, two programs 1.42 times, and programs between the requests 0.99 times. A low
    # priority would not help, because a formula is given up after ten seconds of wall-clock time. So there the next
    # request waits; in a batch, on a GPU and on the workers of a cluster it need not.

    def __init__(self, store: RunStore, *, sandbox: str, waits: bool) -> None:
        # Half of the processors, as far as a program takes one: decoding on a GPU or in a batch needs the others.
        super().__init__(sandbox=sandbox, workers=max(1, (os.cpu_count() or 1) // 2), judges_again=True)
        self._store = store
        self._waits = waits
        self._recorded = {(score.key, score.scorer): score for score in store.scores() if score.metric == PASSED}
        self._seen: set[tuple[SampleKey, str]] = set()
        self._num_judged: Counter[str] = Counter()
        self._num_right: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._num_unscored = 0

    @property
    def num_unscored(self) -> int:
        """Number of texts without a verdict, because judging them failed; the next run judges them."""
        return self._num_unscored

    def running_score(self, task: str) -> RunningScore:
        """Counts the verdicts so far on the texts of a task that were given to `judge`, recorded ones included."""
        return RunningScore(self._num_right[task], self._num_judged[task])

    def judge(self, task: Task, row: Row, sample: Sample) -> None:
        """Begins to judge the text of a sample, unless it failed or has a verdict.

        A StoreError says that the verdict on this or an earlier text could not be written.
        """
        benchmark = task.benchmark
        rule = f"{task.name}/{benchmark.default_filter} {benchmark.prompts.version}"
        judged = (sample.key, f"{rule} {__version__}")
        if sample.error is not None or judged in self._seen:
            return
        self._seen.add(judged)
        if recorded := self._recorded.get(judged):
            self._count(recorded)
            return
        # A verdict is written by the thread that reached it: the main thread may be decoding for minutes.
        write = partial(self._write, benchmark, row, sample, rule)
        failed = partial(self._note_failure, sample)
        self.submit(benchmark, row, partial(benchmark.extract, response(sample), row), write, on_failure=failed)
        self.wait(None if self._waits and sample.batch_size == 1 else 0)

    def _note_failure(self, sample: Sample, problem: Exception) -> None:
        """One text that cannot be judged must not cost the run its other texts."""
        reason = f"{type(problem).__name__}: {problem}"
        log.error("%s item %s is not scored: %s", sample.key.task, sample.item_id, reason)
        log.debug("%s: a text cannot be judged", sample.key.task, exc_info=problem)
        with self._counting:
            self._num_unscored += 1

    def _write(self, benchmark: Benchmark, row: Row, sample: Sample, rule: str, verdict: Verdict) -> None:
        if verdict.verdict == ERROR:
            log.warning("%s item %s counts as wrong: %s", sample.key.task, sample.item_id, verdict.reason)
        rows = [verdict.score(sample.key, sample.item_id, rule)]
        if benchmark.has_strict_score:
            (strict,) = judge_texts(benchmark, [(row, response(sample))], filter_name=STRICT)
            rows.append(
                replace(rows[0], metric=STRICT, value=float(strict.passed), extracted=None, verdict="", reason="")
            )
        self._store.append_scores(rows)
        self._count(rows[0])

    def _count(self, verdict: ScoreRow) -> None:
        with self._counting:  # several threads judge
            self._num_judged[verdict.key.task] += 1
            self._num_right[verdict.key.task] += verdict.value > 0
