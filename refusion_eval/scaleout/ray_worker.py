"""The actor that runs in the processes that Ray starts: it receives requests and returns records."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from refusion_eval.errors import RefusionEvalError
from refusion_eval.runs.job import Job
from refusion_eval.runs.system import build_manifest
from refusion_eval.scaleout.messages import Setup, decode, job_from_json, record_to_json
from refusion_eval.store.records import Sample


class RayWorker:
    """A worker in a process of its own, of which Ray calls one method at a time.

    `setup` is a `Setup` as JSON without a fingerprint; `num_processes` has the workers of each machine by its node id.
    """

    def __init__(self, setup: Mapping[str, Any], device: str, num_processes: Mapping[str, int]) -> None:
        self._setup, self._device, self._num_processes = Setup(**setup), device, num_processes
        self._inbox: deque[Mapping[str, Any]] = deque()
        self._samples: Iterator[Sample] = iter(())

    def load(self, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
        """Loads the checkpoint; returns facts about the worker, or as `problem` why no worker of its machine can.

        The `fingerprint` of the run is empty for the first worker, whose answer holds the `manifest`.
        """
        import ray

        facts: dict[str, Any] = {"node_id": ray.get_runtime_context().get_node_id()}
        try:
            self._system = self._setup.open_system(self._device, self._num_processes.get(facts["node_id"], 1))
            _ = self._system.model.engine  # loads the weights, so that errors appear before a request is handed out
            if fingerprint:
                replace(self._setup, fingerprint=fingerprint).check(self._system)
        # Any other error, such as a device that is out of memory now, ends this worker; another worker may succeed.
        except RefusionEvalError as error:
            return facts | {"problem": str(error)}
        self._hardware = self._system.backend.hardware()
        if not fingerprint:
            facts["manifest"] = build_manifest(self._system, {}).to_json()
        return facts | {"batch_size": self._system.batch_size, "attention": self._system.model.attention}

    def width_cost(self) -> dict[str, Any]:
        return dict(self._system.model.width_cost._asdict())

    def decode(self, jobs: Sequence[Mapping[str, Any]], run_facts: Mapping[str, Any]) -> dict[str, Any]:
        """Decodes new and earlier requests together until one of them ends, and returns its record as a message."""
        self._setup.run_facts.update(run_facts)
        self._inbox.extend(jobs)
        sample = next(self._samples, None)
        if sample is None:  # the iterator had ended before these requests came
            self._samples = decode(self._system, self._jobs())
            sample = next(self._samples)
        return record_to_json(sample, self._hardware)

    def _jobs(self) -> Iterator[Job]:
        """Yields the jobs in the inbox; ends when the decoder asks for a job and the inbox is empty."""
        has_batch = False
        # A job that is decoded alone would join a batch that the decoder has begun.
        while self._inbox and not (has_batch and self._inbox[0]["alone"]):
            job = job_from_json(self._inbox.popleft(), self._system.args.settings_type)
            has_batch = has_batch or not job.alone
            yield job
