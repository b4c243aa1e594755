"""One evaluation through lm-eval's Python API: this project's tasks, one system, one run directory.

lm-eval renders prompts, asks for responses and scores them; every response and every score ends up in the run store,
from which the tables are made. What is already in the store is neither decoded nor lost.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.api.task
from lm_eval.tasks import TaskManager

import refusion_eval
from refusion_eval.benchmarks import BENCHMARKS, Task
from refusion_eval.config import check_keys
from refusion_eval.errors import ConfigError
from refusion_eval.lm_eval_plugin.adapter import RefusionLM
from refusion_eval.lm_eval_plugin.hooks import SANDBOX_VARIABLE
from refusion_eval.paths import tasks_path
from refusion_eval.runs.job import Job
from refusion_eval.runs.model_args import ModelArgs, embedded_name
from refusion_eval.runs.settings import choose_preset
from refusion_eval.runs.system import ModelCache
from refusion_eval.scaleout.torchrun import run_worker_or_return
from refusion_eval.scoring.judge import ERROR
from refusion_eval.store.records import PASSED, Sample, ScoreRow

log = logging.getLogger(__name__)

SUITES = {True: "mini_suite", False: "refusion_suite"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run came to.

    Attributes:
        run_dir: where the records are.
        failed: samples that could not be decoded.
        unscored: samples that could not be judged.
    """

    run_dir: Path
    failed: Sequence[Sample]
    unscored: int

    @property
    def is_complete(self) -> bool:
        """Whether every sample was decoded and judged."""
        return not self.failed and not self.unscored


def task_names(names: Sequence[str], model: str) -> list[str]:
    """lm-eval's names of the tasks that a user means.

    Args:
        names: task or group names, or plain benchmark names; none means all seven benchmarks.
        model: the checkpoint: for the embedded ones a plain benchmark name means its mini task.
    """
    mini = embedded_name(model, "") is not None
    own = {name: Task(benchmark, mini).name for name, benchmark in BENCHMARKS.items()}
    return [own.get(name, name) for name in names] or [SUITES[mini]]


def evaluate(
    args: ModelArgs,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    sandbox: str = "auto",
    model_cache: ModelCache | None = None,
) -> Outcome:
    """Runs tasks and stores every sample and score.

    Of several processes that a launcher started only the first one returns: see `run_worker_or_return`.

    Args:
        args: the system; its `run_dir` must be set.
        tasks: names of this project's tasks or groups.
        limit: only the first items of every task.
        sandbox: "auto", or "none" to run model-written code without isolation.
        model_cache: keeps the model for the next evaluation of this process.

    Raises:
        ConfigError: a task is unknown, or an argument is wrong.
        DataError: a task's data cannot be found; nothing was loaded yet.
        CheckpointError: the checkpoint cannot be loaded.
        StoreError: the run directory belongs to another run.
    """
    if args.run_dir is None:
        raise ConfigError("a run needs a run directory: give --run-dir")
    run_worker_or_return(args)
    choose_preset(tasks_path() / "settings" / f"{args.decoder}.yaml", args.preset)  # before data is looked for
    loaded = load_tasks(tasks, args.data_dir)
    versions = {name: str(task.VERSION) for name, task in loaded.items()}
    lm = RefusionLM(args, task_versions=versions, keep_going=True, model_cache=model_cache)
    with contextlib.closing(lm), _environment(SANDBOX_VARIABLE, sandbox):
        # Not simple_evaluate: that would also spend seconds on listing every package of the environment.
        results = lm_eval.evaluate(
            lm=lm,
            task_dict={"tasks": loaded},
            limit=limit,
            apply_chat_template=bool(lm.tokenizer.chat_template),
            fewshot_as_multiturn=True,
            bootstrap_iters=0,
            log_samples=True,
            confirm_run_unsafe_code=True,
        )
        assert results is not None
        assert lm.store is not None
        rows, unscored = score_rows(lm, results["samples"])
        lm.store.append_scores(rows)
    return Outcome(run_dir=Path(args.run_dir), failed=lm.failed, unscored=unscored)


def load_tasks(names: Sequence[str], data_dir: str | None) -> dict[str, lm_eval.api.task.Task]:
    """Builds tasks with their data, before any checkpoint is touched.

    Raises:
        ConfigError: this project has no such task.
        DataError: a task's data cannot be found.
    """
    manager = TaskManager(include_path=str(tasks_path()), include_defaults=False, metadata={"data_dir": data_dir})
    # Benchmark names stand for tasks (see `task_names`), and are what a user most likely meant to write.
    check_keys(names, manager.all_tasks, "", what="task", offered=[*BENCHMARKS, *manager.all_tasks])
    return dict(manager.load(list(names))["tasks"])


def score_rows(lm: RefusionLM, samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[list[ScoreRow], int]:
    """The judgements of a run, from what the tasks' filters returned.

    Args:
        lm: the model that answered; knows the record of every sample.
        samples: lm-eval's logged samples by task.

    Returns:
        Score rows, and the number of samples whose judge failed: these get none.
    """
    failed = {sample.key for sample in lm.failed}
    rows: list[ScoreRow] = []
    unscored = 0
    for task, logged in samples.items():
        for entry in logged:
            scorer = f"{task}/{entry['filter']} {refusion_eval.__version__}"
            for number, judged in enumerate(entry["filtered_resps"][0]):
                job = lm.jobs[task, entry["doc_id"], number]
                if job.key in failed:
                    continue
                if judged["verdict"] == ERROR:
                    log.error("%s item %s is not scored: %s", task, job.item_id, judged["reason"])
                    unscored += 1
                else:
                    rows.extend(_rows_of(job, judged, scorer))
    return rows, unscored


def _rows_of(job: Job, judged: Mapping[str, Any], scorer: str) -> Iterator[ScoreRow]:
    """The verdict on one sample, and beside it the strict one where the benchmark has such a rule."""
    words = {name: judged[name] for name in ("extracted", "verdict", "reason", "tier") if name in judged}
    value = float(judged["passed"])
    yield ScoreRow(key=job.key, item_id=job.item_id, scorer=scorer, metric=PASSED, value=value, **words)
    if "strict" in judged:
        value = float(judged["strict"])
        yield ScoreRow(key=job.key, item_id=job.item_id, scorer=scorer, metric="strict", value=value)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
