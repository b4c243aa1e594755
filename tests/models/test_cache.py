"""The KV buffer holds exactly the rows that were committed, in their order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.errors import DecodeError
from refusion_eval.models.cache import KVCache
from refusion_eval.models.checkpoint import ModelConfig
from tests.examples import examples

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=5,
    hidden_size=4,
    intermediate_size=4,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_positions=64,
    tied_head=True,
    dtype="float32",
)


def new_cache(num_sequences=1, capacity=2):
    return KVCache(CONFIG, num_sequences, capacity, torch.float32, torch.device("cpu"))


@torch.inference_mode()
def stage(cache, sequence, marks):
    """Writes rows that carry a number each, as a forward would."""
    start = cache.lengths[sequence]
    cache.reserve(start + len(marks))
    cache.stage(sequence, len(marks))
    for offset, mark in enumerate(marks):
        cache.keys[:, sequence, :, start + offset] = mark
        cache.values[:, sequence, :, start + offset] = -mark


def stored(cache, sequence):
    rows = cache.keys[:, sequence, :, : cache.lengths[sequence]]
    assert torch.equal(rows, -cache.values[:, sequence, :, : cache.lengths[sequence]])
    assert (rows == rows[:1, :, :, :1]).all()
    return rows[0, 0, :, 0].int().tolist()


@given(st.data())
@examples(60)
def test_any_sequence_of_commits_and_drops(data):
    cache, expected, mark = new_cache(), [], 0
    for _ in range(data.draw(st.integers(1, 6))):
        width = data.draw(st.integers(1, 5))
        marks = list(range(mark + 1, mark + 1 + width))
        mark += width
        stage(cache, 0, marks)
        rows = data.draw(st.permutations(range(width)))[: data.draw(st.integers(0, width))]
        keep = data.draw(st.none() | st.integers(0, len(expected)))
        cache.commit(0, rows, keep)
        expected = expected[:keep] + [marks[row] for row in rows]
        assert stored(cache, 0) == expected


def test_a_prefix_is_committed_in_place():
    cache = new_cache(capacity=8)
    stage(cache, 0, [1, 2, 3])
    before = cache.keys.clone()
    cache.commit(0, [0, 1])
    assert torch.equal(cache.keys, before)
    assert stored(cache, 0) == [1, 2]


def test_sequences_do_not_touch_each_other_and_can_be_moved():
    cache = new_cache(num_sequences=3)
    for sequence, marks in enumerate(([1, 2, 3], [4], [5, 6])):
        stage(cache, sequence, marks)
        cache.commit(sequence, range(len(marks)))
    cache.move(2, 0)
    assert [stored(cache, sequence) for sequence in (0, 1)] == [[5, 6], [4]]
    assert not cache.keys[:, 0, :, 2:].any()


def test_growing_keeps_what_is_stored():
    cache = new_cache(capacity=2)
    stage(cache, 0, [1, 2])
    cache.commit(0, [0, 1])
    cache.reserve(9)
    assert cache.capacity >= 9
    assert stored(cache, 0) == [1, 2]


@pytest.mark.parametrize(("rows", "keep"), [([3], None), ([-1], None), ([0], 2), ([0], -1)])
def test_rows_that_do_not_exist_are_refused(rows, keep):
    cache = new_cache()
    stage(cache, 0, [1])
    cache.commit(0, [0])
    stage(cache, 0, [2, 3])
    with pytest.raises(DecodeError, match="row"):
        cache.commit(0, rows, keep)


@given(st.integers(0, 4), st.permutations(range(5)), st.integers(0, 5))
@examples(60)
def test_kept_rows_are_the_first_ones_and_new_rows_follow_them(keep, order, num_rows):
    cache = new_cache(capacity=16)
    stage(cache, 0, [1, 2, 3, 4])
    cache.commit(0, range(4))
    stage(cache, 0, [11, 12, 13, 14, 15])
    cache.commit(0, order[:num_rows], keep=keep)
    assert stored(cache, 0) == [1, 2, 3, 4][:keep] + [11 + row for row in order[:num_rows]]


def test_more_rows_than_there_are_cannot_be_kept():
    cache = new_cache()
    stage(cache, 0, [1, 2])
    with pytest.raises(DecodeError, match="keep=1 of 0 committed rows"):
        cache.commit(0, [0], keep=1)


@given(st.data())
@examples(60)
def test_a_place_that_is_wiped_or_left_has_zeros_alone(data):
    """Only rows in use are zeroed, however they were written: staged, committed, dropped or moved."""
    cache = new_cache(num_sequences=3)
    for mark in range(1, data.draw(st.integers(2, 8))):
        sequence = data.draw(st.integers(0, 2))
        width = data.draw(st.integers(1, 5))
        stage(cache, sequence, [mark] * width)
        action = data.draw(st.sampled_from(["commit", "drop", "wipe", "move"]))
        if action == "commit":
            cache.commit(sequence, data.draw(st.permutations(range(width)))[:2])
        elif action == "move":
            target = (sequence + 1) % 3
            cache.commit(sequence, range(width))
            cache.move(sequence, target)
            assert not cache.keys[:, target, :, cache.lengths[target] :].any()
        elif action == "wipe":
            cache.wipe(sequence)
            assert not cache.keys[:, sequence].any()
            assert not cache.values[:, sequence].any()
    for sequence in range(3):
        cache.wipe(sequence)
    assert not cache.keys.any()
    assert not cache.values.any()
