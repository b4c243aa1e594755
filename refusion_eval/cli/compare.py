from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli import Json, Markdown, prepare, show, tell


def compare(
    before: Annotated[Path, typer.Argument(help="Run directory A.")],
    after: Annotated[Path, typer.Argument(help="Run directory B.")],
    common_items: Annotated[
        bool, typer.Option("--common-items", help="If the runs hold different items, compare those that both hold.")
    ] = False,
    filter_name: Annotated[
        str | None, typer.Option("--filter", help="Compare by this answer filter, which rescore judged both runs with.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Also write a CSV with one row for each task.")] = None,
    items: Annotated[Path | None, typer.Option(help="Also write a CSV with one row for each item.")] = None,
    markdown: Markdown = None,
    as_json: Json = False,
) -> None:
    """Compare two runs item by item. It shows the difference with its interval, flips, settings and speed."""
    from refusion_eval.results.compare import (
        compare_runs,
        comparison_cells,
        comparison_markdown,
        comparison_table,
        details,
        item_cells,
    )
    from refusion_eval.results.render import csv_text
    from refusion_eval.store.atomic_write import write_output

    prepare(csv, items, markdown)
    comparison = compare_runs(before, after, common_items=common_items, filter_name=filter_name)
    show(comparison_table(comparison), cells=comparison_cells(comparison) if as_json else None)
    if not as_json:
        tell("\n".join(details(comparison)))
    for path, cells in ((csv, comparison_cells), (items, item_cells)):
        if path is not None:
            write_output(path, csv_text(*cells(comparison)))
    if markdown is not None:
        write_output(markdown, comparison_markdown(comparison))
