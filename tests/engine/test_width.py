"""The width curve and its hinge (`refusion_eval.engine.width`)."""

from dataclasses import replace

import pytest

from refusion_eval.decoders.refusion_fused import ForwardCost
from refusion_eval.engine.recorded import WIDTHS, RecordedForwards
from refusion_eval.engine.width import WidthCost, fit, measure, replayed, time_forwards, time_replays
from refusion_eval.errors import ConfigError
from refusion_eval.models.cache import KVCache
from refusion_eval.models.choices import Choices
from tests.engine.random_model import random_transformer


def hinge(free_rows: int, row_cost: float, noise: float = 0.0) -> dict[int, float]:
    widths = (1, 8, 16, 32, 64, 128, 256)
    return {
        width: 0.003 * (1 + row_cost * max(0, width - free_rows)) * (1 + noise * (-1) ** number)
        for number, width in enumerate(widths)
    }


@pytest.mark.parametrize("free_rows", [0, 64])
@pytest.mark.parametrize("row_cost", [0.005, 0.03])
def test_the_fitted_hinge_gives_every_time_of_a_noisy_one(free_rows: int, row_cost: float):
    curve = hinge(free_rows, row_cost, noise=0.01)
    cost = ForwardCost(*fit(curve))
    # A forward that is saved for certain, by no extra row, saves the whole of its time.
    saved = [cost.gain(1.0, width, 1, 0) * curve[1] for width in curve]
    assert saved == pytest.approx(list(curve.values()), rel=0.2)


def test_a_flat_curve_makes_all_its_rows_free():
    assert fit(hinge(256, 0.01)) == WidthCost(256, 0.0)


def test_forwards_are_timed_for_every_width_as_often_as_asked():
    times = time_forwards(random_transformer(), "sdpa", widths=(1, 4, 9), context=5, num_rounds=3)
    assert {width: len(seconds) for width, seconds in times.items()} == {1: 3, 4: 3, 9: 3}
    assert min(second for seconds in times.values() for second in seconds) > 0


def test_without_time_two_widths_are_timed_once():
    times = time_forwards(random_transformer(), "sdpa", widths=(1, 4, 9), num_rounds=3, max_seconds=0.0)
    assert {width: len(seconds) for width, seconds in times.items()} == {1: 1, 4: 1}


def test_what_is_measured_can_be_used():
    cost = measure(random_transformer(), "sdpa")
    assert cost.free_rows >= 0
    assert cost.row_cost >= 0


def test_forwards_of_few_widths_are_checked_after_long_texts_too():
    model = random_transformer()
    model.config = replace(model.config, max_positions=4096)
    cache = KVCache(model.config, 1, 4096, model.dtype, model.device)
    recorded = RecordedForwards(model, cache, lambda compute: compute, (1, 8))
    assert set(time_replays(model, recorded, (1, 8), context=5, num_rounds=1)) == {1, 8}


def test_replays_repeat_the_forward_of_their_width_and_none_other():
    model, computed = random_transformer(), []

    def record(compute):
        width = compute.args[0]
        return lambda: (computed.append(width), compute())

    cache = KVCache(model.config, 1, 512, model.dtype, model.device)
    recorded = RecordedForwards(model, cache, record, WIDTHS, Choices(skipped=WIDTHS[4:-1]))
    recorded.reserve(20)
    recorded.prepare()
    computed.clear()
    assert set(time_replays(model, recorded, (1, 8, 9), context=5, num_rounds=3)) == {1, 8, 9}
    # One forward, and what repeats it; the width of 9 rows is not recorded, but a larger one.
    assert computed == [1] * 4 + [8] * 4 + [WIDTHS[-1]] * 4
    with pytest.raises(ConfigError, match="a forward of 600 rows is not recorded; those of up to 512 are"):
        replayed(model, recorded, 600, context=5)
