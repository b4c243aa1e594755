"""d3LLM's decoders: the public code's tokens and forwards, its defects and the default without them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.decoders.d3llm import D3llmDreamSettings, D3llmLladaSettings, decode
from refusion_eval.engine.engine import Engine
from refusion_eval.errors import ConfigError
from refusion_eval.types import Forward, ForwardDone, Read, Readout, draw_key
from tests.decoders.baselines import (
    NUM_RECORDS,
    assert_equals_golden,
    decode_golden,
    forwards_of,
    golden_case,
)
from tests.decoders.d2f_oracle import fixed_after
from tests.decoders.d3llm_oracle import released as as_released
from tests.decoders.scripted import run_scripted
from tests.engine.random_model import VOCAB_SIZE, random_engine, random_transformer
from tests.examples import examples

MASK, EOS = VOCAB_SIZE - 1, VOCAB_SIZE - 2
CLASSES = (D3llmLladaSettings, D3llmDreamSettings)
NAMES = ("block_size", "temperature", "threshold", "block_add_threshold", "decoded_token_threshold", "early_stop")
CACHE = ("cache_delay_iter", "refresh_interval")
GOLDENS = [(name, number) for name in ("d3llm_llada", "d3llm_dream") for number in range(NUM_RECORDS[name])]


def released(case):
    """A record's settings under our names; those of a cache are missing where there is none."""
    wanted = case["settings"]
    named = {name: wanted[name] for name in (*NAMES, *CACHE) if name in wanted}
    return {"gen_length": wanted["max_new_tokens"], "eos_ids": (190, 189), "release_compatible": True, **named}


@pytest.mark.parametrize(("decoder", "number"), GOLDENS)
def test_tokens_and_forwards_are_those_of_the_public_code(shared: Path, decoder: str, number: int):
    case = golden_case(shared, decoder, number)
    assert_equals_golden(decode_golden(shared, case, decoder, **released(case)), case)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_on_llada_without_an_end_the_default_decodes_as_released(shared: Path, number: int):
    case = golden_case(shared, "d3llm_llada", number)
    out = decode_golden(shared, case, "d3llm_llada", **released(case) | {"release_compatible": False})
    assert_equals_golden(out, case)


@st.composite
def any_settings(draw: st.DrawFn, **fixed):
    delay = draw(st.sampled_from([None, 0, 1, 2, 3]))
    chosen = {
        "gen_length": draw(st.integers(1, 16)),
        "block_size": draw(st.integers(1, 6)),
        "threshold": draw(st.sampled_from([0.0, 0.8, 1.5, 2.5])),
        "block_add_threshold": draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        "decoded_token_threshold": draw(st.sampled_from([0.0, 0.5, 0.95, 1.0])),
        "cache_delay_iter": delay,
        "refresh_interval": None if delay is None else draw(st.sampled_from([None, 2, 3])),
        "early_stop": draw(st.booleans()),
        "eos_ids": (draw(st.integers(0, 20)), EOS),
    }
    return draw(st.sampled_from(CLASSES))(**{"mask_id": MASK, **chosen, **fixed})


prompts = st.lists(st.integers(0, 20), min_size=1, max_size=6)


@given(any_settings(release_compatible=True), prompts, st.integers(0, 5))
@examples(20)
def test_what_the_release_does_written_out_gives_the_same_forwards(chosen, prompt, seed):
    engine = random_engine(seed)
    ours, plain = (engine.run(algorithm, prompt, chosen) for algorithm in (decode, as_released))
    assert forwards_of(ours) == forwards_of(plain)


@pytest.fixture(scope="module")
def shallow() -> Engine:
    return Engine(random_transformer(num_layers=1), "sdpa")


@pytest.mark.parametrize("threshold", [0.0, 0.8, 2.0])
@pytest.mark.parametrize("cache", [{"cache_delay_iter": 1}, {"cache_delay_iter": 2, "refresh_interval": 3}])
def test_with_one_layer_stale_keys_and_values_are_exact(shallow, threshold, cache):
    chosen = D3llmLladaSettings(mask_id=MASK, eos_ids=(EOS,), gen_length=20, block_size=5, threshold=threshold)
    plain, cached = (shallow.run(decode, [5, 9, 2], replace(chosen, **changes)) for changes in ({}, cache))
    assert fixed_after(plain.trace) == fixed_after(cached.trace)
    rows = [sum(done.rows for done in out.trace.of(ForwardDone)) for out in (plain, cached)]
    assert rows[1] < rows[0]


def answer(forward: Forward, read: Read) -> Readout:
    """Tokens and entropies that depend on place and content; the mask is never chosen."""
    keys = [draw_key(5, sum(forward.tokens), forward.positions[row]) for row in read.rows]
    entropy = np.array([(key >> 20) % 997 / 300 for key in keys])
    return Readout(np.array([key % MASK for key in keys]), 0 * entropy, entropy=entropy)


def few_answers(eos):
    """As `answer`, but half of the tokens are the end."""

    def answer_so(forward: Forward, read: Read) -> Readout:
        out = answer(forward, read)
        return replace(out, tokens=np.where(out.tokens % 2, out.tokens, eos))

    return answer_so


@given(any_settings(), st.integers(1, 5))
@examples(150)
def test_every_forward_fills_masks_of_open_blocks_before_the_end_and_sees_each_key_once(chosen, prompt_length):
    response, trace, forwards = run_scripted(decode, [0] * prompt_length, chosen, answer)
    num_open, end = 0, chosen.gen_length
    for forward, done, fixed in zip(forwards, trace.of(ForwardDone), fixed_after(trace), strict=True):
        assert done.rows + done.cached == prompt_length + chosen.gen_length
        assert list(forward.positions) == list(range(done.cached, prompt_length + chosen.gen_length))
        for read in forward.reads:  # each row is asked for what it was trained to predict
            assert all(forward.tokens[row + chosen.shift] == MASK for row in read.rows if row + 1 < len(forward.tokens))
        assert fixed
        assert max(fixed) < end
        num_open = max(num_open, -(-(max(fixed) + 1) // chosen.block_size))
        assert num_open <= done.forward + 2  # one block is open at first, and a forward opens one at most
        if chosen.early_stop:
            end = min([end, *(position for position, token in fixed.items() if token == chosen.eos_ids[0])])
    filled = trace.fixed_tokens()
    assert sum(map(len, fixed_after(trace))) == len(filled)  # nothing is filled twice
    assert list(response.tokens) == [filled[position] for position in range(len(response.tokens))]
    assert chosen.early_stop or len(filled) == chosen.gen_length


@given(any_settings(early_stop=True, cache_delay_iter=None, refresh_interval=None, release_compatible=True))
@examples(80)
def test_what_is_recorded_as_filled_was_not_there_before(chosen):
    _, trace, forwards = run_scripted(decode, [1, 2], chosen, few_answers(chosen.eos_ids[0]))
    for forward, fixed in zip(forwards, fixed_after(trace), strict=True):
        assert all(forward.tokens[2 + position] != token for position, token in fixed.items())


@given(any_settings(early_stop=False, cache_delay_iter=None, refresh_interval=None))
@examples(80)
def test_with_both_shares_at_one_blocks_follow_each_other(chosen):
    chosen = replace(chosen, block_add_threshold=1.0, decoded_token_threshold=1.0)
    _, trace, _ = run_scripted(decode, [1, 2], chosen, answer)
    blocks = [{position // chosen.block_size for position in fixed} for fixed in fixed_after(trace)]
    assert [len(each) for each in blocks] == [1] * len(blocks)
    assert [min(each) for each in blocks] == sorted(min(each) for each in blocks)


@pytest.mark.parametrize(
    ("threshold", "on_llada", "on_dream"), [(0.0, [0], [0]), (0.75, [0, 1], [0]), (0.8, [0, 1], [0, 1])]
)
def test_llada_fills_up_to_the_threshold_and_dream_below_it(threshold, on_llada, on_dream):
    def rising(_: Forward, read: Read) -> Readout:
        entropy = 0.5 + 0.25 * np.arange(len(read.rows))
        return Readout(np.arange(len(entropy)), entropy, entropy=entropy)

    for settings, filled in ((D3llmLladaSettings, on_llada), (D3llmDreamSettings, on_dream)):
        chosen = settings(mask_id=MASK, gen_length=4, block_size=4, threshold=threshold)
        assert list(fixed_after(run_scripted(decode, [1], chosen, rising)[1])[0]) == filled


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="d3llm_llada: refresh_interval is 3 and there is no cache"):
        D3llmLladaSettings(mask_id=MASK, refresh_interval=3)
    with pytest.raises(ConfigError, match="d3llm_dream: early_stop needs eos_ids"):
        D3llmDreamSettings(mask_id=MASK, early_stop=True)
