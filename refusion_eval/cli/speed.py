from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli import Baseline, Csv, Json, Markdown, prepare, show


def speed(
    results: Annotated[list[Path], typer.Argument(help="Run directories, all of one machine, or results CSV files.")],
    csv: Csv = None,
    markdown: Markdown = None,
    baseline: Baseline = None,
    as_json: Json = False,
) -> None:
    """Print the speed breakdown: forwards/s, tokens per forward, the memory limit, prefill and both AR loops."""
    from refusion_eval.results.measured import read_measurements
    from refusion_eval.results.render import csv_text
    from refusion_eval.results.tables import speed_cells, speed_rows, speed_table
    from refusion_eval.store.atomic_write import write_output

    prepare(csv, markdown)
    rows = speed_rows(read_measurements(results, baseline=baseline))
    show(speed_table(rows), markdown, speed_cells(rows) if as_json else None)
    if csv is not None:
        write_output(csv, csv_text(*speed_cells(rows)))
