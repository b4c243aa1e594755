"""Fast-dLLM on LLaDA: the public code's tokens and forwards, and what must hold for any settings."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.decoders import num_within_factor
from refusion_eval.decoders.fast_dllm import FastDllmLladaSettings, decode
from refusion_eval.errors import ConfigError
from refusion_eval.types import DROP_ALL, NOTHING, Forward, Read, Readout
from tests.decoders.baselines import (
    RECORDS_EACH,
    assert_equals_golden,
    decode_golden,
    decode_in_batch,
    forwards_of,
    golden_case,
    golden_model,
)
from tests.decoders.scripted import answer_by_place, blocks, readout, run_scripted
from tests.examples import examples

MASK, EOS, EOT = 31, 30, 29
CACHES = ("none", "prefix", "dual")
VARIANTS = {"no_cache": "none", "prefix_cache": "prefix", "dual_cache": "dual"}


def released(case):
    names = ("steps", "gen_length", "block_length", "threshold", "factor")
    named = {name: case["settings"][name] for name in names}
    return {"cache": VARIANTS[case["variant"]], "eos_ids": (190, 189), "release_compatible": True, **named}


@pytest.mark.parametrize("number", range(RECORDS_EACH))
def test_tokens_and_forwards_are_those_of_the_public_code(shared: Path, number: int):
    case = golden_case(shared, "fast_dllm_llada", number)
    assert_equals_golden(decode_golden(shared, case, "fast_dllm_llada", **released(case)), case)


@pytest.mark.parametrize("number", range(RECORDS_EACH))
def test_a_batch_changes_nothing(shared: Path, number: int):
    cases = [golden_case(shared, "fast_dllm_llada", other) for other in range(RECORDS_EACH)]
    requests = [(case["prompt_ids"], released(case)) for case in cases]
    requests += [
        ([7] * 40, {"gen_length": 16, "block_length": 16, "threshold": 0.9, "cache": cache}) for cache in CACHES
    ]
    outs = decode_in_batch(shared, cases[number], "fast_dllm_llada", requests)
    assert_equals_golden(outs[number], cases[number])


@pytest.mark.parametrize("rule", [{"threshold": 0.9}, {"factor": 1.0}, {"steps": 16}, {"steps": 8}])
def test_with_one_layer_stale_keys_and_values_are_exact(shared: Path, rule):
    case = golden_case(shared, "fast_dllm_llada", 3)
    assert golden_model(shared, case).config.num_layers == 1
    outs = [
        decode_golden(shared, case, "fast_dllm_llada", gen_length=32, block_length=8, cache=cache, **rule)
        for cache in CACHES
    ]
    fixed = [[forward["commit"] for forward in forwards_of(out)] for out in outs]
    assert fixed[0] == fixed[1] == fixed[2]
    assert len({sum(forward["q"] for forward in forwards_of(out)) for out in outs}) == len(CACHES)


def test_with_more_layers_a_block_begins_as_without_a_cache(shared: Path):
    case = golden_case(shared, "fast_dllm_llada", 0)
    same = {"gen_length": 16, "block_length": 16, "threshold": 0.5}
    first = [
        forwards_of(decode_golden(shared, case, "fast_dllm_llada", cache=cache, **same))[0]["commit"]
        for cache in CACHES
    ]
    assert first[0]
    assert first[0] == first[1] == first[2]


@pytest.mark.parametrize("steps", [4, 8, 32])
def test_without_a_cache_a_quota_is_decoded_as_by_llada(shared: Path, steps: int):
    case = golden_case(shared, "fast_dllm_llada", 4)
    same = {"gen_length": 32, "block_length": 8, "steps": steps}
    fast = decode_golden(shared, case, "fast_dllm_llada", cache="none", **same)
    plain = decode_golden(shared, case, "llada", confidence_dtype="float64", **same)
    assert forwards_of(fast) == forwards_of(plain)
    assert fast.tokens == plain.tokens


answer = answer_by_place(MASK, most=1)  # some confidences are 1


def run(**chosen):
    return run_scripted(decode, [1, 2, 3], FastDllmLladaSettings(mask_id=MASK, **chosen), answer)


@given(blocks(), st.sampled_from(CACHES))
@examples(40)
def test_a_threshold_of_0_takes_blocks_whole_and_one_above_1_single_tokens(size, cache):
    num_blocks = size["gen_length"] // size["block_length"]
    assert len(run(threshold=0.0, cache=cache, **size)[2]) == num_blocks
    _, trace, forwards = run(threshold=1.01, cache=cache, **size)
    assert len(forwards) == len(set(trace.fixed_at().values())) == size["gen_length"]


@given(blocks(), st.sampled_from(CACHES), st.floats(0, 1.1), st.floats(0, 1.1))
@examples(60)
def test_a_higher_threshold_never_lowers_the_forwards(size, cache, one, other):
    low, high = (len(run(threshold=tau, cache=cache, **size)[2]) for tau in sorted((one, other)))
    assert size["gen_length"] // size["block_length"] <= low <= high <= size["gen_length"]


@given(blocks(), st.sampled_from(CACHES), st.sampled_from([{"threshold": 0.6}, {"factor": 1.5}, {}]))
@examples(80)
def test_a_block_is_refreshed_once_and_then_fed_with_what_its_cache_leaves_out(size, cache, rule):
    _, trace, forwards = run(cache=cache, **size, **rule)
    fixed_at, length = trace.fixed_at(), 3 + size["gen_length"]
    last_block = -1
    for index, forward in enumerate(forwards):
        (block,) = {position // size["block_length"] for position, at in fixed_at.items() if at == index}
        start = 3 + block * size["block_length"]
        if block != last_block or cache == "none":
            assert (list(forward.positions), forward.commit) == (list(range(length)), DROP_ALL)
        else:
            end = length if cache == "prefix" else start + size["block_length"]
            assert list(forward.positions) == list(range(start, end))
            is_second = len(forwards[index - 1].tokens) == length and forwards[index - 1].commit == DROP_ALL
            rest = [*range(start), *range(end, length)]
            assert list(forward.commit.rows) == (rest if is_second else [])
            assert is_second or forward.commit == NOTHING
        assert block >= last_block
        last_block = block
        masks = {at for at, position in enumerate(forward.positions) if fixed_at.get(position - 3, -1) >= index}
        assert {row for row, token in enumerate(forward.tokens) if token == MASK} == masks
        assert all(start <= forward.positions[row] < start + size["block_length"] for row in forward.reads[0].rows)
        assert forward.reads[0].confidence.dtype == "float64"


@given(blocks(), st.integers(1, 12), st.sampled_from(CACHES))
@examples(40)
def test_a_quota_has_no_forward_after_the_last_mask(size, steps_each, cache):
    num_blocks = size["gen_length"] // size["block_length"]
    _, trace, forwards = run(cache=cache, steps=num_blocks * steps_each, **size)
    assert len(forwards) == num_blocks * min(steps_each, size["block_length"])
    assert set(trace.fixed_at().values()) == set(range(len(forwards)))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0, 4))
def test_a_factor_takes_the_leading_run(scores, factor):
    ranked = sorted(scores, reverse=True)
    wanted = 1
    while wanted < len(ranked) and ranked[wanted] >= 1 - factor / (wanted + 2):
        wanted += 1
    assert num_within_factor(np.array(scores), factor) == wanted


def test_the_release_lets_the_last_candidate_of_a_factor_through():
    def unsure(forward: Forward, read: Read) -> Readout:
        return readout([5] * len(read.rows), 0.1)

    same = {"mask_id": MASK, "gen_length": 4, "block_length": 4, "factor": 0.5}
    _, trace, _ = run_scripted(decode, [1], FastDllmLladaSettings(**same), unsure)
    assert trace.fixed_at() == {0: 0, 1: 1, 2: 2, 3: 3}
    _, trace, _ = run_scripted(decode, [1], FastDllmLladaSettings(release_compatible=True, **same), unsure)
    assert trace.fixed_at() == {0: 0, 1: 1, 2: 2, 3: 2}


@given(blocks(), st.sampled_from(CACHES), st.sampled_from([{"threshold": 0.6}, {}]))
@examples(40)
def test_stopping_early_gives_the_same_text(size, cache, rule):
    stops = {"eos_ids": (EOS, EOT, *range(20)), "cache": cache, **rule, **size}
    late, late_trace, _ = run(**stops)
    early, early_trace, _ = run(early_stop=True, **stops)
    assert early == late
    assert early_trace.num_forwards <= late_trace.num_forwards


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gen_length": 30, "block_length": 8}, "gen_length is 30 and block_length 8"),
        ({"gen_length": 32, "block_length": 8, "steps": 6}, "steps is 6 for 4 blocks"),
        ({"threshold": 0.9, "factor": 1.0}, "threshold is 0.9 and factor 1.0; they are two rules"),
        ({"threshold": -0.1}, "threshold=-0.1"),
        ({"factor": "one"}, "factor='one'"),
        ({"cache": "triple"}, "cache='triple'; choose one of none, prefix, dual"),
        ({"release_compatible": 2}, "release_compatible=2"),
        ({"eos_ids": (MASK,)}, "also an end-of-sequence id"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=f"fast_dllm_llada: .*{message}"):
        FastDllmLladaSettings(mask_id=MASK, **wrong)


@pytest.mark.parametrize("rule", [{"threshold": 2.0}, {"factor": 0.0}])
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_steps_beside_a_threshold_or_factor_play_no_part(rule, cache):
    size = {"gen_length": 32, "block_length": 8}
    few, few_trace, _ = run(cache=cache, steps=4, **rule, **size)
    plain, plain_trace, _ = run(cache=cache, **rule, **size)
    assert few == plain
    assert few_trace.num_forwards == plain_trace.num_forwards > 4
