"""One run in the processes of a launcher: the first drives and decodes, the others decode what is left to claim.

Nothing is divided in advance. Responses differ tenfold in length, so every process takes its next job when it has room
for one, and all end at about the same time.
"""

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import length_hint
from typing import Any

from refusion_eval import api
from refusion_eval.errors import ConfigError, ScaleOutError
from refusion_eval.runs.interrupt import StoppableIterator
from refusion_eval.runs.job import Job
from refusion_eval.runs.likelihood import Part, Scores, score_part, scores_from_json
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.runs.system import System
from refusion_eval.scaleout.channel import POLL_SECONDS
from refusion_eval.scaleout.driver import Register, Workforce
from refusion_eval.scaleout.launch import ProcessGroup, process_group
from refusion_eval.scaleout.torchrun_worker import SAMPLES, SCORES, serve
from refusion_eval.scaleout.wire import job_to_json
from refusion_eval.scaleout.worker import WIDTH_COST, Setup, decode
from refusion_eval.store.records import Sample

# After a signal, how long the driver waits for records of others, of whom some may be dead: torchrun kills after 30.
STOP_SECONDS = 15.0

# How long a worker whose records are awaited may miss its heartbeats: torchrun does not notice a machine that is lost.
SILENCE_SECONDS = 60.0


def run_worker_or_return(args: ModelArgs) -> None:
    """Returns immediately on rank 0 and without a launcher. On any other rank, runs the worker loop and exits.

    Args:
        args: the model arguments of this process' command line.

    Raises:
        ConfigError: the run would start workers of its own as well.
        ScaleOutError: the processes cannot reach each other.
        SystemExit: the run is over: status 0; 1 where this rank had to give up; more where a signal ended it.
    """
    group = process_group()
    if group is None:
        return
    if args.engine != "local":
        raise ConfigError(f"engine={args.engine} starts its own workers; run it without torchrun or accelerate launch")
    if group.info.rank > 0:
        logging.getLogger("refusion_eval").setLevel(logging.WARNING)  # rank 0 logs the rest
        raise SystemExit(serve(group, args.device))


class TorchrunRunner:
    """Decodes jobs in all processes of a launcher: the driver's side.

    Args:
        group: the processes.
        system: the driver's own.
        register: records a process that generates samples, and names it.
    """

    def __init__(self, group: ProcessGroup, system: System, register: Register) -> None:
        self._channel = group.channel
        self._num_processes = group.info.num_processes
        self._system = system
        self._workforce = Workforce(register)
        self._num_dropped = 0

    def refusal(self, job: Job) -> str | None:
        """Why a job cannot be decoded, known before anything is computed; None if it can."""
        return self._system.decoder.refusal(job)

    def close(self) -> None:
        """The other processes stay, for the next evaluation of this one; they end when it does."""

    def run(self, jobs: Iterable[Job]) -> Iterator[Sample]:
        """Yields the record of each job as it ends; records of others when one of this process' own ends, and at last.

        Args:
            jobs: those that are to be decoded alone before all others; claimed by whoever has room.

        Raises:
            ScaleOutError: another process gave up, or is not heard of any more while its records are awaited.
        """
        source = iter(jobs)
        at_once = -(-length_hint(jobs) // self._num_processes) or None
        first = next(source, None)
        if first is None:
            return
        setup = Setup.of(self._system, [first])
        round_number = self._channel.open_round({"setup": setup.to_json(), "at_once": at_once, "kind": SAMPLES})
        published: dict[int, Job] = {}
        abandoned = threading.Event()
        # Laid out that nobody has claimed yet: what all may take at once, so that nobody waits for the next look.
        ahead = self._num_processes * min(self._system.batch_size, at_once or self._system.batch_size)
        described = self._described(itertools.chain([first], source), published)
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(self._publish, round_number, described, ahead, abandoned)
            try:
                num_done = 0
                self._num_dropped = 0
                ours = self._decode(round_number, jobs, published, at_once)
                others = self._outstanding(round_number, jobs, publishing, lambda: num_done + self._num_dropped)
                for sample in itertools.chain(ours, others):
                    num_done += 1
                    yield sample
            finally:
                abandoned.set()
        publishing.result()

    def _decode(
        self, round_number: int, jobs: Iterable[Job], published: dict[int, Job], at_once: int | None
    ) -> Iterator[Sample]:
        """Records of this process, and those of others that have arrived when one of its own ends."""
        for sample in decode(self._system, self._own_claims(round_number, jobs, published), at_once):
            yield sample
            yield from self._arrived(round_number)

    def _outstanding(
        self, round_number: int, jobs: Iterable[Job], publishing: "Future[int]", num_done: Callable[[], int]
    ) -> Iterator[Sample]:
        """Records that others still owe; after a signal, those that come soon."""
        give_up = math.inf
        while not publishing.done() or num_done() < publishing.result():
            yield from self._arrived(round_number)
            if _is_asked(jobs) and give_up == math.inf:
                give_up = time.monotonic() + STOP_SECONDS
            if time.monotonic() > give_up:
                return
            self._wait_for_others()

    def _wait_for_others(self) -> None:
        """Lets a moment pass.

        Raises:
            ScaleOutError: another process is not heard of any more.
        """
        for rank in self._channel.silent(self._num_processes - 1, SILENCE_SECONDS):
            raise ScaleOutError(
                f"process {rank} has not answered for {SILENCE_SECONDS:g} s; what is recorded stays: run the same "
                "command again to continue"
            )
        time.sleep(POLL_SECONDS)

    def _publish(self, round_number: int, source: Iterator[Any], ahead: int, abandoned: threading.Event) -> int:
        """Lays out jobs ahead of the claims; in a thread of its own, as the driver decodes. Returns how many.

        A source that ends early, as after a signal, thereby ends the work of all processes.
        """
        number = 0
        try:
            for described in source:
                self._channel.publish(round_number, number, described)
                number += 1
                while number >= self._channel.num_claimed(round_number) + ahead:
                    if abandoned.wait(POLL_SECONDS):
                        return number
        finally:
            self._channel.end_round(round_number)
        return number

    def _described(self, source: Iterator[Job], published: dict[int, Job]) -> Iterator[dict[str, Any]]:
        """What workers are told of each job; `published` is told the job itself before."""
        for number, job in enumerate(source):
            published[number] = job
            settled = {}
            if api.needs_width_cost(job.resolved.settings):
                settled[WIDTH_COST] = self._system.width_cost._asdict()
            yield {"job": job_to_json(job), "settled": settled}

    def _own_claims(self, round_number: int, jobs: Iterable[Job], published: dict[int, Job]) -> Iterator[Job]:
        """Jobs for this process; after a signal it takes what is laid out and lets nobody decode it."""
        while (number := self._channel.claim(round_number)) is not None:
            self._channel.take_job(round_number, number)
            if _is_asked(jobs):
                self._num_dropped += 1
            else:
                yield published[number]

    def _arrived(self, round_number: int) -> Iterator[Sample]:
        for message in self._heard(round_number):
            if "hardware" in message:
                self._workforce.join(message["rank"], message["hardware"], message["pid"])
            else:
                yield self._workforce.signed(message["rank"], message["sample"])

    def _heard(self, round_number: int) -> Iterator[dict[str, Any]]:
        """What others have said of this round, not of one that an error ended, and of themselves."""
        for message in self._channel.messages():
            if "error" in message:
                raise ScaleOutError(f"process {message['rank']} gave up: {message['error']}")
            if "hardware" in message or message["round"] == round_number:
                yield message

    def score(self, parts: Sequence[Part]) -> Iterator[tuple[int, Scores]]:
        """Yields number and log-likelihoods of each part as it is done, here or elsewhere.

        Args:
            parts: pairs that are scored together; claimed by whoever has room.

        Raises:
            ScaleOutError: another process gave up, or is not heard of any more while its scores are awaited.
        """
        if not parts:
            return
        setup = Setup.of(self._system, [])
        round_number = self._channel.open_round({"setup": setup.to_json(), "at_once": None, "kind": SCORES})
        abandoned = threading.Event()
        num_left = len(parts)
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(self._publish, round_number, iter(parts), self._num_processes, abandoned)
            try:
                while (number := self._channel.claim(round_number)) is not None:
                    scores = score_part(self._system, self._channel.take_job(round_number, number))
                    num_left -= 1
                    yield number, scores
                    for done in self._scored(round_number):
                        num_left -= 1
                        yield done
                while num_left:
                    for done in self._scored(round_number):
                        num_left -= 1
                        yield done
                    self._wait_for_others()
            finally:
                abandoned.set()
        publishing.result()

    def _scored(self, round_number: int) -> Iterator[tuple[int, Scores]]:
        for message in self._heard(round_number):
            if "scores" in message:
                yield message["number"], scores_from_json(message["scores"])


def _is_asked(jobs: Iterable[Job]) -> bool:
    """Whether a signal asked for an end of these jobs."""
    return isinstance(jobs, StoppableIterator) and jobs.stop_requested
