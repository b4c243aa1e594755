"""Rows to which matrices are padded, from the products that a card was timed with (`performance/padding.py`)."""

import json
from pathlib import Path

import padding
import pytest

from refusion_eval.bench.tune_choices import padding_of
from refusion_eval.models.choices import Product, read_choices

RESULTS = Path(__file__).resolve().parents[2] / "results" / "gpu"


def test_a_matrix_is_padded_only_where_it_was_timed_and_gains_a_hundredth():
    speeds = {1: 4.08, 2: 4.07, 8: 3.68, 16: 3.99, 40: 3.93, 64: 3.94}
    found = padding_of(speeds)
    assert {rows: product.padded_to for rows, product in found.items()} == {1: 0, 2: 0, 7: 0, 8: 16}
    assert padding_of({1: 4.0, 64: 4.03}) == {}
    assert padding_of({1: 4.0, 64: 4.05}) == {1: Product(padded_to=64)}


@pytest.mark.parametrize("folder", [path.parent for path in RESULTS.glob("*/choices.json")], ids=lambda path: path.name)
def test_tables_that_pad_are_those_of_the_timed_products(folder):
    (table, *_) = tables = read_choices(folder / "choices.json")
    if not table.origin.startswith("performance/padding.py"):
        pytest.skip(f"made otherwise: {table.origin}")
    assert tables == (padding.choices_of(json.loads((folder / "checks.json").read_text())),)
