"""Decoding in a worker process of any launcher: the setup that the driver sends, and the worker that it makes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch

from refusion_eval import api
from refusion_eval.errors import ScaleOutError
from refusion_eval.runs.job import Job
from refusion_eval.runs.manifest import identity, machine, run_arguments
from refusion_eval.runs.model_args import ModelArgs, parse_model_args
from refusion_eval.runs.system import System
from refusion_eval.scaleout.wire import SAME_VERSION
from refusion_eval.store.environment import Hardware
from refusion_eval.store.manifest import as_json, differences
from refusion_eval.store.records import Sample

ATTENTION = "attention"
WIDTH_COST = "width_cost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Setup of a worker, sent by the driver; all values are plain JSON types.

    Attributes:
        arguments: model arguments of the run, as on a command line.
        run_facts: facts that were measured once for the whole run. A worker never measures them again, so that
            a record is the same in whatever process it is made.
        fingerprint: everything on which texts depend, see `Manifest.fingerprint`; a worker must have the same.
    """

    arguments: Mapping[str, Any]
    run_facts: Mapping[str, Any]
    fingerprint: Mapping[str, Any]

    @classmethod
    def of(cls, system: System, jobs: Sequence[Job]) -> Self:
        """Makes the setup for some jobs of the driver's system; measures the facts that they need."""
        run_facts: dict[str, Any] = {}
        if system.args.loop == "engine":
            run_facts[ATTENTION] = system.model.attention
        if any(api.needs_width_cost(job.resolved.settings) for job in jobs):
            run_facts[WIDTH_COST] = system.width_cost._asdict()
        arguments = as_json(run_arguments(system.args))
        return cls(arguments=arguments, run_facts=as_json(run_facts), fingerprint=identity(system).fingerprint())

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON types; `Setup(**fields)` is the inverse."""
        return asdict(self)

    def same_system(self, other: "Setup") -> bool:
        """Whether a worker that was made for this setup can be used for the other one."""
        return (self.arguments, self.fingerprint) == (other.arguments, other.fingerprint)

    def args(self, device: str | None = None) -> ModelArgs:
        """Builds the model arguments of a worker.

        Args:
            device: the worker's device; None for the device in `arguments`.

        Raises:
            ScaleOutError: an argument is unknown or impossible on this machine.
        """
        try:
            return parse_model_args({**self.arguments, **({} if device is None else {"device": device})})
        except ValueError as error:
            raise ScaleOutError(f"the driver's model arguments are refused here ({error}); {SAME_VERSION}") from error


class Worker:
    """A system on this process' device, without a run directory, that decodes jobs of a driver.

    Args:
        args: model arguments, with this worker's device.
        run_facts: facts of the run, see `Setup`; the caller may add facts later, before the jobs that need them.
        num_processes: number of processes of this run on this machine.
    """

    def __init__(self, args: ModelArgs, run_facts: Mapping[str, Any], *, num_processes: int = 1) -> None:
        attention = run_facts.get(ATTENTION, args.attention)
        self.system = System(
            replace(args, run_dir=None, attention=attention),
            get_or_compute=lambda name, compute: run_facts[name],
            num_processes=num_processes,
        )

    def hardware(self) -> Hardware:
        """Hardware of this machine, for `RunStore.register_process`."""
        return machine(self.system)

    def check(self, fingerprint: Mapping[str, Any]) -> None:
        """Checks that this worker has the driver's system, and not, say, other weights under the same name.

        Args:
            fingerprint: fingerprint of the driver's system, see `Setup`.

        Raises:
            ScaleOutError: the fingerprints differ; the message names the first differing keys.
        """
        differing = differences(fingerprint, identity(self.system).fingerprint(), ("driver", "here"))
        if differing:
            raise ScaleOutError(
                f"this machine would decode something else than the driver; {'; '.join(differing[:4])}. Give all "
                "machines the same version, checkpoint and kind of device"
            )

    def run(self, jobs: Iterator[Job], max_batch_size: int | None = None) -> Iterator[Sample]:
        """Decodes jobs and yields the record of each as it ends.

        Args:
            jobs: read one by one as places in the batch become free.
            max_batch_size: upper limit of the batch size; without a limit, one worker with a large batch would take
                all of a few jobs.
        """
        return decode(self.system, jobs, max_batch_size)


def decode(system: System, jobs: Iterator[Job], max_batch_size: int | None) -> Iterator[Sample]:
    """Decodes jobs with a system of this process; `Worker.run` describes the arguments."""
    device = system.model.device
    if device.type == "cuda":
        torch.cuda.set_device(device)  # graphs are recorded on the current device
    return system.decoder.run(jobs, min(system.batch_size, max_batch_size or system.batch_size))


def own_device(wanted: str, local_rank: int) -> str:
    """Chooses a GPU for one of several processes on a machine.

    Args:
        wanted: device from the command line; a GPU that is named by number is used as it is.
        local_rank: number of the process on its machine. Processes share GPUs if there are fewer GPUs.
    """
    if wanted not in ("auto", "cuda") or not torch.cuda.is_available():
        return wanted
    return f"cuda:{local_rank % torch.cuda.device_count()}"
