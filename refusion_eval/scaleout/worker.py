"""The part of a run that decodes, wherever it is: what a driver tells its workers, and what a worker does with it."""

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
    """What a driver tells its workers, all of it plain JSON.

    Attributes:
        arguments: the model arguments, as they can be given again.
        settled: facts that were measured or found once for the whole run; a worker measures none of them anew, so that
            a record is the same wherever it is made.
        fingerprint: what decides a text, see `Manifest.fingerprint`; a worker must arrive at the same.
    """

    arguments: Mapping[str, Any]
    settled: Mapping[str, Any]
    fingerprint: Mapping[str, Any]

    @classmethod
    def of(cls, system: System, jobs: Sequence[Job]) -> Self:
        """What workers need for some jobs of the driver's system; measures what has to be measured."""
        settled: dict[str, Any] = {}
        if system.args.loop == "engine":
            settled[ATTENTION] = system.model.attention
        if any(api.needs_width_cost(job.resolved.settings) for job in jobs):
            settled[WIDTH_COST] = system.width_cost._asdict()
        arguments = as_json(run_arguments(system.args))
        return cls(arguments=arguments, settled=as_json(settled), fingerprint=identity(system).fingerprint())

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON types; `Setup(**fields)` is the inverse."""
        return asdict(self)

    def same_system(self, other: "Setup") -> bool:
        """Whether a worker that was made for one will do for the other."""
        return (self.arguments, self.fingerprint) == (other.arguments, other.fingerprint)

    def args(self, device: str | None = None) -> ModelArgs:
        """The model arguments of a worker.

        Args:
            device: the worker's own; None is the one that the driver was given.

        Raises:
            ScaleOutError: an argument is unknown or impossible here.
        """
        try:
            return parse_model_args({**self.arguments, **({} if device is None else {"device": device})})
        except ValueError as error:
            raise ScaleOutError(f"the driver's model arguments are refused here ({error}); {SAME_VERSION}") from error


class Worker:
    """Decodes what a driver hands out: a system on a device of its own, without a run directory.

    Args:
        args: what to load and how to run it, this worker's device included.
        settled: facts of the run, see `Setup`; read when they are needed, so some may be added later.
        num_processes: processes of this run on this machine.
    """

    def __init__(self, args: ModelArgs, settled: Mapping[str, Any], *, num_processes: int = 1) -> None:
        attention = settled.get(ATTENTION, args.attention)
        self.system = System(
            replace(args, run_dir=None, attention=attention),
            get_or_compute=lambda name, compute: settled[name],
            num_processes=num_processes,
        )

    def hardware(self) -> Hardware:
        """The machine, for `RunStore.register_process`."""
        return machine(self.system)

    def check(self, fingerprint: Mapping[str, Any]) -> None:
        """Refuses to decode for another system than this worker's own, such as other weights of the same name.

        Args:
            fingerprint: the driver's, see `Setup`.

        Raises:
            ScaleOutError: they differ; each differing key is named.
        """
        differing = differences(fingerprint, identity(self.system).fingerprint(), ("driver", "here"))
        if differing:
            raise ScaleOutError(
                f"this machine would decode something else than the driver; {'; '.join(differing[:4])}. Give all "
                "machines the same version, checkpoint and kind of device"
            )

    def run(self, claims: Iterator[Job], at_once: int | None = None) -> Iterator[Sample]:
        """Decodes jobs and yields the record of each as it ends.

        Args:
            claims: jobs, asked for one by one as places become free.
            at_once: most jobs decoded together, where that is fewer than the batch size: of few jobs one worker with
                a large batch would take all.
        """
        return decode(self.system, claims, at_once)


def decode(system: System, claims: Iterator[Job], at_once: int | None) -> Iterator[Sample]:
    """Decodes jobs with a system of this process; arguments as `Worker.run`."""
    device = system.model.device
    if device.type == "cuda":
        torch.cuda.set_device(device)  # graphs are recorded on the current device
    return system.decoder.run(claims, min(system.batch_size, at_once or system.batch_size))


def own_device(wanted: str, local_rank: int) -> str:
    """The device of one of several processes on a machine: each takes a GPU of its own.

    Args:
        wanted: what was asked for; a GPU that it names by number is taken as it is.
        local_rank: number of the process on its machine; where there are fewer GPUs, they are shared.
    """
    if wanted not in ("auto", "cuda") or not torch.cuda.is_available():
        return wanted
    return f"cuda:{local_rank % torch.cuda.device_count()}"
