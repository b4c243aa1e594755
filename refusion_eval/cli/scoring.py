"""Commands over what was decoded: tables, verdicts on texts from anywhere, other answer filters."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli.root import Baseline, Data, Sandbox, app, console, names_of
from refusion_eval.errors import ConfigError


@app.command()
def table(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories; speed-up needs the baseline's beside.")],
    csv: Annotated[Path | None, typer.Option(help="Also write every figure as CSV, one row each.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write the table as Markdown.")] = None,
    baseline: Baseline = None,
) -> None:
    """Print the table of one or more runs: accuracy, TPS, TPF, speed-up, each with its interval."""
    from refusion_eval.results import summary
    from refusion_eval.results.tables import tidy_rows, write_csv
    from refusion_eval.store.atomic_write import prepare_output, write_output

    for path in filter(None, (csv, markdown)):
        prepare_output(path)
    rows = tidy_rows(run_dirs, baseline=baseline)
    lines = summary.summary(rows)
    console().print(summary.rich_table(lines))
    if csv is not None:
        write_csv(rows, csv)
    if markdown is not None:
        write_output(markdown, summary.markdown(lines))


@app.command()
def score(
    task: Annotated[str, typer.Option(help="gsm8k, mini_gsm8k, ...")],
    outputs: Annotated[str, typer.Option(help='JSON lines {"id": ..., "text": ...}, or gold for the gold answers.')],
    data: Data = None,
    split: Annotated[str | None, typer.Option(help="Another split than the evaluated one.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="One line a text; OUTPUTS.scores.csv, or TASK.gold.csv here, if not given.")
    ] = None,
    filter_name: Annotated[str | None, typer.Option("--filter", help="Another extraction rule.")] = None,
    allow_partial: Annotated[bool, typer.Option(help="Leave rows without a text out of the score.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes for code and mathematics.")] = None,
    sandbox: Sandbox = "auto",
) -> None:
    """Score texts that were generated anywhere, by the same rules as the tasks."""
    from refusion_eval.scoring.texts import score_command

    score_command(
        task,
        outputs,
        data=data,
        split=split,
        csv_path=csv,
        filter_name=filter_name,
        allow_partial=allow_partial,
        workers=workers,
        sandbox=sandbox,
    )


@app.command()
def rescore(
    run_dirs: Annotated[list[Path] | None, typer.Argument(help="Run directories, finished or not.")] = None,
    filter_name: Annotated[
        str, typer.Option("--filter", help="A public answer filter, your own as module:function, or list.")
    ] = "ours",
    list_filters: Annotated[bool, typer.Option("--list-filters", help="Print the filters, as --filter list.")] = False,
    tasks: Annotated[str, typer.Option(help="Tasks or benchmarks, separated by commas; all if not given.")] = "",
    data: Data = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results, one folder a run; RUN/rescored if not given.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes for code and mathematics.")] = None,
    sandbox: Sandbox = "auto",
) -> None:
    """Score the recorded texts of runs with another answer filter; decodes nothing and changes no record."""
    from refusion_eval.scoring import filters as rescore_filters
    from refusion_eval.scoring.report import rescore_command

    if list_filters or filter_name == rescore_filters.LIST:
        print("\n".join(rescore_filters.describe()))
        return
    if not run_dirs:
        raise ConfigError("no run directory is given; name one or more, as refusion-eval rescore RUN --filter NAME")
    names = names_of(tasks)
    num_differing = rescore_command(
        run_dirs, filter_name, tasks=names, data=data, out=out, workers=workers, sandbox=sandbox, console=console()
    )
    if num_differing:
        print(f"error: {num_differing} verdicts are not the recorded ones", file=sys.stderr)
        raise typer.Exit(1)
