"""Messages between the driver of a run and its workers in other processes, and how a worker decodes.

Messages hold plain JSON types only: unlike pickle, JSON cannot execute code.
"""

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import torch

from refusion_eval.benchmarks import find_task
from refusion_eval.config import build
from refusion_eval.errors import ScaleOutError
from refusion_eval.runs.job import Job
from refusion_eval.runs.model_args import RELEASE, parse_model_args
from refusion_eval.runs.own_engine import OwnEngine
from refusion_eval.runs.settings_tables import Resolved
from refusion_eval.runs.system import System, identity, run_arguments
from refusion_eval.runs.terminal import StoppableIterator
from refusion_eval.store.manifest import Hardware, differences
from refusion_eval.store.records import Sample, SampleKey, as_json, from_fields, from_stored

ATTENTION = "attention"
WIDTH_COST = "width_cost"
_AS_THEY_ARE = ("benchmark", "item_id", "prompt", "prompts", "alone")  # fields of a job that JSON has too
SAME_VERSION = "all processes of a run need one version of refusion_eval"

# After a signal, the driver waits so long for records of workers, which may be dead. torchrun kills after 30 s.
STOP_SECONDS = 15.0

# Records a process that generates samples, from its hardware and process number, and returns the id that its records
# carry; the id is empty where nothing is recorded.
Register = Callable[[Hardware, int], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The driver's message to a worker before its first job; all values are plain JSON types."""

    # Two setups are equal if one worker can serve both, whatever facts they hold.
    arguments: Mapping[str, Any]
    # Measured once for the whole run. A worker never measures them again, so that a record is the same in whatever
    # process it is made. Facts may be added before the jobs that need them.
    run_facts: dict[str, Any] = field(compare=False)
    fingerprint: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, system: System) -> Self:
        run_facts = {ATTENTION: system.model.attention} if system.args.loop == "engine" else {}
        arguments = as_json(run_arguments(system.args))
        return cls(arguments=arguments, run_facts=run_facts, fingerprint=identity(system).fingerprint())

    def open_system(self, device: str, num_processes: int, *, allow_code: bool = False) -> System:
        """The system of a worker; raises ScaleOutError for an argument that is impossible on this machine.

        Args:
            allow_code: whether the worker's own command line allows code of a checkpoint, which no message does.
        """
        allowed = {"allow_code": allow_code} if self.arguments.get("loop") == RELEASE else {}
        try:
            args = parse_model_args({**self.arguments, **allowed, "device": device})
        except ValueError as error:
            raise ScaleOutError(f"the driver's model arguments are refused here ({error}); {SAME_VERSION}") from error
        args = replace(args, attention=self.run_facts.get(ATTENTION, args.attention))
        return System(args, get_or_compute=lambda name, compute: self.run_facts[name], num_processes=num_processes)

    def check(self, system: System) -> None:
        """Raises ScaleOutError unless a worker has the driver's system, and not other weights under the same name."""
        differing = differences(self.fingerprint, identity(system).fingerprint(), ("driver", "here"))
        if differing:
            raise ScaleOutError(
                f"this machine would decode something else than the driver; {'; '.join(differing[:4])}. Give all "
                "machines the same version, checkpoint and kind of device"
            )


def decode(system: System, jobs: Iterator[Job], max_batch_size: int | None = None) -> Iterator[Sample]:
    if isinstance(system.backend, OwnEngine) and system.backend.device == "cuda":
        torch.cuda.set_device(system.backend.model.device)  # graphs are recorded on the current device
    # Without a limit, one worker with a large batch would take all of a few jobs.
    return system.run(jobs, min(system.batch_size, max_batch_size or system.batch_size))


def own_device(wanted: str, local_rank: int) -> str:
    """Chooses a GPU for one of several processes on a machine, which share GPUs if there are fewer GPUs."""
    if wanted not in ("auto", "cuda") or not torch.cuda.is_available():
        return wanted
    return f"cuda:{local_rank % torch.cuda.device_count()}"


def stop_requested(jobs: Iterable[Job]) -> bool:
    return isinstance(jobs, StoppableIterator) and jobs.stop_requested()


def job_to_json(job: Job) -> dict[str, Any]:
    resolved = job.resolved
    return {name: getattr(job, name) for name in _AS_THEY_ARE} | {
        "key": asdict(job.key),
        "prompt_ids": [int(token) for token in job.prompt_ids],
        "sealed": list(job.sealed),
        "settings": dict(resolved.values),
        "sources": dict(resolved.sources),
        "until": list(resolved.until),
        "task": None if resolved.task is None else resolved.task.name,
        "digest": resolved.digest,
    }


def job_from_json(fields: Mapping[str, Any], settings_type: type) -> Job:
    """Inverse of `job_to_json`; raises ScaleOutError if another version of this package reads other settings."""
    where = f"{fields['key']['task']} item {fields['item_id']}"
    try:
        settings: Any = build(settings_type, fields["settings"], where)
    except (ValueError, TypeError) as error:
        raise ScaleOutError(f"{where}: its settings are refused here ({error}); {SAME_VERSION}") from error
    task = None if fields["task"] is None else find_task(fields["task"])
    resolved = Resolved(settings=settings, sources=fields["sources"], until=tuple(fields["until"]), task=task)
    if resolved.digest != fields["digest"]:
        digests = f"{resolved.digest} here and {fields['digest']} at the sender"
        raise ScaleOutError(f"{where}: its settings have the digest {digests}; {SAME_VERSION}")
    same = {name: fields[name] for name in (*_AS_THEY_ARE, "prompt_ids")}
    return Job(key=SampleKey(**fields["key"]), resolved=resolved, sealed=tuple(fields["sealed"]), **same)


def record_to_json(sample: Sample, hardware: Hardware) -> dict[str, Any]:
    return {"hardware": asdict(hardware), "pid": os.getpid(), "body": sample.body(), "trace": sample.trace}


class RecordReader:
    """Reads the records that workers send, and registers each worker in the run store with its first record."""

    def __init__(self, register: Register) -> None:
        self._register = register
        self._process_ids: dict[Hashable, str] = {}

    def read(self, worker: Hashable, message: Mapping[str, Any]) -> Sample:
        if worker not in self._process_ids:
            self._process_ids[worker] = self._register(from_fields(Hardware, message["hardware"]), message["pid"])
        sample = from_stored(Sample, message["body"])
        return replace(sample, trace=message["trace"], process_id=self._process_ids[worker])
