"""One run in the processes of a launcher: rank 0 drives the run, and all ranks decode.

Jobs are not divided in advance. Responses differ tenfold in length, so every process claims its next job when it has
room for one, and all processes end at about the same time.
"""

import contextlib
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any, NoReturn

from refusion_eval import api
from refusion_eval.engine.scoring import TokenScore
from refusion_eval.errors import ConfigError, RefusionEvalError, ScaleOutError
from refusion_eval.runs.job import Job
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.runs.system import Part, System
from refusion_eval.runs.terminal import Interrupted, Interruption
from refusion_eval.scaleout import messages
from refusion_eval.scaleout.channel import POLL_SECONDS, Channel, Finished, open_channel
from refusion_eval.store.records import Sample

# A worker whose heartbeat stops for so long while its records are awaited is lost with its machine, which torchrun does
# not notice.
SILENCE_SECONDS = 60.0

Claims = Iterator[tuple[int, Any]]
Work = Callable[[Claims], Iterator[Any]]


def run_worker_or_return(args: ModelArgs) -> None:
    """Returns on rank 0 and without a launcher; on any other rank, runs the worker loop and raises SystemExit."""
    channel = open_channel()
    if channel is None:
        return
    if args.engine != "local":
        raise ConfigError(f"engine={args.engine} starts its own workers; run it without torchrun or accelerate launch")
    if channel.info.rank > 0:
        logging.getLogger("refusion_eval").setLevel(logging.WARNING)  # rank 0 logs the rest
        raise SystemExit(serve(channel, args.device, allow_code=args.allow_code))


class TorchrunRunner:
    """Decodes or scores in all processes of a launcher; this is the side of rank 0, the driver."""

    def __init__(self, channel: Channel, system: System, register: messages.Register) -> None:
        self._channel, self._system, self._records = channel, system, messages.RecordReader(register)

    def close(self) -> None:
        """Does nothing: the other ranks stay for the next evaluation of this process, and exit when it exits."""

    def run(self, jobs: Iterable[Job]) -> Iterator[Sample]:
        """Yields the record of each job as it ends; jobs to be decoded alone come before all others."""
        listed = list(jobs)
        if not listed:
            return
        max_batch_size = math.ceil(len(listed) / self._channel.info.num_processes)
        needs_width_cost = any(api.needs_width_cost(job.resolved.settings) for job in listed)
        run_facts = {messages.WIDTH_COST: self._system.engine.width_cost._asdict()} if needs_width_cost else {}
        header = {"scores": False, "max_batch_size": max_batch_size, "run_facts": run_facts}

        yield from self._round(
            header,
            [messages.job_to_json(job) for job in listed],
            lambda claims: messages.decode(self._system, (listed[number] for number, _ in claims), max_batch_size),
            lambda: messages.stop_requested(jobs),
        )

    def score(self, parts: Sequence[Part]) -> Iterator[tuple[int, list[TokenScore]]]:
        """Yields number and log-likelihoods of each part as a process has scored it."""
        if parts:
            yield from self._round(
                {"scores": True, "run_facts": {}},
                parts,
                lambda claims: ((number, self._system.score_part(part)) for number, part in claims),
                lambda: False,
            )

    def _round(
        self, header: Mapping[str, Any], encoded: Sequence[Any], work: Work, must_stop: Callable[[], bool]
    ) -> Iterator[Any]:
        channel, num_jobs = self._channel, len(encoded)
        number = channel.open_round({"setup": asdict(messages.Setup.of(self._system)), **header}, encoded)
        num_done, num_expected, deadline = 0, num_jobs, math.inf

        def end_claims() -> None:
            nonlocal num_expected
            num_expected = min(num_expected, channel.end_claims(number, num_jobs))

        def own_claims() -> Claims:
            for claim in channel.claims(number, num_jobs):
                yield claim
                if must_stop():  # nobody begins a further job
                    end_claims()

        try:
            for own in work(own_claims()):
                for result in chain([own], self._received(number)):
                    num_done += 1
                    yield result
            while num_done < num_expected and time.monotonic() < deadline:
                for result in self._received(number):
                    num_done += 1
                    yield result
                if must_stop():
                    end_claims()
                    deadline = min(deadline, time.monotonic() + messages.STOP_SECONDS)
                for rank in channel.silent_workers(SILENCE_SECONDS):
                    silence = f"process {rank} has not answered for {SILENCE_SECONDS:g} s"
                    raise ScaleOutError(f"{silence}; what is recorded stays: run the same command again to continue")
                time.sleep(POLL_SECONDS)
        finally:
            with contextlib.suppress(ScaleOutError):
                end_claims()

    def _received(self, round_number: int) -> Iterator[Any]:
        """Yields the results of other processes that have arrived; drops those of rounds that were abandoned."""
        for message in self._channel.messages():
            rank = message["rank"]
            if "error" in message:
                raise ScaleOutError(f"process {rank} gave up: {message['error']}")
            if message["round"] != round_number:
                continue
            if "scores" in message:
                yield message["number"], [TokenScore(*score) for score in message["scores"]]
            else:
                yield self._records.read(rank, message["record"])


def serve(channel: Channel, device: str, *, allow_code: bool = False) -> int:
    """Decodes on a rank above 0 until the driver declares the run over, and returns the exit status of this process."""
    rank = channel.info.rank
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the driver handles it
    try:
        with channel.heartbeat():
            _serve(channel, messages.own_device(device, channel.info.local_rank), allow_code=allow_code)
    except Finished:
        channel.leave()
    except RefusionEvalError as error:
        print(f"error: process {rank}: {error}", file=sys.stderr, flush=True)
        with contextlib.suppress(ScaleOutError):  # if the driver is gone, each call waits in vain for minutes
            channel.send({"error": str(error)})
            channel.leave()
        return 1
    except Interrupted:
        with contextlib.suppress(ScaleOutError):
            channel.leave()
        raise
    return 0


def _serve(channel: Channel, device: str, *, allow_code: bool) -> NoReturn:
    """Works through the rounds of the driver; ends with an exception."""
    setup: messages.Setup | None = None
    system: System | None = None
    number = -1
    ending = f"process {channel.info.rank} has sent all of its records"
    while True:
        number, header = channel.wait_for_round(number + 1)
        wanted = messages.Setup(**header["setup"])
        if setup is None or system is None or wanted != setup:
            system = None  # frees one model before another is loaded
            setup = wanted
            system = setup.open_system(device, channel.info.num_local, allow_code=allow_code)
            setup.check(system)
            hardware = system.backend.hardware()
        setup.run_facts.update(header["run_facts"])
        with Interruption(lambda: ending, finish_first=True) as stopping:
            claims = stopping.stoppable(channel.claims(number, header["num_jobs"]))
            if header["scores"]:
                for claimed, part in claims:
                    channel.send({"round": number, "number": claimed, "scores": system.score_part(part)})
            else:
                jobs = (messages.job_from_json(message, system.args.settings_type) for _, message in claims)
                for sample in messages.decode(system, jobs, header["max_batch_size"]):
                    channel.send({"round": number, "record": messages.record_to_json(sample, hardware)})
