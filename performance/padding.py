"""Makes the choices of a card from the products that `gpu-check` timed there: rows to which a matrix is padded.

A product of more rows can take less time than one of fewer: cuBLAS runs another kernel. A matrix is padded only at
numbers of rows that were timed, and only to such numbers.

python performance/padding.py results/gpu/h200
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from refusion_eval.bench.checkpoints import SHAPES, config_of
from refusion_eval.models.choices import CHOICES, MATRICES, Choices, Product, Sizes, choices_text
from refusion_eval.store.atomic_write import write_atomically

LEAST_GAIN = 1.01  # of a product, below which its rows stay as they are


def padding_of(speeds: Mapping[int, float]) -> dict[int, Product]:
    """From bytes of weights per second by rows, products by the number of rows up to which they serve."""
    found: dict[int, Product] = {}
    padded: list[int] = []
    for place, rows in enumerate(timed := sorted(speeds)):
        if place and rows - 1 > timed[place - 1]:
            found[rows - 1] = Product()  # rows between two that were timed stay as they are
        best = max(timed[place:], key=speeds.__getitem__)
        is_better = speeds[best] >= LEAST_GAIN * speeds[rows]
        found[rows] = Product(padded_to=best) if is_better else Product()
        padded += [rows] * is_better
    return {rows: product for rows, product in found.items() if rows <= max(padded, default=0)}


def choices_of(report: Mapping[str, Any]) -> Choices:
    """The table of the card of a `checks.json`, whose weights are bfloat16."""
    facts = report["conditions"]
    (figures,) = (check["result"]["figures"] for check in report["checks"] if check["name"] == "products")
    speeds = {matrix: {int(rows): speed for rows, speed in figures[matrix].items()} for matrix in MATRICES}
    return Choices(
        device=facts["device"],
        sizes=Sizes.of(config_of(SHAPES[facts["shape"]]), torch.bfloat16),
        origin=f"performance/padding.py, from the check `products` with torch {facts['torch']}",
        products={matrix: products for matrix in MATRICES if (products := padding_of(speeds[matrix]))},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the checks.json of a card")
    folder = parser.parse_args().folder
    report = json.loads((folder / "checks.json").read_text(encoding="utf-8"))
    write_atomically(folder / CHOICES, choices_text([choices_of(report)]))


if __name__ == "__main__":
    main()
