"""Verdicts on the texts of a run, written to its run store one by one."""

import logging
import os
from concurrent.futures import Future, wait
from functools import partial
from types import TracebackType
from typing import Self

import refusion_eval
from refusion_eval.benchmarks import Benchmark, Row, Task
from refusion_eval.scoring.judge import ERROR, Judge, Verdict
from refusion_eval.store.records import PASSED, Sample, ScoreRow
from refusion_eval.store.run_store import RunStore

log = logging.getLogger(__name__)

STRICT = "strict"  # the filter, and the metric, of answers in exactly the form that the prompt asks for


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
        self._store = store
        self._waits = waits
        # Half of the processors, as far as a program takes one: decoding on a GPU or in a batch needs the others.
        self._judge = Judge(sandbox=sandbox, workers=max(1, (os.cpu_count() or 1) // 2))
        self._judged = {(score.key, score.scorer) for score in store.scores() if score.metric == PASSED}
        self._writing: list[Future[None]] = []  # each is done when its verdict is on the disk
        self._unscored: list[Sample] = []

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

    @property
    def num_unscored(self) -> int:
        """Number of texts that could not be judged; the next run judges them."""
        return len(self._unscored)

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
        written = Future[None]()
        self._writing.append(written)
        verdict = self._judge.submit(benchmark, row, sample.text)
        verdict.add_done_callback(partial(self._write, written, benchmark, row, sample, scorer))
        self._finish(wait_for_all=self._waits and sample.batch_size == 1)

    def _finish(self, *, wait_for_all: bool) -> None:
        """Forgets the verdicts that are written. Raises StoreError for one that could not be."""
        if wait_for_all:
            wait(self._writing)
        unfinished = []
        for written in self._writing:
            if written.done():
                written.result()
            else:
                unfinished.append(written)
        self._writing = unfinished

    def _write(
        self,
        written: Future[None],
        benchmark: Benchmark,
        row: Row,
        sample: Sample,
        scorer: str,
        verdict: Future[Verdict],
    ) -> None:
        """Writes a verdict, in the thread that reached it: the main thread may be decoding for minutes."""
        if verdict.cancelled():
            written.set_result(None)
            return
        try:
            self._write_verdict(benchmark, row, sample, scorer, verdict.result())
            written.set_result(None)
        except Exception as problem:  # noqa: BLE001 - the main thread raises it
            written.set_exception(problem)

    def _write_verdict(self, benchmark: Benchmark, row: Row, sample: Sample, scorer: str, verdict: Verdict) -> None:
        if verdict.verdict == ERROR:
            log.error("%s item %s is not scored: %s", sample.key.task, sample.item_id, verdict.reason)
            self._unscored.append(sample)
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
            strict = self._judge.submit(benchmark, row, sample.text, STRICT).result()  # a number or a choice
            rows.append(row_of(metric=STRICT, value=float(strict.passed)))
        self._store.append_scores(rows)
