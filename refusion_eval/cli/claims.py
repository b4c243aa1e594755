from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli import Results, console, prepare, show

WIDE = 110  # columns of a terminal that has room for the intervals


def claims(
    results: Results = None,
    out: Annotated[Path | None, typer.Option(help="Folder for claims.csv, averages.csv and claims.md.")] = None,
) -> None:
    """Judge the paper's claims by its tables and measured figures. Every average of a speed-up is shown."""
    from refusion_eval.paper.claims import averages_table, claims_table, write_claims
    from refusion_eval.paper.judge import judge_all
    from refusion_eval.paper.studies import sort_sources
    from refusion_eval.results.measured import read_measurements

    prepare(out and out / "claims.csv")
    runs, of_studies = sort_sources(results or [])
    judged, averages = judge_all([*read_measurements(runs), *of_studies])
    narrow = console().width < WIDE
    show(claims_table(judged, brief=True, narrow=narrow))
    show(averages_table(averages, narrow=narrow))
    if out is not None:
        write_claims(judged, averages, out)
