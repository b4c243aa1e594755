"""Gathers runs of models trained on more and less data into the CSV that Figure 7 is drawn from.

python plots/scaling.py 736=runs/data_1 2240=runs/data_3 --out results/embedded/scaling.csv
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from refusion_eval.errors import ConfigError, RefusionEvalError
from refusion_eval.paper.points import SCALING_COLUMNS
from refusion_eval.results.measured import read_measurements
from refusion_eval.results.metric_list import SCORES
from refusion_eval.results.render import csv_text
from refusion_eval.store.atomic_write import prepare_output, write_output

COLUMNS = (*SCALING_COLUMNS, "hardware", "mini")


def rows_of(entries: Sequence[str]) -> list[list]:
    """Rows of the CSV, sorted by number of samples and task.

    Args:
        entries: texts `SAMPLES=RUN`: the number of training samples, and a run directory or results CSV.

    Raises:
        ConfigError: an entry is not of this form.
        StoreError: a run cannot be read.
    """
    rows = []
    for entry in entries:
        samples, _, run = entry.partition("=")
        if not samples.isdecimal() or not run:
            raise ConfigError(f"{entry!r}: write the number of training samples and the run, as 1000=runs/small")
        for figure in read_measurements([run]):
            if figure.metric in (*SCORES, "tps"):
                names = ("benchmark", "metric", "value", "ci_low", "ci_high", "n", "hardware", "mini")
                rows.append([int(samples), *(getattr(figure, name) for name in names)])
    return sorted(rows, key=lambda row: row[:3])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("entries", nargs="+", metavar="SAMPLES=RUN")
    parser.add_argument("--out", type=Path, default=Path("scaling.csv"))
    given = parser.parse_args()
    try:
        prepare_output(given.out)
        write_output(given.out, csv_text(COLUMNS, rows_of(given.entries)))
    except RefusionEvalError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
