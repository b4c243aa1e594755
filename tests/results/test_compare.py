"""Two runs compared: flips, prompts, settings, speed, and the smallest difference a sample shows."""

import csv
import itertools
import math
from statistics import stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.errors import StoreError
from refusion_eval.results.compare import (
    compare_runs,
    comparison_cells,
    comparison_table,
    details,
    detectable_difference,
    mcnemar,
)
from refusion_eval.store.manifest import Hardware
from refusion_eval.store.records import ScoreRow
from refusion_eval.store.run_store import Run, RunStore
from tests.results.conftest import sample


def ten(**changes):
    return [sample(i, **changes) for i in range(10)]


def right(*numbers):
    return {str(number) for number in numbers}


def test_differences_flips_and_speed_by_hand(write_run):
    a = write_run("a", ten(), right=right(0, 1, 2, 3, 4))
    b = write_run("b", ten(seconds=0.25, settings={"slot_size": 8}), right=right(0, 1, 2, 7))
    comparison = compare_runs(a, b)
    (task,) = comparison.tasks
    assert task.accuracies == pytest.approx((50, 40))
    assert task.difference.value == pytest.approx(-10)
    assert task.difference.low < -10 < task.difference.high
    assert task.flips == {"gained": ["7"], "lost": ["3", "4"], "other prompts": []}
    differences = [0, 0, 0, -1, -1, 0, 0, 1, 0, 0]
    by_deviation = 100 * 2.80158 * np.std(differences, ddof=1) / math.sqrt(10)
    by_interval = 2.80158 / 1.95996 * (task.difference.high - task.difference.low) / 2
    assert task.detectable == pytest.approx(max(by_deviation, by_interval), rel=1e-4)
    assert task.speed.value == pytest.approx(2.0)
    assert task.settings == ["slot_size: A 4, B 8"]
    assert comparison.settings == []
    assert details(comparison)[0] == "differs: nothing but the tasks' settings below"
    assert details(compare_runs(a, a)) == ["differs: nothing"]
    assert comparison_table(comparison).columns[-3:] == ("Gained", "Lost", "Speed B / A")


def test_prompts_and_settings_that_differ_are_named(write_run):
    a = write_run("a", ten())
    asked = [sample(i, prompt=f"please-{i}" if i in (2, 5) else None) for i in range(10)]
    b = write_run("b", asked, dtype="bfloat16", seed=3)
    comparison = compare_runs(a, b)
    assert comparison.tasks[0].flips["other prompts"] == ["2", "5"]
    assert comparison.settings == ['dtype: A "float32", B "bfloat16"', "seed: A 0, B 3"]
    assert "mini_gsm8k: other prompts (2): 2, 5" in details(comparison)
    assert "Other prompts" in comparison_table(comparison).columns


def test_other_items_are_refused_or_left_out_on_request(write_run):
    a = write_run("a", ten(), right=right(0, 1))
    b = write_run("b", [sample(i) for i in range(4, 12)], right=right(4))
    with pytest.raises(StoreError, match=r"A has 10 scored items and B 8, 6 of them in common; .*--common-items"):
        compare_runs(a, b)
    (task,) = compare_runs(a, b, common_items=True).tasks
    assert (len(task.items), task.left_out, task.flips["gained"], task.flips["lost"]) == (6, 6, ["4"], [])
    c = write_run("c", [sample(i) for i in range(20, 22)])
    with pytest.raises(StoreError, match="0 of them in common; run both on the same items"):
        compare_runs(a, c, common_items=True)


def test_other_versions_tasks_and_two_settings_are_refused(write_run):
    a = write_run("a", ten())
    with pytest.raises(StoreError, match=r"mini_gsm8k is version '1' in A and '2' in B, .* again with a new --run-dir"):
        compare_runs(a, write_run("b", ten(version="2")))
    with pytest.raises(StoreError, match=r"a \(mini_gsm8k\) and c \(mini_math\) have no task in common"):
        compare_runs(a, write_run("c", ten(task="mini_math")))
    with pytest.raises(
        StoreError, match=r"d holds mini_gsm8k in several versions, settings or protocols, .* --run-dir$"
    ):
        compare_runs(a, write_run("d", [*ten(), *ten(version="2")]))
    both = compare_runs(a, write_run("e", [*ten(), *ten(task="mini_math")]))
    assert both.not_compared == ["mini_math"]


def test_speed_of_two_machines_is_no_ratio(write_run):
    a = write_run("a", ten())
    comparison = compare_runs(a, write_run("b", ten(), hardware=Hardware(cpu="Other CPU")))
    assert comparison.tasks[0].speed is None
    assert "different machines" in comparison.tasks[0].no_speed
    assert any(line.startswith("hardware.cpu: ") for line in comparison.settings)


def test_runs_that_took_no_turns_have_no_ratio_of_speeds(write_run, monkeypatch):
    a, b = write_run("a", ten()), write_run("b", ten())
    turns = itertools.cycle((1, 2))
    monkeypatch.setattr(Run, "round", lambda self, process_id: next(turns) if self.run_id == "b" else 1)
    (task,) = compare_runs(a, b).tasks
    assert task.speed is None
    assert "one was timed in 1 rounds and the other in 2, so not in turns" in task.no_speed


def test_several_samples_of_an_item_count_as_shares(write_run):
    twice = [sample(i, number=number) for i in range(3) for number in range(2)]
    a = write_run("a", twice, right=right(0))
    b = write_run("b", twice, right=right(0, 1))
    (task,) = compare_runs(a, b).tasks
    assert [(item.before, item.after) for item in task.items] == [(1, 1), (0, 1), (0, 0)]


def test_accuracies_of_several_samples_have_their_spread(write_run):
    def drawn(task):
        return [sample(i, task=task, number=number) for i in range(2) for number in range(2)]

    def of_samples(name):
        run_dir = write_run(name, [*drawn("mini_gsm8k"), *drawn("mini_math")])
        with RunStore.open(run_dir) as store:
            for one in drawn("mini_math"):
                first = float(not one.key.sample)
                store.append_scores([ScoreRow(key=one.key, item_id=one.item_id, scorer="test", value=first)])
        return run_dir

    comparison = compare_runs(of_samples("a"), of_samples("b"))
    assert [line.spreads for line in comparison.lines] == [
        (0, 0),
        pytest.approx((stdev([100, 0]),) * 2),
        pytest.approx((stdev([50, 0]),) * 2),
    ]
    table = comparison_table(comparison)
    assert [row[2] for row in table.rows] == ["0.0 \u00b1 0.0", "50.0 \u00b1 70.7", "25.0 \u00b1 35.4"]
    assert "\u00b1: standard deviation" in table.caption
    assert dict(zip(comparison_cells(comparison)[0], comparison_cells(comparison)[1][1], strict=True))["sd_after"] > 70
    alone = compare_runs(write_run("c", ten()), write_run("d", ten()))
    assert "\u00b1" not in comparison_table(alone).markdown()


def test_runs_without_a_flip_have_an_interval_with_a_width(write_run):
    a, b = (write_run(name, ten(), right=right(0, 1)) for name in "ab")
    (task,) = compare_runs(a, b).tasks
    assert task.difference.value == 0
    assert (task.difference.low, task.difference.high) == pytest.approx((-27.753, 27.753), abs=0.001)


def test_several_tasks_have_a_mean_of_equal_weights(write_run):
    both = [*ten(), *(sample(i, task="mini_math") for i in range(5))]
    a, b = write_run("a", both, right=right(0, 1, 2, 3, 4)), write_run("b", both, right=right(0, 1, 2, 3, 7))
    first, second, mean = compare_runs(a, b).lines
    assert [task.accuracies for task in (first, second)] == [pytest.approx((50, 50)), pytest.approx((100, 80))]
    assert mean.accuracies == pytest.approx((75, 65))
    assert mean.difference.value == pytest.approx(-10)
    assert mean.difference.low < -10 < mean.difference.high
    assert {name: len(items) for name, items in mean.flips.items()} == {"gained": 1, "lost": 2, "other prompts": 0}
    assert mean.p_value == 1.0
    *_, unchanged = compare_runs(a, a).lines
    assert unchanged.difference.low == pytest.approx(-math.hypot(27.753, 43.45) / 2, abs=0.01)


def test_mcnemars_p_value_is_that_of_a_fair_coin():
    assert mcnemar(0, 0) == 1
    assert mcnemar(5, 0) == pytest.approx(2 / 32)
    assert mcnemar(1, 7) == mcnemar(7, 1) == pytest.approx(2 * 9 / 256)


def test_no_flip_does_not_promise_that_nothing_is_hidden():
    none = detectable_difference(np.zeros(100))
    one = detectable_difference([1.0, *np.zeros(99)])
    assert 0 < none == pytest.approx(one, rel=0.01)
    assert math.isnan(detectable_difference([1.0]))


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=2, max_size=60))
def test_more_of_the_same_items_show_smaller_differences(values):
    assert detectable_difference(values * 4) < detectable_difference(values)
    assert detectable_difference(values) == detectable_difference([-value for value in values])


def test_a_difference_of_the_detectable_size_is_found_four_times_out_of_five():
    num_items, share = 400, 0.2
    effect = detectable_difference([-1.0] * 40 + [0.0] * 320 + [1.0] * 40)
    rng = np.random.default_rng(0)
    draws = rng.choice(
        [-1.0, 0.0, 1.0], size=(2000, num_items), p=[(share - effect) / 2, 1 - share, (share + effect) / 2]
    )
    errors = draws.std(axis=1, ddof=1) / math.sqrt(num_items)
    assert np.mean(draws.mean(axis=1) > 1.96 * errors) == pytest.approx(0.8, abs=0.05)


def test_the_command_prints_and_writes(write_run, tmp_path):
    a, b = write_run("a", ten(), right=right(0, 1)), write_run("b", ten(), right=right(1, 2, 3))
    paths = {name: tmp_path / f"out.{name}" for name in ("csv", "items", "markdown")}
    options = [part for name, path in paths.items() for part in (f"--{name}", str(path))]
    result = CliRunner().invoke(app, ["compare", str(a), str(b), *options])
    assert result.exit_code == 0, result.output
    assert "lost (1): 0" in result.output
    with paths["csv"].open(newline="") as stream:
        (row,) = csv.DictReader(stream)
    assert (row["before"], row["difference"], row["gained"], row["lost"], row["speed_ratio"]) == (
        "a",
        "10",
        "2",
        "1",
        "1",
    )
    with paths["items"].open(newline="") as stream:
        changes = {line["item_id"]: line["change"] for line in csv.DictReader(stream)}
    assert {item: change for item, change in changes.items() if change} == {"0": "lost", "2": "gained", "3": "gained"}
    assert "gained (2): 2, 3" in paths["markdown"].read_text()


def test_the_statistics_are_written_as_latex_with_their_notes_beside(write_run, tmp_path):
    both = [*ten(), *(sample(i, task="mini_math") for i in range(5))]
    a, b = write_run("a", both, right=right(0, 1)), write_run("b", both, right=right(*range(8)))
    done = CliRunner().invoke(app, ["compare", str(a), str(b), "--latex", str(tmp_path / "c.tex")])
    assert done.exit_code == 0, done.output
    latex = (tmp_path / "c.tex").read_text(encoding="utf-8")
    assert r"\caption{Accuracy of two runs on the same items, A = a, B = b.}" in latex
    other = write_run("c", both, right=right(0), system="AR", expected={"mini_math": 5}, whole={"mini_math": 9})
    caption = comparison_table(compare_runs(a, other)).caption_title
    assert caption.endswith("items, A = ReFusion, B = AR (limited: mini_math 5 of 9)")
    assert r"Task & n & A \% & B \% & B - A & Detectable & p & p (Holm) & Gained & Lost & Speed B / A \\" in latex
    (task, other, mean) = [line.split(" & ") for line in latex.splitlines() if line.startswith(("mini", "mean"))]
    assert (task[6], task[7], other[7]) == ("0.031", "0.062", "0.25")
    assert mean[6] == mean[7]
    assert "p (Holm): adjusted for the number of tasks" in (tmp_path / "c.txt").read_text(encoding="utf-8")


def test_settings_that_differ_are_named_once_and_what_is_not_set_is_no_difference(write_run):
    def samples(**settings):
        return [sample(i, task=task, settings=settings) for task in ("mini_gsm8k", "mini_math") for i in range(3)]

    runs = [write_run("a", samples(tau_slot=0.5, free_rows=None)), write_run("b", samples(tau_slot=0.9))]
    lines = details(compare_runs(*runs, common_items=True))
    assert [line for line in lines if "tau_slot" in line] == ["all tasks: tau_slot: A 0.5, B 0.9"]
    assert not any("null" in line or "free_rows" in line for line in lines)
