"""Engines on the same weights are compared by response (`performance/engines.py`)."""

import pytest
from engines import first_difference, table_of

COMMON = {"threads": 1, "length": 60, "prompt_tokens": 60, "tokens": 11, "weight_bytes": 1e9, "copy_gb_per_second": 10}
COMMON |= {"prefill_seconds": 2, "loaded_mb": 400, "peak_mb": 500, "differs_at": "", "margin": ""}


@pytest.mark.parametrize(
    ("ours", "others", "expected"),
    [([5, 6, 7], [5, 6, 7], None), ([5, 6, 7], [5, 8, 7], 1), ([5, 2, 7], [5, 2, 9], None), ([5, 2], [5, 7], None)],
)
def test_tokens_are_compared_up_to_the_first_end(ours, others, expected):
    assert first_difference(ours, others, (2,)) == expected


def test_the_table_has_rates_ratios_and_what_differs():
    rows = []
    for item in range(2):
        ours = {"engine": "this engine", "weights": "F16", "item": item, "decode_seconds": 1 + item}
        theirs = {"engine": "llama.cpp", "weights": "F16", "item": item, "decode_seconds": 2 + 2 * item}
        rows += [COMMON | ours, COMMON | theirs]
    rows[-1] |= {"differs_at": 4, "margin": 0.0123}
    *_, own, other = table_of(rows).splitlines()
    assert own == "| 1 | 60 | this engine | F16 | 6.7 |  | 30 | 67 % | 500 |  |"
    assert other == "| 1 | 60 | llama.cpp | F16 | 3.3 | 2.00 | 30 | 33 % | 500 | item 1 at 4 (0.012) |"
