"""One evaluation: items become jobs, jobs become records, and every record gets its verdict while the run goes on.

    items -> jobs -> Session.run (decodes, appends records) -> ScoreWriter (judges, appends verdicts)

A record is on the disk before its text is judged, and a verdict as soon as it is reached. A run that is killed at any
instant therefore loses at most the requests in flight and the verdicts that were being reached; the same command run
again decodes what has no record, and judges what has no verdict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from refusion_eval.benchmarks import BENCHMARKS, Item, Task
from refusion_eval.config import check_keys
from refusion_eval.errors import ConfigError
from refusion_eval.evaluate.scores import ScoreWriter
from refusion_eval.evaluate.session import Session
from refusion_eval.paths import tasks_path
from refusion_eval.runs.job import Job, doc_hash, prompt_hash
from refusion_eval.runs.model_args import ModelArgs, embedded_name
from refusion_eval.runs.settings import choose_preset
from refusion_eval.runs.system import ModelCache, System
from refusion_eval.store.records import Sample, SampleKey

# No stop strings: a chat model ends its turn. The length belongs to the system under test, not to the task.
GENERATION_KWARGS: Mapping[str, list[str]] = {"until": []}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run.

    Attributes:
        run_dir: the run directory with the records.
        failed: records of the samples that could not be decoded.
        unscored: number of samples that could not be judged.
    """

    run_dir: Path
    failed: Sequence[Sample]
    unscored: int

    @property
    def is_complete(self) -> bool:
        """Whether every sample was decoded and judged."""
        return not self.failed and not self.unscored


def task_names(names: Sequence[str], model: str) -> list[str]:
    """The names of the tasks that a user means.

    Args:
        names: names of tasks, suites or benchmarks; none means all benchmarks.
        model: the checkpoint: for the embedded checkpoints a benchmark's name means its mini task.
    """
    mini = embedded_name(model, "") is not None
    task_of = {name: Task(benchmark, mini).name for name, benchmark in BENCHMARKS.items()}
    return [task_of.get(name, name) for name in names] or ["mini_suite" if mini else "refusion_suite"]


def find_tasks(names: Sequence[str]) -> list[Task]:
    """The tasks of the given names, each once, in the order in which they are named first.

    Args:
        names: names of this project's tasks, `mini_suite` or `refusion_suite`.

    Raises:
        ConfigError: a name belongs to none of them.
    """
    suites = {
        "refusion_suite": [Task(benchmark) for benchmark in BENCHMARKS.values()],
        "mini_suite": [Task(benchmark, mini=True) for benchmark in BENCHMARKS.values()],
    }
    known = suites | {task.name: [task] for suite in suites.values() for task in suite}
    # `task_names` reads the names of benchmarks, and they are what a user most likely meant to write.
    check_keys(names, known, "", what="task", offered=[*BENCHMARKS, *known])
    return list(dict.fromkeys(task for name in names for task in known[name]))


def load_items(names: Sequence[str], data_dir: str | None) -> dict[Task, list[Item]]:
    """Loads the items of tasks, before any checkpoint is touched.

    Args:
        names: as in `find_tasks`.
        data_dir: folder with benchmark rows; see `Task.rows`.

    Raises:
        ConfigError: a name belongs to no task.
        DataError: a task's rows cannot be found, or are malformed.
    """
    return {task: task.items(data_dir) for task in find_tasks(names)}


def evaluate(
    args: ModelArgs,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    sandbox: str = "auto",
    model_cache: ModelCache | None = None,
) -> Outcome:
    """Runs tasks, and records every sample and every verdict.

    Args:
        args: the system; its `run_dir` must be set.
        tasks: names of this project's tasks or suites.
        limit: evaluates only the first items of every task.
        sandbox: "auto", or "none" to run model-written code without isolation.
        model_cache: shares the opened model with other evaluations of this process.

    Raises:
        ConfigError: a task is unknown, or an argument is wrong.
        DataError: a task's rows cannot be found; nothing was loaded yet.
        CheckpointError: the checkpoint cannot be loaded.
        StoreError: the run directory belongs to another run.
    """
    if args.run_dir is None:
        raise ConfigError("a run needs a run directory: give --run-dir")
    choose_preset(tasks_path() / "settings" / f"{args.decoder}.yaml", args.preset)  # before data is looked for
    items = {task: of_task[:limit] for task, of_task in load_items(tasks, args.data_dir).items()}
    versions = {task.name: task.benchmark.version for task in items}
    with Session(args, task_versions=versions, model_cache=model_cache) as session:
        requests = [(_job(session.system, task, item), task, item) for task in items for item in items[task]]
        questions = {job.key: (task, item.row) for job, task, item in requests}
        assert session.store is not None
        with ScoreWriter(session.store, sandbox=sandbox, waits=_is_timed_on_cpu(session)) as scores:
            session.run([job for job, _, _ in requests], lambda job, sample: scores.judge(*questions[job.key], sample))
    return Outcome(run_dir=Path(args.run_dir), failed=session.failed, unscored=scores.num_unscored)


def _job(system: System, task: Task, item: Item) -> Job:
    """The request of an item: a conversation of one user turn, under the settings of the task."""
    resolved = system.resolve(task.name, GENERATION_KWARGS)
    prompt = system.user_prompt(item.prompt)
    real_prompt, sealed = item.sealing.unseal(prompt)  # hashes and records are of the markers of sealed texts
    key = SampleKey(
        task=task.name,
        task_version=task.benchmark.version,
        doc_hash=doc_hash(item.row),
        prompt_hash=prompt_hash(prompt),
        sample=0,
        settings_hash=resolved.digest,
    )
    return Job(
        key=key,
        benchmark=task.benchmark.name,
        item_id=item.id,
        prompt_ids=system.encode(real_prompt),
        resolved=resolved,
        sealed=sealed,
        alone=item.number < system.args.tps_samples,
    )


def _is_timed_on_cpu(session: Session) -> bool:
    return session.args.engine == "local" and session.system.model.device.type == "cpu"
