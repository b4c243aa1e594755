"""The command `table`."""

from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli.options import Baseline, Csv, Markdown
from refusion_eval.cli.terminal import console


def table(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories. Speed-up needs the baseline's among them.")],
    csv: Csv = None,
    markdown: Markdown = None,
    baseline: Baseline = None,
) -> None:
    """Print the table of one or more runs: accuracy, TPS, TPF and speed-up, each with its interval."""
    from refusion_eval.results.csv_file import write_csv
    from refusion_eval.results.measured import run_figures
    from refusion_eval.results.summary import summary, summary_table
    from refusion_eval.store.atomic_write import prepare_output, write_output

    for path in filter(None, (csv, markdown)):
        prepare_output(path)
    figures = run_figures(run_dirs, baseline=baseline)
    summarised = summary_table(summary(figures))
    console().print(summarised.rich())
    if csv is not None:
        write_csv(figures, csv)
    if markdown is not None:
        write_output(markdown, summarised.markdown())
