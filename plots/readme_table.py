"""Writes the tables of README.md again from the CSV files they come from; `--check` only compares.

python plots/readme_table.py results/embedded/results.csv

The compact table is between `<!-- results:begin -->` and `<!-- results:end -->`. Tables of the paper are between
`<!-- tableN:begin FILE.csv ... -->` and `<!-- tableN:end -->` and come from the files that are named there. The cost of
whole benchmarks is between `<!-- cost:begin -->` and `<!-- cost:end -->`. What `gpu-check` found, in the folders of
`results/gpu`, is between `<!-- gpu:begin -->` and `<!-- gpu:end -->`.
"""

import argparse
import re
import sys
from pathlib import Path

from refusion_eval.bench.gpu_report import results_rows
from refusion_eval.figures.tables import paper_table
from refusion_eval.results.cost import published_table
from refusion_eval.results.measured import measured_figures
from refusion_eval.results.render import Table, read_csv
from refusion_eval.results.tables import summary, summary_table

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- results:begin -->\n", "<!-- results:end -->\n"
COST_TABLE = re.compile(r"(<!-- cost:begin -->\n).*?(<!-- cost:end -->\n)", re.DOTALL)
COST_WORKERS = (1, 8, 64)
GPU_TABLE = re.compile(r"(<!-- gpu:begin -->\n).*?(<!-- gpu:end -->\n)", re.DOTALL)
GPU_RESULTS = ROOT / "results" / "gpu"
NO_GPU = "No result of a GPU is in this repository: every speed and every memory need of one is an estimate.\n"
PAPER_TABLE = re.compile(r"(<!-- table(\d):begin ?([^>]*?) ?-->\n).*?(<!-- table\2:end -->\n)", re.DOTALL)


def results_block(csv: Path) -> str:
    """The compact table with its picture and hardware."""
    rows = read_csv(ROOT / csv)
    hardware = ", ".join(sorted({row.hardware for row in rows if row.hardware}))
    picture = (csv.parent / "overview.png").as_posix()
    parts = (
        f"![accuracy, speed and parallelism]({picture})",
        summary_table(summary(rows)).markdown(),
        f"Measured on {hardware}.",
    )
    return "\n\n".join(part.strip() for part in parts) + "\n"


def regenerated(readme: str, csv: Path) -> str:
    """The text with every table written again between its markers.

    Args:
        readme: text of README.md.
        csv: file of the compact table, relative to the project's folder.
    """
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    text = PAPER_TABLE.sub(_paper_table, f"{before}{BEGIN}{results_block(csv)}{END}{after}")
    return GPU_TABLE.sub(_gpu_table, COST_TABLE.sub(_cost_table, text))


def _paper_table(match: re.Match[str]) -> str:
    begin, number, files, end = match.groups()
    table = paper_table(int(number), measured_figures([ROOT / file for file in files.split()]))
    return f"{begin}{_without_heading(table.markdown())}{end}"


def _cost_table(match: re.Match[str]) -> str:
    begin, end = match.groups()
    return f"{begin}{_without_heading(published_table(COST_WORKERS).markdown())}{end}"


def _gpu_table(match: re.Match[str]) -> str:
    begin, end = match.groups()
    rows = results_rows(GPU_RESULTS)
    columns = ["Results", "GPU", "Check", "Verdict", "What was found"]
    return f"{begin}{Table(columns=columns, rows=rows, num_left=5).markdown() if rows else NO_GPU}{end}"


def _without_heading(markdown_text: str) -> str:
    """README has headings of its own."""
    return markdown_text.partition("\n\n")[2]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path, nargs="?", default=Path("results/embedded/results.csv"))
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
