"""The worker loop of the ranks above 0: they claim jobs, decode or score them, and send the results to rank 0."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from refusion_eval.errors import RefusionEvalError, ScaleOutError
from refusion_eval.runs.interrupt import Interrupted, Interruption
from refusion_eval.runs.job import Job
from refusion_eval.runs.likelihood import score_part
from refusion_eval.scaleout.channel import Channel, Finished
from refusion_eval.scaleout.launch import ProcessGroup
from refusion_eval.scaleout.wire import job_from_json, sample_to_json
from refusion_eval.scaleout.worker import Setup, Worker, own_device

# Kinds of rounds: whether its jobs are decoded or scored.
SAMPLES = "samples"
SCORES = "scores"


def serve(group: ProcessGroup, device: str) -> int:
    """Decodes until the driver declares the run over.

    Args:
        group: processes of the run.
        device: device from the command line.

    Returns:
        Exit status for this process.
    """
    channel, rank = group.channel, group.info.rank
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the driver handles it
    try:
        with channel.heartbeat(rank):
            _serve(group, own_device(device, group.info.local_rank))
    except Finished:
        channel.leave(rank)
    except RefusionEvalError as error:
        print(f"error: process {rank}: {error}", file=sys.stderr, flush=True)
        try:
            channel.send({"rank": rank, "error": str(error)})
            channel.leave(rank)
        except ScaleOutError:
            pass  # the driver is gone, so nobody can receive the message
        return 1
    except Interrupted:
        with contextlib.suppress(ScaleOutError):
            channel.leave(rank)
        raise
    return 0


def _serve(group: ProcessGroup, device: str) -> None:
    channel, rank = group.channel, group.info.rank
    worker: Worker | None = None
    setup: Setup | None = None
    run_facts: dict[str, Any] = {}
    num_seen = 0
    while True:
        number, header = channel.wait_for_round(num_seen)
        num_seen = number + 1
        wanted = Setup(**header["setup"])
        if worker is None or setup is None or not wanted.same_system(setup):
            worker = None  # frees one model before another is loaded
            setup, run_facts = wanted, dict(wanted.run_facts)
            worker = Worker(wanted.args(device), run_facts, num_processes=group.info.num_local)
            worker.check(wanted.fingerprint)
            description = {"rank": rank, "hardware": asdict(worker.hardware()), "pid": os.getpid()}
        channel.send(description)  # every round may be recorded in another run directory
        with Interruption(lambda: f"process {rank} has sent all of its records", finish_first=True) as stopping:
            claims = stopping.stoppable(_claims(channel, number))
            if header["kind"] == SCORES:
                for claimed, part in claims:
                    scores = score_part(worker.system, part)
                    channel.send({"rank": rank, "round": number, "number": claimed, "scores": scores})
            else:
                for sample in worker.run(_jobs(claims, worker, run_facts), header["max_batch_size"]):
                    channel.send({"rank": rank, "round": number, "sample": sample_to_json(sample)})


def _claims(channel: Channel, round_number: int) -> Iterator[tuple[int, Any]]:
    while (number := channel.claim(round_number)) is not None:
        yield number, channel.take_job(round_number, number)


def _jobs(claims: Iterator[tuple[int, Any]], worker: Worker, run_facts: dict[str, Any]) -> Iterator[Job]:
    for _, message in claims:
        run_facts.update(message["run_facts"])
        yield job_from_json(message["job"], worker.system.entry.Settings)
