"""Each caution has one maker, and every view that shows a number shows it."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.report.collect import collect
from refusion_eval.report.leaderboard import leaderboard, read_placed
from refusion_eval.results.cautions import Conditions, cautions, sentences
from refusion_eval.results.measurement import RowKey, have_fewer
from refusion_eval.results.render import csv_text
from refusion_eval.results.results_file import measurement_cells, read_csv
from tests.report.conftest import NoSources
from tests.results.conftest import cell, sample

# What a run has of each kind of caution -> the mark, and a part of the sentence.
KINDS = {
    "errors": ({"errors": 3, "num_refused": 1}, "2 errors", "2 samples"),
    "refused": ({"errors": 3, "num_refused": 1}, "1 refused", "1 prompts were refused"),
    "unfinished": ({"unfinished": "2 of 4"}, "unfinished 2 of 4", "is unfinished: mini_math 2 of 4"),
    "limited": ({"limited": "3 of 5"}, "limited 3 of 5", "Limited: mini_math 3 of 5"),
    "no rows": ({"missing": "get them"}, "no rows", "no rows of it: get them"),
    "no isolation": ({"isolated": False}, "no isolation", "without isolation"),
    "cut short": ({"num_cut": 7}, "7 cut short", "Cut short: responses"),
    "one answer": ({"one_answer": "96 of 100 are C"}, "one answer 96 of 100 are C", "One answer: most"),
    "collapsed": ({"collapsed": "3 of 9: 3 empty"}, "collapsed 3 of 9", "Collapsed: answers that are empty"),
    "other prompts": ({"prompts": "other"}, "other prompts", "Other prompts: neither"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_caution_has_a_mark_and_a_sentence(kind):
    changes, mark, sentence = KINDS[kind]
    conditions = Conditions(task="mini_math", **changes)
    assert mark in [one.label for one in cautions(conditions)]
    assert any(sentence in text for text in sentences([conditions]))
    assert cautions(Conditions()) == sentences([Conditions()]) == []


def test_what_is_counted_is_counted_once_a_task_and_not_in_means():
    of_task = Conditions(place=("run", "gsm8k"), errors=2)
    other, mean = of_task._replace(place=("run", "math")), of_task._replace(is_mean=True, place=("run", "mean"))
    (text,) = sentences([of_task, of_task._replace(is_speed=True), other, mean])
    assert text.startswith("4 samples are errors")


def test_a_measurement_from_a_file_has_the_cautions_of_the_run(tmp_path):
    written = cell(task="mini_math", mini=True, errors=3, num_refused=1, num_cut=2, num_unscored=1, scored=False)
    written = replace(written, notes=("judged twice",))
    (tmp_path / "results.csv").write_text(csv_text(*measurement_cells([written])))
    (found,) = read_csv(tmp_path / "results.csv")
    assert [one.label for one in found.cautions] == ["2 errors", "1 refused", "1 unscored", "2 cut short"]
    assert (found.notes, found.note) == (written.notes, written.note)


def test_means_over_tasks_with_other_prompts_are_of_other_items():
    ours, release = (RowKey("mean", "", False, prompts).source for prompts in ("ours", "release"))
    assert have_fewer([(ours, 3), (release, 4)]) == [False, False]
    assert have_fewer([(ours, 3), (ours, 4)]) == [True, False]
    assert RowKey("gsm8k", "1", False, "ours").source == RowKey("gsm8k", "1", False, "release").source


def test_a_row_has_fewer_items_than_another_only_if_it_has_some():
    lines = [("gsm8k", 0), ("gsm8k", 2), ("gsm8k", 3), ("math", 2)]
    assert have_fewer(lines) == [False, True, False, False]


def test_means_over_tasks_that_were_asked_with_other_prompts_are_two_points(tmp_path):
    means = [cell(task="mean", prompts=prompts, task_version="1") for prompts in ("ours", "release")]
    (tmp_path / "results.csv").write_text(csv_text(*measurement_cells(means)))
    assert sorted(one.measurement.prompts for one in read_placed([tmp_path / "results.csv"])) == ["ours", "release"]


def test_views_say_what_failed(write_run, tmp_path):
    broken = {"error": "it broke", "trace": None, "prefill_seconds": None}
    good = [sample(item) for item in range(3)]
    run = write_run("run", [*good, sample(3, **broken)], scored=good)
    other = write_run("other", good, system="Other")

    def said(*words):
        done = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False, env={"COLUMNS": "300"})
        return " ".join(done.stdout.split())

    for text in (said("table", run), said("speed", run), said("compare", run, other)):
        assert "1 samples are errors and in no figure" in text
    for words in (("paper-table", "1"), ("export", "--format", "hf")):
        said(words[0], *words[1:], run, "--out", tmp_path / words[0])
        written = " ".join(path.read_text() for path in (tmp_path / words[0]).rglob("*.md"))
        assert "1 samples are errors and in no figure" in " ".join(written.split())
    marks = [
        mark["label"]
        for of in (collect([run], NoSources()).index, leaderboard(read_placed([run])))
        for mark in of["cells"][0]["marks"]
    ]
    assert marks.count("1 errors") == 2
    assert json.loads(said("table", run, "--json"))[0]["errors"] == 1
