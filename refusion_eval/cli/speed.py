"""The command `speed`."""

from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli.options import Baseline, Csv, Markdown
from refusion_eval.cli.terminal import console


def speed(
    results: Annotated[list[Path], typer.Argument(help="Run directories, all of one machine, or results CSV files.")],
    csv: Csv = None,
    markdown: Markdown = None,
    baseline: Baseline = None,
) -> None:
    """Print the parts of speed: forwards a second, tokens a forward, the memory's limit, prefill, both AR loops."""
    from refusion_eval.results.measured import measured_figures
    from refusion_eval.results.speed import speed_csv, speed_rows, speed_table
    from refusion_eval.store.atomic_write import prepare_output, write_output

    for path in filter(None, (csv, markdown)):
        prepare_output(path)
    rows = speed_rows(measured_figures(results, baseline=baseline))
    table = speed_table(rows)
    console().print(table.rich())
    if csv is not None:
        write_output(csv, speed_csv(rows))
    if markdown is not None:
        write_output(markdown, table.markdown())
