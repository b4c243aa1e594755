"""Tasks of this project and of lm-eval in one run: the only place that tells them apart.

lm_eval takes seconds to import, so it is imported only where one of its tasks is asked for.
"""

import sys
from collections.abc import Sequence

from refusion_eval.evaluation.loop import Outcome, check_model, evaluate
from refusion_eval.evaluation.tasks import LM_EVAL, find_tasks, own_tasks
from refusion_eval.runs.plan import PlannedRun, Turn
from refusion_eval.runs.system import ModelCache


def evaluate_any(run: PlannedRun, *, model_cache: ModelCache | None = None, turn: Turn | None = None) -> Outcome:
    """Runs tasks of this project and of lm-eval, with the checkpoint's chat template if any, into one run directory."""
    model_cache = model_cache or ModelCache()
    own, others = split_names(run.tasks)
    outcomes = []
    if others:
        from refusion_eval.lm_eval_plugin.tasks import evaluate_others

        check_model(run.args, model_cache)
        outcomes.append(evaluate_others(run, others, model_cache, turn))
    if own:
        outcomes.append(
            evaluate(run.args, own, limit=run.limit, sandbox=run.sandbox, model_cache=model_cache, turn=turn)
        )
    return Outcome.of(outcomes)


def load_any(run: PlannedRun) -> list[str]:
    """Loads the tasks with their rows and returns the names of all; errors as in `evaluate_any`."""
    own, others = split_names(run.tasks)
    tasks = find_tasks(own)
    for task in tasks:
        task.items(run.args.data_dir)
    loaded = [task.name for task in tasks]
    if others:
        from refusion_eval.lm_eval_plugin.tasks import find_other_tasks

        loaded += find_other_tasks(others, run.include_path, run.args, run.sandbox).load(others)["tasks"]
    return loaded


def split_names(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names of this project's tasks, and all others without the prefix of lm-eval."""
    own = [name for name in names if name in own_tasks(names)]
    return own, [name.removeprefix(LM_EVAL) for name in names if name not in own]


def run_lm_eval(arguments: Sequence[str]) -> None:
    """lm-eval's own command line, with the model of this project registered."""
    import lm_eval.models  # noqa: F401 - lm-eval lists its own models only while no other is registered
    from lm_eval.__main__ import cli_evaluate

    from refusion_eval.lm_eval_plugin import adapter  # noqa: F401 - registers the model

    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
