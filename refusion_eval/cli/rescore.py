from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli import Data, Sandbox, Workers, console, names_of, say
from refusion_eval.errors import ConfigError


def rescore(
    run_dirs: Annotated[list[Path] | None, typer.Argument(help="Run directories, finished or not.")] = None,
    filter_name: Annotated[
        str, typer.Option("--filter", help="A public answer filter, your own as module:function, or list.")
    ] = "ours",
    list_filters: Annotated[bool, typer.Option("--list-filters", help="Print the filters and stop.")] = False,
    tasks: Annotated[str, typer.Option(help="Tasks or benchmarks, separated by commas. The default is all.")] = "",
    data: Data = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results, one folder for each run. The default is RUN/rescored.")
    ] = None,
    workers: Workers = None,
    sandbox: Sandbox = "auto",
) -> None:
    """Judge recorded texts with another answer filter. Nothing is decoded; the scores join the records of the run."""
    from refusion_eval.lm_eval_plugin.filters import describe, find_filter
    from refusion_eval.scoring.rescore import rescore_command

    if list_filters or filter_name == "list":
        print("\n".join(describe()))
        return
    if not run_dirs:
        raise ConfigError("no run directory is given; name one or more, as refusion-eval rescore RUN --filter NAME")
    names = names_of(tasks)
    answer_filter = find_filter(filter_name)
    num_differing = rescore_command(
        run_dirs, answer_filter, tasks=names, data=data, out=out, workers=workers, sandbox=sandbox, console=console()
    )
    if num_differing:
        say(f"error: {num_differing} verdicts are not the recorded ones")
        raise typer.Exit(1)
