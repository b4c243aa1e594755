"""What runs in the processes that Ray starts: a worker that asks for requests and streams their records back."""

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import ray

from refusion_eval.errors import RefusionEvalError
from refusion_eval.evaluate.jobs import Job
from refusion_eval.evaluate.run_manifest import build_manifest
from refusion_eval.scaleout.wire import job_from_json, sample_to_json
from refusion_eval.scaleout.worker import Setup, Worker

# The desk is empty for as long as the driver takes to write one record.
WAIT_SECONDS = 0.005


class RayWorker:
    """A worker in a process of its own.

    Args:
        name: what the desk knows it as.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._settled: dict[str, Any] = {}
        self._holding = 0
        self._batching = False

    def hello(self) -> int:
        """The process number, as soon as the process is there."""
        return os.getpid()

    def open(self, setup: Mapping[str, Any], device: str, num_processes: int, *, first: bool) -> dict[str, Any]:
        """Opens the checkpoint.

        Args:
            setup: `Setup` as JSON; of the first worker of a run without a fingerprint, as it is the one to find it.
            device: "cuda" for the GPU that Ray gave to this process, or "cpu".
            num_processes: workers on this machine.
            first: whether to describe the whole run as well.

        Returns:
            `problem`: why no worker of this machine can decode; or `hardware`, `pid`, `batch_size`, `attention` and of
            the first worker `manifest`, all plain JSON.
        """
        given = Setup(**setup)
        try:
            self._settled.update(given.settled)
            self._worker = Worker(given.args(device), self._settled, num_processes=num_processes)
            if not first:
                self._worker.check(given.fingerprint)
            system = self._worker.system
            _ = system.model.engine  # the weights: what is wrong with them shows before a request is handed out
            facts = {
                "hardware": dataclasses.asdict(self._worker.hardware()),
                "pid": os.getpid(),
                "batch_size": system.batch_size,
                "attention": system.model.attention,
            }
            return facts | ({"manifest": build_manifest(system, {}).to_json()} if first else {})
        # Anything else, such as a device that is out of memory for now, ends this worker; another one may fare better.
        except RefusionEvalError as error:
            return {"problem": str(error)}

    def width_cost(self) -> dict[str, Any]:
        """Measures how the time of a forward grows with its rows here."""
        return dict(self._worker.system.model.width_cost._asdict())

    def run(self, desk: Any, at_once: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Decodes until the desk says that there is nothing to do.

        Args:
            desk: handle of the actor that holds a `Desk`.
            at_once: most requests decoded together.

        Yields:
            (number of the request, its record as JSON) as each ends.
        """
        numbers: dict[bytes, int] = {}
        self._holding, self._batching = 0, False
        for sample in self._worker.run(self._claims(desk, numbers), at_once):
            self._holding -= 1
            yield numbers.pop(sample.key.digest()), sample_to_json(sample)

    def _claims(self, desk: Any, numbers: dict[bytes, int]) -> Iterator[Job]:
        while True:
            claim = ray.get(desk.claim.remote(self._name, self._holding, self._batching))
            if claim.state == "none":
                return
            if claim.state == "wait":
                time.sleep(WAIT_SECONDS)
                continue
            self._settled.update(claim.settled)
            job = job_from_json(claim.job, self._worker.system.entry.Settings)
            numbers[job.key.digest()] = claim.number
            self._holding += 1
            self._batching = self._batching or not job.alone
            yield job
