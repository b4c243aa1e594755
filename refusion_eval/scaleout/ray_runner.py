"""Decodes the jobs of a run on a Ray cluster; this process asks for the work and records it, and decodes nothing."""

import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from refusion_eval.errors import ConfigError, ScaleOutError
from refusion_eval.runs.interrupt import StoppableIterator
from refusion_eval.runs.job import Job
from refusion_eval.runs.manifest import run_arguments
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.runs.system import System
from refusion_eval.scaleout.driver import Register, Workforce
from refusion_eval.scaleout.ray_cluster import Cluster
from refusion_eval.scaleout.ray_dispatch import LOOK_SECONDS, Dispatch
from refusion_eval.scaleout.ray_pool import Event, Member, Pool, Room, in_short
from refusion_eval.scaleout.worker import ATTENTION, WIDTH_COST, Setup
from refusion_eval.store.manifest import Manifest, as_json
from refusion_eval.store.records import Sample

log = logging.getLogger(__name__)

# How long a run waits for its first worker: machines that are rented on demand take minutes to come.
FIRST_WORKER_SECONDS = 900.0
LOG_SECONDS = 60.0


def on_driver(args: ModelArgs) -> ModelArgs:
    """What the driver itself opens: no weights, so whatever a GPU is needed for is left to the workers."""
    return replace(args, device="cpu", attention="sdpa", cuda_graphs=False, loop="engine", run_dir=None)


class RayRunner:
    """A `JobRunner` whose workers are processes of a Ray cluster.

    Args:
        args: what to load and how to run it.
        system: the driver's own view of it, of `on_driver(args)`.
        register: records a process that generates samples, and names it.
        keep_workers: whether workers stay for another call of `run`; else what they take is free for others after it.

    Raises:
        ConfigError: ray is missing, or an argument means one process only.
        ScaleOutError: the cluster cannot be reached.
    """

    def __init__(self, args: ModelArgs, system: System, register: Register, *, keep_workers: bool = False) -> None:
        if args.device.startswith("cuda:"):
            raise ConfigError(
                f"device={args.device} names one GPU, and with engine=ray each worker has its own: say cuda"
            )
        self._args = args
        self._system = system
        self._keep_workers = keep_workers
        self._workforce = Workforce(register)
        self.cluster = Cluster(args.ray_address)
        self._pool: Pool | None = None
        self._numbers = itertools.count()
        self._manifest: Manifest | None = None
        self._facts: dict[str, Mapping[str, Any]] = {}
        self.settled: dict[str, Any] = {}
        self._first: Member | None = None

    def refusal(self, job: Job) -> str | None:
        """Why a job cannot be decoded, known before anything is computed; None if it can."""
        return self._system.decoder.refusal(job)

    def manifest(self, task_versions: Mapping[str, str]) -> Manifest:
        """Describes this run as its first worker sees it: the device and all that follows from it are a worker's.

        Raises:
            ScaleOutError: no worker can be started, or none can open the checkpoint.
        """
        found = self._described(lambda: False)
        assert found is not None
        return replace(
            found,
            tasks=dict(task_versions),
            checkpoint=self._args.pretrained,
            command=sys.argv,
            arguments=run_arguments(self._args),
        )

    def _described(self, is_asked: Callable[[], bool]) -> Manifest | None:
        """The run as its first worker sees it, which this waits for; None if an end is asked for before."""
        pool = self._open_pool()
        give_up = time.monotonic() + FIRST_WORKER_SECONDS
        next_line = time.monotonic() + LOG_SECONDS
        while self._manifest is None and not is_asked():
            pool.grow()
            for event in pool.wait(LOOK_SECONDS):
                self.welcome(event)
            doing = ", ".join(f"{member.name} is {member.doing}" for member in pool.members) or "there is no room"
            if time.monotonic() > next_line:
                next_line = time.monotonic() + LOG_SECONDS
                log.info("waiting for a first worker: %s; %s", doing, self.demand())
            if self._first is not None:  # it is there, and may have to download its checkpoint
                give_up = time.monotonic() + FIRST_WORKER_SECONDS
            if time.monotonic() > give_up:
                raise ScaleOutError(f"no worker started in {FIRST_WORKER_SECONDS:.0f} s: {self.demand()}")
        return self._manifest

    def demand(self) -> str:
        """What a worker needs, and what the cluster has."""
        room = self._open_pool().room
        need = "a free GPU" if room.use_gpu else f"{room.cpus} free cores"
        nodes = ", ".join(f"{node.label}: {node.num_gpus} GPUs, {node.num_cpus} cores" for node in self.cluster.nodes())
        return f"each needs {need}; the cluster has {nodes or 'no machine'}"

    def signed(self, member: Member, sample: Mapping[str, Any]) -> Sample:
        """A worker's record, with the process that made it, which is registered with its first one."""
        facts = self._facts[member.name]
        self._workforce.join(member.name, facts["hardware"], facts["pid"])
        return self._workforce.signed(member.name, sample)

    def settle_width_cost(self, measure: Callable[[], Mapping[str, Any]]) -> None:
        """Finds out how the time of a forward grows with its rows: recorded by a run that is resumed, or measured."""
        self.settled[WIDTH_COST] = self._system.get_or_compute(WIDTH_COST, measure)

    def _open_pool(self) -> Pool:
        if self._pool is None:
            args = self._args
            use_gpu = args.device == "cuda" or (
                args.device == "auto" and any(node.num_gpus for node in self.cluster.nodes())
            )
            self._pool = Pool(self.cluster, Room(use_gpu, args.worker_cpus, args.workers))
        return self._pool

    def _setup(self) -> dict[str, Any]:
        """What a worker is told."""
        given = run_arguments(self._args)
        for name in ("pretrained", "adapter", "chat_template"):
            # Ray starts workers in a folder of its own.
            if name in given and (path := Path(str(given[name])).expanduser()).exists():
                given[name] = str(path.absolute())
        attention = System(self._args).wanted_attention()
        settled = self.settled if attention == "auto" else {ATTENTION: attention, **self.settled}
        fingerprint = {} if self._manifest is None else self._manifest.fingerprint()
        return Setup(arguments=as_json(given), settled=settled, fingerprint=fingerprint).to_json()

    def welcome(self, event: Event) -> None:
        """Takes a worker from its start to where it can decode; the first one describes the run for all others."""
        assert self._pool is not None
        member, pool = event.member, self._pool
        if event.kind == "opened" and "problem" in event.value:
            pool.leave_out(member.node, event.value["problem"])
            pool.dismiss(member)
        elif event.kind == "opened":
            self._facts[member.name] = event.value
            member.batch_size = event.value["batch_size"]
            log.info("%s is ready", member.name)
            if self._manifest is None:
                self._manifest = Manifest.from_json(event.value["manifest"])
                if self._args.loop == "engine":
                    self.settled[ATTENTION] = event.value["attention"]
        elif event.kind == "lost":
            log.warning("%s is lost (%s)", member.name, event.value)
        if event.kind in ("opened", "lost") and member is self._first:
            self._first = None
        for started in pool.members:
            if started.doing == "started" and (self._manifest is not None or self._first is None):
                pool.open(started, self._setup(), first=self._manifest is None)
                self._first = started if self._manifest is None else self._first

    def run(self, jobs: Iterable[Job]) -> Iterator[Sample]:
        """Decodes jobs on all workers and yields the record of each as it arrives.

        Args:
            jobs: consumed as workers become free, and a few ahead; those to be decoded alone before all others.

        Raises:
            ScaleOutError: no worker can decode, or the cluster is gone.
        """
        pool = self._open_pool()
        is_done = False
        try:
            if self._described(lambda: isinstance(jobs, StoppableIterator) and jobs.stop_requested) is None:
                return
            dispatch = Dispatch(pool, self._numbers, iter(jobs), self)
            yield from dispatch.records()
            is_done = dispatch.is_complete
        except self.cluster.ray.exceptions.RayError as error:
            raise ScaleOutError(
                f"the Ray cluster failed ({in_short(error)}); run the same command again to continue"
            ) from error
        finally:
            if not (self._keep_workers and is_done):
                pool.dismiss_all()

    def close(self) -> None:
        """Ends the workers and leaves the cluster."""
        if self._pool is not None:
            self._pool.dismiss_all()
            self._pool = None
        self.cluster.close()
