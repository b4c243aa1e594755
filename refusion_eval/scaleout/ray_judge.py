"""Judges programs on the processors of a Ray cluster while its workers decode."""

import logging
from typing import Any

from refusion_eval.benchmarks import BENCHMARKS, Row
from refusion_eval.scaleout.ray_cluster import Cluster
from refusion_eval.scoring.early import Verdict
from refusion_eval.scoring.judge import Judged, judge_texts

log = logging.getLogger(__name__)

# After decoding no worker keeps processors busy, so a verdict that is not there by then comes soon or never.
VERDICT_SECONDS = 120.0


def judge_one(benchmark: str, row: Row, text: str, sandbox: str) -> Judged:
    """Judges one text in a process of the cluster."""
    (judged,) = judge_texts(BENCHMARKS[benchmark], [(row, text)], workers=1, sandbox=sandbox)
    return judged


class RayJudge:
    """A `Judge` whose processes take one processor core each, wherever one is free.

    Args:
        cluster: where they run.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._ray = cluster.ray
        self._task = self._ray.remote(judge_one).options(num_cpus=1)
        self._is_stuck = False

    def submit(self, benchmark: str, row: Row, text: str, sandbox: str) -> Verdict:
        """Begins to judge a text."""
        answer = self._task.remote(benchmark, row, text, sandbox)
        return lambda: self._take(answer)

    def _take(self, answer: Any) -> Judged | None:
        try:
            # Once the cluster did not answer in time, only what is there already counts.
            judged: Judged = self._ray.get(answer, timeout=0 if self._is_stuck else VERDICT_SECONDS)
        except self._ray.exceptions.GetTimeoutError:
            if not self._is_stuck:
                log.warning("the Ray cluster judged no program for %.0f s; the rest are judged here", VERDICT_SECONDS)
            self._is_stuck = True
            return None
        except self._ray.exceptions.RayError as error:
            log.warning("a program could not be judged on the Ray cluster (%s); it is judged here", error)
            return None
        return judged
