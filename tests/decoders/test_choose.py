"""Choices shared by decoders."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.decoders import above_or_best, accepted_prefix, at_least_or_best, first_eos


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0, 1))
def test_at_least_one_is_chosen_and_several_only_above_the_threshold(scores: list[float], threshold: float):
    chosen = above_or_best(np.array(scores), threshold)
    above = [index for index, score in enumerate(scores) if score > threshold]
    assert chosen == (above or [scores.index(max(scores))])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0, 2))
def test_the_best_is_always_chosen_and_others_unless_below_the_threshold(scores: list[float], threshold: float):
    best = scores.index(max(scores))
    wanted = [index for index, score in enumerate(scores) if index == best or score >= threshold]
    assert at_least_or_best(np.array(scores), threshold) == wanted


def test_accepted_prefix_ends_at_the_first_rejection():
    assert accepted_prefix(np.array([True, True, False, True])) == 2
    assert accepted_prefix(np.array([True, True])) == 2
    assert accepted_prefix(np.array([False])) == 0


def test_first_eos_finds_any_of_several_ids():
    assert first_eos([1, 2, 3], (3, 2)) == 1
    assert first_eos([1, 2, 3], ()) is None
