"""A ratio of speeds is one of systems that took turns, in every view."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.errors import DataError
from refusion_eval.paper.points import against_baseline
from refusion_eval.report.collect import collect
from refusion_eval.results.compare import compare_runs
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.results_file import write_csv
from refusion_eval.store.records import ScoreRow
from refusion_eval.store.run_store import RunStore
from tests.report.conftest import NoSources
from tests.results.conftest import MACHINE, sample

NOT_IN_TURNS = "not measured in turns"


@pytest.fixture
def write_turns(write_run):
    """Writes a run of two right items a turn; `turns` are pairs of a round and the minute in which it was decoded."""

    def write(name, turns, *, seconds=0.5, command=("refusion-eval", "suite"), **changes):
        run = write_run(name, [], turn=None, **changes)
        for number, (of_round, minute) in enumerate(turns):
            created = f"2026-11-01T10:{minute:02}:00.000+00:00"
            samples = [sample(2 * number + place, created=created, seconds=seconds) for place in range(2)]
            with RunStore.open(run) as store:
                process = store.register_process(MACHINE)
                store.note(process, command=command, **({} if of_round is None else {"round": of_round}))
                for one in samples:
                    store.append(replace(one, process_id=process))
                scores = [ScoreRow(key=one.key, item_id=one.item_id, scorer="test", value=1.0) for one in samples]
                store.append_scores(scores)
        return run

    return lambda name, *turns, **changes: write(name, turns, **changes)


@pytest.fixture
def base(write_turns):
    """An autoregressive run of three rounds, whose turns end at minutes 1, 3 and 5."""

    def write(*turns, **changes):
        return write_turns("ar", *turns, seconds=1.0, system="AR", decoder="autoregressive", **changes)

    return write


def refusal(ours, base):
    """Why there is no ratio, which every view says; empty if there is one."""
    (task,) = compare_runs(base, ours).tasks
    of_ours = {one.metric: one for one in run_measurements([ours, base]) if one.run_id == "ours"}
    page = collect([ours, base], NoSources()).index["cells"][0]["metrics"]
    speeds = json.loads(CliRunner().invoke(app, ["speed", str(ours), str(base), "--json"]).stdout)
    ratios = [task.speed and task.speed.value, *(of["speedup"].value if "speedup" in of else None for of in [of_ours])]
    ratios += [page.get("speedup", {}).get("value"), *(row.get("speedup") for row in speeds if row["run_id"] == "ours")]
    assert ratios == [pytest.approx(2.0) if not task.no_speed else None] * 4
    if task.no_speed:
        assert f"no speedup over ar: {task.no_speed}" in of_ours["tps"].note
        with pytest.raises(DataError, match="in turns"):
            against_baseline([ours, base], "gsm8k")
    else:
        assert len(against_baseline([ours, base], "gsm8k")) == 2
    return task.no_speed


def test_rounds_in_turns_have_a_ratio(write_turns, base):
    ours = write_turns("ours", (1, 0), (2, 2), (3, 4))
    assert refusal(ours, base((1, 1), (2, 3), (3, 5))) == ""


def test_a_retried_sample_of_an_earlier_round_changes_nothing(write_turns, base):
    ours = write_turns("ours", (1, 0), (2, 2), (1, 3), (2, 4), (3, 6))
    assert refusal(ours, base((1, 1), (1, 3), (2, 5), (2, 5), (3, 7))) == ""


def test_rounds_one_system_after_the_other_have_none(write_turns, base):
    ours = write_turns("ours", (1, 0), (2, 1), (3, 2))
    assert NOT_IN_TURNS in refusal(ours, base((1, 3), (2, 4), (3, 5)))


def test_a_system_that_failed_and_was_continued_later_took_no_turns(write_turns, base):
    ours = write_turns("ours", (1, 0), (2, 2), (3, 4))
    assert NOT_IN_TURNS in refusal(ours, base((1, 1), (2, 5), (3, 6)))


def test_other_numbers_of_rounds_are_not_in_turns(write_turns, base):
    ours = write_turns("ours", (1, 0), (2, 2), (2, 4))
    assert "one was timed in 3 rounds and the other in 2" in refusal(ours, base((1, 1), (2, 3), (3, 5)))


def test_two_runs_in_one_go_each_have_none_and_the_advice_names_commands(write_turns, base):
    refused = refusal(write_turns("ours", (None, 0)), base((None, 1)))
    assert NOT_IN_TURNS in refused
    assert "suite, sweep, protocol run and eval.sh take turns" in refused


def test_one_round_is_in_turns_only_within_one_command(write_turns, base):
    ours, ar = write_turns("ours", (1, 0)), base((1, 1))
    assert refusal(ours, ar) == ""
    other = write_turns("other", (1, 0), command=["refusion-eval", "run", "--round", "1/1"])
    (task,) = compare_runs(ar, other).tasks
    assert NOT_IN_TURNS in task.no_speed


def test_a_figure_of_files_needs_as_many_rounds_of_each(write_turns, base, tmp_path):
    runs = [write_turns("ours", (1, 0), (2, 2)), base((1, 1), (2, 3))]
    write_csv(run_measurements(runs), tmp_path / "two.csv")
    assert len(against_baseline([tmp_path / "two.csv"], "gsm8k")) == 2
    write_csv(run_measurements([write_turns("one", (1, 0))]), tmp_path / "one.csv")
    with pytest.raises(DataError, match="do not say that the systems took turns"):
        against_baseline([tmp_path / "one.csv", runs[1]], "gsm8k")


def test_a_figure_leaves_out_what_took_no_turns_and_its_caption_says_so(write_turns, base):
    runs = [
        write_turns("ours", (1, 0), (2, 2)),
        base((1, 1), (2, 3)),
        write_turns("late", (1, 7), (2, 8), system="Late"),
    ]
    points = against_baseline(runs, "gsm8k")
    assert [point.label for point in points] == ["AR", "ReFusion"]
    assert "late left out (the two were not measured in turns" in points[0].note
