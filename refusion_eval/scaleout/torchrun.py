"""One run in the processes of a launcher: rank 0 drives the run, and all ranks decode.

Jobs are not divided in advance. Responses differ tenfold in length, so every process claims its next job when it has
room for one, and all processes end at about the same time.
"""

import contextlib
import itertools
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from operator import length_hint
from typing import Any

from refusion_eval import api
from refusion_eval.errors import ConfigError, RefusionEvalError, ScaleOutError
from refusion_eval.runs.job import Job
from refusion_eval.runs.likelihood import Part, Scores, score_part, scores_from_json
from refusion_eval.runs.manifest import machine
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.runs.system import System
from refusion_eval.runs.terminal import Interrupted, Interruption, StoppableIterator
from refusion_eval.scaleout.channel import POLL_SECONDS, Channel, Finished, open_channel
from refusion_eval.scaleout.worker import (
    WIDTH_COST,
    RecordReader,
    RecordWriter,
    Register,
    Setup,
    decode,
    job_from_json,
    job_to_json,
    own_device,
)
from refusion_eval.store.records import Sample

# Kinds of rounds: whether its jobs are decoded or scored.
SAMPLES = "samples"
SCORES = "scores"

# After a signal, the driver waits so long for records of other ranks, which may be dead. torchrun kills after 30 s.
STOP_SECONDS = 15.0

# A worker whose heartbeat stops for so long while its records are awaited is lost with its machine, which torchrun does
# not notice.
SILENCE_SECONDS = 60.0

Claims = Iterator[tuple[int, Any]]


def run_worker_or_return(args: ModelArgs) -> None:
    """Returns immediately on rank 0 and without a launcher. On any other rank, runs the worker loop and exits.

    Raises:
        ConfigError: the run would start workers of its own as well.
        ScaleOutError: the processes cannot reach each other.
        SystemExit: the run is over: status 0; 1 where this rank had to give up; more where a signal ended it.
    """
    channel = open_channel()
    if channel is None:
        return
    if args.engine != "local":
        raise ConfigError(f"engine={args.engine} starts its own workers; run it without torchrun or accelerate launch")
    if channel.info.rank > 0:
        logging.getLogger("refusion_eval").setLevel(logging.WARNING)  # rank 0 logs the rest
        raise SystemExit(serve(channel, args.device))


class TorchrunRunner:
    """Decodes or scores in all processes of a launcher; this is the side of rank 0, the driver."""

    def __init__(self, channel: Channel, system: System, register: Register) -> None:
        self._channel = channel
        self._num_processes = channel.info.num_processes
        self._system = system
        self._records = RecordReader(register)

    def refusal(self, job: Job) -> str | None:
        """The reason why a job cannot be decoded, if that is known before decoding; else None."""
        return self._system.refusal(job)

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
        published: list[Job] = []

        def messages() -> Iterator[dict[str, Any]]:
            for job in itertools.chain([first], source):
                published.append(job)
                needs_width_cost = api.needs_width_cost(job.resolved.settings)
                run_facts = {WIDTH_COST: self._system.width_cost._asdict()} if needs_width_cost else {}
                yield {"job": job_to_json(job), "run_facts": run_facts}

        def decode_own(claims: Claims) -> Iterator[Sample]:
            return decode(self._system, (published[number] for number, _ in claims), max_batch_size)

        header = {"kind": SAMPLES, "max_batch_size": max_batch_size}
        # One batch for each process lies ready without a claim, so that no process waits for the publishing thread.
        num_ahead = self._num_processes * min(self._system.batch_size, max_batch_size or self._system.batch_size)
        yield from self._round(header, messages(), num_ahead, decode_own, jobs)

    def score(self, parts: Sequence[Part]) -> Iterator[tuple[int, Scores]]:
        """Yields number and log-likelihoods of each part as a process has scored it.

        Args:
            parts: each part holds pairs that are scored together; a process claims a part when it has room for it.

        Raises:
            ScaleOutError: another process failed, or its heartbeat stopped while its scores are awaited.
        """

        def score_own(claims: Claims) -> Iterator[tuple[int, Scores]]:
            return ((number, score_part(self._system, part)) for number, part in claims)

        if parts:
            yield from self._round({"kind": SCORES}, iter(parts), self._num_processes, score_own)

    def _round(
        self,
        header: Mapping[str, Any],
        messages: Iterator[Any],
        num_ahead: int,
        work: Callable[[Claims], Iterator[Any]],
        jobs: Iterable[Job] = (),
    ) -> Iterator[Any]:
        """Yields the results of one round, of this process and of the others."""
        channel = self._channel
        number = channel.open_round({"setup": asdict(Setup.of(self._system)), **header})
        abandoned = threading.Event()
        num_done, deadline = 0, math.inf

        def stop_requested() -> bool:
            return isinstance(jobs, StoppableIterator) and jobs.stop_requested

        def claims() -> Claims:
            nonlocal num_done
            for claim in channel.claims(number):
                if stop_requested():
                    num_done += 1  # published jobs are drained without decoding them, so that nobody begins them
                else:
                    yield claim

        def received() -> Iterator[Any]:
            nonlocal num_done
            for result in self._received(number):
                num_done += 1
                yield result

        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(self._publish, number, messages, num_ahead, abandoned)
            try:
                for result in work(claims()):
                    num_done += 1
                    yield result
                    yield from received()
                while not publishing.done() or num_done < publishing.result():
                    yield from received()
                    if stop_requested():
                        deadline = min(deadline, time.monotonic() + STOP_SECONDS)
                    if time.monotonic() > deadline:
                        break
                    self._wait_for_others()
            finally:
                abandoned.set()
        publishing.result()

    def _publish(self, round_number: int, messages: Iterator[Any], num_ahead: int, abandoned: threading.Event) -> int:
        """Publishes jobs ahead of the claims and returns their number; runs in a thread, because the driver decodes.

        If the source ends early, as it does after a signal, the round ends for all processes.
        """
        number = 0
        try:
            for message in messages:
                self._channel.publish(round_number, number, message)
                number += 1
                while number >= self._channel.num_claimed(round_number) + num_ahead:
                    if abandoned.wait(POLL_SECONDS):
                        return number
        finally:
            self._channel.end_round(round_number)
        return number

    def _received(self, round_number: int) -> Iterator[Any]:
        """Yields the results of other processes that have arrived; drops those of rounds that were abandoned."""
        for message in self._channel.messages():
            rank = message["rank"]
            if "error" in message:
                raise ScaleOutError(f"process {rank} gave up: {message['error']}")
            if message["round"] != round_number:
                continue
            if "scores" in message:
                yield message["number"], scores_from_json(message["scores"])
            else:
                yield self._records.read(rank, message["record"])

    def _wait_for_others(self) -> None:
        """Sleeps for a moment."""
        for rank in self._channel.silent_workers(SILENCE_SECONDS):
            raise ScaleOutError(
                f"process {rank} has not answered for {SILENCE_SECONDS:g} s; what is recorded stays: run the same "
                "command again to continue"
            )
        time.sleep(POLL_SECONDS)


def serve(channel: Channel, device: str) -> int:
    """Decodes on a rank above 0 until the driver declares the run over, and returns the exit status of this process."""
    rank = channel.info.rank
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the driver handles it
    try:
        with channel.heartbeat():
            _serve(channel, own_device(device, channel.info.local_rank))
    except Finished:
        channel.leave()
    except RefusionEvalError as error:
        print(f"error: process {rank}: {error}", file=sys.stderr, flush=True)
        with contextlib.suppress(ScaleOutError):  # if the driver is gone, nobody can receive the message
            channel.send({"error": str(error)})
            channel.leave()
        return 1
    except Interrupted:
        with contextlib.suppress(ScaleOutError):
            channel.leave()
        raise
    return 0


def _serve(channel: Channel, device: str) -> None:
    """Works through the rounds of the driver; ends with an exception."""
    setup: Setup | None = None
    system: System | None = None
    num_seen = 0
    ending = f"process {channel.info.rank} has sent all of its records"
    while True:
        number, header = channel.wait_for_round(num_seen)
        num_seen = number + 1
        wanted = Setup(**header["setup"])
        if setup is None or system is None or wanted != setup:
            system = None  # frees one model before another is loaded
            setup = wanted
            system = setup.open_system(device, channel.info.num_local)
            setup.check(system)
            records = RecordWriter(machine(system))
        with Interruption(lambda: ending, finish_first=True) as stopping:
            claims = stopping.stoppable(channel.claims(number))
            if header["kind"] == SCORES:
                for claimed, part in claims:
                    channel.send({"round": number, "number": claimed, "scores": score_part(system, part)})
            else:
                for sample in decode(system, _jobs(claims, setup, system), header["max_batch_size"]):
                    channel.send({"round": number, "record": records.write(sample)})


def _jobs(claims: Claims, setup: Setup, system: System) -> Iterator[Job]:
    for _, message in claims:
        setup.run_facts.update(message["run_facts"])
        yield job_from_json(message["job"], system.entry.Settings)
