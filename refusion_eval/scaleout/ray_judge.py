"""Judges programs on the processors of a Ray cluster while its workers decode."""

import logging
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from refusion_eval.benchmarks import BENCHMARKS, Row
from refusion_eval.scaleout.ray_cluster import Cluster
from refusion_eval.scoring.judge import ERROR, Judge, Request, Verdict, judge_texts

log = logging.getLogger(__name__)

# After decoding no worker keeps processors busy, so a verdict that is not there by then comes soon or never.
VERDICT_SECONDS = 120.0


def judge_one(benchmark: str, row: Row, text: str, filter_name: str | None, sandbox: str) -> Verdict:
    """Judges one text in a process of the cluster."""
    items = [(row, text)]
    (verdict,) = judge_texts(BENCHMARKS[benchmark], items, filter_name=filter_name, workers=1, sandbox=sandbox)
    return verdict


class RayJudge(Judge):
    """A `Judge` of which each program takes one processor core of a cluster, wherever one is free.

    A program that the cluster cannot judge, or for which no verdict comes, is judged in this process.

    Args:
        cluster: the processors.
        sandbox: as in `Judge`.
    """

    def __init__(self, cluster: Cluster, *, sandbox: str = "auto") -> None:
        super().__init__(sandbox=sandbox)
        self._ray = cluster.ray
        self._task = self._ray.remote(judge_one).options(num_cpus=1)

    def _begin(self, request: Request) -> None:
        if request.benchmark.kind != "code":
            super()._begin(request)
            return
        name = request.benchmark.name
        answer = self._task.remote(name, request.row, request.text, request.filter_name, self.sandbox)
        answer.future().add_done_callback(lambda future: self._take(request, future))

    def _take(self, request: Request, answer: "Future[Any]") -> None:
        try:
            verdict: Verdict = answer.result()
        except self._ray.exceptions.RayError as error:
            log.warning("a program could not be judged on the Ray cluster (%s); it is judged here", error)
        else:
            if verdict.verdict != ERROR:  # a sandbox that failed elsewhere says nothing about the program
                request.settle(verdict)
                return
        if not request.future.done():
            super()._begin(request)

    def drain(self) -> None:
        """Waits for all verdicts; programs that the cluster leaves without one for long are judged here."""
        while pending := self._pending_requests():
            done, _ = wait(pending, VERDICT_SECONDS, return_when=FIRST_COMPLETED)
            if not done:
                log.warning("the Ray cluster judged no program for %.0f s; the rest are judged here", VERDICT_SECONDS)
                for request in pending.values():
                    super()._begin(request)
                break
        super().drain()
