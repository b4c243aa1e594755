from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.sweep.spec import Frontier, TaskResult


def _measure(frontier: Frontier, curve: Callable[[float], list[TaskResult]]) -> list[float]:
    measured: dict[float, list[TaskResult]] = {}
    while (value := frontier.next_value(measured)) is not None:
        measured[value] = curve(value)
    return list(measured)


def test_ends_first_then_the_middle_of_the_widest_gap() -> None:
    frontier = Frontier(setting="tau_slot", low=0.0, high=1.0, points=5)
    # All of the change lies above 0.5, most of it above 0.75.
    chosen = _measure(frontier, lambda x: [TaskResult(1 + max(0.0, x - 0.5) ** 2, 50.0)])
    assert chosen == [0.0, 1.0, 0.5, 0.75, 0.875]


def test_a_flat_curve_needs_its_ends_only() -> None:
    frontier = Frontier(setting="tau_slot", low=0.1, high=0.9, points=9)
    assert _measure(frontier, lambda x: [TaskResult(2.0, 70.0)]) == [0.1, 0.9]


def test_log_scale_and_multiples() -> None:
    frontier = Frontier(setting="steps", low=8, high=128, points=4, scale="log", multiple_of=8)
    assert _measure(frontier, lambda x: [TaskResult(128 / x, x)])[2:] == [32.0, 16.0]


def test_neighbouring_whole_numbers_have_no_middle() -> None:
    frontier = Frontier(setting="steps", low=1, high=3, points=9, multiple_of=1)
    assert sorted(_measure(frontier, lambda x: [TaskResult(x, x)])) == [1.0, 2.0, 3.0]


@given(
    low=st.floats(0.01, 1),
    width=st.floats(0.1, 10),
    points=st.integers(2, 9),
    exponent=st.floats(0.2, 5),
    scale=st.sampled_from(["linear", "log"]),
)
def test_no_value_twice_none_outside_and_no_more_than_asked_for(
    low: float, width: float, points: int, exponent: float, scale: str
) -> None:
    frontier = Frontier(setting="tau_slot", low=low, high=low + width, points=points, scale=scale)
    chosen = _measure(frontier, lambda x: [TaskResult(x**exponent, 1 / x), TaskResult(1.0, x)])
    assert len(set(chosen)) == len(chosen) == points
    assert min(chosen) == low
    assert max(chosen) == low + width


def test_two_tasks_count_alike_whatever_their_units() -> None:
    frontier = Frontier(setting="tau_slot", low=0.0, high=1.0, points=4)
    # The first task changes in the lower half, the second, with larger numbers, in the upper.
    curve = lambda x: [TaskResult(min(x, 0.5), 1.0), TaskResult(1000 * max(x, 0.5), 1.0)]  # noqa: E731
    measured = {value: curve(value) for value in (0.0, 0.5, 1.0)}
    assert frontier.next_value(measured) == pytest.approx(0.25)
