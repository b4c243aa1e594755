"""Tasks of lm-eval under this project's commands: lm-eval loads, asks and judges them, this project records them."""

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.task import Task
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from yaml import YAMLError

from refusion_eval.errors import ConfigError, DataError, DecodeError, RefusionEvalError
from refusion_eval.evaluation.loop import Outcome, Session
from refusion_eval.evaluation.tasks import find_tasks
from refusion_eval.lm_eval_plugin.adapter import RefusionLM
from refusion_eval.lm_eval_plugin.evaluation import read_local_rows
from refusion_eval.lm_eval_plugin.hooks import code_metrics, filters_in_sandbox
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.runs.plan import PlannedRun, Turn
from refusion_eval.runs.system import ModelCache
from refusion_eval.untrusted import open_plain

log = logging.getLogger(__name__)

_MOST_INCLUDED = 100


def evaluate_others(run: PlannedRun, names: list[str], model_cache: ModelCache, turn: Turn | None) -> Outcome:
    """Evaluates those tasks of a run that are lm-eval's."""
    manager = find_other_tasks(names, run.include_path, run.args, run.sandbox)
    model = RefusionLM(run.args, model_cache, turn, sandbox=run.sandbox)
    num_unscored = 0
    try:
        items = None if turn is None else _items_of(turn, manager.load(names)["tasks"], run.limit, model.session)
        with filters_in_sandbox(run.sandbox):
            simple_evaluate(
                model,
                tasks=names,
                task_manager=manager,
                limit=run.limit if items is None else None,
                samples=items,
                bootstrap_iters=0,
                apply_chat_template=model.system.backend.takes_messages or bool(model.tokenizer.chat_template),
                confirm_run_unsafe_code=True,
            )
    except DecodeError:
        if not model.session.failed:
            raise
        # Lm-eval judges nothing unless every text is there.
        num_unscored = sum(map(len, model.evaluation.samples.values()))
    finally:
        model.close()
    return Outcome(model.session.failed, num_unscored)


def _items_of(turn: Turn, tasks: Mapping[str, Task], limit: int | None, session: Session) -> dict[str, Sequence[int]]:
    """Task -> numbers of its items in a turn; records how many there are in all."""
    totals = {name: min(len(task.eval_docs), limit or len(task.eval_docs)) for name, task in tasks.items()}
    if session.store is not None:
        session.store.expect(totals)
    # lm-eval takes no empty choice, so a task without an item in this turn is asked whole. Its items are recorded by
    # then, so nothing is decoded.
    return {name: range(turn.number - 1, num, turn.of) or range(num) for name, num in totals.items()}


def find_other_tasks(
    names: Sequence[str], include_path: Path | None, args: ModelArgs, sandbox: str = "auto"
) -> "OtherTasks":
    """Finds tasks, groups and tags of lm-eval or of the include path, and YAML files, without loading them."""
    are_groups = [_is_group(Path(name).resolve()) for name in names if Path(name).is_file()]  # each is looked at
    for path in [] if include_path is None else include_path.rglob("*.yaml"):
        if not path.is_file():
            raise DataError(f"{path} is not a plain file; remove it")
    read_local_rows()
    metadata = {"pretrained": args.checkpoint} | ({} if args.data_dir is None else {"data_dir": args.data_dir})
    manager = functools.partial(OtherTasks, sandbox=sandbox, include_path=include_path, metadata=metadata)
    of_user = tasks = manager(include_defaults=False)
    if not all(map(of_user.knows, names)) or any(are_groups):
        log.info("reading the index of lm-eval's own tasks, which are more than 10,000 files ...")
        tasks = manager(include_defaults=True)
    find_tasks([name for name in names if not tasks.knows(name)], of_user.all_tasks)  # raises the error, if any
    return tasks


def _is_group(path: Path) -> bool:
    """Whether a task file, or one that it includes, is a list of tasks, which may be any of lm-eval's."""
    files = [path]
    try:
        for file in files:  # which grows
            with open_plain(file):
                content = load_yaml(file, resolve_func=False, recursive=False)
            if "group" in content:
                return True
            included = content.get("include", [])
            files += [file.parent / name for name in (included if isinstance(included, list) else [included])]
            if len(files) > _MOST_INCLUDED:
                raise ValueError("its files include each other")
    except (OSError, ValueError, TypeError, RecursionError, YAMLError) as error:
        raise DataError(f"{path}: not a task file ({error}); correct it") from error
    return False


class OtherTasks(TaskManager):
    """Loads tasks of lm-eval with the errors of this project."""

    def __init__(self, *, sandbox: str, **options: Any) -> None:
        super().__init__(**options)
        self._sandbox = sandbox

    def knows(self, name: str) -> bool:
        return name in self.task_index or Path(name).is_file()

    def load(self, task_list: Any) -> Any:
        try:
            loaded = super().load(task_list)
        except RefusionEvalError:
            raise
        except Exception as problem:  # whatever a task file, the function that it names or a download raises
            raise DataError(
                f"{', '.join(map(str, task_list))}: lm-eval cannot load it ({type(problem).__name__}: {problem}); "
                "correct the task file, or see to its rows: put them on this machine, or allow the download"
            ) from problem
        # A user's variants of this project's code tasks have their metrics, and run programs in the sandbox.
        unsafe = [
            name
            for name, task in loaded["tasks"].items()
            if getattr(task, "UNSAFE_CODE", False) and task.config.process_results is not code_metrics
        ]
        if unsafe and self._sandbox != "none":
            raise ConfigError(
                f"{unsafe[0]}: lm-eval runs model-written programs without isolation; allow it with --sandbox none, or "
                "take this project's humaneval or mbpp"
            )
        return loaded
