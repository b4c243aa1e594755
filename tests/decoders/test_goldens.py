"""Golden decodings of the public release: tokens and forwards, with its defects and without.

The cases and their checkpoint are in `tests/data/parity`.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from refusion_eval.api import load_model
from tests.decoders.baselines import GOLDEN_DEVICE
from tests.decoders.goldens import decode_golden

NUM_CASES = 66


@pytest.fixture(scope="module")
def cases(shared: Path) -> list[dict[str, Any]]:
    read = [json.loads(line) for line in (shared / "parity" / "golden.jsonl").read_text().splitlines()]
    assert len(read) == NUM_CASES
    return read


@pytest.fixture
def case(cases: list[dict[str, Any]], number: int) -> dict[str, Any]:
    return cases[number]


@pytest.fixture(scope="module")
def model(shared: Path) -> Any:
    return load_model(str(shared / "parity" / "tiny"), dtype="float32", device=GOLDEN_DEVICE)


@pytest.mark.parametrize("number", range(NUM_CASES))
def test_plainly_the_default_gives_the_right_tokens_and_forwards(model: Any, case: dict[str, Any]):
    out = decode_golden(model, case, release_compatible=False, fuse=False)
    assert list(out.tokens) == case["fixed"]["output_ids"]
    assert out.num_forwards == case["fixed"]["n_forward"]


@pytest.mark.parametrize("row_cost", [0.0, 0.02])
@pytest.mark.parametrize("number", range(NUM_CASES))
def test_fused_the_tokens_are_the_same_in_no_more_forwards(model: Any, case: dict[str, Any], row_cost: float):
    out = decode_golden(model, case, release_compatible=False, fuse=True, row_cost=row_cost)
    assert list(out.tokens) == case["fixed"]["output_ids"]
    assert out.num_forwards <= case["fixed"]["n_forward"]


@pytest.mark.parametrize("number", range(0, NUM_CASES, 4))
def test_fused_the_release_is_reproduced_in_no_more_forwards(model: Any, case: dict[str, Any]):
    out = decode_golden(model, case, release_compatible=True, fuse=True, row_cost=0.0)
    assert list(out.tokens) == case["output_ids"]
    assert out.num_forwards <= case["n_forward"]


@pytest.mark.parametrize("number", range(NUM_CASES))
def test_release_compatible_gives_the_tokens_and_forwards_of_the_release(model: Any, case: dict[str, Any]):
    out = decode_golden(model, case, release_compatible=True)
    assert list(out.tokens) == case["output_ids"]
    assert out.num_forwards == case["n_forward"]
