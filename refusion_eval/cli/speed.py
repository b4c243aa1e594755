from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli import Baseline, Csv, Markdown, prepare, show


def speed(
    results: Annotated[list[Path], typer.Argument(help="Run directories, all of one machine, or results CSV files.")],
    csv: Csv = None,
    markdown: Markdown = None,
    baseline: Baseline = None,
) -> None:
    """Print what makes up speed: forwards per second, tokens per forward, memory limit, prefill, both AR loops."""
    from refusion_eval.results.measured import measured_figures
    from refusion_eval.results.tables import speed_csv, speed_rows, speed_table
    from refusion_eval.store.atomic_write import write_output

    prepare(csv, markdown)
    rows = speed_rows(measured_figures(results, baseline=baseline))
    show(speed_table(rows), markdown)
    if csv is not None:
        write_output(csv, speed_csv(rows))
