from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli import Baseline, Out, Results, names_of, prepare
from refusion_eval.errors import ConfigError


def paper_table(
    table: Annotated[str, typer.Argument(help="Tables by number, 1 to 7, separated by commas, or all.")],
    results: Results = None,
    out: Out = Path("tables"),
    baseline: Baseline = None,
) -> None:
    """Write tables of the paper with published and measured figures side by side: CSV, Markdown and LaTeX."""
    from refusion_eval.figures.tables import NUMBERS, paper_table
    from refusion_eval.results.measured import measured_figures

    names = [str(number) for number in NUMBERS] if table == "all" else names_of(table)
    numbers = [int(name) for name in (name.removeprefix("table") for name in names) if name.isdecimal()]
    if len(numbers) < len(names) or not numbers:
        raise ConfigError(f"{table!r}: name tables by number, 1 to {NUMBERS[-1]}, or all")
    prepare(out / f"table{numbers[0]}.csv")
    measured = measured_figures(results or [], baseline=baseline)
    for made in [paper_table(number, measured) for number in numbers]:
        for path in made.write(out):
            print(path)
