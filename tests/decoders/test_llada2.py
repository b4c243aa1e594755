"""LLaDA2: the tokens and forwards of SGLang's rules, and what must hold for any settings."""

from pathlib import Path

import pytest

from refusion_eval.decoders.llada2 import Llada2Settings, decode
from refusion_eval.errors import ConfigError
from refusion_eval.types import Confidence
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


def fill_alone(tokens, probs, prompt=(1, 2), **chosen):
    """The response and the number of forwards where every forward reads these tokens with these probabilities."""

    def answer(forward, read):
        positions = [forward.positions[row] - len(prompt) for row in read.rows]
        return readout([tokens[position] for position in positions], [probs[position] for position in positions])

    settings = Llada2Settings(gen_length=len(tokens), block_length=4, threshold=0.8, mask_id=MASK, **chosen)
    response, _, forwards = run_scripted(decode, list(prompt), settings, answer)
    return response, forwards


EOS = 30


@pytest.mark.parametrize(
    ("chosen", "num_forwards"),
    [
        ({}, 4),  # one step for each position
        ({"steps_per_block": 3}, 3),  # quotas 2, 1, 1
        ({"steps_per_block": 2}, 2),
        ({"minimal_topk": 4}, 4),  # 16 // 4 steps
        ({"minimal_topk": 8}, 2),
    ],
)
def test_steps_of_the_models_own_rule_share_the_positions_of_a_block(chosen, num_forwards):
    size = 16
    probs = [0.5 - 0.01 * place for place in range(size)]
    _, forwards = fill_alone(range(size), probs, prompt=(1, 2, 3, 4), rule="generate_2.0", **chosen)
    assert len(forwards) == 4 * num_forwards


def test_more_than_the_quota_above_the_threshold_are_all_filled():
    probs = [0.9, 0.5, 0.9, 0.9, 0.7, 0.6, 0.5, 0.4]
    _, forwards = fill_alone(range(8), probs, prompt=(1, 2, 3, 4), rule="generate_2.0", steps_per_block=2)
    assert len(forwards) == 2 + 2


def test_a_stop_token_ends_the_step_that_fills_it_in_while_no_mask_is_before_it():
    tokens = [3, EOS, 4, 5, 6, 7, 8, 9]
    # The second position is filled first, and the first one by a later step, which fills no stop token in.
    probs = [0.4, 0.7, 0.3, 0.2, 0.5, 0.5, 0.5, 0.5]
    stops = {"rule": "generate_2.0", "eos_ids": (EOS,), "prompt": (1, 2, 3, 4)}
    whole, forwards = fill_alone(tokens, probs, **stops)
    assert (whole.tokens, whole.stop, len(forwards)) == ((3, EOS), "eos", 4)
    early, forwards = fill_alone(tokens, probs, **stops, eos_early_stop=True)
    assert (early.tokens, len(forwards)) == ((3, EOS), 4)
    early, forwards = fill_alone(tokens, [0.7, 0.4, 0.3, 0.2] * 2, **stops, eos_early_stop=True)
    assert (early.tokens, early.stop, len(forwards)) == ((3, EOS), "eos", 2)
    settled, forwards = fill_alone(tokens, probs, **stops, early_stop=True)
    assert (settled.tokens, len(forwards)) == ((3, EOS), 2)


def test_the_rule_of_2_1_decodes_on_behind_a_stop_token_unless_it_is_told_to_stop():
    tokens, stops = [3, EOS, 4, 5, 6, 7, 8, 9], {"rule": "generate_2.1", "eos_ids": (EOS,), "prompt": (1, 2, 3, 4)}
    whole, forwards = fill_alone(tokens, [0.9] * 8, **stops)
    assert (whole.tokens, whole.stop, len(forwards)) == (
        (3, EOS),
        "eos",
        4,
    )  # a block ends with a forward without edits
    early, forwards = fill_alone(tokens, [0.9] * 8, **stops, eos_early_stop=True)
    assert (early.tokens, early.stop, len(forwards)) == ((3, EOS), "eos", 2)
    _, forwards = fill_alone(tokens, [0.9] * 8, **stops, max_post_edit_steps=0)
    assert len(forwards) == 2
    _, forwards = fill_alone(tokens, [0.5] * 8, **stops, num_to_transfer=3, max_post_edit_steps=0)
    assert len(forwards) == 4


@pytest.mark.parametrize("most", range(4))
def test_the_rule_of_2_1_makes_no_forward_after_its_last_edit(most: int):
    swaps = [(3 + number % 2, 0.95) for number in range(20)]
    response, _, forwards = run(swaps, rule="generate_2.1", max_post_edit_steps=most)
    assert len(forwards) == 1 + most
    assert response.tokens == (swaps[most][0], 7)


def test_forwards_of_a_release_keep_nothing():
    rows = fill_alone(range(10), [0.9] * 10, prompt=(1, 2), rule="generate_2.0", release_compatible=True)[1]
    assert [len(forward.tokens) for forward in rows] == [4, 8, 12]
    rows = fill_alone(range(10), [0.9] * 10, prompt=(1, 2), rule="generate_2.0")[1]
    assert [len(forward.tokens) for forward in rows] == [4, 8, 8]
    rows = fill_alone(range(10), [0.9] * 10, prompt=(1, 2), rule="generate_2.0", separate_commit=True)[1]
    assert [(len(forward.tokens), forward.kind) for forward in rows] == [
        *[(4, "denoise"), (4, "store")] * 2,
        (4, "denoise"),
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps_per_block": 4}, "steps_per_block=4 has no effect with rule=sglang"),
        ({"rule": "generate_2.0", "edit_threshold": 0.5}, "edit_threshold=0.5 has no effect with rule=generate_2.0"),
        ({"rule": "generate_2.1", "minimal_topk": 2}, "minimal_topk=2 has no effect with rule=generate_2.1"),
        ({"rule": "generate_2.0", "gen_length": 4, "minimal_topk": 5}, "no step would fill a mask"),
        ({"rule": "generate_2.1", "num_to_transfer": 0}, "num_to_transfer=0"),
    ],
)
def test_settings_of_another_rule_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=f"llada2: .*{message}"):
        Llada2Settings(mask_id=MASK, **wrong)


def test_sampling_by_the_models_own_rules_takes_confidences_from_what_is_sampled():
    sampled = Llada2Settings(rule="generate_2.0", mask_id=MASK, temperature=0.5, top_k=3, top_p=0.9).read([1], 0, [4])
    assert (sampled.top_k, sampled.top_p, sampled.top_k_first) == (3, 0.9, True)
    assert sampled.confidence == Confidence(temperature=0.5)
    greedy = Llada2Settings(rule="generate_2.0", mask_id=MASK, top_k=3).read([1], 0, [4])
    assert (greedy.top_k, greedy.confidence) == (0, Confidence())
