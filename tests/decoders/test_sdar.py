"""SDAR: the tokens and forwards of its public code, and what must hold for any settings."""

from pathlib import Path

import pytest

from tests.decoders.baselines import (
    NUM_RECORDS,
    assert_equals_golden,
    decode_golden,
    decode_in_batch,
    forwards_of,
    golden_case,
)

RECORDS = range(NUM_RECORDS["sdar"])


def released(case):
    """A case's settings: OpenCompass, generate.py and JetEngine name them differently."""
    wanted = case["settings"]
    if case["variant"] == "opencompass":
        dynamic = wanted["threshold"] < 1
        own = {
            "remasking_strategy": "low_confidence_dynamic" if dynamic else "low_confidence_static",
            "confidence_threshold": wanted["threshold"],
        }
        stops = wanted["stopping_criteria_idx"]
    else:
        is_engine = case["variant"] == "jetengine"
        own = {
            "remasking_strategy": wanted["remasking_strategy"],
            "confidence_threshold": wanted["dynamic_threshold" if is_engine else "confidence_threshold"],
            "eb_threshold": wanted.get("eb_threshold", 0.35),
            "confidence_from": "truncated",
        }
        stops = wanted["stop_words"] if is_engine else wanted["stopping_criteria_idx"]
    return {
        "gen_length": wanted.get("gen_length", wanted.get("max_tokens")),
        "block_length": wanted["block_length"],
        "denoising_steps": wanted["denoising_steps"],
        "temperature": 0,  # the records took the most probable token, or kept one with top_k 1
        "confidence_temperature": wanted["temperature"],
        "top_k": wanted.get("top_k", wanted.get("topk")),
        "top_p": wanted.get("top_p", wanted.get("topp")),
        "mask_id": 159,
        "eos_ids": tuple(stops or ()),
        **own,
    }


@pytest.mark.parametrize("number", RECORDS)
def test_tokens_and_forwards_are_those_of_the_public_code(shared: Path, number: int):
    case = golden_case(shared, "sdar", number)
    out = decode_golden(shared, case, "sdar", release_compatible=True, **released(case))
    assert_equals_golden(out, case)


@pytest.mark.parametrize("number", RECORDS)
def test_riding_commits_save_forwards_and_change_no_token(shared: Path, number: int):
    case = golden_case(shared, "sdar", number)
    riding, apart = (decode_golden(shared, case, "sdar", separate_commit=apart, **released(case)) for apart in (0, 1))
    commits = [forward["commit"] for forward in case["forwards"] if not forward.get("store")]
    assert [sorted(forward["commit"]) for forward in forwards_of(riding)] == commits
    assert riding.tokens == apart.tokens
    num_stores = sum(forward.get("store", False) for forward in case["forwards"])
    assert riding.num_forwards + num_stores == apart.num_forwards + 1 == case["num_forwards"]


@pytest.mark.parametrize("number", RECORDS)
def test_a_batch_changes_nothing(shared: Path, number: int):
    cases = [golden_case(shared, "sdar", other) for other in RECORDS]
    requests = [(case["prompt_ids"], {"release_compatible": True, **released(case)}) for case in cases]
    requests += [(case["prompt_ids"], released(case)) for case in cases]
    same = [other for other in RECORDS if cases[other]["checkpoint"] == cases[number]["checkpoint"]]
    outs = decode_in_batch(shared, cases[number], "sdar", requests)
    for other in same:
        assert_equals_golden(outs[other], cases[other])
