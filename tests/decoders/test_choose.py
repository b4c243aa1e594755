"""Choices shared by decoders."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.decoders import (
    DECODERS,
    above_or_best,
    accepted_prefix,
    at_least_or_best,
    first_eos,
    rounded_threshold,
)
from refusion_eval.types import Readout
from tests.decoders.scripted import run_scripted


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0, 1))
def test_at_least_one_is_chosen_and_several_only_above_the_threshold(scores: list[float], threshold: float):
    chosen = above_or_best(np.array(scores), threshold)
    above = [index for index, score in enumerate(scores) if score > threshold]
    assert chosen == (above or [scores.index(max(scores))])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0, 2))
def test_the_best_is_always_chosen_and_others_unless_below_the_threshold(scores: list[float], threshold: float):
    best = scores.index(max(scores))
    wanted = [index for index, score in enumerate(scores) if index == best or score >= threshold]
    readout = Readout(np.zeros(len(scores), np.int64), np.array(scores))
    assert at_least_or_best(readout.probs, threshold, readout) == wanted


def test_accepted_prefix_ends_at_the_first_rejection():
    assert accepted_prefix(np.array([True, True, False, True])) == 2
    assert accepted_prefix(np.array([True, True])) == 2
    assert accepted_prefix(np.array([False])) == 0


def test_first_eos_finds_any_of_several_ids():
    assert first_eos([1, 2, 3], (3, 2)) == 1
    assert first_eos([1, 2, 3], ()) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(score=st.floats(0, 1), threshold=st.floats(0, 1.5))
def test_a_threshold_is_rounded_as_torch_rounds_it_to_compare(dtype: torch.dtype, score: float, threshold: float):
    scores = torch.tensor([score, threshold], dtype=torch.float64).to(dtype)  # also the very threshold
    name = str(dtype).removeprefix("torch.")
    rounded = rounded_threshold(threshold, Readout(np.zeros(2, np.int64), scores.float().numpy(), rounded_to=name))
    assert [float(number) < rounded for number in scores] == (scores < threshold).tolist()
    assert [float(number) > rounded for number in scores] == (scores > threshold).tolist()


def test_other_thresholds_stay_as_they_are():
    assert rounded_threshold(0.9, Readout(np.zeros(1, np.int64), np.ones(1), rounded_to="bfloat16")) == 0.8984375
    for rounded_to in ("", "float32"):
        assert rounded_threshold(0.9, Readout(np.zeros(1, np.int64), np.ones(1), rounded_to=rounded_to)) == 0.9


@pytest.mark.parametrize(
    ("decoder", "settings"),
    [
        ("bd3lm", {"threshold": 0.9}),
        ("fast_dllm_llada", {"threshold": 0.9}),
        ("fast_dllm_dream", {"threshold": 0.9}),
        ("fast_dllm_dream", {"threshold": 0.9, "cache": "none", "steps": 1}),
        ("d2f_llada", {"skip_threshold": 0.8}),
        ("d2f_dream", {"skip_threshold": 0.8}),
    ],
)
def test_decoders_compare_with_the_rounded_threshold(decoder: str, settings: dict[str, object]):
    """In bfloat16 0.9 is 0.8984375, which then reaches it; 0.8 is 0.80078125, which then no longer exceeds it."""
    is_d2f = decoder.startswith("d2f")
    block = {"block_size" if is_d2f else "block_length": 8}
    chosen = DECODERS[decoder].Settings(mask_id=31, gen_length=8, confidence_dtype="model", **block, **settings)
    confidence = np.float32(0.80078125 if is_d2f else 0.8984375)

    def num_forwards(rounded_to: str) -> int:
        def answer(_forward: object, read) -> Readout:
            return Readout(np.full(len(read.rows), 5), np.full(len(read.rows), confidence), rounded_to=rounded_to)

        return len(run_scripted(DECODERS[decoder].decode, [1, 2, 3], chosen, answer)[2])

    # With a cache, Fast-dLLM on Dream begins a block with a forward for its first position alone.
    first = int(decoder == "fast_dllm_dream" and "cache" not in settings)
    expected = (1, 8) if is_d2f else (8, 1 + first)
    assert (num_forwards("float32"), num_forwards("bfloat16")) == expected
