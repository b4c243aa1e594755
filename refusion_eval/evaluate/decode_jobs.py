"""Decodes jobs, one at a time or many at once, and turns every outcome, failures included, into a record."""

import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from refusion_eval import api
from refusion_eval.engine.engine import Request
from refusion_eval.engine.width import WidthCost
from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.evaluate.jobs import Job, record, record_error
from refusion_eval.evaluate.text import Detokenizer
from refusion_eval.store.records import Sample
from refusion_eval.types import Decode, Decoded

log = logging.getLogger(__name__)


class JobDecoder:
    """Runs jobs of one decoder on one model.

    Args:
        model: the checkpoint.
        decode: the decoder.
        detokenizer: writes text from tokens.
        batch_size: jobs decoded at the same time.
        warmup: decodings thrown away before the first measured one of each settings.
        width_cost: gives the width curve that decides how forwards are fused; called only if it is needed.
        run_alone: decodes one prompt under the decoder's settings; None is the engine.
    """

    def __init__(
        self,
        model: api.LoadedModel,
        decode: Decode,
        detokenizer: Detokenizer,
        *,
        batch_size: int,
        warmup: int,
        width_cost: Callable[[], WidthCost],
        run_alone: Callable[[Sequence[int], Any], Decoded] | None = None,
    ) -> None:
        self.model = model
        self.decode = decode
        self.detokenizer = detokenizer
        self.batch_size = batch_size
        self.warmup = warmup
        self.width_cost = width_cost
        self._run_alone = run_alone or (lambda prompt, settings: model.engine.run(decode, prompt, settings))
        self._warm: set[str] = set()

    def _settings(self, job: Job) -> Any:
        """The settings for one request, with what this device decides."""
        return api.with_width_cost(job.settings(self.detokenizer), self.width_cost)

    def refusal(self, job: Job) -> str | None:
        """Why a job cannot be decoded, known before anything is computed; None if it can."""
        try:
            api.check_prompt(self.model, job.prompt_ids, job.resolved.settings.num_positions)
        except ConfigError as error:
            return str(error)
        return None

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Sample]]:
        """Decodes jobs and yields each one's index and record as it ends, in whatever order that is.

        Jobs that are to be measured come first, one at a time.
        """
        possible = []
        for index, job in enumerate(jobs):
            refusal = self.refusal(job)
            if refusal is None:
                possible.append(index)
            else:
                yield index, record_error(job, refusal, batch_size=self.batch_size)
        alone = [index for index in possible if self.batch_size == 1 or jobs[index].alone]
        yield from self._one_by_one(alone, jobs)
        yield from self._together([index for index in possible if index not in set(alone)], jobs)

    def _one_by_one(self, indices: Sequence[int], jobs: Sequence[Job]) -> Iterator[tuple[int, Sample]]:
        for index in indices:
            job = jobs[index]
            try:
                warm = self._warm_up(job)
                decoded = self._run_alone(job.prompt_ids, self._settings(job))
            # RuntimeError: what torch raises when memory runs out or a kernel fails.
            except (DecodeError, RuntimeError):
                yield index, record_error(job, traceback.format_exc(), batch_size=1)
            else:
                yield index, record(job, decoded, self.detokenizer, batch_size=1, warm=warm)

    def _together(self, indices: Sequence[int], jobs: Sequence[Job]) -> Iterator[tuple[int, Sample]]:
        left, batch_size = dict.fromkeys(indices), self.batch_size
        while left and batch_size > 1:
            try:
                for index, outcome in self._batches(list(left), jobs, batch_size):
                    del left[index]
                    if isinstance(outcome, DecodeError):
                        error = "".join(traceback.format_exception(outcome))
                        yield index, record_error(jobs[index], error, batch_size=batch_size)
                    else:
                        # Times of a batch are no measure of speed, so no warm-up is spent on it.
                        sample = record(jobs[index], outcome, self.detokenizer, batch_size=batch_size, warm=False)
                        yield index, sample
            except RuntimeError as error:  # memory ran out, most likely
                log.warning("a batch of %d failed (%s): half of it is tried", batch_size, error)
                batch_size //= 2
        yield from self._one_by_one(list(left), jobs)

    def _batches(
        self, indices: Sequence[int], jobs: Sequence[Job], batch_size: int
    ) -> Iterator[tuple[int, Decoded | DecodeError]]:
        requests = (Request(self.decode, jobs[index].prompt_ids, self._settings(jobs[index])) for index in indices)
        for place, outcome in self.model.engine.run_many(requests, batch_size):
            yield indices[place], outcome

    def _warm_up(self, job: Job) -> bool:
        """Decodes the first job of each settings for nothing, so that no measured one pays for first-time work."""
        if job.resolved.digest in self._warm:
            return True
        started = time.perf_counter()
        for _ in range(self.warmup):
            self._run_alone(job.prompt_ids, self._settings(job))
        self._warm.add(job.resolved.digest)
        log.info("%s: %d warm-up decodings, %.1f s", job.key.task, self.warmup, time.perf_counter() - started)
        return self.warmup > 0
