"""LLaDA2: the tokens and forwards of SGLang's rules, and what must hold for any settings."""

from pathlib import Path

import pytest

from refusion_eval.decoders.llada2 import Llada2Settings, decode
from refusion_eval.errors import ConfigError
from tests.decoders.baselines import NUM_RECORDS, assert_equals_golden, decode_golden, golden_case
from tests.decoders.scripted import readout, run_scripted

RECORDS = range(NUM_RECORDS["llada2"])


def released(case):
    wanted = case["settings"]
    return {
        "gen_length": wanted["max_new_tokens"],
        "block_length": wanted["block_size"],
        "threshold": wanted["threshold"],
        "edit_threshold": wanted.get("edit_threshold"),
        "max_post_edit_steps": wanted.get("max_post_edit_steps", 16),
        "mask_id": 191,
        "eos_ids": tuple(wanted["stop_ids"]),
    }


@pytest.mark.parametrize("number", RECORDS)
def test_tokens_and_forwards_are_those_of_the_public_code(shared: Path, number: int):
    case = golden_case(shared, "llada2", number)
    out = decode_golden(shared, case, "llada2", release_compatible=True, **released(case))
    assert_equals_golden(out, case)


MASK = 31


def run(probs, **chosen):
    """Forwards of a block of two positions, whose first token and its probability are those of `probs`, in turn."""
    turns = iter(probs)

    def answer(forward, read):
        token, prob = next(turns)
        return readout([token, 7], [prob, 0.9])

    settings = Llada2Settings(gen_length=2, block_length=2, threshold=0.8, mask_id=MASK, **chosen)
    return run_scripted(decode, [1, 2], settings, answer)


def test_a_token_is_rewritten_where_another_one_is_probable_enough():
    response, trace, forwards = run([(3, 0.7), (4, 0.6), (5, 0.5), (6, 0.4)], edit_threshold=0.45)
    # The second position is filled first, then the first one by 4; 5 replaces it, and 6 is not probable enough.
    assert response.tokens == (5, 7)
    fixes = [(event[1], event[2], event[3]) for event in trace.to_json() if event[0] == "fix"]
    assert fixes == [(0, [1], [7]), (1, [0], [4]), (2, [0], [5])]
    assert len(forwards) == 4


@pytest.mark.parametrize("most", range(4))
def test_no_more_edits_than_allowed_after_the_last_mask(most: int):
    swaps = [(3 + number % 2, 0.9) for number in range(20)]
    response, _, forwards = run(swaps, edit_threshold=0.0, max_post_edit_steps=most)
    assert len(forwards) == 1 + most + 1  # the last one may change nothing any more
    assert response.tokens == (swaps[most][0], 7)


def test_without_an_edit_threshold_nothing_is_rewritten():
    response, _, forwards = run([(3, 0.9), (4, 1.0)])
    assert (response.tokens, len(forwards)) == ((3, 7), 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"threshold": -1}, "threshold=-1"), ({"edit_threshold": -1}, "edit_threshold=-1"), ({"mask_id": -1}, "mask_id")],
)
def test_settings_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=f"llada2: .*{message}"):
        Llada2Settings(**{"mask_id": MASK, **wrong})


def test_a_stored_prompt_takes_a_forward_for_each_of_its_blocks():
    def answer(forward, read):
        return readout([3, 7], [0.9, 0.9])

    settings = Llada2Settings(gen_length=2, block_length=2, mask_id=MASK, release_compatible=True)
    _, _, forwards = run_scripted(decode, [1, 2, 3, 4, 5, 6], settings, answer)
    assert [(len(forward.tokens), forward.kind) for forward in forwards[:4]] == [
        *[(2, "prefill")] * 3,
        (2, "denoise"),
    ]
