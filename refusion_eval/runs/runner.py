"""Decodes jobs, one at a time or in a batch, and turns every result, failures included, into a record."""

import itertools
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from refusion_eval import api
from refusion_eval.engine.engine import Request
from refusion_eval.engine.width import WidthCost
from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.runs.job import Job, record, record_error
from refusion_eval.runs.text import Detokenizer
from refusion_eval.store.records import Sample
from refusion_eval.types import Decode, Decoded

log = logging.getLogger(__name__)


class JobRunner(Protocol):
    """Turns jobs into records, in this process or in several."""

    def refusal(self, job: Job) -> str | None:
        """Why a job cannot be decoded, known before anything is computed; None if it can."""
        ...

    def run(self, jobs: Iterable[Job]) -> Iterator[Sample]:
        """Yields the record of each job as it ends. The jobs that are decoded alone come first in `jobs`."""
        ...

    def close(self) -> None:
        """Releases other processes; harmless if there are none."""
        ...


class JobDecoder:
    """Decodes the jobs of one decoder on one model, in this process.

    Args:
        model: the checkpoint.
        decode: the decoder.
        detokenizer: writes text from tokens.
        batch_size: jobs decoded at the same time.
        warmup: untimed decodings before the first timed one of each settings.
        width_cost: returns the width curve that decides how forwards are fused; called only if it is needed.
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
        """The settings for one request, with the width curve of this device."""
        return api.with_width_cost(job.settings(self.detokenizer), self.width_cost)

    def refusal(self, job: Job) -> str | None:
        """Why a job cannot be decoded, known before anything is computed; None if it can."""
        try:
            api.check_prompt(self.model, job.prompt_ids, job.resolved.settings.num_positions)
        except ConfigError as error:
            return str(error)
        return None

    def close(self) -> None:
        """No-op: there are no other processes."""

    def run(self, jobs: Iterable[Job], batch_size: int | None = None) -> Iterator[Sample]:
        """Decodes jobs and yields the record of each as it ends, in whatever order that is.

        Args:
            jobs: consumed as the batch has room; jobs that are decoded alone come before all others.
            batch_size: jobs decoded at the same time; None is the system's own batch size.
        """
        if batch_size is None:
            batch_size = self.batch_size
        refused: deque[Sample] = deque()
        for sample in self._decode(self._accept(jobs, refused, batch_size), batch_size):
            yield from _drain(refused)
            yield sample
        yield from _drain(refused)

    def _accept(self, jobs: Iterable[Job], refused: deque[Sample], batch_size: int) -> Iterator[Job]:
        """The jobs that can be decoded; the records of all others go to `refused`."""
        for job in jobs:
            refusal = self.refusal(job)
            if refusal is None:
                yield job
            else:
                refused.append(record_error(job, refusal, batch_size=batch_size))

    def _decode(self, jobs: Iterator[Job], batch_size: int) -> Iterator[Sample]:
        for job in jobs:
            if batch_size > 1 and not job.alone:
                yield from self._together(itertools.chain([job], jobs), batch_size)
            else:
                yield self._alone(job)

    def _alone(self, job: Job) -> Sample:
        try:
            warm = self._warm_up(job)
            decoded = self._run_alone(job.prompt_ids, self._settings(job))
        # torch raises RuntimeError when memory runs out or a kernel fails.
        except (DecodeError, RuntimeError):
            return record_error(job, traceback.format_exc(), batch_size=1)
        return record(job, decoded, self.detokenizer, batch_size=1, warm=warm)

    def _together(self, jobs: Iterator[Job], batch_size: int) -> Iterator[Sample]:
        returned: deque[Job] = deque()  # jobs of a batch that failed
        while batch_size > 1:
            taken: dict[int, Job] = {}
            try:
                for number, outcome in self.model.engine.run_many(self._requests(returned, jobs, taken), batch_size):
                    job = taken.pop(number)
                    if isinstance(outcome, DecodeError):
                        error = "".join(traceback.format_exception(outcome))
                        yield record_error(job, error, batch_size=batch_size)
                    else:
                        # Times of a batch are no measure of speed, so no warm-up is spent on it.
                        yield record(job, outcome, self.detokenizer, batch_size=batch_size, warm=False)
                return
            except RuntimeError as error:  # most likely memory ran out
                log.warning("a batch of %d failed (%s): half of it is tried", batch_size, error)
                returned.extendleft(reversed(taken.values()))
                batch_size //= 2
        for job in itertools.chain(returned, jobs):
            yield self._alone(job)

    def _requests(self, returned: deque[Job], jobs: Iterator[Job], taken: dict[int, Job]) -> Iterator[Request]:
        for number in itertools.count():
            job = returned.popleft() if returned else next(jobs, None)
            if job is None:
                return
            taken[number] = job
            yield Request(self.decode, job.prompt_ids, self._settings(job))

    def _warm_up(self, job: Job) -> bool:
        """Warm-up: decodes the first job of each settings digest untimed, so that one-off costs are not measured.

        Returns:
            Whether the warm-up of these settings is over, so that the time of the next decoding measures speed.
        """
        if job.resolved.digest in self._warm:
            return True
        started = time.perf_counter()
        for _ in range(self.warmup):
            self._run_alone(job.prompt_ids, self._settings(job))
        self._warm.add(job.resolved.digest)
        log.info("%s: %d warm-up decodings, %.1f s", job.key.task, self.warmup, time.perf_counter() - started)
        return self.warmup > 0


def _drain(samples: deque[Sample]) -> Iterator[Sample]:
    while samples:
        yield samples.popleft()
