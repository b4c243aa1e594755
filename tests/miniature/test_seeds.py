"""Intervals over items and training seeds (`miniature.seeds`)."""

import numpy as np
import pandas
import pytest

from miniature.seeds import over_seeds
from refusion_eval.metrics import mean_of_intervals, paired_difference

TASKS, ITEMS = ("one", "two"), 60


def table(*systems: tuple[str, str, list[float]], noise: int = 0) -> pandas.DataFrame:
    """Answers of (system, model, true accuracy of each seed) to the same items."""
    rng = np.random.default_rng(noise)
    rows = []
    for system, model, accuracies in systems:
        for seed, accuracy in enumerate(accuracies):
            for task in TASKS:
                for item, drawn in enumerate(rng.random(ITEMS)):
                    rows.append((system, model, seed, task, item, int(drawn < accuracy)))
    return pandas.DataFrame(rows, columns=["system", "model", "seed", "task", "item", "right"])


def test_one_seed_has_about_the_interval_over_items() -> None:
    answers = table(("A", "a", [0.8]), ("B", "b", [0.6]))
    found = over_seeds(answers, "A", "B").interval()
    right = {name: part.set_index(["task", "item"]).right for name, part in answers.groupby("system")}
    tasks = [paired_difference(right["B"][task], right["A"][task]) for task in TASKS]
    expected = mean_of_intervals(tasks)
    assert found.value == pytest.approx(100 * expected.value)
    assert found.high - found.low == pytest.approx(100 * (expected.high - expected.low), rel=0.02)
    assert found.n == len(TASKS) * ITEMS


def test_seeds_that_differ_widen_the_interval() -> None:
    alike = over_seeds(table(("A", "a", [0.7, 0.7, 0.7]), ("B", "b", [0.6, 0.6, 0.6])), "A", "B").interval()
    apart = over_seeds(table(("A", "a", [0.5, 0.7, 0.9]), ("B", "b", [0.6, 0.6, 0.6])), "A", "B").interval()
    assert apart.high - apart.low > 2 * (alike.high - alike.low)


def test_two_systems_of_the_same_trained_models_are_paired_by_seed() -> None:
    accuracies = [0.4, 0.9]
    answers = table(("A", "a", accuracies))
    gained = answers.copy()
    gained["right"] = np.where(gained.item < 3, 1, gained.right)  # the same gain, whatever the seed
    same = pandas.concat([answers, gained.assign(system="B")])
    other = pandas.concat([answers, gained.assign(system="B", model="b")])
    widths = [
        found.high - found.low
        for found in (over_seeds(same, "B", "A").interval(), over_seeds(other, "B", "A").interval())
    ]
    assert widths[0] < widths[1] / 3


def test_nineteen_of_twenty_intervals_cover_the_truth() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for noise in range(50):
        one, other = (rng.normal(centre, 0.04, 3).clip(0, 1) for centre in (0.7, 0.6))
        found = over_seeds(table(("A", "a", list(one)), ("B", "b", list(other)), noise=noise), "A", "B").interval()
        covered += found.low <= 10 <= found.high
    assert 45 <= covered <= 50


def test_a_system_alone_has_its_accuracy() -> None:
    found = over_seeds(table(("A", "a", [1.0, 1.0])), "A").interval()
    assert (found.value, found.low <= 100 <= found.high) == (100, True)


def test_a_difference_has_a_p_value_below_5_percent_where_its_interval_leaves_out_0() -> None:
    estimates = [
        over_seeds(table(("A", "a", [0.6, share, share]), ("B", "b", [0.6, 0.6, 0.6])), "A", "B")
        for share in (0.5, 0.55, 0.6, 0.65, 0.7)
    ]
    found = [(one.p_value() < 0.05, not one.interval().low <= 0 <= one.interval().high) for one in estimates]
    assert set(found) == {(True, True), (False, False)}
