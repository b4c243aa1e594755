"""SDAR: the tokens and forwards of its public code, and what must hold for any settings."""

from pathlib import Path

import pytest

from refusion_eval.decoders.sdar import SdarSettings
from refusion_eval.errors import ConfigError
from refusion_eval.types import Confidence, Read
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
        stops = (
            [*(wanted["stop_words"] or ()), 158] if is_engine else wanted["stopping_criteria_idx"]
        )  # 158: <|endoftext|>
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


MASK = 31


def test_what_is_read_for_each_reading_of_confidence():
    def read(**chosen):
        return SdarSettings(mask_id=MASK, top_k=3, top_p=0.9, **chosen).read([1], 0, [4])

    plain, truncated = read(), read(confidence_from="truncated", confidence_temperature=0.7)
    assert plain == Read([1], suppress=(MASK,))  # nothing is sampled and nothing is cut
    assert (truncated.top_k, truncated.top_p, truncated.top_k_first) == (3, 0.9, True)
    assert truncated.confidence == Confidence(temperature=0.7)
    sampled = read(temperature=0.5)
    assert (sampled.top_k, sampled.confidence) == (3, Confidence(temperature=0.5, truncate=False))
    assert read(temperature=0.5, confidence_from="truncated").confidence == Confidence(temperature=0.5)


def test_samples_do_not_depend_on_the_batch(shared: Path):
    case = golden_case(shared, "sdar", 0)
    chosen = {"gen_length": 16, "temperature": 1.0, "top_k": 20, "top_p": 0.95, "mask_id": 159, "eos_ids": ()}
    requests = [([5 + seed] * (1 + seed), {**chosen, "seed": seed}) for seed in range(5)]
    outs = decode_in_batch(shared, case, "sdar", requests)  # each goes as it goes alone
    again = decode_golden(shared, {**case, "prompt_ids": [5]}, "sdar", **chosen, seed=1)
    assert again.tokens != outs[0].tokens


def test_early_stop_ends_at_a_stop_string_or_token(shared: Path):
    case = golden_case(shared, "sdar", 5)
    whole, early = (decode_golden(shared, case, "sdar", early_stop=early, **released(case)) for early in (False, True))
    assert (early.tokens, early.stop) == (whole.tokens, whole.stop) == ((157,), "eos")
    assert (whole.num_forwards, early.num_forwards) == (2, 1)
    case = golden_case(shared, "sdar", 1)
    rule = decode_golden(shared, case, "sdar", early_stop=True, stop_rule=lambda tokens: 20 in tokens, **released(case))
    assert (rule.stop, len(rule.tokens)) == ("stop_string", 5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_length": 0}, "block_length=0"),
        ({"denoising_steps": 0}, "denoising_steps=0"),
        ({"remasking_strategy": "random"}, "remasking_strategy='random'; choose one of low_confidence_static"),
        ({"confidence_from": "top_k"}, "confidence_from='top_k'"),
        ({"confidence_temperature": 0}, "confidence_temperature=0"),
        ({"draft_steps": -1}, "draft_steps=-1"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=f"sdar: .*{message}"):
        SdarSettings(**{"mask_id": MASK, **wrong})
