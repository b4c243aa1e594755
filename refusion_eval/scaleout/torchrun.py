"""One run in the processes of a launcher: the first drives and decodes, the others decode what is left to claim.

Nothing is divided in advance. Responses differ tenfold in length, so every process takes its next job when it has room
for one, and all end at about the same time.
"""

import contextlib
import itertools
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from operator import length_hint
from typing import Any

from refusion_eval import api
from refusion_eval.errors import ConfigError, RefusionEvalError, ScaleOutError
from refusion_eval.evaluate.interrupt import Interrupted, Interruption, UntilAsked
from refusion_eval.evaluate.jobs import Job
from refusion_eval.evaluate.model_args import ModelArgs
from refusion_eval.evaluate.system import System
from refusion_eval.scaleout.channel import POLL_SECONDS, Channel, Finished
from refusion_eval.scaleout.driver import Register, Workforce
from refusion_eval.scaleout.launch import Team, team
from refusion_eval.scaleout.wire import job_from_json, job_to_json, sample_to_json
from refusion_eval.scaleout.worker import WIDTH_COST, Setup, Worker, decode, own_device
from refusion_eval.store.records import Sample

# After a signal, how long the driver waits for records of others, of whom some may be dead: torchrun kills after 30.
STOP_SECONDS = 15.0

# How long a worker whose records are awaited may miss its heartbeats: torchrun does not notice a machine that is lost.
SILENCE_SECONDS = 60.0


def take_place(args: ModelArgs) -> None:
    """Returns at once in the first process of a run. Any other one works here until the run is over, and ends here.

    Args:
        args: the model arguments of this process' command line.

    Raises:
        ConfigError: the run is to start workers of its own as well.
        ScaleOutError: the processes cannot reach each other.
        SystemExit: the run is over: 0; 1 where this process had to give up; more where a signal ended it.
    """
    joined = team()
    if joined is None:
        return
    if args.engine != "local":
        raise ConfigError(f"engine={args.engine} starts its own workers; run it without torchrun or accelerate launch")
    if joined.place.rank > 0:
        logging.getLogger("refusion_eval").setLevel(logging.WARNING)  # the driver says the rest
        raise SystemExit(serve(joined, args.device))


class TorchrunRunner:
    """Decodes jobs in all processes of a launcher: the driver's side.

    Args:
        team: the processes.
        system: the driver's own; told how many processes share its machine.
        register: records a process that generates samples, and names it.
    """

    def __init__(self, team: Team, system: System, register: Register) -> None:
        system.num_processes = team.place.num_local
        self._channel = team.channel
        self._num_processes = team.place.num_processes
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
        round_number = self._channel.open_round({"setup": setup.to_json(), "at_once": at_once})
        published: dict[int, Job] = {0: first}
        abandoned = threading.Event()
        # Laid out that nobody has claimed yet: what all may take at once, so that nobody waits for the next look.
        ahead = self._num_processes * min(self._system.batch_size, at_once or self._system.batch_size)
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(self._publish, round_number, source, published, ahead, abandoned)
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
            for rank in self._channel.silent(self._num_processes - 1, SILENCE_SECONDS):
                raise ScaleOutError(
                    f"process {rank} has not answered for {SILENCE_SECONDS:g} s; what is recorded stays: run the same "
                    "command again to continue"
                )
            time.sleep(POLL_SECONDS)

    def _publish(
        self,
        round_number: int,
        source: Iterator[Job],
        published: dict[int, Job],
        ahead: int,
        abandoned: threading.Event,
    ) -> int:
        """Lays out jobs ahead of the claims; in a thread of its own, as the driver decodes. Returns how many.

        A source that ends early, as after a signal, thereby ends the work of all processes.
        """
        number = 0
        try:
            job: Job | None = published[0]
            while job is not None and not abandoned.is_set():
                published[number] = job
                self._channel.publish(round_number, number, self._described(job))
                number += 1
                while number >= self._channel.num_claimed(round_number) + ahead:
                    if abandoned.wait(POLL_SECONDS):
                        return number
                job = next(source, None)
        finally:
            self._channel.end_round(round_number)
        return number

    def _described(self, job: Job) -> dict[str, Any]:
        settled = {}
        if api.needs_width_cost(job.resolved.settings):
            settled[WIDTH_COST] = self._system.width_cost._asdict()
        return {"job": job_to_json(job), "settled": settled}

    def _own_claims(self, round_number: int, jobs: Iterable[Job], published: dict[int, Job]) -> Iterator[Job]:
        """Jobs for this process; after a signal it takes what is laid out and lets nobody decode it."""
        while (number := self._channel.claim(round_number)) is not None:
            self._channel.take_job(round_number, number)
            if _is_asked(jobs):
                self._num_dropped += 1
            else:
                yield published[number]

    def _arrived(self, round_number: int) -> Iterator[Sample]:
        for message in self._channel.messages():
            rank = message["rank"]
            if "error" in message:
                raise ScaleOutError(f"process {rank} gave up: {message['error']}")
            if "hardware" in message:
                self._workforce.join(rank, message["hardware"], message["pid"])
            elif message["round"] == round_number:  # not of a round that an error ended
                yield self._workforce.signed(rank, message["sample"])


def _is_asked(jobs: Iterable[Job]) -> bool:
    """Whether a signal asked for an end of these jobs."""
    return isinstance(jobs, UntilAsked) and jobs.asked


def serve(team: Team, device: str) -> int:
    """Decodes until the driver says that the run is over.

    Args:
        team: the processes.
        device: what the command line asked for.

    Returns:
        Exit status of this process.
    """
    channel, rank = team.channel, team.place.rank
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes: the driver answers
    try:
        with channel.beating(rank):
            _serve(team, own_device(device, team.place.local_rank))
    except Finished:
        channel.leave(rank)
    except RefusionEvalError as error:
        print(f"error: process {rank}: {error}", file=sys.stderr, flush=True)
        try:
            channel.send({"rank": rank, "error": str(error)})
            channel.leave(rank)
        except ScaleOutError:
            pass  # the driver is gone: there is nobody to tell
        return 1
    except Interrupted:
        with contextlib.suppress(ScaleOutError):
            channel.leave(rank)
        raise
    return 0


def _serve(team: Team, device: str) -> None:
    channel, rank = team.channel, team.place.rank
    worker: Worker | None = None
    setup: Setup | None = None
    settled: dict[str, Any] = {}
    num_seen = 0
    while True:
        number, header = channel.wait_for_round(num_seen)
        num_seen = number + 1
        wanted = Setup(**header["setup"])
        if worker is None or setup is None or not wanted.same_system(setup):
            worker = None  # lets go of one model before another is loaded
            setup, settled = wanted, dict(wanted.settled)
            worker = Worker(wanted.args(device), settled, num_processes=team.place.num_local)
            worker.check(wanted.fingerprint)
            hello = {"rank": rank, "hardware": asdict(worker.hardware()), "pid": os.getpid()}
        channel.send(hello)  # every round may be recorded in another run directory
        with Interruption(lambda: f"process {rank} has sent all of its records", finish_first=True) as stopping:
            claims = stopping.until_asked(_claims(channel, number, worker, settled))
            for sample in worker.run(claims, header["at_once"]):
                channel.send({"rank": rank, "round": number, "sample": sample_to_json(sample)})


def _claims(channel: Channel, round_number: int, worker: Worker, settled: dict[str, Any]) -> Iterator[Job]:
    while (number := channel.claim(round_number)) is not None:
        described = channel.take_job(round_number, number)
        settled.update(described["settled"])
        yield job_from_json(described["job"], worker.system.entry.Settings)
