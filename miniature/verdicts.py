"""`python -m miniature.verdicts`: every answer of some runs, so that any two systems can be compared by item.

    python -m miniature.verdicts RUN... --out results/embedded/verdicts.csv

One row for each item and system, named as in the table of the same runs: whether the answer is right, its tokens, its
forwards and the query rows of all its forwards, none of which depends on the speed of the machine, and the machine.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas

from miniature.measure import num_rows
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.tables import summary
from refusion_eval.store.records import PASSED
from refusion_eval.store.run_store import RunReader

COLUMNS = ("task", "item", "system", "right", "tokens", "forwards", "rows", "hardware")


def verdicts(run_dirs: Sequence[Path]) -> pandas.DataFrame:
    """The answers of runs of the family, one sample an item, by task, item and system.

    Raises:
        StoreError: a folder holds no readable run.
    """
    lines = summary(run_measurements(run_dirs))
    systems = {line.any_measurement.run_id: line.system for line in lines}
    found = []
    for run_dir in run_dirs:
        with RunReader.open(run_dir) as reader:
            scores = reader.scores_by_sample()
            for sample in reader.samples():
                right = int(scores[sample.key][PASSED].value > 0)
                counts = (sample.num_tokens, sample.num_forwards, num_rows(sample.events()))
                machine = reader.run.hardware(sample.process_id).label()
                found.append((sample.key.task, sample.item_id, systems[reader.run.run_id], right, *counts, machine))
    return pandas.DataFrame(sorted(found, key=lambda row: (row[0], str(row[1]), row[2])), columns=list(COLUMNS))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m miniature.verdicts", description=__doc__.split("\n", 1)[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories of the family")
    parser.add_argument("--out", type=Path, required=True, help="CSV")
    given = parser.parse_args()
    verdicts(given.runs).to_csv(given.out, index=False)


if __name__ == "__main__":
    main()
