"""`python -m miniature.equal_accuracy`: what the causal diffusion models need to reach one accuracy, answer by answer.

For each task the accuracy is the lowest of the systems' best ones, and of each system the setting with most tokens a
forward that reaches it is decoded again on the same draws. Settings that are ablations of a system's algorithm are left
out (`frontier.is_ablation`): they belong to the grid of one system alone.

    python -m miniature.equal_accuracy results/embedded/frontiers.csv --out results/embedded/equal_accuracy.csv
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas

from miniature.family import EMBEDDED, Family
from miniature.frontier import is_ablation
from miniature.measure import draws, measure
from refusion_eval import api
from refusion_eval.benchmarks import BENCHMARKS

SYSTEMS = ("ReFusion", "ReFusion, verifier", "WeDLM", "I-DLM")
COLUMNS = ("task", "reached", "system", "item", "right", "tokens", "forwards", "rows")


def points(rows: pandas.DataFrame, systems: Sequence[str]) -> Iterator[pandas.Series]:
    """The point of each task and system, a row of the frontiers with `reached`, the accuracy that was asked for."""
    rows = rows[rows.system.isin(systems) & ~rows.settings.map(is_ablation)]
    for _, of_task in rows.groupby("task", sort=False):
        reached = of_task.groupby("system").accuracy.max().min()
        enough = of_task[of_task.accuracy >= reached].assign(reached=reached)
        for system in systems:
            yield enough[enough.system == system].sort_values(["tpf", "accuracy"]).iloc[-1]


def measured(family: Family, models: str, rows: pandas.DataFrame) -> pandas.DataFrame:
    """Decodes the points again.

    Args:
        family: the family of the checkpoints.
        models: what the names of the checkpoints follow: "embedded:", or a folder with a slash.
        rows: the frontiers.
    """
    by_name = {system.name: system for system in family.systems}
    answers = []
    for point in points(rows, SYSTEMS):
        system = by_name[point.system]
        model = api.load_model(f"{models}{system.model}")
        settings = {"gen_length": family.gen_length} | json.loads(point.settings)
        chosen = draws(family, point.task, point.n)
        found = measure(model, system.decoder, BENCHMARKS[point.task], chosen, **settings)
        common = (point.task, point.reached, point.system)
        answers += [(*common, item, int(right), *counts) for item, (right, *counts) in enumerate(found.answers)]
        print(f"{point.task}: {point.system}, {found.accuracy:g} %, {point.settings}", flush=True)
    return pandas.DataFrame(answers, columns=list(COLUMNS))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m miniature.equal_accuracy", description=__doc__.split("\n", 1)[0])
    parser.add_argument("frontiers", type=Path, help="CSV of miniature.frontier")
    parser.add_argument("--models", default="embedded:", help="prefix of the checkpoints, such as runs/miniature/out/")
    parser.add_argument("--out", type=Path, required=True, help="CSV with a row for each answer")
    given = parser.parse_args()
    found = measured(EMBEDDED, given.models, pandas.read_csv(given.frontiers))
    found.to_csv(given.out, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
