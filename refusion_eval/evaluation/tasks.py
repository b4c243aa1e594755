"""The tasks that a user means by names, of benchmarks, families, tasks and suites, and the run that has them."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from refusion_eval.benchmarks import (
    BENCHMARKS,
    OURS,
    PUBLISHED,
    RELEASE,
    RELEASED,
    SUITE_TASKS,
    SUITES,
    Task,
    find_task,
    main_variant,
)
from refusion_eval.config import check_keys
from refusion_eval.errors import ConfigError
from refusion_eval.paths import embedded_name
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.plan import PlannedRun

# What comes before the name of a task of lm-eval where a task or benchmark of this project has the same name.
LM_EVAL = "lm_eval:"

_T = TypeVar("_T")


def task_names(
    names: Sequence[str], model: str, *, prompts: str | None = None, data: str | Path | None = None
) -> list[str]:
    """The names of the tasks that a user means; ConfigError if they do not fit the rows or prompts that are named."""
    names = list(map(main_variant, names))
    mini = embedded_name(model, "") is not None
    tasks = {
        name: Task(benchmark, name not in PUBLISHED or (mini and benchmark.has_mini))
        for name, benchmark in BENCHMARKS.items()
    }
    # A real checkpoint gets the prompts of the release where it has any: the paper's figures were measured with them.
    if not mini and prompts != OURS:
        tasks |= {name: Task(benchmark) for name, benchmark in RELEASED.items()}
    unlisted = [name for name in names if name not in tasks and name in BENCHMARKS and name not in PUBLISHED]
    tasks |= {name: Task(BENCHMARKS[name], mini=True) for name in unlisted}
    looks_alike = (name for name in names if name in tasks and tasks[name].mini)
    meant = next(looks_alike, None if names else "the default")
    if mini and meant is not None:
        look_alike = f"with --model {model}, {meant} means synthetic mini tasks"
        if data is not None:
            real = next((name for name in names if name in PUBLISHED), "gsm8k")
            raise ConfigError(
                f"{look_alike}, which do not read --data {data}; name the benchmark itself, such as --tasks "
                f"{Task(PUBLISHED[real]).name}, or leave --data out"
            )
        if prompts == RELEASE:
            raise ConfigError(f"{look_alike}, which have no --prompts {prompts}; leave it out")
    suite = "mini_suite" if mini else "refusion_suite" if prompts == OURS else "refusion_suite_release"
    tasks |= {name: Task(PUBLISHED[name]) for name in names if name not in tasks and name in PUBLISHED}
    return [tasks[name].name if name in tasks else name for name in names] or [suite]


def plan_run(
    arguments: Mapping[str, Any],
    tasks: Sequence[str],
    run_dir: str | PathLike[str],
    *,
    data: str | Path | None = None,
    prompts: str | None = None,
    **of_run: Any,
) -> PlannedRun:
    """The run of model arguments, as `parse_model_args` takes them, on the tasks that a user means.

    `of_run` are further fields of `PlannedRun`.
    """
    places = {"run_dir": str(run_dir), "data_dir": None if data is None else str(data)}
    args = parse_model_args({**arguments, **places})
    names = task_names(tasks, args.pretrained, prompts=prompts, data=data)
    return PlannedRun(args=args, tasks=tuple(names), **of_run)


def own_tasks(names: Sequence[str] = ()) -> dict[str, list[Task]]:
    """Name of a task or suite of this project -> its tasks; with those of `names` that are not listed, as a window."""
    suites = {
        **{SUITE_TASKS[name]: list(map(Task, benchmarks)) for name, benchmarks in SUITES.items()},
        "refusion_suite_release": [Task(benchmark) for benchmark in RELEASED.values()],
        "mini_suite": [Task(benchmark, mini=True) for benchmark in BENCHMARKS.values() if benchmark.has_mini],
    }
    named = [task for name in names if (task := find_task(name)) and task.name == name]
    every = [*map(Task, PUBLISHED.values()), *(task for suite in suites.values() for task in suite)]
    every += [task for task in named if task.mini or task.benchmark.name in PUBLISHED]
    return suites | {task.name: [task] for task in every}


def find_tasks(names: Sequence[str], offered: Sequence[str] = ()) -> list[Task]:
    """The tasks of the given names, each once, in the order in which they are named first."""
    tasks = own_tasks(names)
    # `task_names` reads the names of benchmarks, and they are what a user most likely meant to write.
    check_keys(names, tasks, "", what="task", offered=[*PUBLISHED, *tasks, *offered])
    return list(dict.fromkeys(task for name in names for task in tasks[name]))


def is_sorted(task: Task) -> bool:
    """Whether the first rows are not like the others, because rows of one subject or time stand together."""
    return not task.mini and bool(task.benchmark.source.sorted_by)


def limited(task: Task, items: Sequence[_T], limit: int | None) -> list[_T]:
    """The items that a limit leaves, in their order: the first ones, or as many that are spread over sorted rows.

    A higher limit leaves the items of a lower one and more, so that a run can go on.
    """
    if limit is None or not is_sorted(task):
        return list(items[:limit])
    # In the order of their binary digits read backwards, numbers come far from those before them.
    width = len(items).bit_length()
    numbers = sorted(range(len(items)), key=lambda number: f"{number:0{width}b}"[::-1])
    return [items[number] for number in sorted(numbers[:limit])]
