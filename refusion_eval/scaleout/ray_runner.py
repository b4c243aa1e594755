"""Decodes the jobs of a run on a Ray cluster. This process hands out jobs and stores records; it decodes nothing."""

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
from refusion_eval.scaleout.ray_cluster import Cluster
from refusion_eval.scaleout.ray_dispatch import POLL_SECONDS, Dispatcher
from refusion_eval.scaleout.ray_pool import Resources, WorkerEvent, WorkerHandle, WorkerPool, in_short
from refusion_eval.scaleout.worker import ATTENTION, WIDTH_COST, Setup
from refusion_eval.scaleout.worker_registry import Register, WorkerRegistry
from refusion_eval.store.manifest import Manifest, as_json
from refusion_eval.store.records import Sample

log = logging.getLogger(__name__)

# Longest wait for the first worker: machines that are rented on demand take minutes to start.
FIRST_WORKER_SECONDS = 900.0
LOG_SECONDS = 60.0


class _NotRecordedError(Exception):
    """The run directory does not hold a fact of the run."""


def driver_args(args: ModelArgs) -> ModelArgs:
    """Arguments of the driver's own system, which loads no weights and needs no GPU."""
    return replace(args, device="cpu", attention="sdpa", cuda_graphs=False, loop="engine", run_dir=None)


class RayRunner:
    """A `JobRunner` whose workers are processes of a Ray cluster.

    Args:
        args: model arguments of the run.
        system: the driver's own system, made with `driver_args(args)`.
        register: records a process in the run store and returns its id.
        keep_workers: whether workers stay alive after `run`, for another call. By default their resources become free.

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
        self._registry = WorkerRegistry(register)
        self.cluster = Cluster(args.ray_address)
        self._pool: WorkerPool | None = None
        self._numbers = itertools.count()
        self._manifest: Manifest | None = None
        self._worker_facts: dict[str, Mapping[str, Any]] = {}  # results of `RayWorker.open`, by worker
        self.run_facts: dict[str, Any] = {}
        self._first: WorkerHandle | None = None  # the worker that loads the checkpoint and describes the run

    def refusal(self, job: Job) -> str | None:
        """The reason why a job cannot be decoded, if that is known before decoding; else None."""
        return self._system.decoder.refusal(job)

    def manifest(self, task_versions: Mapping[str, str]) -> Manifest:
        """Describes this run. The device and all that depends on it are those of the first worker, which this awaits.

        Raises:
            ScaleOutError: no worker can be started, or none can load the checkpoint.
        """
        manifest = self._wait_for_manifest(lambda: False)
        assert manifest is not None
        return replace(
            manifest,
            tasks=dict(task_versions),
            checkpoint=self._args.pretrained,
            command=sys.argv,
            arguments=run_arguments(self._args),
        )

    def _wait_for_manifest(self, stop_requested: Callable[[], bool]) -> Manifest | None:
        """Waits for the first worker's description of the run; returns None if a stop is requested before."""
        pool = self._open_pool()
        deadline = time.monotonic() + FIRST_WORKER_SECONDS
        next_line = time.monotonic() + LOG_SECONDS
        while self._manifest is None and not stop_requested():
            pool.grow()
            for event in pool.wait(POLL_SECONDS):
                self.on_setup_event(event)
            if time.monotonic() > next_line:
                next_line = time.monotonic() + LOG_SECONDS
                states = ", ".join(f"{worker.name} is {worker.state}" for worker in pool.workers)
                log.info("waiting for a first worker: %s; %s", states or "there is no room", self.describe_resources())
            if self._first is not None:  # it has started; its checkpoint may have to be downloaded
                deadline = time.monotonic() + FIRST_WORKER_SECONDS
            if time.monotonic() > deadline:
                raise ScaleOutError(f"no worker started in {FIRST_WORKER_SECONDS:.0f} s: {self.describe_resources()}")
        return self._manifest

    def describe_resources(self) -> str:
        """Resources that a worker needs, and resources of the cluster."""
        resources = self._open_pool().resources
        need = "a free GPU" if resources.use_gpu else f"{resources.cpus} free cores"
        nodes = ", ".join(f"{node.label}: {node.num_gpus} GPUs, {node.num_cpus} cores" for node in self.cluster.nodes())
        return f"each needs {need}; the cluster has {nodes or 'no machine'}"

    def sample(self, worker: WorkerHandle, fields: Mapping[str, Any]) -> Sample:
        """Decodes a worker's record from JSON, and registers the worker with its first record."""
        facts = self._worker_facts[worker.name]
        self._registry.add(worker.name, facts["hardware"], facts["pid"])
        return self._registry.sample(worker.name, fields)

    def has_width_cost(self) -> bool:
        """Whether the cost of a forward by its rows is known, in this process or from the run directory."""

        def fail() -> Mapping[str, Any]:
            raise _NotRecordedError

        if WIDTH_COST not in self.run_facts:
            try:
                self.run_facts[WIDTH_COST] = self._system.get_or_compute(WIDTH_COST, fail)
            except _NotRecordedError:
                return False
        return True

    def set_width_cost(self, measured: Mapping[str, Any]) -> None:
        """Records the cost of a forward by its rows."""
        self.run_facts[WIDTH_COST] = self._system.get_or_compute(WIDTH_COST, lambda: measured)

    def _open_pool(self) -> WorkerPool:
        if self._pool is None:
            args = self._args
            use_gpu = args.device == "cuda" or (
                args.device == "auto" and any(node.num_gpus for node in self.cluster.nodes())
            )
            self._pool = WorkerPool(self.cluster, Resources(use_gpu, args.worker_cpus, args.workers))
        return self._pool

    def _setup(self) -> dict[str, Any]:
        """The `Setup` of a worker as JSON."""
        arguments = run_arguments(self._args)
        for name in ("pretrained", "adapter", "chat_template"):
            # Ray starts workers in another working directory.
            if name in arguments and (path := Path(str(arguments[name])).expanduser()).exists():
                arguments[name] = str(path.absolute())
        attention = System(self._args).wanted_attention()
        run_facts = self.run_facts if attention == "auto" else {ATTENTION: attention, **self.run_facts}
        fingerprint = {} if self._manifest is None else self._manifest.fingerprint()
        return Setup(arguments=as_json(arguments), run_facts=run_facts, fingerprint=fingerprint).to_json()

    def on_setup_event(self, event: WorkerEvent) -> None:
        """Advances the setup of workers, or logs the loss of a worker without requests.

        One worker loads the checkpoint first and describes the run; the others load it after that and have to agree.
        """
        assert self._pool is not None
        worker, pool = event.worker, self._pool
        if event.kind == "opened" and "problem" in event.value:
            pool.exclude(worker.node, event.value["problem"])
            pool.stop(worker)
        elif event.kind == "opened":
            self._worker_facts[worker.name] = event.value
            worker.batch_size = event.value["batch_size"]
            log.info("%s is ready", worker.name)
            if self._manifest is None:
                self._manifest = Manifest.from_json(event.value["manifest"])
                if self._args.loop == "engine":
                    self.run_facts[ATTENTION] = event.value["attention"]
        elif event.kind == "lost":
            log.warning("%s is lost (%s)", worker.name, event.value)
        if event.kind in ("opened", "lost") and worker is self._first:
            self._first = None
        for started in pool.workers:
            if started.state == "started" and (self._manifest is not None or self._first is None):
                pool.open(started, self._setup(), first=self._manifest is None)
                self._first = started if self._manifest is None else self._first

    def run(self, jobs: Iterable[Job]) -> Iterator[Sample]:
        """Decodes jobs on all workers and yields the record of each job as it arrives.

        Args:
            jobs: read as workers become free, and a few jobs ahead; jobs to be decoded alone come before all others.

        Raises:
            ScaleOutError: no worker can decode, or the cluster failed.
        """
        pool = self._open_pool()
        is_complete = False
        try:
            stoppable = jobs if isinstance(jobs, StoppableIterator) else None
            if self._wait_for_manifest(lambda: stoppable is not None and stoppable.stop_requested) is None:
                return
            dispatcher = Dispatcher(pool, self._numbers, iter(jobs), self)
            yield from dispatcher.records()
            is_complete = dispatcher.is_complete
        except self.cluster.ray.exceptions.RayError as error:
            raise ScaleOutError(
                f"the Ray cluster failed ({in_short(error)}); run the same command again to continue"
            ) from error
        finally:
            if not (self._keep_workers and is_complete):
                pool.stop_all()

    def close(self) -> None:
        """Ends the workers and leaves the cluster."""
        if self._pool is not None:
            self._pool.stop_all()
            self._pool = None
        self.cluster.close()
