"""What runs in the processes that Ray starts: a worker that takes requests and answers with records."""

import dataclasses
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from refusion_eval.errors import RefusionEvalError
from refusion_eval.runs.job import Job
from refusion_eval.runs.manifest import build_manifest
from refusion_eval.scaleout.wire import job_from_json, sample_to_json
from refusion_eval.scaleout.worker import Setup, Worker
from refusion_eval.store.records import Sample

# A call in this group runs beside all others, in a thread of its own.
MAIL = "mail"


class RayWorker:
    """A worker in a process of its own.

    Args:
        name: what the driver calls it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._settled: dict[str, Any] = {}
        self._inbox: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._numbers: dict[bytes, int] = {}
        self._session: Iterator[Sample] = iter(())
        self._turn = -1
        self._withdrawn: set[int] = set()
        self._begins = threading.Lock()

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

    def turn(self, number: int, jobs: Sequence[tuple[int, Mapping[str, Any]]], settled: Mapping[str, Any]) -> Any:
        """Takes requests and decodes until a record is there.

        The driver asks for the next turn while this one decodes: it waits here, with its requests, so that nothing
        waits for the driver when this one ends.

        Args:
            number: of this turn; they count up.
            jobs: number and JSON of each request, to be decoded together with those of former turns as far as the
                batch goes.
            settled: facts of the run that they need, see `Setup`.

        Returns:
            The number of a request, of this or a former turn, and its record as JSON; None if none is left here.
        """
        with self._begins:
            self._turn = number
            if number not in self._withdrawn:
                self._inbox.extend(jobs)
        self._settled.update(settled)
        sample = next(self._session, None)
        if sample is None and self._inbox:  # it had ended before these came
            self._session = self._worker.run(self._claims())
            sample = next(self._session, None)
        return None if sample is None else (self._numbers.pop(sample.key.digest()), sample_to_json(sample))

    def withdraw(self, number: int) -> bool:
        """Takes the requests out of a turn, if it has not begun; whether it has not. Called in the group `MAIL`."""
        with self._begins:
            if number <= self._turn:
                return False
            self._withdrawn.add(number)
            return True

    def _claims(self) -> Iterator[Job]:
        """What is in the inbox; ends with the last one, or before one that is to be measured alone behind a batch."""
        batching = False
        while self._inbox and not (batching and self._inbox[0][1]["alone"]):
            number, fields = self._inbox.popleft()
            job = job_from_json(fields, self._worker.system.entry.Settings)
            self._numbers[job.key.digest()] = number
            batching = batching or not job.alone
            yield job
