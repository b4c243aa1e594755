"""Samples of a step and how they are dealt to forwards (`refusion_eval.training.data.batches`)."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.training.config import OptimisationConfig
from refusion_eval.training.data.batches import Draw, StepPlan, corruption_rng

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=50)
# micro_batch_size, groups of a step, forwards
CUTS = st.tuples(st.integers(1, 4), st.integers(1, 12), st.integers(1, 12)).filter(lambda cut: cut[2] <= cut[1])


def a_plan(lengths: list[int], cut: tuple[int, int, int] = (4, 6, 3), seed: int = 0) -> StepPlan:
    micro, num_groups, num_forwards = cut
    batch = {"global_batch_size": micro * num_groups, "micro_batch_size": micro}
    return StepPlan(lengths, OptimisationConfig(max_steps=1, num_forwards=num_forwards, seed=seed, **batch))


@given(lengths=LENGTHS, cut=CUTS, num_epochs=st.integers(1, 3))
def test_epochs_hold_each_sample_once_and_every_step_is_whole(
    lengths: list[int], cut: tuple[int, int, int], num_epochs: int
) -> None:
    plan, batch = a_plan(lengths, cut), cut[0] * cut[1]
    num_steps = plan.num_steps(num_epochs)
    seen = [draw for step in range(num_steps + 1) for group in plan.groups(step) for draw in group]
    assert len(seen) == (num_steps + 1) * batch
    assert num_steps * batch <= num_epochs * len(lengths) < (num_steps + 1) * batch
    for epoch in range(num_epochs):  # the step behind the last one completes the last epoch
        assert sorted(draw.sample for draw in seen if draw.epoch == epoch) == list(range(len(lengths)))


@given(lengths=LENGTHS, cut=CUTS, step=st.integers(0, 5))
def test_every_group_is_in_one_forward_and_no_forward_is_empty(
    lengths: list[int], cut: tuple[int, int, int], step: int
) -> None:
    plan = a_plan(lengths, cut)
    forwards = plan.forwards(step)
    assert len(forwards) == cut[2]
    assert all(forwards)
    assert Counter(group for forward in forwards for group in forward) == Counter(plan.groups(step))
    assert {len(group) for forward in forwards for group in forward} == {cut[0]}


@given(lengths=LENGTHS, cut=CUTS, step=st.integers(0, 5))
def test_forwards_are_balanced(lengths: list[int], cut: tuple[int, int, int], step: int) -> None:
    plan = a_plan(lengths, cut)
    rows = [[sum(lengths[draw.sample] for draw in group) for group in forward] for forward in plan.forwards(step)]
    loads = [sum(forward) for forward in rows]
    assert loads == sorted(loads, reverse=True)
    # What LPT grants: without its last and so smallest group, no forward would have more than any other.
    assert all(load - min(forward) <= min(loads) for load, forward in zip(loads, rows, strict=True))


def test_forwards_of_fine_tuning_lengths_are_almost_equal() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(330) - 0.9**2 / 2, 0.9, 20_000), 8, 4096).astype(int)
    plan = StepPlan(lengths, OptimisationConfig(max_steps=1, global_batch_size=512, num_forwards=16))
    for step in range(5):
        loads = [sum(lengths[draw.sample] for group in forward for draw in group) for forward in plan.forwards(step)]
        assert max(loads) < 1.05 * np.mean(loads)


def test_seed_and_epoch_decide_the_order() -> None:
    lengths = list(range(1, 41))
    first = a_plan(lengths, seed=3).groups(0)
    assert a_plan(lengths, seed=3).groups(0) == first
    assert a_plan(lengths, seed=4).groups(0) != first
    plan = a_plan(lengths, (1, 40, 1))
    of_epochs = [[draw.sample for (draw,) in plan.groups(step)] for step in range(2)]
    assert of_epochs[0] != of_epochs[1]


def test_draws_of_a_sample_are_its_own() -> None:
    draws = [Draw(epoch, sample) for epoch in range(3) for sample in range(3)]
    numbers = {corruption_rng(seed, draw).random() for seed in range(2) for draw in draws}
    assert len(numbers) == 2 * len(draws)
    assert corruption_rng(1, Draw(2, 0)).random() == corruption_rng(1, Draw(2, 0)).random()


def test_parts_of_epochs_count() -> None:
    plan = a_plan([1] * 100, (1, 10, 1))
    assert [plan.num_steps(num_epochs) for num_epochs in (0.05, 0.1, 0.29, 2)] == [0, 1, 2, 20]
