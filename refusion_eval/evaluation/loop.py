"""One evaluation: items become jobs, jobs become records, and every record gets its verdict while the run goes on.

    items -> jobs -> Session.run (decodes, appends records) -> ScoreWriter (judges, appends verdicts)

A record is on the disk before its text is judged, and a verdict as soon as it is reached. A run that is killed at any
instant therefore loses at most the requests in flight and the verdicts that were being reached; the same command run
again decodes what has no record, and judges what has no verdict.
"""

import contextlib
import functools
import logging
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from operator import length_hint
from typing import Any, NamedTuple, Self

from refusion_eval.benchmarks import Item, Task
from refusion_eval.decoders import find_decoder
from refusion_eval.decoders.infilling import whole_gap
from refusion_eval.errors import ConfigError, GaveUpError, MissingRowsError, ScaleOutError, StoreError
from refusion_eval.evaluation.tasks import find_tasks, limited
from refusion_eval.evaluation.tracking import Tracking, check_tracker
from refusion_eval.results.facts import natural_order
from refusion_eval.runs.job import Job, JobRunner, sample_key
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.runs.plan import Turn
from refusion_eval.runs.settings_tables import check_preset
from refusion_eval.runs.system import ModelCache, System, build_manifest
from refusion_eval.runs.terminal import Interruption, ProgressDisplay, RunningScore, resume_hint
from refusion_eval.scoring.judge import ScoreWriter
from refusion_eval.store.manifest import Hardware, Manifest
from refusion_eval.store.records import REFUSED, Sample, SampleKey
from refusion_eval.store.run_files import ADVICE
from refusion_eval.store.run_store import RunStore

log = logging.getLogger(__name__)

# Samples in a row that fail for one reason, after which a run gives up: each may take minutes of attempts.
_MOST_ALIKE = 5

# scaleout is imported inside functions: torch.distributed and Ray load slowly, and most runs have one process.


class Outcome(NamedTuple):
    failed: Sequence[Sample]  # samples that could not be decoded
    unscored: int  # number of samples that could not be judged
    missing: Sequence[str] = ()  # tasks that were not asked, because there are no rows of theirs

    @classmethod
    def of(cls, outcomes: Sequence[Self]) -> Self:
        """The outcome of several evaluations together."""
        failed = [sample for outcome in outcomes for sample in outcome.failed]
        missing = dict.fromkeys(task for outcome in outcomes for task in outcome.missing)
        return cls(failed, sum(outcome.unscored for outcome in outcomes), list(missing))

    @property
    def is_complete(self) -> bool:
        return not self.failed and not self.unscored and not self.missing


def evaluate(
    args: ModelArgs,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    sandbox: str = "auto",
    model_cache: ModelCache | None = None,
    turn: Turn | None = None,
) -> Outcome:
    """Runs the tasks that have rows, and records every sample and every verdict, and which tasks have no rows.

    What is missing is found before weights are loaded.

    Raises:
        MissingRowsError: none of the tasks has rows.
    """
    model_cache = model_cache or ModelCache()
    wanted = find_tasks(tasks)
    check_model(args, model_cache)
    every, errors = _items_of(wanted, args.data_dir)
    for name, error in errors.items() if turn is None or turn.number == 1 else ():
        log.warning("%s is left out: %s", name, error)
    missing = {name: error.advice for name, error in errors.items()}
    whole = {task.name: len(of_task) * args.samples for task, of_task in every.items()}
    items = {task: limited(task, of_task, limit) for task, of_task in every.items()}
    versions = {task.name: task.benchmark.prompts.version for task in wanted}
    totals = {task.name: len(of_task) * args.samples for task, of_task in items.items()}
    if turn is not None:
        items = {task: of_task[turn.number - 1 :: turn.of] for task, of_task in items.items()}
    session = Session(args, task_versions=versions, model_cache=model_cache, turn=turn, missing=missing)
    with contextlib.closing(session):
        texts = {task: session.version_of(task.name, versions[task.name]) for task in items}
        for task in items:
            session.check_samples(task.name)
        assert session.store is not None
        # Before anything else takes time, so that a run that is killed at any moment says how much was asked for.
        session.store.expect(totals, whole)
        requests = [
            (job_of(session.system, task, item, texts[task], sample), task, item)
            for task in items
            for item in items[task]
            for sample in range(args.samples)
        ]
        questions = {job.key: (task, item.row) for job, task, item in requests}
        with ScoreWriter(session.store, sandbox=sandbox, waits=session.decodes_on_cpu) as scores:
            session.run(
                [job for job, _, _ in requests],
                lambda job, sample: scores.judge(*questions[job.key], sample),
                score_of=scores.running_score,
            )
    return Outcome(session.failed, scores.num_unscored, list(missing))


def _items_of(
    tasks: Sequence[Task], data_dir: str | None
) -> tuple[dict[Task, list[Item]], dict[str, MissingRowsError]]:
    """The items of each task with rows, and why each other task has none; MissingRowsError if all are others."""
    items: dict[Task, list[Item]] = {}
    missing: dict[str, MissingRowsError] = {}
    for task in tasks:
        try:
            items[task] = task.items(data_dir)
        except MissingRowsError as error:
            missing[task.name] = error
    if not items:
        raise MissingRowsError(". And ".join(map(str, missing.values())))
    return items, missing


def check_model(args: ModelArgs, model_cache: ModelCache) -> None:
    """Opens a checkpoint without its weights, before rows are looked for: the hub may take half a minute to refuse."""
    if args.run_dir is None:
        raise ConfigError("a run needs a run directory: give --run-dir")
    check_preset(args.decoder, args.preset)
    _ = Session(args, model_cache=model_cache).system.checkpoint_settings


def job_of(system: System, task: Task, item: Item, version: str, sample: int) -> Job:
    """The request of an item, under the settings of the task: their length is the system's, not the task's."""
    prompts = task.benchmark.prompts
    is_whole = prompts.gap is not None and not prompts.gap.ends_at_eos
    of_gap = whole_gap(find_decoder(system.args.decoder)) if is_whole else {}
    resolved = system.resolve(task.name, {"until": list(prompts.stop_strings), **of_gap})
    prompt = system.render_turns(item.turns)
    real_prompt, sealed = system.unsealed(prompt, item.sealing)  # hashes and records are of the markers of sealed texts
    return Job(
        key=sample_key(task.name, version, item.row, prompt, resolved, sample),
        benchmark=task.benchmark.name,
        item_id=item.id,
        prompt_ids=system.encode_item(real_prompt, item, prompts.gap),
        prompt=real_prompt,
        resolved=resolved,
        prompts=task.benchmark.prompts_name,
        sealed=sealed,
        alone=not sample and item.number < system.args.tps_samples,
    )


def _common(causes: Sequence[str]) -> str:
    """The reason for which so many samples in a row failed; empty without one."""
    are_alike = len(causes) == _MOST_ALIKE and all(causes) and len(set(map(_without_ids, causes))) == 1
    return causes[-1] if are_alike else ""


def _without_ids(cause: str) -> str:
    """The words of a message without those that have a digit: sizes, addresses and the ids that servers give requests.

    The whole word is left out, because the letters of an id differ too from one request to the next. JSON without
    blanks has several words.
    """
    return " ".join(word for word in re.split(r"[\s{}\[\]\",:=]+", cause) if not any(map(str.isdigit, word)))


def _cause(sample: Sample) -> str:
    return (sample.error or "").strip().rpartition("\n")[2]


class Session:
    """The runner and the run store of a system during a run, each opened when it is first needed."""

    def __init__(
        self,
        args: ModelArgs,
        *,
        task_versions: Mapping[str, str] | None = None,
        model_cache: ModelCache | None = None,
        turn: Turn | None = None,
        missing: Mapping[str, str] | None = None,  # task without rows -> what to do
    ) -> None:
        self.args = args
        self._facts = ({} if turn is None else {"round": turn.number}) | ({"missing": missing} if missing else {})
        self.failed: list[Sample] = []
        self.task_versions = dict(task_versions or {})
        self._store: RunStore | None = None
        self._runner: JobRunner | None = None
        check_tracker(args.tracker)
        self._tracking = Tracking(args.tracker, str(args.run_dir)) if args.tracker else None
        if args.engine == "ray":  # this process opens less than was asked for, because only workers decode
            from refusion_eval.scaleout import ray_runner

            args = ray_runner.driver_args(args)
        self.system = System(
            args, model_cache, get_or_compute=self._get_or_compute, num_processes=num_local_processes()
        )

    def close(self) -> None:
        """Releases the runner's processes and the run directory; a later request opens them again."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        self.close_store()

    def close_store(self) -> None:
        if self._store is not None:
            if self.args.engine == "local":
                with contextlib.suppress(StoreError):  # of a disk that the run has just failed on
                    self._store.note(self._store.process_id, after=self.system.backend.state())
            self._store.close()
            self._store = None
            if self._tracking is not None:
                self._tracking.on_end()

    @property
    def store(self) -> RunStore | None:
        if self._store is None and self.args.run_dir is not None:
            self._store = self._open_store(self.args.run_dir)
        return self._store

    def _open_store(self, run_dir: str) -> RunStore:
        manifest = self.manifest()
        store = RunStore.open(run_dir, manifest)
        if self.args.engine == "local":
            state = self.system.backend.state()
            store.note(store.process_id, before=state, **self._facts)
            weights = manifest.roofline.get("weight_bytes", 0)
            for sentence in manifest.hardware.slowed_by(state.get("load"), weights):
                log.warning("speed will be lower than need be: %s (load %s)", sentence, state.get("load"))
        if others := store.other_machines(manifest.hardware):
            log.warning(
                "%s was begun on other hardware (%s; here %s): its tasks get no common speed. OMP_NUM_THREADS sets the "
                "threads",
                *(run_dir, " and ".join(others), manifest.hardware.label()),
            )
        return store

    @property
    def runner(self) -> JobRunner:
        """Decodes the jobs: this process, the processes of its launcher, or workers on a Ray cluster."""
        if self._runner is None:
            self._runner = self._choose_runner()
        return self._runner

    @functools.cached_property
    def _recorded(self) -> Mapping[str, set[tuple[str, int]]]:
        """Task -> its version and the number of the sample in recorded keys, each pair once."""
        found: dict[str, set[tuple[str, int]]] = {}
        for sample in self.store.samples(traces=False) if self.store is not None else ():
            found.setdefault(sample.key.task, set()).add((sample.key.task_version, sample.key.sample))
        return found

    def version_of(self, task: str, current: str) -> str:
        """The version of a task under which the run records its texts: that of those that are there already.

        A later version of the task may judge texts by other rules; the texts stay those of the same prompts.
        """
        recorded = {version for version, _ in self._recorded.get(task, ())} or {current}
        return current if current in recorded else max(recorded, key=natural_order)

    def check_samples(self, task: str) -> None:
        """Raises StoreError if the run directory has more samples of an item than are asked for."""
        recorded = max((1 + number for _, number in self._recorded.get(task, ())), default=0)
        asked = self.args.samples
        if recorded > asked:
            raise StoreError(
                f"{self.args.run_dir} has {recorded} samples of an item of {task}, and {asked} are asked for; ask for "
                f"{recorded} or more (--samples, or samples among model arguments). Otherwise {ADVICE}"
            )

    @property
    def decodes_on_cpu(self) -> bool:
        return self.args.engine == "local" and self.system.backend.device == "cpu"

    def manifest(self) -> Manifest:
        if self.args.engine != "ray":
            return build_manifest(self.system, self.task_versions)
        runner: Any = self.runner  # a RayRunner; it asks its first worker, because this process decodes nothing
        manifest: Manifest = runner.manifest(self.task_versions)
        return manifest

    def _choose_runner(self) -> JobRunner:
        """Raises ScaleOutError in a worker of a launcher's processes, which decodes for rank 0 and drives no run."""
        if self.args.engine == "ray":
            from refusion_eval.scaleout.ray_runner import RayRunner

            return RayRunner(self.args, self.system, self._register_process)
        if not _has_launcher():
            return self.system
        from refusion_eval.scaleout.channel import open_channel
        from refusion_eval.scaleout.torchrun import TorchrunRunner

        if (channel := open_channel()) is None:
            return self.system
        if channel.info.rank > 0:
            raise ScaleOutError(
                f"process {channel.info.rank} of a launcher decodes for process 0 and drives no run of its own; call "
                "refusion_eval.evaluation.loop.run_worker_or_return(args) before the run"
            )
        return TorchrunRunner(channel, self.system, self._register_process)

    def _get_or_compute(self, name: str, compute: Callable[[], Any]) -> Any:
        return compute() if self.store is None else self.store.get_or_compute(name, compute)

    def _register_process(self, hardware: Hardware, pid: int) -> str:
        if self.store is None:
            return ""
        process_id = self.store.register_process(hardware, pid=pid)
        self.store.note(process_id, driver=os.getpid(), **self._facts)
        return process_id

    def run(
        self,
        jobs: Sequence[Job],
        on_sample: Callable[[Job, Sample], None],
        *,
        check_all: bool = False,
        score_of: Callable[[str], RunningScore] | None = None,
    ) -> None:
        """Decodes every job that has no successful record; an interruption lets the requests in flight end.

        Args:
            on_sample: called with each job and its record: with recorded ones first, then as decoding ends. A record
                is in the run store before that.
            check_all: refuse the whole run if one prompt cannot be decoded, instead of recording a failure.
        """
        totals = Counter(job.key.task for job in jobs)
        store = self.store
        if store:
            store.expect(totals)  # those of later turns are expected already
        interruption = Interruption(lambda: resume_hint(self.args.run_dir), finish_first=True)
        display = ProgressDisplay(self.args.system_name, dict(totals), score_of=score_of)
        with interruption, display as progress:
            missing: dict[SampleKey, Job] = {}
            self.check_prompts({job.key: job.item_id for job in jobs})
            for job in jobs:
                sample = store.get(job.key) if store else None
                if sample is not None and sample.error is None:
                    if sample.prompt_num_tokens not in (0, len(job.prompt_ids)):  # 0 where it is not recorded
                        raise StoreError(
                            f"{self.args.run_dir}: the prompt of {job.key.task} item {job.item_id} had "
                            f"{sample.prompt_num_tokens} tokens and has {len(job.prompt_ids)} now: the tokenizer "
                            f"changed, or what is added around a prompt. Take the former one; otherwise {ADVICE}"
                        )
                    on_sample(job, sample)
                    progress.stored(job.key.task)
                else:
                    missing.setdefault(job.key, job)
            ordered = sorted(missing.values(), key=lambda job: not job.alone)
            if check_all:
                self._check_lengths(ordered)
            causes: deque[str] = deque(maxlen=_MOST_ALIKE)  # of the last samples; empty for one that did not fail
            given_up = ""  # why; what is in flight then may succeed
            waiting = interruption.stoppable(ordered, lambda: bool(given_up))
            for sample in self.runner.run(waiting):
                if store:
                    store.append(sample)
                if self._tracking is not None:
                    self._tracking.on_sample(sample)
                if sample.error is not None:
                    self.failed.append(sample)
                    log.error("%s %s failed: %s", sample.key.task, sample.item_id, _cause(sample))
                if sample.stop != REFUSED:  # which is about one prompt, and was found in no time
                    causes.append(_cause(sample))
                    given_up = given_up or _common(causes)
                on_sample(missing[sample.key], sample)
                progress.decoded(sample)
            if given_up and length_hint(waiting):
                raise GaveUpError(
                    f"{_MOST_ALIKE} items in a row failed for one reason, so the run gave up: {given_up}. Mend "
                    f"this; {resume_hint(self.args.run_dir)}"
                )

    def check_prompts(self, requests: Mapping[SampleKey, str]) -> None:
        """Raises StoreError if items of the run directory would be asked with another prompt under equal settings."""
        if self.store is None:
            return
        recorded = {
            (sample.key.without_prompt(), sample.item_id): sample.key.prompt_hash
            for sample in self.store.samples(traces=False)
            if sample.error is None
        }
        others = [
            f"{key.task} item {item_id}"
            for key, item_id in requests.items()
            if recorded.get((key.without_prompt(), item_id), key.prompt_hash) != key.prompt_hash
        ]
        if others:
            raise StoreError(
                f"{self.args.run_dir} has {len(others)} of these items with another prompt, the first of them "
                f"{others[0]}; take the chat template, its date (prompt_time) and the examples that the run began "
                f"with. Otherwise {ADVICE}"
            )

    def _check_lengths(self, jobs: Sequence[Job]) -> None:
        refusals = [(job, reason) for job in jobs if (reason := self.system.backend.refusal(job))]
        if refusals:
            job, reason = refusals[0]
            more = f" ({len(refusals)} of {len(jobs)} prompts are refused; this is the first)" if refusals[1:] else ""
            raise ConfigError(f"{job.key.task} item {job.item_id}: {reason}{more}; nothing was decoded")


def run_worker_or_return(args: ModelArgs) -> None:
    """Runs the worker loop and exits on ranks above 0 of a launcher; a command calls this before it runs anything."""
    if _has_launcher():
        from refusion_eval.scaleout import torchrun

        torchrun.run_worker_or_return(args)


def num_local_processes() -> int:
    if not _has_launcher():
        return 1
    from refusion_eval.scaleout.channel import ProcessInfo

    info = ProcessInfo.from_environment(os.environ)
    return 1 if info is None else info.num_local


def _has_launcher() -> bool:
    return "RANK" in os.environ
