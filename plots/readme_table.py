"""Writes the tables of README.md again from the files in results/; `--check` only compares.

python plots/readme_table.py results/embedded/results.csv

A table is between `<!-- NAME:begin WORDS -->` and `<!-- NAME:end -->`:

- results: the compact table of the CSV file, of all tasks or of those that are named;
- table1 to table7: the paper's table with the figures of the files that are named;
- gpu: what `gpu-check` found, in the folders of `results/gpu`.

The documentation is built with the same function (`docs/hooks.py`), which knows more tables.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from refusion_eval.bench.gpu_check import results_rows
from refusion_eval.paper.tables import paper_table
from refusion_eval.results.measured import read_measurements
from refusion_eval.results.render import Table, markdown_source, read_csv
from refusion_eval.results.tables import summary, summary_table

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = Path("results/embedded/results.csv")
BLOCK = re.compile(r"(<!-- (\w+):begin ?([^>]*?) ?-->\n).*?(<!-- \2:end -->\n)", re.DOTALL)
GPU_RESULTS = ROOT / "results" / "gpu"
NO_GPU = "No result of a GPU is in this repository: every speed and every memory need of one is an estimate.\n"

Maker = Callable[[Sequence[str]], str]  # words behind the name -> Markdown


def regenerated(text: str, csv: Path = RESULTS, more: Mapping[str, Maker] | None = None) -> str:
    """The text with every table written again between its markers.

    Args:
        text: text of README.md, or of a page.
        csv: file of the compact table, relative to the project's folder.
        more: makers of further tables, by name.

    Raises:
        KeyError: a marker names no table.
    """
    makers: dict[str, Maker] = {"results": lambda tasks: results_block(csv, tasks)}
    makers |= {"gpu": gpu_block, **{f"table{number}": _paper_block(number) for number in range(1, 8)}, **(more or {})}
    return BLOCK.sub(lambda found: f"{found[1]}{makers[found[2]](found[3].split())}{found[4]}", text)


def results_block(csv: Path, tasks: Sequence[str] = ()) -> str:
    """The compact table with its hardware; of all tasks if none is named, else of these and the mean."""
    rows = [row for row in read_csv(ROOT / csv) if not tasks or row.task in tasks or row.is_mean]
    hardware = ", ".join(sorted({row.hardware for row in rows if row.hardware}))
    return f"{summary_table(summary(rows)).markdown().strip()}\n\nMeasured on {hardware}.\n"


def gpu_block(_: Sequence[str]) -> str:
    """What was found on GPUs, or that nothing was."""
    rows = results_rows(GPU_RESULTS)
    columns = ["Results", "GPU", "Check", "Verdict", "What was found"]
    table = Table(columns=columns, rows=rows, num_left=5, escape=markdown_source)
    return table.markdown() if rows else NO_GPU


def _paper_block(number: int) -> Maker:
    def block(files: Sequence[str]) -> str:
        table = paper_table(number, read_measurements([ROOT / file for file in files]))
        return _without_heading(table.markdown())

    return block


def _without_heading(markdown_text: str) -> str:
    """The text around the table has headings of its own."""
    return markdown_text.partition("\n\n")[2]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    csv = arguments.csv.resolve().relative_to(ROOT) if arguments.csv.is_absolute() else arguments.csv
    text = README.read_text(encoding="utf-8")
    fresh = regenerated(text, csv)
    if arguments.check:
        sys.exit(fresh != text)
    README.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
