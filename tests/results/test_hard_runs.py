"""Every view of a run that is hard to show has the figures, and counts the cautions, of the facts of its records.

The hard runs have both kinds of prompts, two machines, two seeds with refused prompts, or texts that nothing judged.
"""

import csv
import json
from collections import Counter

import pytest
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.exports import every_eval_ever, lm_eval
from refusion_eval.exports.source import read_exported
from refusion_eval.lm_eval_plugin.hooks import answer_metrics
from refusion_eval.report.collect import collect
from refusion_eval.report.leaderboard import leaderboard, read_placed
from refusion_eval.results.compare import compare_runs
from refusion_eval.results.facts import read_facts
from refusion_eval.results.measured import run_measurements
from refusion_eval.store.manifest import Hardware
from refusion_eval.store.records import REFUSED, ScoreRow
from refusion_eval.store.run_store import RunStore
from tests.report.conftest import LetterSources, NoSources
from tests.results.conftest import sample

OTHER_MACHINE = Hardware(cpu="Other CPU", cores=2, threads=1)
TASKS = ("gsm8k", "math")


def asked(item, seconds=0.5, **changes):
    return sample(item, seconds=seconds, **changes)


def of_both_prompts():
    """Three items of two tasks by the prompts of this project, and slower ones by those of the release."""
    for task in TASKS:
        for name, prompts, seconds in (("refusion_", "ours", 0.5), ("refusion_release_", "release", 2.0)):
            for item in range(3):
                changes = {"task": f"{name}{task}", "benchmark": task, "prompts": prompts}
                yield asked(item, seconds, **changes)


def refusing(seed, hardware=None):
    """Ten items of a seed, of which the last is refused."""
    for item in range(10):
        refused = {"error": "too long", "stop": REFUSED, "trace": None} if item == 9 else {}
        yield asked(item, settings={"seed": seed}, **refused)


@pytest.fixture
def hard(write_run):
    """The hard runs by name."""
    unjudged = write_run("unjudged", [asked(i) for i in range(3)], right={"0", "1", "2"}, scored=[asked(0), asked(1)])
    with RunStore.open(unjudged) as store:
        verdict = {"value": 0.0, "verdict": "error"}
        store.append_scores([ScoreRow(key=asked(2).key, item_id="2", scorer="test", **verdict)])
    seeds = [list(refusing(seed)) for seed in (1, 2)]
    good = [[one for one in of_seed if one.error is None] for of_seed in seeds]
    elsewhere = [asked(i, 1.0, settings={"seed": 3}) for i in range(9)]
    return {
        "prompts": write_run("prompts", list(of_both_prompts()), right={"0", "1"}),
        "seed1": write_run("seed1", seeds[0], right={"0", "1"}, scored=good[0]),
        "seed2": write_run("seed2", seeds[1], right={"0"}, scored=good[1]),
        "elsewhere": write_run("elsewhere", elsewhere, right={"0", "1"}, hardware=OTHER_MACHINE),
        "unjudged": unjudged,
    }


def command(*words):
    done = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False, env={"COLUMNS": "400"})
    assert done.exit_code == 0, done.output
    return done.stdout


def rows_of(*words):
    return json.loads(command(*words, "--json"))


def figures_of(run, metric):
    """Task (means by their prompts) -> value, as computed from the facts."""
    entries = [one for one in run_measurements([run]) if one.metric == metric]
    return {named(one): one.value for one in entries}


def named(one):
    return f"mean {one.prompts}" if one.is_mean else one.task


def test_speeds_by_hand_are_those_of_the_measurements(hard):
    assert figures_of(hard["prompts"], "tps") == {
        **{f"refusion_{task}": 12.0 for task in TASKS},
        **{f"refusion_release_{task}": 3.0 for task in TASKS},
        "mean ours": 12.0,
        "mean release": 3.0,
    }


@pytest.mark.parametrize("name", ["prompts", "seed1", "elsewhere", "unjudged"])
def test_every_view_of_a_run_has_each_figure_once(hard, name, tmp_path):
    run = hard[name]
    wanted = Counter(round(value, 6) for value in figures_of(run, "tps").values())
    of_tasks = Counter(
        round(one.value, 6) for one in run_measurements([run]) if one.metric == "tps" and not one.is_mean
    )
    page = collect([run], NoSources()).index["cells"]
    board = leaderboard(read_placed([run]))["cells"]
    exported = [
        file for file in every_eval_ever.write(read_exported([run]), tmp_path / "eee") if file.suffix == ".json"
    ]
    of_files = [json.loads(file.read_text())["evaluation_results"] for file in exported]
    (of_lm_eval,) = lm_eval.write(read_exported([run]), tmp_path / "lm_eval")
    views = {
        "table": [row["value"] for row in rows_of("table", run) if row["metric"] == "tps"],
        "speed": [row["tps"] for row in rows_of("speed", run)],
        "page": [cell["metrics"]["tps"]["value"] for cell in page],
        "leaderboard": [cell["metrics"]["tps"]["value"] for cell in board],
    }
    assert {view: Counter(round(value, 6) for value in values) for view, values in views.items()} == dict.fromkeys(
        views, wanted
    )
    exports = {
        "every-eval-ever": [
            one["score_details"]["score"] for file in of_files for one in file if one["evaluation_result_id"] == "tps"
        ],
        "lm-eval": [of["tps,none"] for of in json.loads(of_lm_eval.read_text())["results"].values()],
    }
    for values in exports.values():
        assert Counter(round(value, 6) for value in values) == of_tasks


def test_the_printed_tables_tell_the_means_of_both_prompts_apart(hard):
    for words in ("table", "speed"):
        text = command(words, hard["prompts"])
        assert "prompts=ours" in text
        assert "prompts=release" in text


def test_every_form_of_the_table_of_speeds_tells_both_prompts_apart(hard, tmp_path):
    command("speed", hard["prompts"], "--csv", tmp_path / "speed.csv")
    with (tmp_path / "speed.csv").open(newline="", encoding="utf-8") as stream:
        of_file = list(csv.DictReader(stream))
    for rows in (rows_of("speed", hard["prompts"]), of_file):
        marks = [(row["task"], row["told_apart_by"]) for row in rows]
        assert sorted(marks) == [
            (task, f"prompts={prompts}") for task in ("average", *TASKS) for prompts in ("ours", "release")
        ]
    assert {row["told_apart_by"] for row in rows_of("speed", hard["seed1"])} == {""}


def test_compare_has_the_means_that_the_table_has(hard):
    lines = compare_runs(hard["prompts"], hard["prompts"]).lines
    means = [line for line in lines if line.parts]
    of_table = [one for one in run_measurements([hard["prompts"]]) if one.is_mean and one.metric == "accuracy"]
    assert [len(line.parts) for line in means] == [one.num_tasks for one in of_table] == [2, 2]
    assert sorted(line.accuracies[0] for line in means) == pytest.approx(sorted(one.value for one in of_table))


def test_a_mean_over_seeds_sums_what_its_runs_count_and_is_counted_once(hard):
    seeds = [hard["seed1"], hard["seed2"]]
    refused = sum(task.num_refused for run in seeds for task in read_facts(run).tasks)
    means = [row for row in rows_of("table", *seeds) if row["run_id"] == "mean of 2 seeds"]
    assert {row["num_refused"] for row in means} == {refused} == {2}
    text = " ".join(command("table", *seeds).split())
    assert "2 prompts were refused" in text
    assert "samples are errors" not in text


def test_speeds_of_two_machines_have_no_mean_over_seeds_and_scores_have(hard):
    seeds = [hard["seed1"], hard["elsewhere"]]
    metrics = {row["metric"]: row for row in rows_of("table", *seeds) if row["run_id"] == "mean of 2 seeds"}
    assert "accuracy" in metrics
    assert not {"tps", "latency_mean"} & metrics.keys()
    labels = sorted(label for run in seeds for task in read_facts(run).tasks for label in task.hardware)
    assert metrics["accuracy"]["hardware"] == " | ".join(labels)


@pytest.mark.parametrize("name", ["prompts", "seed1", "unjudged"])
def test_a_run_and_its_table_are_one_set_of_points(hard, name, tmp_path):
    command("table", hard[name], "--csv", tmp_path / "results.csv")
    alone, both = (
        leaderboard(read_placed(of))["cells"] for of in ([hard[name]], [hard[name], tmp_path / "results.csv"])
    )
    assert len(both) == len(alone)


def test_a_text_that_nothing_could_judge_is_wrong_in_every_view(hard):
    verdicts = [sample.verdict for task in read_facts(hard["unjudged"]).tasks for sample in task.samples]
    of_lm_eval = [{"passed": one.value > 0, "verdict": one.verdict or "correct", "extracted": "x"} for one in verdicts]
    share = 100 * answer_metrics({}, [of_lm_eval])["acc"]
    assert share == pytest.approx(200 / 3)
    values = [row["value"] for row in rows_of("table", hard["unjudged"]) if row["metric"] == "accuracy"]
    (page,) = (
        cell["metrics"]["accuracy"]["value"] for cell in collect([hard["unjudged"]], LetterSources()).index["cells"]
    )
    (line,) = compare_runs(hard["unjudged"], hard["unjudged"]).lines
    assert [*values, page, line.accuracies[0]] == pytest.approx([share] * 3, abs=0.01)


def test_marks_of_page_and_leaderboard_are_those_of_the_table(write_run):
    samples = [asked(i, stop="length", prompts="other", server={"template": "none"}) for i in range(2)]
    run = write_run("marked", samples, expected={"mini_gsm8k": 3}, whole={"mini_gsm8k": 9})
    more = write_run("more", [asked(i) for i in range(4)])
    text = command("table", run, more)
    wanted = ["unfinished 2 of 3", "limited 3 of 9", "cut short", "no chat template", "other prompts", "fewer items"]
    indexes = (collect([run, more], NoSources()).index, leaderboard(read_placed([run, more])))
    for index in indexes:
        cell = next(cell for cell in index["cells"] if cell["metrics"]["tps"]["n"] == 2)
        labels = " ".join(mark["label"] for mark in cell["marks"])
        assert [word for word in wanted if word not in labels or word not in text] == []
