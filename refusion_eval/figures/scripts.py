"""What the scripts in plots/ share: each is one table or figure, from CSV to files."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from refusion_eval.errors import ConfigError, RefusionEvalError
from refusion_eval.figures.figures import FIGURES, rows_of, write_figure
from refusion_eval.figures.render import write_table
from refusion_eval.figures.tables import paper_table
from refusion_eval.results.measured import measured_figures


def main(name: str, description: str | None, arguments: Sequence[str] | None = None) -> None:
    """Runs a script; what is refused is one line on stderr and exit status 1.

    Args:
        name: table1, figure1, ...
        description: docstring of the script.
        arguments: of the command line; None for the process's own.
    """
    is_table = name.startswith("table")
    takes = "run directories and results CSV files" if is_table else f"{FIGURES[name].sources}, or its own CSV"
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("sources", nargs="*", type=Path, help=takes)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the files")
    if not is_table:
        parser.add_argument("--task", help="benchmark; mbpp if not given")
    given = parser.parse_args(arguments)
    try:
        if is_table:
            paths = write_table(
                paper_table(int(name.removeprefix("table")), measured_figures(given.sources)), given.out
            )
        else:
            rows = rows_of(name, given.sources, given.task)
            if rows is None:
                raise ConfigError(f"{name}: give its CSV, which `refusion-eval plot {name} RUN` writes from a run")
            paths = write_figure(name, rows, given.out)
    except RefusionEvalError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    print("\n".join(map(str, paths)))
