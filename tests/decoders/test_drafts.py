"""Lossless draft-and-verify: the tokens of one token a step, in fewer forwards."""

from pathlib import Path

import pytest

from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError
from tests.decoders.aligned_oracle import freedave, order_of_fixes
from tests.decoders.baselines import NUM_RECORDS, assert_equals_golden, decode_golden, golden_case
from tests.decoders.scripted import readout, run_scripted
from tests.engine.random_model import VOCAB_SIZE, random_engine

MASK, EOS = VOCAB_SIZE - 1, VOCAB_SIZE - 2
ONE_A_STEP = {
    "bd3lm": {"block_length": 6},
    "dream": {"draft_steps": 1},
    "llada": {"block_length": 6},
    "sdar": {"block_length": 6},
}
EAGER = {"eager_acceptance_mode": True}
CASES = [*((name, {}) for name in ONE_A_STEP), ("sdar", EAGER)]
PROMPTS = [[3 + place * place % 17 for place in range(length)] for length in (1, 4, 6, 9, 12)]


def made(name, **more):
    chosen = {"gen_length": 18, "mask_id": MASK, "eos_ids": (EOS,)} | ONE_A_STEP[name] | more
    return DECODERS[name].Settings(**chosen)


def released(case):
    wanted = case["settings"]
    drafts = {name: wanted[name] for name in ("block_length", "draft_steps", "eager_acceptance_mode")}
    common = {"mask_id": 159, "eos_ids": (), "release_compatible": True}
    return {"gen_length": wanted["max_gen_length"], **common, **drafts}


@pytest.mark.parametrize("number", range(NUM_RECORDS["freedave_sdar"]))
def test_tokens_and_forwards_are_those_of_the_public_code(shared: Path, number: int):
    case = golden_case(shared, "freedave_sdar", number)
    out = decode_golden(shared, case, "sdar", **released(case))
    assert_equals_golden(out, {**case, "first_eos": None})
    plain = decode_golden(shared, case, "sdar", **released(case) | {"draft_steps": 0, "eager_acceptance_mode": False})
    assert (plain.tokens, plain.num_forwards) == (out.tokens, case["one_a_step_forwards"])
    assert out.num_forwards < plain.num_forwards


@pytest.mark.parametrize(("name", "more"), CASES)
@pytest.mark.parametrize("draft_steps", [1, 2, 5])
def test_drafts_change_no_token_and_save_forwards(name, more, draft_steps):
    engine, saved = random_engine(1), 0
    for prompt in PROMPTS:
        plain = engine.run(DECODERS[name].decode, prompt, made(name))
        out = engine.run(DECODERS[name].decode, prompt, made(name, draft_steps=draft_steps, **more))
        assert (out.tokens, out.stop) == (plain.tokens, plain.stop)
        # Eager drafts verify the last mask of a block too, because of the block behind, also where the text ends.
        assert out.num_forwards <= plain.num_forwards + (bool(more) and out.stop == "eos")
        saved += plain.num_forwards - out.num_forwards
    assert (saved > 0) == (draft_steps > 1)


@pytest.mark.parametrize("more", [{}, EAGER])
@pytest.mark.parametrize(("block_length", "draft_steps"), [(4, 3), (4, 9), (8, 1), (8, 5)])
def test_decoding_with_a_cache_is_decoding_without_one(block_length, draft_steps, more):
    engine = random_engine(2)
    for prompt in PROMPTS:
        chosen = made("sdar", block_length=block_length, draft_steps=draft_steps, **more)
        out, whole = (engine.run(decode, prompt, chosen) for decode in (DECODERS["sdar"].decode, freedave))
        assert (out.tokens, out.stop) == (whole.tokens, whole.stop)
        assert order_of_fixes(out.trace) == order_of_fixes(whole.trace)


def same_tokens(forward, read):
    """Tokens and confidences of a position never change, so that every draft is right."""
    places = [forward.positions[row] for row in read.rows]
    return readout([1 + place % 9 for place in places], [1 / (1 + place) for place in places])


@pytest.mark.parametrize(("draft_steps", "num_forwards"), [(1, 18), (2, 12), (3, 9), (6, 6)])
def test_where_every_draft_is_right_a_forward_takes_all_of_them(draft_steps, num_forwards):
    # Each block of 6 has a forward without drafts; its last mask needs none where it is left alone.
    chosen = made("sdar", draft_steps=draft_steps)
    response, trace, forwards = run_scripted(DECODERS["sdar"].decode, [1] * 6, chosen, same_tokens)
    assert response.tokens == tuple(1 + place % 9 for place in range(6, 24))
    assert len(forwards) == num_forwards
    assert trace.fixed_tokens() == dict(enumerate(response.tokens))


def test_copies_of_the_text_do_not_see_each_other():
    chosen = made("sdar", draft_steps=3, eager_acceptance_mode=True)
    _, _, forwards = run_scripted(DECODERS["sdar"].decode, [1] * 6, chosen, same_tokens)
    first, second = forwards[:2]
    assert (len(first.tokens), len(second.tokens)) == (18, 36)  # prompt and two blocks; three copies of two blocks
    starts = [0, 6] * 3
    for number, segment in enumerate(second.attention):
        copy = number // 2 * 12
        assert segment.sees == (((copy, copy + 6),) if starts[number] else ())
    assert list(second.positions) == [*range(6, 18)] * 3
    assert [second.tokens.count(MASK), second.tokens[:12].count(MASK), second.tokens[24:].count(MASK)] == [30, 11, 9]


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("sdar", {"temperature": 1.0}, "draft_steps is 2 with temperature 1.0; drafts are of the most confident token"),
        ("sdar", {"remasking_strategy": "sequential"}, "with remasking_strategy sequential"),
        ("sdar", {"denoising_steps": 2}, "with denoising_steps 2"),
        ("sdar", {"draft_steps": 0, "eager_acceptance_mode": True}, "eager_acceptance_mode is about drafts"),
        ("llada", {"steps": 9, "block_length": 36}, "with steps 9; .* set steps=none$"),
        (
            "llada",
            {"remasking": "random", "cfg_scale": 1.0, "block_length": 36},
            "with remasking random and cfg_scale 1.0; .* set remasking=low_confidence and cfg_scale=0.0",
        ),
        ("bd3lm", {"threshold": 0.9}, "with threshold 0.9"),
        ("dream", {"alg": "origin"}, "with alg origin"),
        ("fast_dllm_dream", {"alg": "entropy", "block_length": 6}, "draft_steps is 2; with a cache nothing is drafted"),
    ],
)
def test_settings_that_do_not_commit_one_token_a_step_are_refused(name, wrong, message):
    with pytest.raises(ConfigError, match=f"{name}: .*{message}"):
        DECODERS[name].Settings(**{"mask_id": MASK, "gen_length": 36, "draft_steps": 2} | wrong)
