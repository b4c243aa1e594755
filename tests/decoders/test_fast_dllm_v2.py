"""Fast-dLLM v2: the tokens and forwards of its public code, and what must hold for any settings."""

from pathlib import Path

import pytest

from refusion_eval.api import generate
from refusion_eval.decoders.fast_dllm_v2 import FastDllmV2Settings, decode
from refusion_eval.errors import ConfigError
from refusion_eval.types import Confidence
from tests.decoders.baselines import (
    NUM_RECORDS,
    assert_equals_golden,
    decode_golden,
    forwards_of,
    golden_case,
    golden_model,
)
from tests.decoders.scripted import readout, run_scripted

RECORDS = range(NUM_RECORDS["fast_dllm_v2"])


def released(case):
    """A case's settings; `generate` of the checkpoint stops early, `batch_sample` finishes the block."""
    wanted = case["settings"]
    return {
        "gen_length": wanted["max_new_tokens"],
        "block_length": wanted["block_size"],
        "small_block_size": wanted["small_block_size"],
        "threshold": wanted["threshold"],
        "top_p": wanted["top_p"],
        "temperature": wanted["temperature"],
        "use_block_cache": wanted["use_block_cache"],
        "early_stop": case["variant"] == "generate",
        "mask_id": 159,
        "eos_ids": (158,),
        "release_compatible": True,
    }


def as_decoded(case):
    """The case without the masks that `generate` leaves behind the stop token, and with one stop token."""
    output_ids = [token for token in case["output_ids"] if token != 159]
    return {**case, "output_ids": output_ids, "first_stop": case["first_eos"]}


@pytest.mark.parametrize("number", RECORDS)
def test_tokens_and_forwards_are_those_of_the_public_code(shared: Path, number: int):
    case = golden_case(shared, "fast_dllm_v2", number)
    out = decode_golden(shared, case, "fast_dllm_v2", **released(case))
    assert_equals_golden(out, as_decoded(case))


@pytest.mark.parametrize("number", RECORDS)
def test_our_response_has_the_length_that_was_asked_for(shared: Path, number: int):
    case = golden_case(shared, "fast_dllm_v2", number)
    chosen = released(case) | {"release_compatible": False, "early_stop": False}
    out = decode_golden(shared, case, "fast_dllm_v2", **chosen)
    released_tokens = decode_golden(shared, case, "fast_dllm_v2", **released(case)).tokens
    common = min(len(out.tokens), len(released_tokens))
    assert out.tokens[:common] == released_tokens[:common]
    assert len(out.tokens) == chosen["gen_length"] or out.tokens[-1] == 158


STOP, MASK = 30, 31


def answer_with_stop(at):
    """The response has a stop token at one place, other tokens elsewhere."""

    def answer(forward, read):
        places = [forward.positions[row] + 1 for row in read.rows]
        return readout([STOP if place == at else 1 + place % 9 for place in places], 0.5)

    return answer


def test_a_stop_token_that_begins_a_block_is_overlooked_by_the_release_alone():
    common = {"gen_length": 12, "block_length": 4, "small_block_size": 2, "mask_id": MASK, "eos_ids": (STOP,)}
    for prompt in ([1, 2], [1, 2, 3, 4]):
        ours, _, forwards = run_scripted(decode, prompt, FastDllmV2Settings(**common), answer_with_stop(8))
        chosen = FastDllmV2Settings(**common, release_compatible=True)
        release, _, more = run_scripted(decode, prompt, chosen, answer_with_stop(8))
        assert ours == release  # the text is cut at the stop token in any case
        assert (ours.stop, len(prompt) + len(ours.tokens)) == ("eos", 9)
        assert forwards[-1].kind == "store"
        assert len(more) > len(forwards)


@pytest.mark.parametrize("release_compatible", [False, True])
def test_what_is_sampled_is_compared_with_the_threshold(release_compatible: bool):
    sizes = {"gen_length": 8, "block_length": 4, "small_block_size": 2, "mask_id": MASK}
    chosen = FastDllmV2Settings(**sizes, temperature=0.7, top_p=0.9, release_compatible=release_compatible)
    _, _, forwards = run_scripted(decode, [1] * 4, chosen, answer_with_stop(None))
    denoise, store = ([f.reads[0] for f in forwards if f.kind == kind] for kind in ("denoise", "store"))
    assert len(store) > 1
    sampled = {(read.temperature, read.top_p, read.confidence) for read in denoise}
    assert sampled == {(0.7, 0.9, Confidence(temperature=0.7, truncate=True))}
    # The release takes the most probable token at the beginning of a block.
    firsts = {(read.temperature, read.top_p) for read in store}
    assert firsts == {(0.0, 1.0) if release_compatible else (0.7, 0.9)}


@pytest.mark.parametrize("release_compatible", [False, True])
def test_a_stop_token_behind_a_prompt_of_whole_blocks_ends_the_text_early(release_compatible: bool):
    common = {"gen_length": 12, "block_length": 4, "small_block_size": 2, "mask_id": MASK, "eos_ids": (STOP,)}
    chosen = FastDllmV2Settings(**common, early_stop=True, release_compatible=release_compatible)
    response, _, forwards = run_scripted(decode, [1] * 8, chosen, answer_with_stop(8))
    assert (response.tokens, response.stop, len(forwards)) == ((STOP,), "eos", 1)


@pytest.mark.parametrize("use_block_cache", [False, True])
def test_rows_of_each_forward(use_block_cache: bool):
    sizes = {"gen_length": 6, "block_length": 8, "small_block_size": 4}
    chosen = FastDllmV2Settings(**sizes, mask_id=MASK, use_block_cache=use_block_cache)
    _, _, forwards = run_scripted(decode, [1, 2], chosen, answer_with_stop(None))
    # The first forward is of the whole block. Then the first sub-block, which begins with the prompt, is computed by
    # itself; the second one once its first token is known, and here that is the first that is filled.
    small, whole = range(4), range(8)
    rows = [whole, small, whole, range(4, 8), range(4, 8), range(4, 8)] if use_block_cache else [whole] * 6
    assert [list(forward.positions) for forward in forwards] == [list(positions) for positions in rows]


def test_a_prompt_of_one_block_is_read(shared: Path):
    case = golden_case(shared, "fast_dllm_v2", 0)
    model = golden_model(shared, case)
    outs = [
        generate(model, [first, *range(31)], "fast_dllm_v2", gen_length=4, mask_id=159, eos_ids=())
        for first in range(40, 60)
    ]
    assert len({out.tokens for out in outs}) > 1  # as released, the model would not see the prompt
    assert forwards_of(outs[0])[0]["q"] == 32


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"small_block_size": 12}, "block_length is 32 and small_block_size 12; set small_block_size to a divisor"),
        (
            {"release_compatible": True, "gen_length": 31},
            "gen_length is 31 and block_length 32; with release_compatible",
        ),
        ({"threshold": -1}, "threshold=-1"),
        ({"top_p": 0}, "top_p=0"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=f"fast_dllm_v2: .*{message}"):
        FastDllmV2Settings(**{"mask_id": MASK, **wrong})
