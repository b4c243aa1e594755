"""Conditions for continuous integration: what is understood, what fails, and that no absent figure passes."""

import itertools
import json
import math
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from refusion_eval.cli import EXIT_FAILED, app
from refusion_eval.errors import ConfigError
from refusion_eval.results.gate import (
    comparison_conditions,
    failed,
    run_conditions,
    verdicts_of_comparison,
    verdicts_of_run,
)
from refusion_eval.results.measured import run_measurements
from refusion_eval.store.records import BY_FILTER, ScoreRow
from refusion_eval.store.run_store import RunStore
from tests.results.conftest import cell, sample
from tests.results.test_hard_runs import of_both_prompts


def rows(*values, metric="difference", **more):
    return [
        {"task": task, metric: value, "p_holm": p, "no_speed": "", "told_apart_by": "", **more}
        for task, value, p in values
    ]


@pytest.mark.parametrize(
    ("condition", "failing"),
    [
        ("accuracy < -2 (p < 0.05)", ["b"]),
        ("accuracy<-2", ["b", "c"]),
        ("difference <= -1", ["a", "b", "c"]),
        ("b: accuracy < -2 (p<0.05)", ["b"]),
        ("a: accuracy < -2", []),
        ("mean: accuracy < -2", ["mean"]),
        ("accuracy > .5e1", []),
    ],
)
def test_a_change_fails_if_it_is_large_enough_and_no_chance(condition, failing):
    changed = rows(("a", -1.0, 0.01), ("b", -3.0, 0.01), ("c", -3.0, 0.2), ("mean", -2.3, 0.01))
    failures = failed(verdicts_of_comparison(comparison_conditions([condition]), changed))
    assert [failure.task for failure in failures] == failing


@pytest.mark.parametrize(
    "condition",
    ["accuracy", "accuracy < two", "accuracy = 3", "accuracy < 2 (p > 0.05)", "< 2", "a b: accuracy < 2 or 3", ""],
)
@pytest.mark.parametrize("read", [run_conditions, comparison_conditions])
def test_what_is_not_understood_is_refused_with_an_example(read, condition):
    with pytest.raises(ConfigError, match=r"is not understood: write .*TASK:.* METRIC < NUMBER"):
        read([condition])


@pytest.mark.parametrize(
    ("read", "condition", "message"),
    [
        (run_conditions, "acuracy < 60", "unknown metric 'acuracy'; did you mean accuracy"),
        (comparison_conditions, "tsp < 60", "unknown metric 'tsp'"),
        (run_conditions, "accuracy < 60 (p < 0.05)", "p is of two runs"),
        (comparison_conditions, "speed < 0.9 (p < 0.05)", "p is that of a change of accuracy"),
    ],
)
def test_a_metric_or_a_p_that_does_not_exist_is_refused(read, condition, message):
    with pytest.raises(ConfigError, match=message):
        read([condition])


def test_a_figure_that_is_absent_fails_with_its_reason():
    figures = [cell(metric="accuracy", value=70.0), cell(metric="tpf", value=math.nan), cell(task="math", value=40.0)]
    conditions = run_conditions(["tps < 30", "tpf < 1", "humaneval: accuracy < 1"])
    reasons = [
        (failure.task, failure.value, failure.reason) for failure in failed(verdicts_of_run(conditions, figures))
    ]
    assert reasons == [
        ("gsm8k", None, "tps was not measured (there are accuracy)"),
        ("gsm8k", None, "tpf was not measured (there are accuracy)"),
        ("math", None, "tpf was not measured (there are tps)"),
        ("humaneval", None, "there is no task humaneval (there are gsm8k, math)"),
    ]
    absent = rows(("a", None, 1.0), metric="speed_ratio") + rows(("b", math.nan, 1.0), metric="speed_ratio")
    absent[0]["no_speed"] = "another machine"
    failures = failed(verdicts_of_comparison(comparison_conditions(["speed < 0.9"]), absent))
    assert [failure.reason for failure in failures] == [
        "speed_ratio was not measured (another machine)",
        "speed_ratio was not measured",
    ]


def test_a_row_without_the_figure_fails_although_another_row_of_its_task_has_it():
    figures = [cell(settings={"slot_size": "4"}), cell(settings={"slot_size": "8"}, metric="accuracy", value=70.0)]
    (failure,) = failed(verdicts_of_run(run_conditions(["tps < 1"]), figures))
    assert (failure.task, failure.reason) == ("gsm8k", "tps was not measured (there are accuracy)")


def test_accuracy_is_that_of_programs_too_and_a_benchmark_names_its_task():
    figures = [
        cell(task="mini_mbpp", metric="pass@1", value=50.0),
        cell(task="mini_gsm8k", metric="accuracy", value=5.0),
    ]
    failing = [failure.task for failure in failed(verdicts_of_run(run_conditions(["mbpp: accuracy < 60"]), figures))]
    assert failing == ["mini_mbpp"]


def test_every_metric_of_a_run_can_stand_in_a_condition(write_run):
    run_dir = write_run("a", [sample(number) for number in range(3)], right={"1"})
    figures = [figure for figure in run_measurements([run_dir]) if not math.isnan(figure.value)]
    conditions = run_conditions([f"{figure.metric} >= {figure.value}" for figure in figures])
    assert len(failed(verdicts_of_run(conditions, figures))) == len(figures) > 10


def compared(write_run, *words):
    samples = [sample(number) for number in range(20)]
    a = write_run("a", samples, right=set(map(str, range(20))))
    b = write_run("b", samples, right=set(map(str, range(10))))
    return CliRunner().invoke(app, ["compare", str(a), str(b), *words])


def test_compare_ends_with_a_status_of_its_own_and_says_what_failed(write_run):
    words = ("--fail-if", "accuracy < -2 (p < 0.05)", "--fail-if", "gained > 0")
    done = compared(write_run, *words)
    assert done.exit_code == EXIT_FAILED == 4
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("failed: ")]
    assert line == "failed: accuracy < -2 (p < 0.05): mini_gsm8k: difference is -50, p (Holm) 0.00195"


def test_the_json_says_which_conditions_failed(write_run):
    done = compared(write_run, "--json", "--fail-if", "accuracy < -2 (p < 0.05)")
    content = json.loads(done.stdout)
    assert [row["task"] for row in content["results"]] == ["mini_gsm8k"]
    (failed,) = content["failed"]
    assert (failed["condition"], failed["task"], failed["value"]) == ("accuracy < -2 (p < 0.05)", "mini_gsm8k", -50)


def test_conditions_stand_in_junit_xml_one_for_each_task(write_run, tmp_path):
    words = ("--junit", str(tmp_path / "junit.xml"), "--fail-if", "accuracy < -2", "--fail-if", "gained > 0")
    compared(write_run, *words, "--fail-if", "math: lost > 3")
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("3", "2")
    found = {case.get("name"): (case.get("classname"), [one.get("message") for one in case]) for case in suite}
    assert found["accuracy < -2"] == ("mini_gsm8k", ["difference is -50"])
    assert found["gained > 0"] == ("mini_gsm8k", [])
    assert found["math: lost > 3"] == ("math", ["there is no task math (there are mini_gsm8k)"])


def test_the_worst_of_several_means_decides_and_marks_tell_them_apart(write_run):
    samples = list(of_both_prompts())
    wrong = [one for one in samples if one.prompts == "ours"]
    a, b = write_run("a", samples, right=set("012")), write_run("b", samples, right=set("012"))
    with RunStore.open(b) as store:
        store.append_scores([ScoreRow(key=one.key, item_id=one.item_id, scorer="test", value=0.0) for one in wrong])
    words = ["compare", str(a), str(b), "--fail-if", "mean: accuracy < -50"]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})  # no name is wrapped
    assert done.exit_code == EXIT_FAILED
    assert "failed: mean: accuracy < -50: mean: difference is -100 (prompts=ours)" in done.stderr.splitlines()
    assert "mean (prompts=release)" in done.stdout
    rows = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["results"]
    assert [(row["told_apart_by"], row["difference"]) for row in rows if row["task"] == "mean"] == [
        ("prompts=ours", -100),
        ("prompts=release", 0),
    ]


@pytest.mark.parametrize(
    ("condition", "absent"),
    [
        ("accuracy < -2", ["mini_mbpp"]),
        ("mini_mbpp: accuracy < -2", ["mini_mbpp"]),
        ("mbpp: accuracy < -2", ["mini_mbpp"]),
        ("mean: accuracy < -2", ["mini_mbpp"]),
        ("gsm8k: accuracy < -2", []),
    ],
)
@pytest.mark.parametrize("expected", [None, {"mini_mbpp": 20}])
def test_a_task_that_a_run_lacks_passes_no_condition_but_one_on_other_tasks(write_run, condition, absent, expected):
    of_tasks = [[sample(n, task=f"mini_{name}") for n in range(20)] for name in ("gsm8k", "math", "mbpp")]
    a = write_run("a", itertools.chain(*of_tasks), scored=list(itertools.chain(*of_tasks)))
    there = list(itertools.chain(*of_tasks[:2]))
    b = write_run("b", there, expected=expected, tasks=dict.fromkeys(expected or (), "1"))
    for runs in ((a, b), (b, a)):
        done = CliRunner().invoke(app, ["compare", *map(str, runs), "--fail-if", condition, "--json"])
        failures = [(entry["task"], entry["reason"]) for entry in json.loads(done.stdout)["failed"]]
        reason = "there is no task mini_mbpp (there are mini_gsm8k, mini_math, mean)"
        assert failures == [(task, reason) for task in absent]
        assert done.exit_code == (EXIT_FAILED if absent else 0)


def test_a_control_that_a_run_lacks_is_in_no_mean():
    control = "refusion_humaneval_infilling_single_line_oracle_wrong_suffix"
    compared_rows = rows(("mini_gsm8k", 0.0, 1.0), ("mean", 0.0, 1.0))
    conditions = comparison_conditions(["mean: accuracy < -2", "accuracy < -2"])
    failures = failed(verdicts_of_comparison(conditions, compared_rows, [control]))
    assert [failure.condition for failure in failures] == ["accuracy < -2"]


def test_a_task_that_a_filter_judged_in_neither_run_fails_no_condition(write_run):
    samples = [sample(number, task=f"mini_{name}") for name in ("gsm8k", "mbpp") for number in range(5)]
    runs = [write_run(name, samples) for name in "ab"]
    judged = {"scorer": "test", "metric": f"{BY_FILTER}last", "value": 1.0}
    words, statuses = ["compare", *map(str, runs), "--filter", "last", "--fail-if", "accuracy < -2"], []
    for tasks in (("mini_gsm8k",), ("mini_mbpp",)):
        for run in runs:
            with RunStore.open(run) as store:
                of_tasks = [one for one in samples if one.key.task in tasks]
                store.append_scores([ScoreRow(key=one.key, item_id=one.item_id, **judged) for one in of_tasks])
            statuses.append(CliRunner().invoke(app, words).exit_code)
    assert statuses == [1, 0, EXIT_FAILED, 0]


def test_a_comparison_that_passes_ends_with_0_and_has_no_failures(write_run):
    done = compared(write_run, "--json", "--fail-if", "accuracy < -60")
    assert (done.exit_code, json.loads(done.stdout)["failed"]) == (0, [])


def test_a_condition_is_read_before_anything_else_is_done(tmp_path):
    for words in (["compare", "no", "such"], ["run", "--run-dir", str(tmp_path / "a")]):
        done = CliRunner().invoke(app, [*words, "--fail-if", "acuracy < 60"])
        assert "unknown metric 'acuracy'" in str(done.exception)
    assert not (tmp_path / "a").exists()


def test_a_run_fails_below_a_bound_and_passes_above_it(tmp_path, checkpoint):
    words = ["run", "--model", checkpoint, "--tasks", "mini_gsm8k", "--limit", "1", "--set", "gen_length=8"]
    words += [
        "--set",
        "slot_size=4",
        "--set",
        "block_size=8",
        "--warmup",
        "0",
        "--run-dir",
        str(tmp_path / "a"),
        "--json",
    ]
    statuses = {"tpf < 1000": 4, "tpf > 1000": 0, "mbu < 0": 4}  # without a warm-up there are no speeds
    for condition, status in statuses.items():
        done = CliRunner().invoke(app, [*words, "--fail-if", condition, "--junit", str(tmp_path / "junit.xml")])
        assert done.exit_code == status, done.output
        assert ElementTree.parse(tmp_path / "junit.xml").getroot().get("failures") == str(int(status == 4))
        assert len(json.loads(done.stdout)["failed"]) == (status == 4)
    done = CliRunner().invoke(app, [*words, "--round", "1/2", "--fail-if", "tpf < 1"])
    assert "--round prints none" in str(done.exception)
