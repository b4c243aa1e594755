"""I-DLM's decoder: the public code's tokens, forwards and accept rule, autoregression when greedy, and no cache."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.api import generate
from refusion_eval.decoders import autoregressive
from refusion_eval.decoders.autoregressive import AutoregressiveSettings
from refusion_eval.decoders.idlm import IdlmSettings, accepts, decode, residual
from refusion_eval.engine.engine import Request
from refusion_eval.types import Draft, Forward, ForwardDone, Read, draw_key
from tests.decoders.baselines import (
    NUM_RECORDS,
    assert_equals_golden,
    decode_golden,
    forwards_of,
    golden_case,
    golden_model,
)
from tests.decoders.d2f_oracle import fixed_after
from tests.decoders.oracle import without_cache
from tests.decoders.scripted import readout, run_scripted
from tests.engine.random_model import VOCAB_SIZE, random_engine
from tests.examples import examples

MASK, EOS = VOCAB_SIZE - 1, VOCAB_SIZE - 2
NAMES = ("gen_block_size", "temperature", "top_k", "top_p", "verify_alpha", "fast_verify", "fast_verify_topk")
CASES = range(NUM_RECORDS["idlm"])


def released(case):
    """A record's settings under our names."""
    wanted = case["settings"]
    named = {name: wanted[name] for name in NAMES if name in wanted}
    common = {"mask_id": 159, "eos_ids": wanted["stop_ids"], "release_compatible": True}
    return {"gen_length": wanted["max_new_tokens"], **common, **named}


@pytest.mark.parametrize("number", CASES)
def test_tokens_and_forwards_are_those_of_the_public_code(shared: Path, number: int):
    case = golden_case(shared, "idlm", number)
    assert_equals_golden(decode_golden(shared, case, "idlm", **released(case)), case)


@pytest.mark.parametrize("number", CASES)
def test_the_default_gives_the_same_tokens_in_as_many_forwards_and_fewer_rows(shared: Path, number: int):
    case = golden_case(shared, "idlm", number)
    out = decode_golden(shared, case, "idlm", **released(case) | {"release_compatible": False})
    assert list(out.tokens) == case["output_ids"]
    assert out.num_forwards <= case["num_forwards"]
    assert sum(done.rows for done in out.trace.of(ForwardDone)) < sum(forward["q"] for forward in case["forwards"])


@pytest.mark.parametrize("number", CASES)
def test_greedy_tokens_are_those_of_autoregression_token_by_token(shared: Path, number: int):
    case = golden_case(shared, "idlm", number)
    plain = {"gen_length": 40, "eos_ids": case["settings"]["stop_ids"]}
    wanted = generate(golden_model(shared, case), case["prompt_ids"], "autoregressive", **plain)
    for gen_block_size in (1, 2, 4, 7):
        own = {"gen_block_size": gen_block_size, "mask_id": 159}
        out = decode_golden(shared, case, "idlm", **plain, **own)
        assert (out.tokens, out.stop) == (wanted.tokens, wanted.stop)
        assert out.num_forwards <= wanted.num_forwards
        assert gen_block_size > 1 or forwards_of(out) == forwards_of(wanted)


@pytest.mark.parametrize("number", range(NUM_RECORDS["idlm_accept"]))
def test_drafts_are_judged_as_by_the_public_code(shared: Path, number: int):
    case = golden_case(shared, "idlm_accept", number)
    clean, draft = (np.array(case[f"{name}_logits"]) for name in ("clean", "draft"))
    p, q, uniform = (np.array([case[name]]) for name in ("p", "q", "uniform"))
    assert accepts(p, q, uniform, case["verify_alpha"]) == [case["accepted"]]
    if not case["accepted"]:
        np.testing.assert_allclose(residual(clean, draft, case["temperature"]), case["residual"], atol=1e-6)
        assert residual(clean, draft, case["temperature"])[case["corrected"]] > 0


def test_a_sampled_run_of_the_public_code_is_reproduced_from_its_draws(shared: Path, monkeypatch):
    case = golden_case(shared, "idlm_sampled", 0)
    forwards = case["forwards"]
    number = 0  # of the forward whose readouts the decoder has

    def drawn(prompt, settings, trace):
        nonlocal number
        decoding = decode(prompt, settings, trace)
        forward = next(decoding)
        while True:
            readouts = yield forward
            number = trace.num_forwards - 1
            token = forwards[number]["drawn"] if number else forwards[1]["drawn_t0"]
            assert forward.reads[0].temperature == case["settings"]["temperature"]
            try:
                forward = decoding.send((replace(readouts[0], tokens=np.array([token])), *readouts[1:]))
            except StopIteration as stop:
                return stop.value

    def uniform(_, position, __):
        return forwards[number]["uniforms"][position - forwards[number]["start"] - 1]

    def replacement(settings, judged, drafted, index, _):
        probs = residual(judged.logits(index), drafted.logits(index), settings.temperature)
        assert probs[forwards[number]["corrected"]] > 0
        return forwards[number]["corrected"]

    monkeypatch.setattr(IdlmSettings, "_uniform", uniform)
    monkeypatch.setattr(IdlmSettings, "replacement", replacement)
    assert_equals_golden(
        golden_model(shared, case).engine.run(drawn, case["prompt_ids"], IdlmSettings(**released(case))), case
    )


@st.composite
def any_settings(draw: st.DrawFn, **fixed):
    chosen = {
        "gen_length": draw(st.integers(1, 24)),
        "gen_block_size": draw(st.integers(1, 6)),
        "temperature": draw(st.sampled_from([0.0, 0.7, 1.5])),
        "top_k": draw(st.sampled_from([0, 5])),
        "verify_alpha": draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        "fast_verify": draw(st.booleans()),
        "fast_verify_topk": draw(st.integers(1, 4)),
        "release_compatible": draw(st.booleans()),
    }
    return IdlmSettings(**{"mask_id": MASK, "eos_ids": (EOS,), **chosen, **fixed})


prompts = st.lists(st.integers(0, 20), min_size=1, max_size=9)


@given(any_settings(), prompts, st.integers(0, 5))
@examples(30)
def test_cached_and_recomputed_decodings_are_equal(chosen, prompt, seed):
    engine = random_engine(seed)
    cached, anew = (engine.run(algorithm, prompt, chosen) for algorithm in (decode, without_cache(decode)))
    assert fixed_after(cached.trace) == fixed_after(anew.trace)


@given(any_settings(temperature=0.0, fast_verify=False), prompts, st.integers(0, 5))
@examples(30)
def test_greedy_tokens_are_those_of_autoregression_on_any_model(chosen, prompt, seed):
    engine = random_engine(seed)
    plain = AutoregressiveSettings(gen_length=chosen.gen_length, eos_ids=(EOS,))
    wanted = engine.run(masked(autoregressive.decode), prompt, plain)
    out = engine.run(decode, prompt, chosen)
    assert (out.tokens, out.stop) == (wanted.tokens, wanted.stop)
    assert out.num_forwards <= wanted.num_forwards + chosen.release_compatible


def masked(algorithm):
    """A decoder that never chooses the mask, which is a token like any other for autoregression."""

    def decode_masked(prompt, settings, trace):
        decoding = algorithm(prompt, settings, trace)
        forward = next(decoding)
        while True:
            reads = tuple(replace(read, suppress=(MASK,)) for read in forward.reads)
            try:
                forward = decoding.send((yield replace(forward, reads=reads)))
            except StopIteration as stop:
                return stop.value

    return decode_masked


def answer(forward: Forward, read: Read):
    """Tokens and probabilities that depend on place and content; a third of the drafts is what the text will say."""
    keys = [draw_key(3, forward.positions[row], forward.tokens[row] == MASK) for row in read.rows]
    out = readout([key % 4 for key in keys], 0.5, None if read.given is None else [0.25] * len(keys))
    return replace(out, logits=lambda row: np.eye(VOCAB_SIZE)[keys[row] % 4]) if read.logits else out


@given(any_settings(), st.integers(1, 5))
@examples(150)
def test_rows_are_the_last_token_its_drafts_and_masks_and_only_what_is_accepted_stays(chosen, prompt_length):
    response, trace, forwards = run_scripted(decode, [0] * prompt_length, chosen, answer)
    text = [*[0] * prompt_length, *(trace.fixed_tokens()[place] for place in range(len(response.tokens)))]
    num_cached, drafts = 0, {event.forward: event.tokens for event in trace.of(Draft)}
    for index, forward in enumerate(forwards[1:]):
        assert len(forward.commit.rows) == forward.positions[0] - num_cached
        num_cached = forward.positions[0]
        assert list(forward.commit.rows) == list(range(len(forward.commit.rows)))
        assert forward.tokens[0] == text[num_cached]
        proposed = drafts.get(index, ())
        assert tuple(forward.tokens[1 : 1 + len(proposed)]) == proposed
        assert set(forward.tokens[1 + len(proposed) :]) <= {MASK}
        assert len(forward.tokens) <= 2 * chosen.gen_block_size - 1
        assert not chosen.release_compatible or len(forward.tokens) == 2 * chosen.gen_block_size - 1
        assert max(forward.positions) < prompt_length + chosen.num_positions
    assert len(forwards) <= len(response.tokens) + 1


def test_replacements_are_drawn_from_the_residual():
    clean, draft = np.log([0.5, 0.2, 0.2, 0.1]), np.log([0.7, 0.1, 0.1, 0.1])
    judged, drafted = (replace(readout([0], 0.5), logits=lambda _, rows=rows: rows) for rows in (clean, draft))
    counts = np.zeros(4)
    for seed in range(400):
        counts[IdlmSettings(mask_id=3, temperature=1.0, seed=seed).replacement(judged, drafted, 0, 5)] += 1
    assert counts[0] == counts[3] == 0
    assert abs(counts[1] - 200) < 40


def test_where_the_mask_alone_is_likelier_than_in_the_draft_a_token_of_the_clean_row_is_drawn():
    clean, draft = np.log([0.5, 0.2, 0.2, 0.1]), np.log([0.55, 0.22, 0.22, 0.01])
    judged, drafted = (replace(readout([0], 0.5), logits=lambda _, rows=rows: rows) for rows in (clean, draft))
    settings = [IdlmSettings(mask_id=3, temperature=1.0, seed=seed) for seed in range(40)]
    assert {one.replacement(judged, drafted, 0, 5) for one in settings} == {0, 1, 2}


@pytest.mark.parametrize(("alpha", "share"), [(0.0, 1.0), (0.5, 1.0), (1.0, 0.5), (2.0, 0.25)])
def test_alpha_scales_the_share_of_accepted_drafts(alpha, share):
    uniforms = np.linspace(0, 1, 1000, endpoint=False)
    assert accepts(np.full(1000, 0.2), np.full(1000, 0.4), uniforms, alpha).mean() == pytest.approx(share, abs=1e-3)


def test_samples_do_not_depend_on_the_batch():
    engine = random_engine(3)
    chosen = IdlmSettings(gen_length=24, temperature=1.3, mask_id=MASK, eos_ids=(EOS,))
    requests = [Request(decode, [1 + index] * (1 + index), replace(chosen, seed=index)) for index in range(5)]
    outs = dict(engine.run_many(requests, batch_size=3))
    alone = [engine.run(request.decode, request.prompt, request.settings) for request in requests]
    assert [fixed_after(outs[index].trace) for index in range(5)] == [fixed_after(out.trace) for out in alone]
