"""`refusion_eval.evaluate`: one system on some tasks in one call, for notebooks and scripts."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from refusion_eval.api import LoadedModel
from refusion_eval.config import CheckpointOptions
from refusion_eval.errors import ConfigError
from refusion_eval.evaluation.tasks import plan_run
from refusion_eval.lm_eval_plugin.any_task import evaluate_any
from refusion_eval.paths import EMBEDDED, EMBEDDED_FOLDER
from refusion_eval.results.data_frames import figures
from refusion_eval.runs.system import ModelCache


def evaluate(
    model: str | LoadedModel,
    tasks: str | PathLike[str] | Sequence[str | PathLike[str]] = (),
    *,
    include_path: str | PathLike[str] | None = None,
    limit: int | None = None,
    run_dir: str | PathLike[str] | None = None,
    data: str | PathLike[str] | None = None,
    prompts: str | None = None,
    sandbox: str = "auto",
    **arguments: Any,
) -> pd.DataFrame:
    """Evaluates one system as `refusion-eval run` does, and returns its figures.

    Args:
        model: "embedded", a folder, a hub id, or what `load_model` returned.
        tasks: benchmarks, tasks of this project or of lm-eval (`lm_eval:NAME` where a benchmark has the same name) and
            YAML files of tasks, one or several; none means all benchmarks. For an embedded model a benchmark's name
            means its mini task.
        include_path: folder with task files of lm-eval, whose tasks may be named.
        limit: only so many items of every task: the first ones, or a spread over rows that are sorted, by subject say.
        run_dir: folder where samples are recorded and found again; None for a folder that is removed at the end.
        data: folder with benchmark rows.
        prompts: what a benchmark's name means: "release" for the prompts of ReFusion's release, as for real checkpoints
            by default, or "ours" for those of this project.
        sandbox: "auto", or "none" to run model-written code without isolation.
        **arguments: the decoder, its settings and other model arguments, as `lm_eval --model_args` takes them. The
            default decoder is that of a loaded model, else "refusion".

    Returns:
        One row for each task and metric, means included, with the columns of `refusion_eval.results.figures`.

    Raises:
        ConfigError: an argument is wrong, or a loaded model has decided it already.
        DataError: a task cannot be found, or the rows of none of them; nothing was decoded. Where only some tasks have
            no rows, the others run, and a warning says what to do.
        CheckpointError: the checkpoint cannot be loaded.
        StoreError: the run directory belongs to another run.
    """
    name = model
    if isinstance(model, LoadedModel):
        options = {option.name: getattr(model.options, option.name) for option in fields(CheckpointOptions)}
        if decided := [argument for argument in (*options, "chat_template") if argument in arguments]:
            raise ConfigError(
                f"{', '.join(decided)}: the loaded model has decided that; give its name and this argument instead"
            )
        opened = Path(model.name)
        name = f"{EMBEDDED}:{opened.name}" if opened.parent == EMBEDDED_FOLDER else model.name
        arguments = {**options, "decoder": model.decoders[0], **arguments}
    with ExitStack() as stack:
        place = run_dir or Path(stack.enter_context(TemporaryDirectory(prefix="refusion_eval_"))) / "run"
        run = plan_run(
            {**arguments, "pretrained": name},
            [os.fspath(task) for task in ([tasks] if isinstance(tasks, str | PathLike) else tasks)],
            place,
            data=None if data is None else Path(data),
            prompts=prompts,
            limit=limit,
            include_path=None if include_path is None else Path(include_path),
            sandbox=sandbox,
        )
        evaluate_any(run, model_cache=ModelCache(model if isinstance(model, LoadedModel) else None))
        return figures(place)
