from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli import Baseline, Csv, Json, Markdown, prepare, show


def table(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories. Speed-up needs the baseline's among them.")],
    csv: Csv = None,
    markdown: Markdown = None,
    baseline: Baseline = None,
    as_json: Json = False,
) -> None:
    """Print the table of one or more runs. It has accuracy, TPS, TPF and speed-up, each with its interval."""
    from refusion_eval.results.measured import run_measurements
    from refusion_eval.results.render import measurement_cells, write_csv
    from refusion_eval.results.tables import summary, summary_table

    prepare(csv, markdown)
    figures = run_measurements(run_dirs, baseline=baseline)
    show(summary_table(summary(figures)), markdown, measurement_cells(figures) if as_json else None)
    if csv is not None:
        write_csv(figures, csv)
