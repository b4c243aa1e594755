"""WeDLM's decoder: the public code's tokens and forwards, the same without a cache, and what any settings keep."""

from itertools import count, takewhile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.decoders.wedlm import WedlmSettings, decode
from refusion_eval.errors import ConfigError
from refusion_eval.types import DROP_ALL, Forward, ForwardDone, Read, Readout, Response, causal
from tests.decoders.baselines import (
    NUM_RECORDS,
    assert_equals_golden,
    decode_golden,
    golden_case,
)
from tests.decoders.d2f_oracle import fixed_after
from tests.decoders.scripted import answer_by_place, run_scripted
from tests.engine.random_model import VOCAB_SIZE, random_engine
from tests.examples import examples

MASK, EOS = VOCAB_SIZE - 1, VOCAB_SIZE - 2
PROMPT = [1, 2, 3]


def released(case):
    """A record's settings under our names; the code on the hub fills one mask a forward where the threshold is 0."""
    wanted = case["settings"]
    if case["variant"] == "hf_block":
        chosen = {
            "gen_length": wanted["max_new_tokens"],
            "block_size": wanted["block_size"],
            "confidence_threshold": wanted["confidence_threshold"] or None,
            "confidence_temperature": wanted["temperature"],
        }
    else:
        chosen = {
            "gen_length": wanted["max_tokens"],
            "temperature": wanted["temperature"],
            "window_size": wanted["wedlm_window_size"],
            "entropy_threshold": wanted["wedlm_entropy_threshold"],
            "pos_penalty_factor": wanted["wedlm_pos_penalty_factor"],
            "eos_ids": (158, *wanted["stop_token_ids"]) if wanted["eos_in_tokenizer"] else wanted["stop_token_ids"],
        }
    return {"mask_id": 159, "eos_ids": (), "release_compatible": True, **chosen}


@pytest.mark.parametrize("number", range(NUM_RECORDS["wedlm"]))
def test_tokens_and_forwards_are_those_of_the_public_code(shared: Path, number: int):
    case = golden_case(shared, "wedlm", number)
    assert_equals_golden(decode_golden(shared, case, "wedlm", **released(case)), case)


@pytest.mark.parametrize("number", [0, 1, 5])
def test_as_released_decoding_ends_one_forward_after_the_text_up_to_a_stop_string_is_final(shared: Path, number: int):
    case = golden_case(shared, "wedlm", number)
    stop = case["output_ids"][6:9]
    found: dict[int, int] = {}
    for num_forwards, forward in enumerate(case["forwards"], start=1):  # noqa: B007 - those up to the break
        found |= dict(forward["commit"])
        final = [found[position] for position in takewhile(found.__contains__, count())]
        if contains(final, stop):
            break
    *before, last = case["forwards"][: num_forwards + 1]
    out = decode_golden(shared, case, "wedlm", **released(case), stop_rule=lambda tokens: contains(list(tokens), stop))
    wanted = {"forwards": [*before, {**last, "commit": []}], "num_forwards": num_forwards + 1}
    assert num_forwards + 1 < case["num_forwards"]
    assert_equals_golden(out, {**case, **wanted, "first_eos_or_eot": len(final) - 1})
    assert out.stop == "stop_string"


def contains(tokens: list[int], stop: list[int]) -> bool:
    return any(tokens[start : start + len(stop)] == stop for start in range(len(tokens)))


SOUND = {"release_compatible": False}


def test_the_default_reads_the_prompt_with_the_first_masks_and_makes_no_forward_for_a_final_text(shared: Path):
    case = golden_case(shared, "wedlm", 2)  # one token a forward from left to right, so no mask beyond the length wins
    out = decode_golden(shared, case, "wedlm", **released(case) | SOUND)
    assert list(out.tokens) == case["output_ids"]
    assert out.num_forwards == case["num_forwards"] - 2
    case = golden_case(shared, "wedlm", 6)
    out = decode_golden(shared, case, "wedlm", **released(case) | SOUND)
    assert (list(out.tokens), out.num_forwards) == (case["output_ids"], case["num_forwards"])
    assert sum(done.rows for done in out.trace.of(ForwardDone)) < sum(forward["q"] for forward in case["forwards"])


@st.composite
def any_settings(draw: st.DrawFn, **fixed):
    thresholds = st.sampled_from([None, 0.0, 0.4, 1.0, 2.0])
    chosen = {
        "gen_length": draw(st.integers(1, 24)),
        "window_size": draw(st.integers(1, 9)),
        "entropy_threshold": draw(thresholds),
        "pos_penalty_factor": draw(st.sampled_from([0.0, 0.02, 1.0])),
        "release_compatible": draw(st.booleans()),
    }
    if draw(st.booleans()):
        chosen |= {"block_size": draw(st.integers(1, 9)), "confidence_threshold": draw(thresholds)}
    return WedlmSettings(**{"mask_id": MASK, "eos_ids": (EOS,), **chosen, **fixed})


def recomputed(prompt, chosen, trace):
    """The algorithm without a cache: every forward feeds the prompt, all tokens in order, and the masks in order."""
    text, length = {}, chosen.gen_length
    while True:
        first = next(position for position in range(len(text) + 1) if position not in text)
        answer = [text[position] for position in range(min(first, length))]
        if first >= length or EOS in answer:
            return Response(tuple(answer), "length")
        size = chosen.block_size
        end = first + chosen.window_size if size is None else (first // size + 1) * size
        masked = [position for position in range(min(end, length)) if position not in text]
        order = [*sorted(text), *masked]
        tokens = [*prompt, *(text.get(position, MASK) for position in order)]
        positions = [*range(len(prompt)), *(len(prompt) + position for position in order)]
        read = Read(range(len(tokens) - len(masked), len(tokens)), suppress=(MASK,), entropy=True)
        (out,) = yield Forward(tokens, positions, causal(len(tokens)), (read,), DROP_ALL)
        if size is None:
            costs = out.entropy + chosen.pos_penalty_factor * (np.array(masked) - first)
            filled = costs < (-1 if chosen.entropy_threshold is None else chosen.entropy_threshold)
        else:
            costs = -out.probs
            filled = -costs >= (2 if chosen.confidence_threshold is None else chosen.confidence_threshold)
        filled[np.argmin(costs)] |= not filled.any()
        fixed = {masked[index]: int(out.tokens[index]) for index in np.flatnonzero(filled)}
        text |= fixed
        trace.fix(list(fixed), list(fixed.values()))


@given(any_settings(release_compatible=False), st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(0, 5))
@examples(30)
def test_cached_and_recomputed_decodings_are_equal(chosen, prompt, seed):
    engine = random_engine(seed)
    cached, whole = (engine.run(algorithm, prompt, chosen) for algorithm in (decode, recomputed))
    assert fixed_after(cached.trace) == fixed_after(whole.trace)


answer = answer_by_place(MASK)


@given(any_settings(), st.integers(1, 5))
@examples(150)
def test_rows_are_clean_tokens_then_masks_and_only_the_leading_ones_stay(chosen, prompt_length):
    response, trace, forwards = run_scripted(decode, [0] * prompt_length, chosen, answer)
    final = trace.fixed_tokens()
    cached: list[int] = []
    for before, forward in zip([None, *forwards], forwards, strict=False):
        if before is not None:
            cached = cached[: forward.commit.keep] + [before.positions[row] for row in forward.commit.rows]
            assert cached == list(range(len(cached)))  # nothing is missing in front of what is kept
            assert all(before.tokens[row] != MASK for row in forward.commit.rows)
        num_clean = len(forward.tokens) - list(forward.tokens).count(MASK)
        for part in (forward.positions[:num_clean], forward.positions[num_clean:]):
            assert list(part) == sorted(part)
        assert MASK not in forward.tokens[:num_clean]
        assert sorted([*cached, *forward.positions]) == list(range(len(cached) + len(forward.positions)))
        assert max(forward.positions) < prompt_length + chosen.num_positions
    assert list(response.tokens) == [final[position] for position in range(len(response.tokens))]
    if not chosen.release_compatible:
        assert max(final) < chosen.gen_length
        assert len(forwards) <= len(final)  # each forward fills a mask


@given(any_settings(release_compatible=False))
@examples(80)
def test_decoding_ends_as_soon_as_the_text_is_final(chosen):
    response, trace, forwards = run_scripted(decode, PROMPT, chosen, answer)
    last = max(trace.fixed_at()[position] for position in range(len(response.tokens)))
    assert last == len(forwards) - 1


@pytest.mark.parametrize(("threshold", "filled"), [(0.5, [0, 2]), (0.6, [0, 2]), (0.61, [0, 2, 3]), (None, [0])])
def test_entropy_plus_penalty_is_compared_strictly(threshold, filled):
    def entropies(_: Forward, read: Read) -> Readout:
        probs = np.full(len(read.rows), 0.5)
        return Readout(np.arange(len(probs)), probs, entropy=np.array([0.25, 0.7, 0.1, 0.3])[: len(probs)])

    chosen = WedlmSettings(
        mask_id=MASK, gen_length=4, window_size=4, entropy_threshold=threshold, pos_penalty_factor=0.1
    )
    _, trace, _ = run_scripted(decode, PROMPT, chosen, entropies)
    assert list(fixed_after(trace)[0]) == filled


def test_a_threshold_of_the_other_form_is_refused():
    with pytest.raises(ConfigError, match="set block_size, or entropy_threshold"):
        WedlmSettings(mask_id=MASK, confidence_threshold=0.9)
