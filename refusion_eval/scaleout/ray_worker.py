"""The actor that runs in the processes that Ray starts: it receives requests and returns records."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from refusion_eval.errors import RefusionEvalError
from refusion_eval.runs.job import Job
from refusion_eval.runs.manifest import build_manifest, machine
from refusion_eval.scaleout.ray_cluster import import_ray
from refusion_eval.scaleout.worker import RecordWriter, Setup, decode, job_from_json
from refusion_eval.store.records import Sample


class RayWorker:
    """A worker in a process of its own, which loads the checkpoint when it starts. Ray calls one method at a time.

    Args:
        setup: `Setup` as JSON, without a fingerprint.
        num_processes: number of workers on each machine, by the id of its node.
    """

    def __init__(self, setup: Mapping[str, Any], device: str, num_processes: Mapping[str, int]) -> None:
        self._node_id: str = import_ray().get_runtime_context().get_node_id()
        self._inbox: deque[Mapping[str, Any]] = deque()
        self._samples: Iterator[Sample] = iter(())
        self._setup = Setup(**setup)
        self._problem = ""
        try:
            self._system = self._setup.open_system(device, num_processes.get(self._node_id, 1))
            _ = self._system.model.engine  # loads the weights, so that errors appear before a request is handed out
            self._records = RecordWriter(machine(self._system))
        # Any other error, such as a device that is out of memory now, ends this worker; another worker may succeed.
        except RefusionEvalError as error:
            self._problem = str(error)

    def describe(self, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
        """Describes the worker; the answer tells the driver that it has loaded the checkpoint.

        Args:
            fingerprint: fingerprint of the run; empty for the first worker, which determines it.

        Returns:
            `node_id`, and `problem`: the reason why no worker of this machine can decode; or `batch_size`, `attention`
            and, from the first worker, `manifest`.
        """
        try:
            if self._problem:
                return {"node_id": self._node_id, "problem": self._problem}
            if fingerprint:
                replace(self._setup, fingerprint=fingerprint).check(self._system)
        except RefusionEvalError as error:
            return {"node_id": self._node_id, "problem": str(error)}
        manifest = {} if fingerprint else {"manifest": build_manifest(self._system, {}).to_json()}
        attention = self._system.model.attention
        return {"node_id": self._node_id, "batch_size": self._system.batch_size, "attention": attention, **manifest}

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
