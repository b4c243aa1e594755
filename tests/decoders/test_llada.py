"""LLaDA's decoder: the public code's tokens and forwards, and what must hold for any settings."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.decoders import most_confident
from refusion_eval.decoders.canvas import even_quotas
from refusion_eval.decoders.llada import LladaSettings, decode
from refusion_eval.errors import ConfigError
from refusion_eval.types import Forward, Read, Readout, draw_key
from tests.decoders.baselines import RECORDS_EACH, assert_equals_golden, decode_golden, golden_case
from tests.decoders.scripted import readout, run_scripted
from tests.examples import examples

MASK, EOS, EOT = 31, 30, 29
NAMES = ("steps", "gen_length", "block_length", "temperature", "cfg_scale", "remasking")
SWITCHES = ("logits_eos_inf", "confidence_eos_eot_inf")


@pytest.mark.parametrize("number", range(RECORDS_EACH))
def test_tokens_and_forwards_are_those_of_the_public_code(shared: Path, number: int):
    case = golden_case(shared, "llada", number)
    named = {name: case["settings"][name] for name in (*NAMES, *SWITCHES)}
    out = decode_golden(shared, case, "llada", eos_ids=(190, 189), **named)
    assert_equals_golden(out, case)


def answer(forward: Forward, read: Read) -> Readout:
    """Tokens and confidences that depend on place and content, spread over all ids but the mask."""
    keys = [draw_key(7, sum(forward.tokens), row) for row in read.rows]
    return readout([key % MASK for key in keys], [(key >> 20) % 997 / 997 for key in keys])


@st.composite
def sizes(draw):
    block_length, num_blocks = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    return {
        "gen_length": block_length * num_blocks,
        "block_length": block_length,
        "steps": num_blocks * draw(st.integers(1, 10)),
    }


@given(sizes(), st.sampled_from(["low_confidence", "random"]), st.sampled_from([0.0, 1.5]))
@examples(80)
def test_every_step_fills_its_quota_block_after_block(size, remasking, cfg_scale):
    prompt = [1, 2, 3]
    chosen = LladaSettings(mask_id=MASK, remasking=remasking, cfg_scale=cfg_scale, **size)
    response, trace, forwards = run_scripted(decode, prompt, chosen, answer)
    assert len(forwards) == size["steps"]
    assert len(response.tokens) == size["gen_length"]
    fixed_at = trace.fixed_at()
    per_block = size["steps"] // len(chosen.blocks)
    for position, forward in fixed_at.items():
        assert forward // per_block == position // size["block_length"]
    counts = np.bincount(list(fixed_at.values()), minlength=size["steps"])
    assert counts.tolist() == even_quotas(size["block_length"], per_block) * len(chosen.blocks)
    canvas = len(prompt) + size["gen_length"]
    for forward in forwards:
        assert list(forward.tokens[:3]) == prompt
        assert len(forward.tokens) == canvas * (2 if cfg_scale else 1)
        if cfg_scale:
            assert list(forward.tokens[canvas : canvas + 3]) == [MASK] * 3
            assert forward.tokens[canvas + 3 :] == forward.tokens[3:canvas]


@given(st.integers(1, 200), st.integers(1, 50))
def test_quotas_add_up_and_differ_by_one(num_masked, steps):
    quotas = even_quotas(num_masked, steps)
    assert (sum(quotas), len(quotas)) == (num_masked, steps)
    assert quotas == sorted(quotas, reverse=True)
    assert max(quotas) - min(quotas) <= 1


@given(st.lists(st.sampled_from([0.1, 0.5, 1.0]), min_size=1), st.data())
def test_among_equally_confident_ones_the_first_win(scores, data):
    count = data.draw(st.integers(0, len(scores)))
    ranked = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    assert most_confident(np.array(scores), count) == sorted(ranked[:count])


@given(sizes())
@examples(40)
def test_stopping_early_gives_the_same_text(size):
    given_settings = {"mask_id": MASK, "eos_ids": (EOS, EOT, *range(20)), **size}
    late, late_trace, _ = run_scripted(decode, [5], LladaSettings(**given_settings), answer)
    early, early_trace, _ = run_scripted(decode, [5], LladaSettings(early_stop=True, **given_settings), answer)
    assert early == late
    assert early_trace.num_forwards <= late_trace.num_forwards == size["steps"]


def test_stop_tokens_keep_their_place_but_lose_their_confidence():
    def stops_first(forward: Forward, read: Read) -> Readout:
        assert read.confidence.exclude == (EOS, EOT)
        return answer(forward, read)

    run_scripted(
        decode,
        [1],
        LladaSettings(mask_id=MASK, eos_ids=(EOS, EOT), gen_length=4, block_length=4, confidence_eos_eot_inf=True),
        stops_first,
    )
    released = LladaSettings(
        mask_id=MASK, eos_ids=(EOS, EOT), confidence_eos_eot_inf=True, temperature=1.0, release_compatible=True
    )
    assert released.confidence.exclude == (EOT,)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gen_length": 30, "block_length": 8}, "gen_length is 30 and block_length 8"),
        ({"gen_length": 32, "block_length": 8, "steps": 6}, "steps is 6 for 4 blocks"),
        ({"remasking": "entropy"}, "remasking='entropy'; choose one of low_confidence, random"),
        ({"cfg_scale": -1}, "cfg_scale=-1"),
        ({"logits_eos_inf": True}, "need eos_ids"),
        ({"eos_ids": (MASK,)}, "also an end-of-sequence id"),
        ({"confidence_dtype": "float16"}, "confidence_dtype='float16'"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        LladaSettings(mask_id=MASK, **wrong)
