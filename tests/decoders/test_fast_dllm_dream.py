"""Fast-dLLM on Dream: the public code's tokens, forwards and cached rows, and what must hold for any settings."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.api import decoder_settings, generate_many, generate_stream
from refusion_eval.decoders import dream
from refusion_eval.decoders.fast_dllm import FastDllmDreamSettings
from refusion_eval.decoders.fast_dllm import decode_dream as decode
from refusion_eval.errors import ConfigError
from refusion_eval.types import DROP_ALL, NOTHING, Forward, Read, Readout, draw_key
from tests.decoders.baselines import (
    RECORDS_EACH,
    assert_equals_golden,
    decode_golden,
    forwards_of,
    golden_case,
    golden_model,
)
from tests.decoders.scripted import blocks, run_scripted
from tests.decoders.test_dream import settings_of as dream_settings_of
from tests.examples import examples

MASK, EOS = 31, 30
CACHES = {"no_cache": "none", "prefix_cache": "prefix", "dual_cache": "dual"}
CACHED = st.sampled_from(["prefix", "dual"])


def settings_of(case):
    """A record's settings under our names; without a cache it names no block length."""
    released = case["settings"]
    names = ("block_length", "steps", "temperature", "alg", "alg_temp", "threshold")
    named = {name: released[name] for name in names if name in released}
    return {"gen_length": released["max_new_tokens"], "cache": CACHES[case["variant"]], **named}


@pytest.mark.parametrize("dtype", ["float32", "float64", "model"])
@pytest.mark.parametrize("number", range(RECORDS_EACH))
def test_tokens_and_forwards_are_those_of_the_public_code(shared: Path, number: int, dtype: str):
    case = golden_case(shared, "fast_dllm_dream", number)
    out = decode_golden(shared, case, "fast_dllm_dream", confidence_dtype=dtype, **settings_of(case))
    assert_equals_golden(out, case)


@pytest.mark.parametrize("number", range(RECORDS_EACH))
def test_a_batch_of_unequal_prompts_changes_no_token(shared: Path, number: int):
    case = golden_case(shared, "fast_dllm_dream", number)
    prompt = case["prompt_ids"]
    # The last two wait for a place, so that full and block forwards share a batch.
    prompts = [prompt[:2], prompt, prompt * 3, prompt, prompt[1:]]
    batched = generate_many(golden_model(shared, case), prompts, "fast_dllm_dream", batch_size=3, **settings_of(case))
    for out in (batched[1], batched[3]):
        assert_equals_golden(out, case)
    for prompt_ids, out in zip(prompts, batched, strict=True):
        alone = decode_golden(shared, {**case, "prompt_ids": prompt_ids}, "fast_dllm_dream", **settings_of(case))
        assert (out.tokens, forwards_of(out)) == (alone.tokens, forwards_of(alone))


@pytest.mark.parametrize("number", range(RECORDS_EACH))
def test_both_decoders_of_a_checkpoint_share_a_batch(shared: Path, number: int):
    fast, plain = (golden_case(shared, name, number) for name in ("fast_dllm_dream", "dream"))
    model = golden_model(shared, fast)
    assert fast["checkpoint"] == plain["checkpoint"]
    cases = {
        "fast_dllm_dream": (fast, decoder_settings(model, "fast_dllm_dream", **settings_of(fast))),
        "dream": (plain, decoder_settings(model, "dream", **dream_settings_of(plain))),
    }
    names = ["dream", "fast_dllm_dream"] * 2
    requests = [(name, cases[name][0]["prompt_ids"], cases[name][1]) for name in names]
    results = dict(generate_stream(model, requests, batch_size=3))
    for index, name in enumerate(names):
        assert_equals_golden(results[index], cases[name][0])


@pytest.mark.parametrize("rule", [{"threshold": 0.5}, {"threshold": 0.9}, {"alg": "entropy", "steps": 16}])
def test_with_one_layer_both_caches_are_exact(shared: Path, rule):
    # Keys and values of a single layer depend on nothing but the tokens.
    case = golden_case(shared, "fast_dllm_dream", 3)
    assert case["checkpoint"] == "dream_4"
    prefix, dual = (
        decode_golden(shared, case, "fast_dllm_dream", gen_length=32, block_length=8, cache=cache, **rule)
        for cache in ("prefix", "dual")
    )
    assert [each["commit"] for each in forwards_of(prefix)] == [each["commit"] for each in forwards_of(dual)]
    assert [each["ctx"] for each in forwards_of(prefix)] != [each["ctx"] for each in forwards_of(dual)]


@pytest.mark.parametrize("alg", ["origin", *dream.RANKING_ALGS])
def test_quotas_without_a_cache_are_dreams_decoder(shared: Path, alg):
    case = golden_case(shared, "fast_dllm_dream", 4)
    same = {"gen_length": 20, "steps": 7, "alg": alg}
    ours = decode_golden(shared, case, "fast_dllm_dream", cache="none", **same)
    assert ours.trace.to_json() == decode_golden(shared, case, "dream", **same).trace.to_json()


def answer(forward: Forward, read: Read) -> Readout:
    """Tokens, confidences and entropies that depend on place and content; the mask is never chosen."""
    keys = [draw_key(7, sum(forward.tokens), forward.positions[row]) for row in read.rows]
    probs, entropy = (np.array([(key >> shift) % 97 / 97 for key in keys]) for shift in (8, 24))
    return Readout(np.array([key % MASK for key in keys]), probs, None, entropy if read.entropy else None)


def by_place(confidences):
    """The same confidences in every forward, one for each response position behind a prompt of one token."""

    def scripted(forward: Forward, read: Read) -> Readout:
        places = [forward.positions[row] for row in read.rows]
        return Readout(np.array(places), np.array([confidences[place] for place in places]))

    return scripted


@given(blocks(), CACHED, st.sampled_from([0.0, 0.6, 0.9]), st.sampled_from([0.0, 1.0]))
@examples(80)
def test_a_block_begins_with_its_first_position_and_is_filled_before_the_next(size, cache, threshold, temperature):
    prompt = [1, 2, 3]
    chosen = FastDllmDreamSettings(
        mask_id=MASK, cache=cache, threshold=threshold, temperature=temperature, confidence_dtype="model", **size
    )
    response, trace, forwards = run_scripted(decode, prompt, chosen, answer)
    length, block_length = len(prompt) + size["gen_length"], size["block_length"]
    assert len(response.tokens) == size["gen_length"]
    fixed_at = trace.fixed_at()
    start, before = 0, None
    for number, forward in enumerate(forwards):
        (read,) = forward.reads
        fixed = [position for position, at in fixed_at.items() if at == number]
        assert fixed
        if forward.kind == "refresh":
            assert len(forward.tokens) == length
            start = len(prompt) + block_length * sum(each.kind == "refresh" for each in forwards[:number])
            assert forward.commit == DROP_ALL
            assert read.rows == [start - 1]
            assert fixed == [start - len(prompt)]
        else:
            end = length if cache == "prefix" else start + block_length
            assert list(forward.positions) == list(range(start, end))
            kept = [row for row in range(length) if not start <= row < end]
            assert list(forward.commit.rows) == (kept if before == "refresh" else [])
            assert forward.commit.keep is None
            # The row before each mask of the block, none of them outside.
            masked = [row for row in range(block_length) if forward.tokens[row] == MASK]
            assert read.rows == [row - 1 for row in masked]
            assert {len(prompt) + position - start for position in fixed} <= set(masked)
        before = forward.kind
    assert sum(forward.kind == "refresh" for forward in forwards) == len(chosen.blocks)


@given(blocks(), CACHED)
@examples(40)
def test_above_1_a_threshold_gives_one_token_a_forward(size, cache):
    chosen = FastDllmDreamSettings(mask_id=MASK, cache=cache, threshold=1.01, **size)
    _, _, forwards = run_scripted(decode, [1, 2], chosen, answer)
    assert len(forwards) == size["gen_length"]


@given(blocks(), CACHED)
@examples(40)
def test_a_threshold_of_0_takes_two_forwards_a_block(size, cache):
    chosen = FastDllmDreamSettings(mask_id=MASK, cache=cache, threshold=0.0, **size)
    _, _, forwards = run_scripted(decode, [1, 2], chosen, answer)
    # A block of one position is full after its first forward.
    assert len(forwards) == len(chosen.blocks) * min(2, size["block_length"])


@given(blocks(), CACHED, st.integers(2, 12))
@examples(60)
def test_quotas_of_a_block_take_its_steps(size, cache, steps_per_block):
    num_blocks = size["gen_length"] // size["block_length"]
    steps = steps_per_block * num_blocks
    chosen = FastDllmDreamSettings(mask_id=MASK, cache=cache, alg="entropy", steps=steps, **size)
    response, trace, forwards = run_scripted(decode, [1, 2], chosen, answer)
    assert len(response.tokens) == size["gen_length"]
    counts = np.bincount(list(trace.fixed_at().values()), minlength=len(forwards)).tolist()
    assert [len(forward.reads) for forward in forwards] == [min(1, count) for count in counts]
    left, wanted = size["block_length"] - 1, [1]
    for share in dream.shares(steps_per_block, chosen.eps)[1:] if left else ():
        wanted.append(dream.quota(left, share))
        left -= wanted[-1]
    assert counts == wanted * num_blocks


def test_quotas_of_a_block_as_long_as_its_steps():
    chosen = FastDllmDreamSettings(mask_id=MASK, alg="entropy", gen_length=32, steps=32)
    _, trace, forwards = run_scripted(decode, [1], chosen, answer)
    counts = np.bincount(list(trace.fixed_at().values()), minlength=len(forwards))
    assert counts.tolist() == [1, 0, *[1] * 29, 2]


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from([0.0, 0.5, 0.9, 1.01]))
@examples(80)
def test_without_a_cache_rejected_positions_are_offered_again(per_step, steps, threshold):
    gen_length = per_step * steps
    chosen = FastDllmDreamSettings(
        mask_id=MASK, cache="none", gen_length=gen_length, steps=steps, threshold=threshold, block_length=7
    )
    response, trace, forwards = run_scripted(decode, [1, 2], chosen, answer)
    assert len(response.tokens) == gen_length
    counts = np.bincount(list(trace.fixed_at().values())).tolist()
    assert len(counts) == len(forwards)
    assert steps <= len(forwards) <= gen_length
    assert all(forward.commit == NOTHING for forward in forwards)
    fixed = np.cumsum(counts)
    assert all(total <= per_step * (step + 1) for step, total in enumerate(fixed))
    if threshold == 0:
        assert counts == [per_step] * steps
    if threshold > 1:
        assert counts == [1] * gen_length


def test_without_a_cache_only_the_best_are_held_against_the_threshold():
    # Two candidates a step: 0.95 and 0.9 pass; then 0.8 does as the best, 0.7 does not and is offered again.
    confidences = [0.7, 0.95, 0.6, 0.9, 0.8, 0.5]
    chosen = FastDllmDreamSettings(mask_id=MASK, cache="none", gen_length=6, steps=3, threshold=0.9)
    _, trace, _ = run_scripted(decode, [1], chosen, by_place(confidences))
    assert trace.fixed_at() == {1: 0, 3: 0, 4: 1, 0: 2, 2: 3, 5: 4}


def test_without_a_cache_one_step_is_one_threshold_for_the_canvas():
    confidences = [0.2, 0.95, 0.6, 0.9, 0.1, 0.99]
    chosen = FastDllmDreamSettings(mask_id=MASK, cache="none", gen_length=6, steps=1, threshold=0.9)
    _, trace, _ = run_scripted(decode, [1], chosen, by_place(confidences))
    # What reaches the threshold exactly passes.
    assert trace.fixed_at() == {1: 0, 3: 0, 5: 0, 2: 1, 0: 2, 4: 3}


@given(st.lists(st.floats(0, 1), min_size=8, max_size=8), CACHED, st.floats(0, 1), st.floats(0, 1))
@examples(60)
def test_a_higher_threshold_never_takes_fewer_forwards(confidences, cache, one, other):
    def num_forwards(threshold):
        chosen = FastDllmDreamSettings(mask_id=MASK, cache=cache, gen_length=8, block_length=4, threshold=threshold)
        return len(run_scripted(decode, [1], chosen, by_place(confidences))[2])

    low, high = sorted((one, other))
    assert num_forwards(low) <= num_forwards(high)


@given(blocks(), st.sampled_from(["none", "prefix", "dual"]), st.sampled_from(["confidence_threshold", "entropy"]))
@examples(60)
def test_stopping_early_gives_the_same_text(size, cache, alg):
    late = FastDllmDreamSettings(
        mask_id=MASK, eos_ids=(EOS, *range(10)), cache=cache, alg=alg, steps=size["gen_length"], threshold=0.5, **size
    )
    response, trace, _ = run_scripted(decode, [5], late, answer)
    early, early_trace, _ = run_scripted(decode, [5], replace(late, early_stop=True), answer)
    assert early == response
    assert early_trace.num_forwards <= trace.num_forwards


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cache": "block"}, "cache='block'; choose one of none, prefix, dual"),
        ({"alg": "random"}, "alg='random'; choose one of confidence_threshold, origin"),
        ({"threshold": -0.1}, "threshold=-0.1"),
        ({"gen_length": 30, "block_length": 8}, "gen_length is 30 and block_length 8"),
        ({"gen_length": 64, "alg": "entropy", "steps": 3}, "steps is 3 for 2 blocks"),
        ({"gen_length": 64, "alg": "entropy", "steps": 2}, "set steps to at least 4"),
        ({"alg": "maskgit_plus"}, "with a cache quotas go by entropy"),
        ({"alg": "origin", "cache": "prefix"}, "with a cache quotas go by entropy"),
        ({"cache": "none"}, "steps is None and gen_length 256"),
        ({"cache": "none", "steps": 7}, "set steps to a divisor of gen_length"),
        ({"alg_temp": 0.5}, "alg=confidence_threshold draws nothing"),
        ({"steps": 0}, "steps=0"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        FastDllmDreamSettings(mask_id=MASK, **wrong)
