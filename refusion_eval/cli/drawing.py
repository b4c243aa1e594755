"""Commands that make what a reader of the paper sees: its figures and its tables."""

from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli.root import Baseline, app, log_to_stderr
from refusion_eval.errors import ConfigError

Out = Annotated[Path, typer.Option(help="Folder for the files.")]


@app.command()
def plot(
    figure: Annotated[str, typer.Argument(help="figure1, 3, 4, 5, 6, 7, 8 or 9; list says what each is drawn from.")],
    sources: Annotated[
        list[Path] | None, typer.Argument(help="What it is drawn from, or the CSV that it was drawn from before.")
    ] = None,
    out: Out = Path("figures"),
    task: Annotated[str | None, typer.Option(help="Benchmark; mbpp if not given (5 and 9: the run's first).")] = None,
    item: Annotated[str | None, typer.Option(help="Figures 5 and 9: the item; else the one with most steps.")] = None,
) -> None:
    """Draw a figure of the paper from measured figures, beside the published ones: CSV, PNG and PDF."""
    from refusion_eval.figures.figures import FIGURES, rows_of, write_figure
    from refusion_eval.store.atomic_write import prepare_output

    if figure == "list":
        for name, one in FIGURES.items():
            print(f"{name}  {one.shows}; from {one.sources}")
        return
    name = figure if figure.startswith("figure") else f"figure{figure}"
    if name not in FIGURES:
        raise ConfigError(f"there is no {figure!r}; the figures are {', '.join(FIGURES)}")
    log_to_stderr()
    prepare_output(out / f"{name}.csv")
    rows = rows_of(name, sources or [], task)
    if rows is None:
        rows = _moments(name, sources or [], task, item)
    for path in write_figure(name, rows, out):
        print(path)


@app.command("paper-table")
def paper_table(
    table: Annotated[str, typer.Argument(help="1 to 7, several separated by commas, or all.")],
    results: Annotated[
        list[Path] | None, typer.Argument(help="Run directories and results CSV files; none shows the paper alone.")
    ] = None,
    out: Out = Path("tables"),
    baseline: Baseline = None,
) -> None:
    """Write tables of the paper with published and measured figures side by side: CSV, Markdown and LaTeX."""
    from refusion_eval.figures.render import write_table
    from refusion_eval.figures.tables import NUMBERS, paper_table
    from refusion_eval.results.cells import measured_cells
    from refusion_eval.store.atomic_write import prepare_output

    names = [str(number) for number in NUMBERS] if table == "all" else table.split(",")
    numbers = [int(name) for name in (one.strip().removeprefix("table") for one in names) if name.isdecimal()]
    if len(numbers) < len(names):
        raise ConfigError(f"{table!r}: name tables by number, 1 to {NUMBERS[-1]}, or all")
    prepare_output(out / f"table{numbers[0]}.csv")
    measured = measured_cells(results or [], baseline=baseline)
    for made in [paper_table(number, measured) for number in numbers]:
        for path in write_table(made, out):
            print(path)


def _moments(name: str, sources: list[Path], task: str | None, item: str | None) -> list:
    """The text of one sample of a run, at one moment or several."""
    from refusion_eval.cli.sources import FoundSources
    from refusion_eval.figures.moments import generation_order, step_by_step, telling_sample
    from refusion_eval.report.find import find_sample, speller_of

    if len(sources) != 1:
        raise ConfigError(f"{name} shows one sample; name one run directory")
    if item is None:
        task, item = telling_sample(sources[0], task)
    run, sample = find_sample(sources[0], task, item)
    make = generation_order if name == "figure5" else step_by_step
    return list(make(run.manifest.system, sample, speller_of(sample, FoundSources(None).spell(run))))
