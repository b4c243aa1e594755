from pathlib import Path
from typing import Annotated, Literal

import typer

from refusion_eval.cli import Data, Out, Settings, log_to_stderr, prepare, read_pairs
from refusion_eval.config import unknown_key
from refusion_eval.errors import ConfigError

NUM_CASES = 20  # items that the case study tries


def plot(
    figure: Annotated[
        str, typer.Argument(help="figure1, 3, 4, 5, 6, 7, 8 or 9; or list, which says what each is drawn from.")
    ],
    sources: Annotated[
        list[Path] | None, typer.Argument(help="Sources of the figure, or the CSV that was written with it before.")
    ] = None,
    out: Out = Path("figures"),
    task: Annotated[
        str | None,
        typer.Option(
            help="Benchmark. Default: that of a sweep of one, else mbpp; for figures 5 and 9 the first of the run."
        ),
    ] = None,
    item: Annotated[
        str | None,
        typer.Option(help="Item of figures 5 and 9. The default is the right answer with the most steps."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Figures 5 and 9: let this ReFusion (folder, hub id or embedded) answer the first 20 items under the "
            "settings of the paper's case study (--set changes them), into OUT/case_study, and draw from that."
        ),
    ] = None,
    settings: Settings = None,
    data: Data = None,
    width: Annotated[
        Literal["one", "two"] | None,
        typer.Option(help="Columns of a paper that the figure takes. Default: as many as it needs."),
    ] = None,
) -> None:
    """Draw the paper's figures beside measured ones. The files are CSV, PNG, PDF, and the caption."""
    from refusion_eval.paper.figures import FIGURES, rows_of, write_figure
    from refusion_eval.paper.points import TASK

    if figure == "list":
        for name, entry in FIGURES.items():
            print(f"{name}  {entry.shows}; from {entry.sources}")
        return
    name = figure if figure.startswith("figure") else f"figure{figure}"
    if name not in FIGURES:
        raise unknown_key(figure, FIGURES, what="figure")
    log_to_stderr()
    prepare(out / f"{name}.csv")
    if settings and model is None:
        raise ConfigError("--set changes the settings of --model; name a model with it")
    if model is not None:
        if FIGURES[name].read is not None or sources:
            raise ConfigError("--model makes the run that figures 5 and 9 are drawn from; name no sources with it")
        task = task or TASK
        sources = [_case_study(model, task, read_pairs(settings), data, out / "case_study")]
    rows = rows_of(name, sources or [], task)
    if rows is None:
        rows = _moments(name, sources or [], task, item)
    for path in write_figure(name, rows, out, width):
        print(path)


def _case_study(model: str, task: str, settings: dict[str, str], data: Path | None, run_dir: Path) -> Path:
    """Runs the first items of a task by the paper's algorithm; what is not set is as in the paper's case study."""
    from refusion_eval.evaluation.loop import evaluate, task_names
    from refusion_eval.paper.studies import CASE_STUDY
    from refusion_eval.runs.model_args import parse_model_args

    where = {"pretrained": model, "decoder": "refusion", "run_dir": str(run_dir)}
    where |= {} if data is None else {"data_dir": str(data)}
    args = parse_model_args({**where, **CASE_STUDY, "fuse": False, **settings})
    evaluate(args, task_names([task], model, data=data), limit=NUM_CASES)
    return run_dir


def _moments(name: str, sources: list[Path], task: str | None, item: str | None) -> list:
    """Returns the rows of figure 5 or 9: the text of one sample at one or several steps of its decoding."""
    from refusion_eval.cli.sources import FoundSources
    from refusion_eval.paper.moments import generation_order, longest_sample, step_by_step
    from refusion_eval.report.sample import find_sample, speller_of

    if len(sources) != 1:
        raise ConfigError(f"{name} shows one sample; name one run directory")
    if item is None:
        task, item = longest_sample(sources[0], task)
    run, sample = find_sample(sources[0], task, item)
    make = generation_order if name == "figure5" else step_by_step
    return list(make(run.manifest.system, sample, speller_of(sample, FoundSources(None).spell(run))))
