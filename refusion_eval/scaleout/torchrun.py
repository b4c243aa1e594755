"""One run in the processes of a launcher: rank 0 drives the run, and all ranks decode.

Jobs are not divided in advance. Responses differ tenfold in length, so every process claims its next job when it has
room for one, and all processes end at about the same time.
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
from refusion_eval.scaleout.launch import ProcessGroup, process_group
from refusion_eval.scaleout.torchrun_worker import SAMPLES, SCORES, serve
from refusion_eval.scaleout.wire import job_to_json
from refusion_eval.scaleout.worker import WIDTH_COST, Setup, decode
from refusion_eval.scaleout.worker_registry import Register, WorkerRegistry
from refusion_eval.store.records import Sample

# After a signal, the driver waits so long for records of other ranks, which may be dead. torchrun kills after 30 s.
STOP_SECONDS = 15.0

# A worker whose heartbeat stops for so long while its records are awaited is lost with its machine, which torchrun does
# not notice.
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
    """Decodes jobs in all processes of a launcher; this is the side of rank 0, the driver.

    Args:
        group: processes of the run.
        system: the driver's system.
        register: records a process in the run store and returns its id.
    """

    def __init__(self, group: ProcessGroup, system: System, register: Register) -> None:
        self._channel = group.channel
        self._num_processes = group.info.num_processes
        self._system = system
        self._registry = WorkerRegistry(register)
        self._num_dropped = 0

    def refusal(self, job: Job) -> str | None:
        """The reason why a job cannot be decoded, if that is known before decoding; else None."""
        return self._system.decoder.refusal(job)

    def close(self) -> None:
        """Does nothing: the other ranks stay for the next evaluation of this process, and exit when it exits."""

    def run(self, jobs: Iterable[Job]) -> Iterator[Sample]:
        """Yields the record of each job as it ends.

        Records of other ranks are yielded whenever a job of this process ends, and after its last job.

        Args:
            jobs: jobs to be decoded alone come before all others; a process claims a job when it has room for it.

        Raises:
            ScaleOutError: another process failed, or its heartbeat stopped while its records are awaited.
        """
        source = iter(jobs)
        max_batch_size = -(-length_hint(jobs) // self._num_processes) or None
        first = next(source, None)
        if first is None:
            return
        setup = Setup.of(self._system, [first])
        header = {"setup": setup.to_json(), "max_batch_size": max_batch_size, "kind": SAMPLES}
        round_number = self._channel.open_round(header)
        published: dict[int, Job] = {}
        abandoned = threading.Event()
        # One batch for each process lies ready without a claim, so that no process waits for the publishing thread.
        num_ahead = self._num_processes * min(self._system.batch_size, max_batch_size or self._system.batch_size)
        messages = self._job_messages(itertools.chain([first], source), published)
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(self._publish, round_number, messages, num_ahead, abandoned)
            try:
                num_done = 0
                self._num_dropped = 0
                own = self._decode(round_number, jobs, published, max_batch_size)
                others = self._outstanding(round_number, jobs, publishing, lambda: num_done + self._num_dropped)
                for sample in itertools.chain(own, others):
                    num_done += 1
                    yield sample
            finally:
                abandoned.set()
        publishing.result()

    def _decode(
        self, round_number: int, jobs: Iterable[Job], published: dict[int, Job], max_batch_size: int | None
    ) -> Iterator[Sample]:
        """Yields the records of this process, and after each of them the records of others that have arrived."""
        for sample in decode(self._system, self._own_jobs(round_number, jobs, published), max_batch_size):
            yield sample
            yield from self._received_samples(round_number)

    def _outstanding(
        self, round_number: int, jobs: Iterable[Job], publishing: "Future[int]", num_done: Callable[[], int]
    ) -> Iterator[Sample]:
        """Yields the records that other ranks still owe; after a signal, those that arrive within `STOP_SECONDS`."""
        deadline = math.inf
        while not publishing.done() or num_done() < publishing.result():
            yield from self._received_samples(round_number)
            if _stop_requested(jobs) and deadline == math.inf:
                deadline = time.monotonic() + STOP_SECONDS
            if time.monotonic() > deadline:
                return
            self._wait_for_others()

    def _wait_for_others(self) -> None:
        """Sleeps for a moment.

        Raises:
            ScaleOutError: the heartbeat of another process has stopped.
        """
        for rank in self._channel.silent_workers(self._num_processes - 1, SILENCE_SECONDS):
            raise ScaleOutError(
                f"process {rank} has not answered for {SILENCE_SECONDS:g} s; what is recorded stays: run the same "
                "command again to continue"
            )
        time.sleep(POLL_SECONDS)

    def _publish(self, round_number: int, source: Iterator[Any], num_ahead: int, abandoned: threading.Event) -> int:
        """Publishes jobs ahead of the claims and returns their number; runs in a thread, because the driver decodes.

        If the source ends early, as it does after a signal, the round ends for all processes.
        """
        number = 0
        try:
            for message in source:
                self._channel.publish(round_number, number, message)
                number += 1
                while number >= self._channel.num_claimed(round_number) + num_ahead:
                    if abandoned.wait(POLL_SECONDS):
                        return number
        finally:
            self._channel.end_round(round_number)
        return number

    def _job_messages(self, source: Iterator[Job], published: dict[int, Job]) -> Iterator[dict[str, Any]]:
        """Yields each job as JSON with the facts that it needs; stores the job itself in `published` first."""
        for number, job in enumerate(source):
            published[number] = job
            run_facts = {}
            if api.needs_width_cost(job.resolved.settings):
                run_facts[WIDTH_COST] = self._system.width_cost._asdict()
            yield {"job": job_to_json(job), "run_facts": run_facts}

    def _own_jobs(self, round_number: int, jobs: Iterable[Job], published: dict[int, Job]) -> Iterator[Job]:
        """Yields the jobs this rank claims. After a signal, drains published jobs without decoding them."""
        while (number := self._channel.claim(round_number)) is not None:
            self._channel.take_job(round_number, number)
            if _stop_requested(jobs):
                self._num_dropped += 1
            else:
                yield published[number]

    def _received_samples(self, round_number: int) -> Iterator[Sample]:
        for message in self._received(round_number):
            if "hardware" in message:
                self._registry.add(message["rank"], message["hardware"], message["pid"])
            else:
                yield self._registry.sample(message["rank"], message["sample"])

    def _received(self, round_number: int) -> Iterator[dict[str, Any]]:
        """Yields messages about this round, and hardware descriptions; drops messages about abandoned rounds."""
        for message in self._channel.messages():
            if "error" in message:
                raise ScaleOutError(f"process {message['rank']} gave up: {message['error']}")
            if "hardware" in message or message["round"] == round_number:
                yield message

    def score(self, parts: Sequence[Part]) -> Iterator[tuple[int, Scores]]:
        """Yields number and log-likelihoods of each part as a process has scored it.

        Args:
            parts: each part holds pairs that are scored together; a process claims a part when it has room for it.

        Raises:
            ScaleOutError: another process failed, or its heartbeat stopped while its scores are awaited.
        """
        if not parts:
            return
        setup = Setup.of(self._system, [])
        round_number = self._channel.open_round({"setup": setup.to_json(), "max_batch_size": None, "kind": SCORES})
        abandoned = threading.Event()
        num_left = len(parts)
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(self._publish, round_number, iter(parts), self._num_processes, abandoned)
            try:
                while (number := self._channel.claim(round_number)) is not None:
                    scores = score_part(self._system, self._channel.take_job(round_number, number))
                    num_left -= 1
                    yield number, scores
                    for done in self._received_scores(round_number):
                        num_left -= 1
                        yield done
                while num_left:
                    for done in self._received_scores(round_number):
                        num_left -= 1
                        yield done
                    self._wait_for_others()
            finally:
                abandoned.set()
        publishing.result()

    def _received_scores(self, round_number: int) -> Iterator[tuple[int, Scores]]:
        for message in self._received(round_number):
            if "scores" in message:
                yield message["number"], scores_from_json(message["scores"])


def _stop_requested(jobs: Iterable[Job]) -> bool:
    """Whether a signal has ended these jobs."""
    return isinstance(jobs, StoppableIterator) and jobs.stop_requested
