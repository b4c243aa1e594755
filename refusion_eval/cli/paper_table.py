from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from refusion_eval.cli import Baseline, Data, Out, Results, names_of, prepare
from refusion_eval.errors import ConfigError

if TYPE_CHECKING:
    from refusion_eval.results.render import Table

ANSWERS = 8


def paper_table(
    table: Annotated[
        str, typer.Argument(help="Tables by number, 1 to 7, separated by commas, or all; 8 with --item, from runs.")
    ],
    results: Results = None,
    out: Out = Path("tables"),
    baseline: Baseline = None,
    paper: Annotated[
        Literal["v1", "v2"], typer.Option(help="Version of the paper whose values Table 2 prints.")
    ] = "v2",
    item: Annotated[str | None, typer.Option(help="Table 8: the benchmark's id of the problem.")] = None,
    task: Annotated[str | None, typer.Option(help="Table 8: task or benchmark of the problem.")] = None,
    data: Data = None,
    rows: Annotated[
        str | None,
        typer.Option(help="Tables 1 to 4: the systems to show, by label, in this order, separated by commas."),
    ] = None,
    row: Annotated[
        str | None,
        typer.Option(help="Tables 1 to 4: print one measured system as lines for an existing LaTeX table; no file."),
    ] = None,
    intervals: Annotated[
        bool, typer.Option("--intervals/--no-intervals", help="Whether LaTeX shows intervals.")
    ] = True,
) -> None:
    """Write the paper's tables beside measured figures. The files are CSV, Markdown and LaTeX.

    Table 8 has the answers of several runs to one problem side by side.
    """
    from refusion_eval.paper.tables import NUMBERS
    from refusion_eval.paper.tables import paper_table as make_table
    from refusion_eval.results.measured import read_measurements

    names = [str(number) for number in NUMBERS] if table == "all" else names_of(table)
    numbers = [int(name) for name in (name.removeprefix("table") for name in names) if name.isdecimal()]
    if len(numbers) < len(names) or not set(numbers) <= {*NUMBERS, ANSWERS}:
        raise ConfigError(f"{table!r}: name tables by number, 1 to {ANSWERS}, or all")
    if (ANSWERS in numbers) != (item is not None) or (ANSWERS in numbers and numbers != [ANSWERS]):
        raise ConfigError("Table 8 shows one problem: paper-table 8 RUN RUN RUN --item ID; other tables take no --item")
    if row is None:
        prepare(out / f"table{numbers[0]}.csv")
    if item is not None:
        made = [_answers(results or [], task, item, data)]
    else:
        measured = read_measurements(results or [], baseline=baseline)
        systems = [row] if row is not None else [] if rows is None else [name.strip() for name in rows.split(",")]
        made = [make_table(number, measured, paper, systems) for number in numbers]
    for each in made:
        if row is None:
            for path in each.write(out, intervals=intervals):
                print(path)
        else:
            _print_row(each, row, intervals)


def _print_row(table: "Table", name: str, intervals: bool) -> None:
    """Prints the score and throughput of a measured system, without the columns that say which is which."""
    lines = [line for line in table.lines if line.origin == "measured"]
    if not lines:
        raise ConfigError(f"{name} was not measured; name its run or results CSV")
    for line in lines:
        label, _, _, *figures = line.shown
        print("\n".join(table.latex_lines(replace(line, cells=(label, *figures), num_repeated=0), intervals=intervals)))


def _answers(run_dirs: list[Path], task: str | None, item: str, data: Path | None) -> "Table":
    from refusion_eval.cli.sources import FoundSources
    from refusion_eval.paper.answers import answers_table, read_answers

    if not run_dirs:
        raise ConfigError("Table 8 is made from runs; name their directories")
    answers = read_answers(run_dirs, task, item)
    asked = FoundSources(data).asked(answers[0].run, answers[0].sample)
    return answers_table(answers, asked.prompt, asked.gold)
