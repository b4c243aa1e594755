"""dParallel's entropy rule, a setting of LLaDA, Fast-dLLM and Dream: the public code's tokens and forwards."""

from pathlib import Path

import numpy as np
import pytest

from refusion_eval.decoders import fast_dllm, llada
from refusion_eval.decoders.dream import DreamSettings
from refusion_eval.decoders.dream import decode as decode_dream
from refusion_eval.decoders.fast_dllm import FastDllmLladaSettings
from refusion_eval.decoders.llada import LladaSettings
from refusion_eval.errors import ConfigError
from refusion_eval.types import Forward, Read, Readout
from tests.decoders.baselines import (
    NUM_RECORDS,
    assert_equals_golden,
    decode_golden,
    forwards_of,
    golden_case,
)
from tests.decoders.d2f_oracle import fixed_after
from tests.decoders.scripted import run_scripted

MASK, PROMPT = 31, [1, 2, 3]
LLADA, DREAM = (range(NUM_RECORDS[f"dparallel_{name}"]) for name in ("llada", "dream"))
CACHES = {"generate_with_prefix_cache": "prefix", "generate_with_dual_cache": "dual"}


def released_llada(case):
    """Decoder and settings of a record: without a threshold only the cached forms go by entropy.

    `generate` without a threshold leaves a block that is full, as Fast-dLLM does and LLaDA's own release does not.
    """
    names = ("steps", "gen_length", "block_length", "temperature", "threshold")
    named = {name: case["settings"][name] for name in names} | {"eos_ids": (190, 189)}
    by_entropy = {"remasking": "low_entropy", "release_compatible": True}
    if case["variant"] == "generate" and named["threshold"] is not None:
        return "llada", named | by_entropy
    if case["variant"] == "generate":
        return "fast_dllm_llada", named | {"cache": "none"}
    return "fast_dllm_llada", named | by_entropy | {"cache": CACHES[case["variant"]]}


def released_dream(case):
    wanted = case["settings"]
    named = {name: wanted[name] for name in ("temperature", "alg", "block_length", "threshold")}
    return named | {"gen_length": wanted["max_new_tokens"]}


def without_padding(case):
    """The record as it is where a prompt has no padding, which nobody sees, in front."""
    padding = case["settings"].get("left_pad", 0)
    return {**case, "forwards": [{**forward, "q": forward["q"] - padding} for forward in case["forwards"]]}


@pytest.mark.parametrize("number", LLADA)
def test_on_llada_tokens_and_forwards_are_those_of_the_public_code(shared: Path, number: int):
    case = golden_case(shared, "dparallel_llada", number)
    decoder, settings = released_llada(case)
    assert_equals_golden(decode_golden(shared, case, decoder, **settings), case)


@pytest.mark.parametrize("number", DREAM)
def test_on_dream_tokens_and_forwards_are_those_of_the_public_code(shared: Path, number: int):
    case = golden_case(shared, "dparallel_dream", number)
    assert_equals_golden(decode_golden(shared, case, "dream", **released_dream(case)), without_padding(case))


@pytest.mark.parametrize("number", LLADA)
def test_the_default_leaves_out_forwards_that_fill_nothing(shared: Path, number: int):
    case = golden_case(shared, "dparallel_llada", number)
    decoder, settings = released_llada(case)
    out = decode_golden(shared, case, decoder, **settings | {"release_compatible": False})
    wanted = [forward["commit"] for forward in case["forwards"] if forward["commit"]]
    assert [sorted(forward["commit"]) for forward in forwards_of(out)] == wanted


def half_a_nat(_: Forward, read: Read) -> Readout:
    """Entropies 0.5, 0.75, 1, ... from left to right."""
    entropy = 0.5 + 0.25 * np.arange(len(read.rows))
    return Readout(np.arange(len(read.rows)), np.full(len(read.rows), 0.1), entropy=entropy if read.entropy else None)


@pytest.mark.parametrize(("threshold", "on_llada", "on_dream"), [(0.0, 1, 1), (0.75, 2, 1), (0.8, 2, 2), (9.0, 4, 4)])
def test_llada_fills_up_to_the_threshold_and_dream_below_it(threshold, on_llada, on_dream):
    sizes = {"mask_id": MASK, "gen_length": 8, "block_length": 4, "threshold": threshold}
    by_entropy = {**sizes, "remasking": "low_entropy"}
    for decode, settings, most in (
        (llada.decode, LladaSettings(**by_entropy), on_llada),
        (fast_dllm.decode, FastDllmLladaSettings(**by_entropy, cache="none"), on_llada),
        (decode_dream, DreamSettings(**sizes, alg="entropy_threshold"), on_dream),
    ):
        _, trace, _ = run_scripted(decode, PROMPT, settings, half_a_nat)
        assert list(fixed_after(trace)[0]) == list(range(most))  # the second block waits for the first


def test_a_threshold_needs_a_rule_that_compares_entropies():
    with pytest.raises(ConfigError, match="set remasking to low_entropy"):
        LladaSettings(mask_id=MASK, threshold=0.5)
    with pytest.raises(ConfigError, match="which counts with probabilities"):
        FastDllmLladaSettings(mask_id=MASK, factor=1.0, remasking="low_entropy")
    with pytest.raises(ConfigError, match="set gen_length to a multiple of block_length"):
        DreamSettings(mask_id=MASK, alg="entropy_threshold", gen_length=10, block_length=4)


def test_entropies_of_dream_are_those_of_the_untempered_distribution():
    read = DreamSettings(mask_id=MASK, alg="entropy_threshold", temperature=0.2).read([4], 0, [5])
    assert (read.temperature, read.confidence.temperature, read.entropy) == (0.2, 1.0, True)
