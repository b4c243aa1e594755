"""lm-eval's own tasks on the benchmarks of this project read the rows of `data_dir`, as this project's tasks do.

lm-eval passes model arguments to tasks as metadata, and loads a task's rows from the hub whatever they say. The method
`download` of its tasks is therefore wrapped as soon as a model of this project is made.
"""

import functools
from pathlib import Path
from typing import Any

import datasets
from lm_eval.api.task import ConfigurableTask

from refusion_eval.benchmarks import PUBLISHED
from refusion_eval.benchmarks.rows import check_rows, find_rows
from refusion_eval.errors import DataError

# Arguments of `datasets.load_dataset` that name files of the user.
_NAMES_FILES = {"data_files", "data_dir"}


def read_local_rows() -> None:
    """Has lm-eval's tasks read the rows of `data_dir`; further calls do nothing."""
    original = ConfigurableTask.download
    if hasattr(original, "reads_local_rows"):
        return

    @functools.wraps(original)
    def download(task: ConfigurableTask, dataset_kwargs: dict[str, Any] | None = None, **others: Any) -> None:
        data_dir = (task.config.metadata or {}).get("data_dir")
        is_local = _NAMES_FILES & (dataset_kwargs or {}).keys() or Path(str(task.DATASET_PATH)).exists()
        if data_dir is None or is_local or callable(task.config.custom_dataset):
            original(task, dataset_kwargs, **others)
        else:
            task.dataset = LocalSplits(str(task.config.task), task.DATASET_PATH, task.DATASET_NAME, str(data_dir))

    download.reads_local_rows = True  # type: ignore[attr-defined] # says that there is nothing left to wrap
    ConfigurableTask.download = download  # type: ignore[method-assign]


class LocalSplits(dict[str, datasets.Dataset]):
    """The splits of a dataset of the hub that is one of the benchmarks, each read when it is first asked for."""

    def __init__(self, task: str, path: str | None, config: str | None, data_dir: str) -> None:
        super().__init__()
        sources = {name: benchmark.source for name, benchmark in PUBLISHED.items()}
        served = (name for name, source in sources.items() if source.hub == path and config in (*source.configs, None))
        name = next(served, None)
        if name is None:
            raise DataError(
                f"data_dir={data_dir} serves {', '.join(sources)}; {task} reads {path}"
                f"{'' if config is None else f' ({config})'}, which is none of them: leave data_dir out, and its rows "
                "come from the hub"
            )
        self._benchmark, self._config, self._data_dir = PUBLISHED[name], config, data_dir

    def __missing__(self, split: str) -> datasets.Dataset:
        benchmark = self._benchmark
        rows, origin = find_rows(benchmark.name, benchmark.source, self._data_dir, split)
        check_rows(rows, benchmark.source, origin)
        if self._config is not None and len(benchmark.source.configs) > 1:
            # Each configuration is a subject, which the column `type` names in another spelling.
            rows = [
                row for row in rows if str(row["type"]).lower().replace("&", "and").replace(" ", "_") == self._config
            ]
        self[split] = datasets.Dataset.from_list(list(rows))
        return self[split]
