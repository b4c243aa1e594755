"""Writes a generated Markdown table between the result markers of README.md; `--check` only compares.

python plots/readme_table.py results/embedded/results.csv
"""

import argparse
import sys
from pathlib import Path

from refusion_eval.store.summary import markdown, summary
from refusion_eval.store.tables import read_csv

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- results:begin -->\n", "<!-- results:end -->\n"


def with_table(readme: str, table: str) -> str:
    """The text with the table in place of what stands between the markers."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{table}{END}{after}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    rows = read_csv(arguments.csv)
    hardware = ", ".join(sorted({row.hardware for row in rows if row.hardware}))
    picture = (arguments.csv.parent / "overview.png").as_posix()
    parts = (f"![accuracy, speed and parallelism]({picture})", markdown(summary(rows)), f"Measured on {hardware}.")
    table = "\n\n".join(part.strip() for part in parts) + "\n"
    text = README.read_text()
    wanted = with_table(text, table)
    if arguments.check:
        sys.exit(wanted != text)
    README.write_text(wanted)


if __name__ == "__main__":
    main()
