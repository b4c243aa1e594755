"""Tokens per forward, worked out by hand and held against the public release."""

import json

import pytest

from refusion_eval.errors import DataError
from refusion_eval.metrics.parallelism import tpf, tpf_release
from refusion_eval.trace import Trace


def iteration(trace, chosen, kinds, fixed):
    """One plan and its infill: the forwards behind the plan by kind, then the positions fixed."""
    trace.forward("plan", 8, 0)
    trace.select("slot", range(0, 40, 4), [0.5] * 10, chosen)
    for kind in kinds:
        trace.forward(kind, 8, 0)
    trace.fix(fixed, [7] * len(fixed))


def test_tpf_sums_before_it_divides():
    assert tpf([10, 90], [10, 10]).value == 5.0


def test_tpf_without_forwards_is_refused():
    with pytest.raises(DataError):
        tpf([1], [0])


def test_directly_accepted_slots_count_whole_over_two_forwards():
    trace = Trace()
    iteration(trace, [0, 4, 8], ["verify"], range(8))
    assert tpf_release(trace, 4) == 8 / 2


def test_a_slot_cut_by_eos_counts_whole():
    trace = Trace()
    iteration(trace, [0, 4, 8], ["verify"], range(6))
    assert tpf_release(trace, 4) == 8 / 2


def test_completed_slots_all_count_even_those_dropped():
    trace = Trace()
    iteration(trace, [0, 4, 8], ["verify", "predict", "verify", "predict", "verify"], range(8))
    assert tpf_release(trace, 4) == 12 / 6


def test_iterations_weigh_the_same_whatever_their_length():
    trace = Trace()
    iteration(trace, [0, 4], ["verify"], range(8))
    iteration(trace, [8], ["verify", "predict", "verify"], range(8, 12))
    assert tpf_release(trace, 4) == (8 / 2 + 4 / 4) / 2


def test_a_refresh_costs_a_forward_and_is_no_completion():
    trace = Trace()
    iteration(trace, [0], ["verify", "refresh"], range(4))
    assert tpf_release(trace, 4) == 4 / 3


def test_other_decoders_and_fused_plans_have_no_release_figure():
    autoregressive, fused = Trace(), Trace()
    autoregressive.forward("decode", 8, 0)
    autoregressive.fix([0], [7])
    fused.forward("plan", 8, 0)
    fused.select("slot", [0, 4], [0.9, 0.1], [0])
    fused.forward("verify", 8, 0)
    fused.fix([0], [7])
    fused.select("slot", [4], [0.9], [4])
    assert tpf_release(Trace(), 4) is None
    assert tpf_release(autoregressive, 4) is None
    assert tpf_release(fused, 4) is None


def test_a_slot_without_positions_is_refused():
    with pytest.raises(DataError, match="slot_size is 0"):
        tpf_release(Trace(), 0)


@pytest.mark.parametrize("part", ["shortest", pytest.param("rest", marks=pytest.mark.slow)])
def test_the_release_figure_equals_what_the_release_printed(shared, part):
    """Stored decodings of the public release, decoded again with its defects."""
    from refusion_eval.api import load_model
    from tests.decoders.goldens import decode_golden

    model = load_model(shared / "parity" / "tiny", dtype="float32", device="cpu")
    cases = [json.loads(line) for line in (shared / "parity" / "golden.jsonl").open()]
    cases.sort(key=lambda case: case["n_forward"])
    for case in cases[:4] if part == "shortest" else cases[4:]:
        out = decode_golden(model, case, release_compatible=True)
        assert tpf_release(out.trace, case["settings"]["slot_size"]) == pytest.approx(case["tpf"], abs=1e-9)
        assert tpf([len(out.tokens)], [out.num_forwards]).value == pytest.approx(case["tokens_per_forward_total"])
