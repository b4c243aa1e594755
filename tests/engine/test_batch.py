"""Rows and forwards of a batch, priced by the load of the whole call (`refusion_eval.engine.width.LoadCurve`)."""

import numpy as np
import pytest

from refusion_eval import api
from refusion_eval.bench.bench import mini_prompts
from refusion_eval.decoders import DECODERS
from refusion_eval.engine.engine import Engine, Request
from refusion_eval.engine.width import LoadCurve
from refusion_eval.errors import ConfigError
from refusion_eval.types import ForwardDone

# Milliseconds of an 8B model on an H200: measured to 256 rows, then 15 GFLOP a row at 650 TFLOP/s.
H200 = {1: 4.8, 16: 4.98, 40: 5.34, 64: 5.45, 128: 6.1, 256: 8.02, 512: 12.4, 1024: 24.3, 2048: 48.1}


def test_a_curve_says_what_a_row_adds():
    curve = LoadCurve({1: 2.0, 10: 2.0, 20: 4.0, 30: 3.0})
    assert [curve.row_cost(rows, 1) for rows in (1, 9, 10, 19, 20, 99)] == pytest.approx([0, 0, 0.1, 0.1, 0, 0])
    assert curve.row_cost(10, 8) == pytest.approx(0.8)
    assert LoadCurve({1: 1.0, 11: 2.0}).row_cost(31, 2) == pytest.approx(0.2)
    with pytest.raises(ConfigError, match=r"a curve of \[4, 8\] rows; it needs the seconds of 1 row and of more"):
        LoadCurve({8: 1.0, 4: 1.0})


@pytest.fixture(scope="module")
def decoded():
    """Batch size, whether rows are priced -> tokens, forwards, rows, and the milliseconds of all calls by the curve."""
    model = api.load_model("embedded", device="cpu")
    settings = api.decoder_settings(
        model, "refusion", gen_length=64, slot_size=8, block_size=32, fuse=True, free_rows=0, row_cost=0.002
    )
    requests = [Request(DECODERS["refusion"].decode, prompt, settings) for prompt in mini_prompts(model, 16)]
    curve, found = LoadCurve(H200), {}
    for size in (1, 4, 16):
        for is_priced in (False, True):
            engine, calls = Engine(model.transformer, model.attention), []
            engine.load_curve = curve if is_priced else None
            compute = engine._compute
            engine._compute = lambda cache, forwards, sequences, compute=compute, calls=calls: (
                calls.append(sum(len(forward.tokens) for forward in forwards)) or compute(cache, forwards, sequences)
            )
            results = dict(engine.run_many(iter(requests), size))
            tokens = [results[index].tokens for index in range(len(requests))]
            num_forwards = sum(result.num_forwards for result in results.values())
            assert sum(calls) <= sum(done.rows for result in results.values() for done in result.trace.of(ForwardDone))
            milliseconds = np.interp(calls, list(H200), list(H200.values())).sum()
            found[size, is_priced] = tokens, num_forwards, sum(calls), milliseconds
    return found


def test_the_price_of_rows_changes_no_token(decoded):
    assert all(tokens == decoded[1, False][0] for tokens, *_ in decoded.values())


def test_a_larger_batch_takes_fewer_rows_a_token_and_more_forwards(decoded):
    unpriced = {size: decoded[size, False][1] for size in (1, 4, 16)}
    assert len(set(unpriced.values())) == 1  # without prices, forwards do not depend on the batch
    forwards, rows = ([decoded[size, True][place] for size in (1, 4, 16)] for place in (1, 2))
    assert forwards == sorted(forwards)
    assert rows == sorted(rows, reverse=True)
    assert forwards[-1] > 1.05 * unpriced[16]
    assert rows[-1] < 0.95 * decoded[16, False][2]


@pytest.mark.parametrize(("size", "gain"), [(1, 0.99), (4, 1.0), (16, 1.04)])
def test_by_the_curve_a_priced_batch_is_faster(decoded, size, gain):
    assert decoded[size, False][3] >= gain * decoded[size, True][3]
