"""The benchmarks: what is asked of a model, and which answer is right.

Each benchmark is one file of this folder with a `BENCHMARK`. No other module knows how task names are built:
`find_task` reads a name, and a `Task` knows its own.
"""

import fnmatch
import functools
import importlib
import pkgutil

from refusion_eval.benchmarks.base import Benchmark, CodeTest, Extraction, Item, Task
from refusion_eval.benchmarks.rows import Row, Source
from refusion_eval.errors import DataError

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "CodeTest",
    "Extraction",
    "Item",
    "Row",
    "Source",
    "Task",
    "find_task",
    "get_task",
    "is_mini",
    "is_sealed",
]


def _benchmarks_of_this_folder() -> dict[str, Benchmark]:
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    benchmarks = [module.BENCHMARK for module in modules if hasattr(module, "BENCHMARK")]
    return {benchmark.name: benchmark for benchmark in sorted(benchmarks, key=lambda one: (one.order, one.name))}


# In the order of the paper's tables.
BENCHMARKS: dict[str, Benchmark] = _benchmarks_of_this_folder()


@functools.cache
def find_task(name: str) -> Task | None:
    """Recognises a task by the name that lm-eval and the records have for it.

    Args:
        name: `refusion_<benchmark>` or `mini_<benchmark>`, also with `_<anything>` after it, as variants of a user are
            named; or one of lm-eval's own tasks on a benchmark.

    Returns:
        The benchmark and whether its look-alike is meant; None if it is none of the benchmarks.
    """
    own = {task.name: task for benchmark in BENCHMARKS.values() for task in (Task(benchmark), Task(benchmark, True))}
    variants = [own_name for own_name in own if name == own_name or name.startswith(f"{own_name}_")]
    if variants:
        return own[max(variants, key=len)]
    for benchmark in BENCHMARKS.values():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in benchmark.stock_tasks):
            return Task(benchmark)
    return None


def get_task(name: str) -> Task:
    """The task that a user means: a benchmark's plain name, or a task that `find_task` recognises.

    Raises:
        DataError: the name belongs to none of the benchmarks.
    """
    task = Task(BENCHMARKS[name]) if name in BENCHMARKS else find_task(name)
    if task is None:
        raise DataError(f"unknown task {name!r}; known: {', '.join(BENCHMARKS)}, each also with mini_ before it")
    return task


def is_mini(task: str) -> bool:
    """Whether a task is one of the synthetic look-alikes, which must never be taken for the real benchmark."""
    found = find_task(task)
    return found is not None and found.mini


def is_sealed(task: str, benchmark: str = "") -> bool:
    """Whether a task asks questions that must not be written anywhere.

    A task whose name holds that of a sealed benchmark counts too, because a user's own variant may be none of the
    known tasks.

    Args:
        task: its name.
        benchmark: the benchmark that its records name.
    """
    names = f"{task} {benchmark}".lower()
    return not is_mini(task) and any(known.sealed and known.name in names for known in BENCHMARKS.values())
