"""Corruption of answers into ReFusion training examples (`refusion_eval.training.objectives.corrupt`)."""

import numpy as np
import pytest

from refusion_eval.training.objectives.corrupt import (
    Draws,
    arrange,
    causal_example,
    draw,
    draw_slot_size,
    fill_with_eos,
)
from refusion_eval.training.objectives.example import IGNORED

MASK = 99


def _oracle(prompt: list[int], answer: list[int], draws: Draws) -> list[tuple[int, int, int, int]]:
    """(token, position, AR label, MDM label) one token at a time, straight from the definition."""
    out = [(token, position, IGNORED, IGNORED) for position, token in enumerate(prompt)]
    for slot in draws.clean_slots:
        first = slot * draws.slot_size
        end = min(first + draws.slot_size, len(answer))
        for index in range(first, end):
            label = answer[index + 1] if index + 1 < end else IGNORED
            out.append((answer[index], len(prompt) + index, label, IGNORED))
    for slot, num_given in zip(draws.masked_slots, draws.num_given or [0] * len(draws.masked_slots), strict=True):
        first = slot * draws.slot_size
        for index in range(first, min(first + draws.slot_size, len(answer))):
            given = index < first + num_given
            token, label = (answer[index], IGNORED) if given else (MASK, answer[index])
            out.append((token, len(prompt) + index, IGNORED, label))
    return out


def test_arrange_equals_the_definition_on_random_draws() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        prompt = rng.integers(0, 50, rng.integers(0, 6)).tolist()
        answer = rng.integers(0, 50, rng.integers(1, 40)).tolist()
        half_filled = float(rng.choice([0.0, 0.5]))
        draws = draw(rng, len(answer), draw_slot_size(rng, (1, 4, 8, 16, 32)), half_filled_share=half_filled)
        example = arrange(prompt, answer, draws, mask=MASK)
        rows = zip(example.tokens, example.positions, example.ar_labels, example.mdm_labels, strict=True)
        assert [tuple(map(int, row)) for row in rows] == _oracle(prompt, answer, draws)


def test_labels_of_a_small_example_worked_out_by_hand() -> None:
    draws = Draws(slot_size=2, mask_probability=0.5, masked_slots=(1,), clean_slots=(2, 0))
    example = arrange([1, 2], [10, 11, 12, 13, 14], draws, mask=MASK)
    assert example.tokens.tolist() == [1, 2, 14, 10, 11, MASK, MASK]
    assert example.positions.tolist() == [0, 1, 6, 2, 3, 4, 5]
    assert example.ar_labels.tolist() == [IGNORED, IGNORED, IGNORED, 11, IGNORED, IGNORED, IGNORED]
    assert example.mdm_labels.tolist() == [IGNORED] * 5 + [12, 13]
    assert example.mdm_divisors.tolist() == [0.5 * 5] * 7
    assert example.visibility is None


def test_every_slot_is_either_masked_or_clean() -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        draws = draw(rng, 37, 4)
        assert sorted(draws.masked_slots + draws.clean_slots) == list(range(10))


def test_masked_share_follows_the_drawn_probability() -> None:
    rng = np.random.default_rng(2)
    drawn = [draw(rng, 400, 4) for _ in range(400)]
    masked = np.mean([len(draws.masked_slots) / 100 for draws in drawn])
    probability = np.mean([draws.mask_probability for draws in drawn])
    assert masked == pytest.approx(probability, abs=0.01)
    assert probability == pytest.approx(0.5, abs=0.05)
    assert all(0.001 <= draws.mask_probability < 1 for draws in drawn)


def test_exact_masking_masks_floor_of_t_times_the_slots() -> None:
    rng = np.random.default_rng(2)
    for _ in range(300):
        uniform = np.random.Generator(type(rng.bit_generator)())
        uniform.bit_generator.state = rng.bit_generator.state
        t = float(uniform.random())
        draws = draw(rng, 37, 4, "exact")
        assert len(draws.masked_slots) == int(t * 10)
        assert sorted(draws.masked_slots + draws.clean_slots) == list(range(10))
        assert draws.mask_probability == (len(draws.masked_slots) / 10 or 1)


def test_exact_masking_masks_every_slot_equally_often() -> None:
    rng = np.random.default_rng(4)
    counts = np.zeros(10)
    for _ in range(2000):
        counts[list(draw(rng, 40, 4, "exact").masked_slots)] += 1
    assert counts / 2000 == pytest.approx(np.full(10, 0.45), abs=0.05)


def test_a_share_of_the_samples_has_its_clean_slots_first_in_reading_order() -> None:
    rng = np.random.default_rng(5)
    drawn = [draw(rng, 40, 4, "exact", prefix_share=0.5) for _ in range(400)]
    in_order = [draws.clean_slots == tuple(range(len(draws.clean_slots))) for draws in drawn]
    # Short clean parts are in this order by chance, too.
    long = [ordered for draws, ordered in zip(drawn, in_order, strict=True) if 3 <= len(draws.clean_slots) <= 8]
    assert np.mean(long) == pytest.approx(0.5, abs=0.1)
    for draws, ordered in zip(drawn, in_order, strict=True):
        assert sorted(draws.masked_slots + draws.clean_slots) == list(range(10))
        assert draws.mask_probability == (len(draws.masked_slots) / 10 or 1)
        if ordered:
            assert draws.masked_slots == tuple(range(len(draws.clean_slots), 10))


def test_without_such_a_share_the_draws_are_those_of_the_release() -> None:
    first, again = np.random.default_rng(6), np.random.default_rng(6)
    assert [draw(first, 50, 8) for _ in range(5)] == [draw(again, 50, 8, prefix_share=0.0) for _ in range(5)]


def test_a_share_of_the_masked_slots_keeps_some_of_its_first_tokens() -> None:
    rng = np.random.default_rng(7)
    drawn = [draw(rng, 40, 4, half_filled_share=0.3) for _ in range(400)]
    kept = [count for draws in drawn for count in draws.num_given]
    assert all(len(draws.num_given) == len(draws.masked_slots) for draws in drawn)
    assert set(kept) == {0, 1, 2, 3}
    assert np.mean(np.array(kept) > 0) == pytest.approx(0.3, abs=0.05)
    assert draw(rng, 40, 1, half_filled_share=1.0).num_given == ()  # a slot of one token is whole or masked


def test_slot_sizes_are_drawn_uniformly_from_the_setting() -> None:
    rng = np.random.default_rng(3)
    sizes = [draw_slot_size(rng, (4, 8)) for _ in range(1000)]
    assert set(sizes) == {4, 8}
    assert sizes.count(4) == pytest.approx(500, abs=60)


def test_the_same_seed_gives_the_same_draws() -> None:
    assert draw(np.random.default_rng(7), 50, 8) == draw(np.random.default_rng(7), 50, 8)


def test_an_answer_of_one_token_has_no_next_token_label() -> None:
    draws = Draws(slot_size=4, mask_probability=0.1, masked_slots=(), clean_slots=(0,))
    example = arrange([1], [5], draws, mask=MASK)
    assert (example.ar_labels == IGNORED).all()
    assert (example.mdm_labels == IGNORED).all()


def test_eos_filling_reaches_the_next_multiple_and_is_off_by_default_of_the_release() -> None:
    assert fill_with_eos([1, 2, 9], eos=9, multiple=4) == (1, 2, 9, 9)
    assert fill_with_eos([1, 2, 3, 9], eos=9, multiple=4) == (1, 2, 3, 9)
    assert fill_with_eos([1, 9], eos=9, multiple=0) == (1, 9)


def test_causal_labels_are_the_next_tokens_of_the_answer_only_or_of_all() -> None:
    answer_only = causal_example([1, 2], [3, 4], learn_prompt=False)
    assert answer_only.ar_labels.tolist() == [IGNORED, 3, 4, IGNORED]
    everything = causal_example([1, 2], [3, 4], learn_prompt=True)
    assert everything.ar_labels.tolist() == [2, 3, 4, IGNORED]
