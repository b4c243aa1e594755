"""Golden decodings of the public release: tokens and forwards, with its defects and without.

The cases lie in ../shared/parity beside a checkout; without them these tests are skipped.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from refusion_eval.api import load_model
from tests.decoders.goldens import decode_golden

PARITY = Path(__file__).parents[2].parent / "shared" / "parity"
pytestmark = pytest.mark.skipif(not PARITY.is_dir(), reason=f"{PARITY} is absent")

CASES = [json.loads(line) for line in (PARITY / "golden.jsonl").open()] if PARITY.is_dir() else []


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(PARITY / "tiny", dtype="float32", device="cpu")


@pytest.mark.parametrize("number", range(len(CASES)))
def test_plainly_the_default_gives_the_right_tokens_and_forwards(model: Any, number: int):
    case = CASES[number]
    out = decode_golden(model, case, release_compatible=False, fuse=False)
    assert list(out.tokens) == case["fixed"]["output_ids"]
    assert out.num_forwards == case["fixed"]["n_forward"]


@pytest.mark.parametrize("row_cost", [0.0, 0.02])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_fused_the_tokens_are_the_same_in_no_more_forwards(model: Any, number: int, row_cost: float):
    case = CASES[number]
    out = decode_golden(model, case, release_compatible=False, fuse=True, row_cost=row_cost)
    assert list(out.tokens) == case["fixed"]["output_ids"]
    assert out.num_forwards <= case["fixed"]["n_forward"]


@pytest.mark.parametrize("number", range(0, len(CASES), 4))
def test_fused_the_release_is_reproduced_in_no_more_forwards(model: Any, number: int):
    case = CASES[number]
    out = decode_golden(model, case, release_compatible=True, fuse=True, row_cost=0.0)
    assert list(out.tokens) == case["output_ids"]
    assert out.num_forwards <= case["n_forward"]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_release_compatible_gives_the_tokens_and_forwards_of_the_release(model: Any, number: int):
    case = CASES[number]
    out = decode_golden(model, case, release_compatible=True)
    assert list(out.tokens) == case["output_ids"]
    assert out.num_forwards == case["n_forward"]
