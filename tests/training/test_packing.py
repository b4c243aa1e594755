"""Packs of an epoch and how they are dealt to processes (`refusion_eval.training.packing`)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.errors import ConfigError
from refusion_eval.training.packing import PackPlan, batches_of, plan_packs

CAPACITY = 50
LENGTHS = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=120)


def as_lists(plan: PackPlan) -> list[list[int]]:
    return [pack.tolist() for pack in plan]


@given(lengths=LENGTHS, window=st.integers(1, 60), seed=st.integers(0, 5), data=st.data())
def test_each_sample_is_in_one_pack_and_no_pack_is_too_full(
    lengths: list[int], window: int, seed: int, data: st.DataObject
) -> None:
    multiple = data.draw(st.integers(1, len(lengths)).filter(lambda n: len(lengths) % n == 0))
    plan = plan_packs(lengths, CAPACITY, seed, 0, window=window, multiple_of=multiple)
    packs = as_lists(plan)
    assert sorted(number for pack in packs for number in pack) == list(range(len(lengths)))
    sums = [sum(lengths[number] for number in pack) for pack in packs]
    assert 0 < min(sums) <= max(sums) <= CAPACITY
    assert len(packs) % multiple == 0
    assert plan.fill == pytest.approx(sum(sums) / (CAPACITY * len(packs)))


@given(lengths=LENGTHS)
def test_within_a_window_no_two_packs_could_be_one(lengths: list[int]) -> None:
    plan = plan_packs(lengths, CAPACITY, 0, 0, window=len(lengths))
    sums = sorted(sum(lengths[number] for number in pack) for pack in plan)
    assert len(sums) == 1 or sums[0] + sums[1] > CAPACITY


def sft_like_lengths(spread: float) -> np.ndarray:
    """20,000 lognormal lengths of mean 330, at most 4096."""
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(np.log(330) - spread**2 / 2, spread, 20_000)
    return np.clip(drawn, 2, 4096).astype(np.int64)


@pytest.mark.parametrize(("spread", "fill"), [(0.6, 0.993), (1.0, 0.996)])
def test_packs_of_lengths_as_in_fine_tuning_are_nearly_full(spread: float, fill: float) -> None:
    lengths = sft_like_lengths(spread)
    assert 320 < lengths.mean() < 340
    plan = plan_packs(lengths, 4096, 0, 0)
    assert plan.fill == pytest.approx(fill, abs=0.002)
    # For comparison: padding a batch of shuffled samples to its longest leaves most of it empty.
    padded = 12 * sum(lengths[start : start + 12].max() for start in range(0, len(lengths), 12))
    assert lengths.sum() / padded < 0.6


def test_packs_mix_lengths() -> None:
    lengths = sft_like_lengths(1.0)
    plan = plan_packs(lengths, 4096, 0, 0)
    sizes = np.diff(plan.bounds)
    assert sizes.std() < 0.5 * sizes.mean()


def test_seed_and_epoch_decide_the_packs() -> None:
    lengths = sft_like_lengths(1.0)[:500]
    first = as_lists(plan_packs(lengths, 4096, 3, 0))
    assert first == as_lists(plan_packs(lengths.tolist(), 4096, 3, 0))
    others = [as_lists(plan_packs(lengths, 4096, *other)) for other in ((3, 1), (4, 0))]
    assert all(sorted(map(sorted, other)) != sorted(map(sorted, first)) for other in others)


@given(
    lengths=st.lists(st.integers(1, CAPACITY), min_size=24, max_size=120),
    batch=st.sampled_from([1, 2, 4, 6, 12]),
    data=st.data(),
)
def test_any_number_of_processes_sees_the_same_global_batches(
    lengths: list[int], batch: int, data: st.DataObject
) -> None:
    lengths = lengths[: len(lengths) // batch * batch]
    plan = plan_packs(lengths, CAPACITY, 0, 0, multiple_of=batch)
    alone = batches_of(plan, batch)
    assert [number for step in alone for pack in step for number in pack] == plan.members.tolist()
    world_size = data.draw(st.sampled_from([size for size in (1, 2, 3, 4, 6, 12) if batch % size == 0]))
    ranks = [batches_of(plan, batch, rank, world_size) for rank in range(world_size)]
    assert {len(steps) for steps in ranks} == {len(alone)}
    for number, step in enumerate(alone):
        parts = [steps[number] for steps in ranks]
        assert {len(part) for part in parts} == {batch // world_size}
        assert [pack.tolist() for part in parts for pack in part] == [pack.tolist() for pack in step]


def test_packs_are_split_to_fill_the_last_batch_only_as_needed() -> None:
    lengths = [10] * 25  # five packs of five
    assert [len(pack) for pack in plan_packs(lengths, CAPACITY, 0, 0)] == [5] * 5
    split = plan_packs(lengths, CAPACITY, 0, 0, multiple_of=4)
    assert sorted(len(pack) for pack in split) == [2, 2, 2, 3, 3, 3, 5, 5]


@pytest.mark.parametrize(
    ("lengths", "settings", "message"),
    [
        ([], {}, "no samples"),
        ([3, 51, 4], {}, "sample 1 takes 51 tokens and a pack holds 50"),
        ([3, 4], {"multiple_of": 3}, "2 samples are too few for batches of 3 packs"),
        ([3, 4], {"window": 0}, "window 0"),
        ([3, 4], {"multiple_of": 0}, "multiple_of is 0"),
    ],
)
def test_what_cannot_be_packed_is_refused(lengths: list[int], settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_packs(lengths, CAPACITY, 0, 0, **settings)


@pytest.mark.parametrize(
    ("batch", "rank", "world_size", "message"),
    [
        (4, 0, 3, "4 packs cannot be dealt to 3 processes"),
        (0, 0, 1, "batch of 0 packs"),
        (4, 2, 2, "rank is 2 and world_size 2"),
        (4, -1, 2, "rank is -1"),
        (4, 0, 0, "world_size 0"),
        (3, 0, 1, "4 packs are no whole batches of 3; plan them with multiple_of=3"),
    ],
)
def test_a_deal_that_does_not_come_out_is_refused(batch: int, rank: int, world_size: int, message: str) -> None:
    plan = plan_packs([CAPACITY] * 4, CAPACITY, 0, 0)
    with pytest.raises(ConfigError, match=message):
        batches_of(plan, batch, rank, world_size)


def test_a_plan_is_a_sequence() -> None:
    plan = plan_packs([20] * 7, CAPACITY, 0, 0)
    assert len(plan) == 4
    assert plan[-1].tolist() == plan[3].tolist()
    assert [pack.tolist() for pack in plan[1:3]] == [plan[1].tolist(), plan[2].tolist()]
    with pytest.raises(IndexError):
        plan[4]
