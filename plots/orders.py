"""Accuracy and tokens per forward of ReFusion's orders of slots, one column a task, from a sweep.

refusion-eval sweep results/embedded/orders.yaml --out orders
python plots/orders.py orders/sweep.csv --out results/embedded/orders.csv
"""

import argparse
from pathlib import Path

import pandas

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.results.metric_list import SCORES
from refusion_eval.store.atomic_write import write_output

WAYS = {
    "refusion-settings": "by certainty (the paper's algorithm)",
    "refusion-recompute_kv=True": "by certainty, `recompute_kv=true` (the paper's Table 4)",
    "refusion-order=left_to_right": "one slot at a time, from left to right (`order=left_to_right`)",
    "refusion-order=random": "one slot at a time, at random (`order=random`)",
    "refusion-serial=True": "one token a forward (`serial=true`)",
}


def pivot(rows: pandas.DataFrame) -> pandas.DataFrame:
    """One row for each quantity and way of choosing slots, in the order of `WAYS`; one column a task."""
    rows = rows[rows.run_id.isin(WAYS) & rows.benchmark.isin(BENCHMARKS)]
    tables = []
    for title, metrics in {"Accuracy (%)": SCORES, "Tokens per forward": ("tpf",)}.items():
        table = rows[rows.metric.isin(metrics)].pivot(index="run_id", columns="benchmark", values="value")
        table = table.loc[list(WAYS), [task for task in BENCHMARKS if task in table]].rename(
            columns=lambda task: f"mini {BENCHMARKS[task].title}"
        )
        table.insert(0, "Slots", [WAYS[name] for name in table.index])
        table.insert(0, "Quantity", title)
        tables.append(table)
    return pandas.concat(tables)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweep", type=Path, help="sweep.csv of results/embedded/orders.yaml")
    parser.add_argument("--out", type=Path, default=Path("orders.csv"))
    given = parser.parse_args()
    write_output(given.out, pivot(pandas.read_csv(given.sweep)).to_csv(index=False, float_format="%.3g"))


if __name__ == "__main__":
    main()
