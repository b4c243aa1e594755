"""The actor that runs in the processes that Ray starts: it receives requests and returns records."""

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from refusion_eval.errors import RefusionEvalError
from refusion_eval.runs.job import Job
from refusion_eval.runs.manifest import build_manifest, machine
from refusion_eval.scaleout.worker import RecordWriter, Setup, decode, job_from_json
from refusion_eval.store.records import Sample


class RayWorker:
    """A worker in a process of its own. The driver calls one method at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._inbox: deque[Mapping[str, Any]] = deque()
        self._samples: Iterator[Sample] = iter(())

    def hello(self) -> int:
        """Returns the process number; the answer tells the driver that the process has started."""
        return os.getpid()

    def open(self, setup: Mapping[str, Any], device: str, num_processes: int, *, first: bool) -> dict[str, Any]:
        """Loads the checkpoint.

        Args:
            setup: `Setup` as JSON; its fingerprint is ignored on the first worker, which determines the fingerprint.

        Returns:
            `problem`: the reason why no worker of this machine can decode. Or `batch_size`, `attention` and, from the
        """
        self._setup = Setup(**setup)
        try:
            self._system = system = self._setup.open_system(device, num_processes)
            if not first:
                self._setup.check(system)
            _ = system.model.engine  # loads the weights, so that their errors appear before a request is handed out
            self._records = RecordWriter(machine(system))
            facts = {"batch_size": system.batch_size, "attention": system.model.attention}
            return facts | ({"manifest": build_manifest(system, {}).to_json()} if first else {})
        # Any other error, such as a device that is out of memory now, ends this worker; another worker may succeed.
        except RefusionEvalError as error:
            return {"problem": str(error)}

    def width_cost(self) -> dict[str, Any]:
        """Measures how the time of a forward grows with its rows on this machine."""
        return dict(self._system.model.width_cost._asdict())

    def decode(self, jobs: Sequence[Mapping[str, Any]], run_facts: Mapping[str, Any]) -> dict[str, Any]:
        """Decodes until the next request of this worker ends, and returns its record as a message.

        Args:
            jobs: new requests as JSON, which join the batch of earlier requests that have not ended. There may be none
                as long as an earlier request has not ended.
        """
        self._setup.run_facts.update(run_facts)
        self._inbox.extend(jobs)
        sample = next(self._samples, None)
        if sample is None:  # the iterator had ended before these requests came
            self._samples = decode(self._system, self._jobs())
            sample = next(self._samples)
        return self._records.write(sample)

    def _jobs(self) -> Iterator[Job]:
        """Yields the jobs in the inbox; ends when the decoder asks for a job and the inbox is empty.

        Ends before a job that is decoded alone if the decoder has begun a batch, because it would join the batch.
        """
        has_batch = False
        while self._inbox and not (has_batch and self._inbox[0]["alone"]):
            job = job_from_json(self._inbox.popleft(), self._system.entry.Settings)
            has_batch = has_batch or not job.alone
            yield job
