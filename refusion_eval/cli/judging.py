"""Commands that hold figures against each other: claims, speed, cost, compare."""

from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli.root import Baseline, app, console
from refusion_eval.errors import ConfigError


@app.command()
def claims(
    results: Annotated[
        list[Path] | None, typer.Argument(help="Run directories and results CSV files; none shows the paper alone.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for claims.csv, averages.csv and claims.md.")] = None,
) -> None:
    """Judge the paper's claims by its own tables and by measured figures, every average of a speed-up side by side."""
    from refusion_eval.claims.report import averages_table, claims_table, write_claims
    from refusion_eval.claims.verdicts import judge_all
    from refusion_eval.results.cells import measured_cells
    from refusion_eval.store.atomic_write import prepare_output

    if out is not None:
        prepare_output(out / "claims.csv")
    judged, averages = judge_all(measured_cells(results or []))
    for table in (claims_table(judged), averages_table(averages)):
        console().print(table.rich())
    if out is not None:
        write_claims(judged, averages, out)


@app.command()
def speed(
    results: Annotated[list[Path], typer.Argument(help="Run directories, all on one machine, or results CSV files.")],
    csv: Annotated[Path | None, typer.Option(help="Also write every figure with its bounds.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write the table as Markdown.")] = None,
    baseline: Baseline = None,
) -> None:
    """Print what speed is made of: forwards a second, tokens a forward, the memory's limit, prefill, both AR loops."""
    from refusion_eval.results.cells import measured_cells
    from refusion_eval.results.speed import speed_csv, speed_rows, speed_table
    from refusion_eval.store.atomic_write import prepare_output, write_output

    for path in filter(None, (csv, markdown)):
        prepare_output(path)
    rows = speed_rows(measured_cells(results, baseline=baseline))
    table = speed_table(rows)
    console().print(table.rich())
    if csv is not None:
        write_output(csv, speed_csv(rows))
    if markdown is not None:
        write_output(markdown, table.markdown())


@app.command()
def cost(
    run_dirs: Annotated[
        list[Path] | None, typer.Argument(help="Pilot runs, decoded alone; none shows the published systems.")
    ] = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers, each with one GPU or process.")] = "1,8,64",
    csv: Annotated[Path | None, typer.Option(help="With runs: also write every figure.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write the table as Markdown.")] = None,
) -> None:
    """Project what the whole benchmarks cost on many machines, pulled by free workers and in static shards."""
    from refusion_eval.results.cost import cost_csv, cost_table, projected, published_table
    from refusion_eval.store.atomic_write import prepare_output, write_output
    from refusion_eval.studies.locality.measure import parse_numbers

    counts = parse_numbers(workers, "--workers", int)
    if min(counts) < 1:
        raise ConfigError(f"--workers {workers}: a number of workers is at least 1")
    if csv is not None and not run_dirs:
        raise ConfigError("--csv holds measured figures: name pilot runs, or leave it out")
    for path in filter(None, (csv, markdown)):
        prepare_output(path)
    costs = projected(run_dirs or [], counts)
    table = cost_table(costs) if costs else published_table(counts)
    console().print(table.rich())
    if csv is not None:
        write_output(csv, cost_csv(costs))
    if markdown is not None:
        write_output(markdown, table.markdown())


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="Run directory A.")],
    after: Annotated[Path, typer.Argument(help="Run directory B.")],
    common_items: Annotated[
        bool, typer.Option("--common-items", help="Compare what both have where their items differ.")
    ] = False,
    csv: Annotated[Path | None, typer.Option(help="Also write one row a task.")] = None,
    items: Annotated[Path | None, typer.Option(help="Also write one row an item, as CSV.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write table and differences as Markdown.")] = None,
) -> None:
    """Compare two runs item by item: paired difference, smallest one to be seen, flips, prompts, settings, speed."""
    from refusion_eval.results.compare import compare_runs
    from refusion_eval.results.compare_report import (
        comparison_csv,
        comparison_markdown,
        comparison_table,
        details,
        items_csv,
    )
    from refusion_eval.store.atomic_write import prepare_output, write_output

    writers = ((csv, comparison_csv), (items, items_csv), (markdown, comparison_markdown))
    for path, _ in writers:
        if path is not None:
            prepare_output(path)
    comparison = compare_runs(before, after, common_items=common_items)
    console().print(comparison_table(comparison).rich())
    print("\n".join(details(comparison)))
    for path, write in writers:
        if path is not None:
            write_output(path, write(comparison))
