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
from refusion_eval.bench.tune_choices import padding_of
from refusion_eval.models.choices import CHOICES, MATRICES, Choices, Sizes, choices_text
from refusion_eval.store.atomic_write import write_atomically


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
