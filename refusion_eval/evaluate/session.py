"""One system at work: who decodes its requests, and the run store that keeps every record the moment it is finished."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from refusion_eval.errors import ConfigError, ScaleOutError
from refusion_eval.runs.interrupt import Interruption, resume_hint
from refusion_eval.runs.job import Job
from refusion_eval.runs.manifest import build_manifest
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.runs.progress import ProgressDisplay
from refusion_eval.runs.runner import JobRunner
from refusion_eval.runs.system import ModelCache, System
from refusion_eval.store.environment import Hardware
from refusion_eval.store.manifest import Manifest
from refusion_eval.store.records import Sample, SampleKey
from refusion_eval.store.run_store import RunStore

log = logging.getLogger(__name__)


class Session:
    """A system, its runner and its run store; a context manager. Nothing is opened before it is needed.

    Attributes:
        system: the checkpoint and its decoder, as far as this process opens them.
        failed: records of the requests that could not be decoded.

    Args:
        args: what to load and how to run it.
        task_versions: task name -> version, recorded in the manifest.
        model_cache: shares the opened model with other sessions of this process.
    """

    def __init__(
        self,
        args: ModelArgs,
        *,
        task_versions: Mapping[str, str] | None = None,
        model_cache: ModelCache | None = None,
    ) -> None:
        self.args = args
        self.failed: list[Sample] = []
        self._task_versions = dict(task_versions or {})
        self._store: RunStore | None = None
        self._runner: JobRunner | None = None
        self.system = System(
            driver_args(args), model_cache, get_or_compute=self._get_or_compute, num_processes=_num_local_processes()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases the runner's processes and the run directory; a later request opens them again."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        self.close_store()

    def close_store(self) -> None:
        """Releases the run directory; harmless if it is not open."""
        if self._store is not None:
            self._store.close()
            self._store = None

    @property
    def store(self) -> RunStore | None:
        """The run store, opened when it is first asked for; None without a run directory."""
        if self._store is None and self.args.run_dir is not None:
            self._store = RunStore.open(self.args.run_dir, self.manifest())
        return self._store

    @property
    def runner(self) -> JobRunner:
        """Decodes the jobs: this process, the processes of its launcher, or workers on a Ray cluster."""
        if self._runner is None:
            self._runner = choose_runner(self.args, self.system, self._register_process)
        return self._runner

    def manifest(self) -> Manifest:
        """Describes the run: as the first worker sees it where this process decodes nothing."""
        if self.args.engine != "ray":
            return build_manifest(self.system, self._task_versions)
        from refusion_eval.scaleout.ray_runner import RayRunner

        assert isinstance(self.runner, RayRunner)
        return self.runner.manifest(self._task_versions)

    def _get_or_compute(self, name: str, compute: Callable[[], Any]) -> Any:
        return compute() if self._store is None else self._store.get_or_compute(name, compute)

    def _register_process(self, hardware: Hardware, pid: int) -> str:
        return self.store.register_process(hardware, pid=pid) if self.store else ""

    def run(self, jobs: Sequence[Job], on_sample: Callable[[Job, Sample], None], *, check_all: bool = False) -> None:
        """Sees to it that every job has a good record: decodes the jobs whose record is missing or failed.

        A first SIGINT or SIGTERM lets the requests in flight end; a second one does not.

        Args:
            jobs: the requests.
            on_sample: called with each job and its record: with recorded ones first, then as decoding ends. A record
                is in the run store before that.
            check_all: refuse the whole run if one prompt cannot be decoded, instead of recording a failure.

        Raises:
            ConfigError: a prompt cannot be decoded, with `check_all`; nothing was decoded.
            Interrupted: a signal asked for an end; finished requests are recorded.
        """
        totals = Counter(job.key.task for job in jobs)
        store = self.store
        if store:
            store.expect(totals)
        interruption = Interruption(lambda: resume_hint(self.args.run_dir), finish_first=True)
        with interruption, ProgressDisplay(self.args.system_name, dict(totals)) as progress:
            missing: dict[SampleKey, Job] = {}
            for job in jobs:
                sample = store.get(job.key) if store else None
                if sample is not None and sample.error is None:
                    on_sample(job, sample)
                    progress.stored(job.key.task)
                else:
                    missing.setdefault(job.key, job)
            ordered = sorted(missing.values(), key=lambda job: not job.alone)
            if check_all:
                self._check_prompts(ordered)
            for sample in self.runner.run(interruption.stoppable(ordered)):
                if store:
                    store.append(sample)
                if sample.error is not None:
                    self.failed.append(sample)
                    log.error("%s %s failed: %s", sample.key.task, sample.item_id, _last_line(sample.error))
                on_sample(missing[sample.key], sample)
                progress.decoded(sample)

    def _check_prompts(self, jobs: Sequence[Job]) -> None:
        refusals = [(job, reason) for job in jobs if (reason := self.runner.refusal(job))]
        if refusals:
            job, reason = refusals[0]
            more = f" ({len(refusals)} of {len(jobs)} prompts are refused; this is the first)" if refusals[1:] else ""
            raise ConfigError(f"{job.key.task} item {job.item_id}: {reason}{more}; nothing was decoded")


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


# scaleout is imported inside functions: torch.distributed and Ray load slowly, and most runs have one process.


def run_worker_or_return(args: ModelArgs) -> None:
    """Returns immediately on rank 0 and without a launcher. On any other rank, runs the worker loop and exits.

    A command calls this before it runs anything. See `refusion_eval.scaleout.torchrun.run_worker_or_return`.
    """
    if _has_launcher():
        from refusion_eval.scaleout import torchrun

        torchrun.run_worker_or_return(args)


def driver_args(args: ModelArgs) -> ModelArgs:
    """The arguments of the system that this process opens: less than was asked for where only workers decode."""
    if args.engine != "ray":
        return args
    from refusion_eval.scaleout import ray_runner

    return ray_runner.driver_args(args)


def choose_runner(args: ModelArgs, system: System, register: Callable[[Hardware, int], str]) -> JobRunner:
    """Chooses what decodes the jobs of this process' run.

    Args:
        args: what was asked for.
        system: the system of this process.
        register: records a process that generates samples, and returns its id.

    Raises:
        ScaleOutError: this is a worker of a launcher's processes, which decodes for rank 0 and drives no run.
    """
    if args.engine == "ray":
        from refusion_eval.scaleout.ray_runner import RayRunner

        return RayRunner(args, system, register)
    if not _has_launcher():
        return system.decoder
    from refusion_eval.scaleout.launch import process_group
    from refusion_eval.scaleout.torchrun import TorchrunRunner

    group = process_group()
    if group is None:
        return system.decoder
    if group.info.rank > 0:
        raise ScaleOutError(
            f"process {group.info.rank} of a launcher decodes for process 0 and drives no run of its own; call "
            "refusion_eval.evaluate.session.run_worker_or_return(args) before the run"
        )
    return TorchrunRunner(group, system, register)


def _num_local_processes() -> int:
    """Processes of this run on this machine."""
    if not _has_launcher():
        return 1
    from refusion_eval.scaleout.launch import num_local_processes

    return num_local_processes()


def _has_launcher() -> bool:
    return "RANK" in os.environ
