"""Masks say exactly what the segments of a forward say."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.errors import DecodeError
from refusion_eval.models import attention as masks
from refusion_eval.types import Segment, bidirectional, block_causal, causal, groups

CPU = torch.device("cpu")


def test_causal_segments_that_see_all_before_them_are_causal():
    assert masks.is_causal(causal(4))
    assert masks.is_causal((Segment(2), Segment(2, sees=((0, 2),))))
    assert not masks.is_causal(groups([2, 2]))
    assert not masks.is_causal(bidirectional(3))


def test_no_mask_is_needed_where_everything_is_seen():
    assert masks.sees_everything(bidirectional(5))
    assert masks.sees_everything(causal(1))
    assert not masks.sees_everything(causal(2))
    assert not masks.sees_everything(block_causal([2, 2]))


def test_groups_are_blind_to_each_other():
    expected = [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert np.array_equal(masks.visible(groups([1, 2])), np.array(expected, dtype=bool))


def test_a_hypothesis_sees_the_rows_it_names():
    attention = (Segment(3), Segment(1, sees=((0, 1), (2, 3))))
    assert masks.visible(attention)[3].tolist() == [True, False, True, True]


@pytest.mark.parametrize("segment", [Segment(1, sees=((0, 3),)), Segment(1, sees=((-1, 1),)), Segment(0)])
def test_impossible_segments_are_refused(segment):
    with pytest.raises(DecodeError, match="attention segment"):
        masks.check_attention((Segment(2), segment))


@st.composite
def attentions(draw):
    segments, start = [], 0
    for size in draw(st.lists(st.integers(1, 90), min_size=1, max_size=5)):
        ranges = draw(st.lists(st.tuples(st.integers(0, start), st.integers(0, start)), max_size=3))
        segments.append(Segment(size, tuple(tuple(sorted(pair)) for pair in ranges), draw(st.booleans())))
        start += size
    return tuple(segments)


@given(attentions(), st.integers(0, 2))
def test_bits_hold_what_the_segments_say(attention, more_words):
    num_rows = sum(segment.size for segment in attention)
    expected, start = np.zeros((num_rows, num_rows), dtype=bool), 0
    for segment in attention:
        rows = slice(start, start + segment.size)
        for first, last in segment.sees:
            expected[rows, first:last] = True
        expected[rows, rows] = np.tri(segment.size, dtype=bool) if segment.causal else True
        start += segment.size
    for words, seen in zip(
        masks.pattern_bits(attention, masks.num_words(num_rows) + more_words), expected, strict=True
    ):
        found = [column for column in range(64 * len(words)) if words[column // 64] >> (column % 64) & 1]
        assert found == np.flatnonzero(seen).tolist()
    assert np.array_equal(masks.visible(attention), expected)
    assert masks.is_causal(attention) == np.array_equal(expected, np.tri(num_rows, dtype=bool))
    assert masks.sees_everything(attention) == expected.all()


def test_committed_rows_are_seen_by_all():
    mask_QK = masks.additive_mask([groups([1, 1])], [3], 1, torch.float32, CPU)[0, 0]
    assert (mask_QK[:, :3] == 0).all()
    assert torch.equal(mask_QK[:, 3:] == 0, torch.eye(2, dtype=torch.bool))


def test_padding_is_seen_by_none_and_no_row_is_blind():
    mask = masks.additive_mask([causal(1), causal(3)], [5, 0], 2, torch.float32, CPU)
    assert mask.shape == (2 * 2, 1, 3, 6)
    of_groups = mask.unflatten(0, (2, 2))[:, :, 0] == 0
    assert torch.equal(of_groups[:, 0], of_groups[:, 1])
    seen = of_groups[:, 0]
    assert seen.any(dim=-1).all()
    assert seen[0, 0].all()
    assert not seen[1, :, 3:].any()
    assert torch.equal(seen[1, :, :3], torch.ones(3, 3, dtype=torch.bool).tril())


def test_equal_sequences_that_see_everything_need_no_mask():
    pair = [bidirectional(3), bidirectional(3)]
    assert masks.additive_mask(pair, [4, 4], 2, torch.float32, CPU) is None
    assert masks.additive_mask(pair, [4, 5], 2, torch.float32, CPU) is not None
    assert masks.additive_mask([*pair, bidirectional(2)], [4, 4, 4], 2, torch.float32, CPU) is not None
    assert masks.additive_mask([causal(3), causal(3)], [4, 4], 2, torch.float32, CPU) is not None


def test_rows_of_masks_begin_at_multiples_of_eight():
    """Kernels copy any other mask once a layer."""
    alone = masks.additive_mask([causal(2)], [9], 1, torch.bfloat16, CPU)
    together = masks.additive_mask([causal(1), causal(3)], [5, 0], 2, torch.bfloat16, CPU)
    for mask in (alone, together):
        assert all(stride % 8 == 0 for stride in mask.stride()[:-1])
