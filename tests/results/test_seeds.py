"""Means over runs that differ in their seed only."""

import csv
import json
import math
from statistics import stdev

import pytest
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.report.leaderboard import leaderboard, read_placed
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.results_file import read_csv, write_csv
from refusion_eval.results.seeds import means_over_seeds
from refusion_eval.store.manifest import Hardware
from tests.results.conftest import sample

SERVED = {"address": "localhost:8000", "name": "vLLM", "version": "1", "model": "m1"}


@pytest.fixture
def of_seeds(write_run):
    """Writes a run of ten items with a seed, of which the first ones are right."""

    def write(name, seed, num_right, *, prompt="prompt", seconds=0.5, run=None, **settings):
        in_force = {"seed": seed, **settings}
        samples = [sample(item, settings=in_force, prompt=f"{prompt}-{item}", seconds=seconds) for item in range(10)]
        return write_run(name, samples, right={str(item) for item in range(num_right)}, **(run or {}))

    return write


def command(*words):
    done = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def of_two_types(of_seeds):
    """Runs of one system with the seeds 1 and 2 in either type: 20 % in float32, in bfloat16 60 % at half the speed."""
    return [
        of_seeds(f"{dtype}_{seed}", seed, num_right, seconds=seconds, run={"dtype": dtype})
        for dtype, num_right, seconds in (("float32", 2, 0.5), ("bfloat16", 6, 1.0))
        for seed in (1, 2)
    ]


def test_runs_of_several_seeds_have_a_mean_and_its_spread(of_seeds):
    runs = [of_seeds(f"r{seed}", seed, num_right) for seed, num_right in ((1, 4), (2, 6), (3, 8))]
    (score,) = [one for one in means_over_seeds(run_measurements(runs)) if one.metric == "accuracy"]
    assert (score.run_id, score.num_seeds, score.n, score.samples) == ("mean of 3 seeds", 3, 10, 30)
    assert (score.value, score.seed_sd) == pytest.approx((60, stdev([40, 60, 80])))
    assert math.isnan(score.ci_low)
    assert score.notes[0] == "mean over the seeds 1, 2, 3 (r1, r2, r3)"


def test_runs_that_differ_in_more_than_the_seed_have_no_mean(of_seeds):
    first = of_seeds("a", 1, 4, tau_slot=0.5)
    for other in (of_seeds("b", 2, 6, tau_slot=0.9), of_seeds("c", 1, 6, tau_slot=0.5)):
        assert means_over_seeds(run_measurements([first, other])) == []
    again = [first, of_seeds("d", 2, 6, tau_slot=0.5), of_seeds("e", 2, 6, tau_slot=0.5)]
    assert means_over_seeds(run_measurements(again)) == []


def test_runs_with_other_numbers_of_samples_have_no_mean(write_run):
    def of_seed(seed, numbers, failed=()):
        texts = [
            sample(item, number=number, settings={"seed": seed}) for item in range(10) for number in range(numbers)
        ]
        return write_run(f"seed{seed}", [text for place, text in enumerate(texts) if place not in failed])

    two, four, less = of_seed(1, 2), of_seed(2, 4), of_seed(3, 2, failed=(5,))
    assert means_over_seeds(run_measurements([two, four])) == []
    assert {one.samples for one in means_over_seeds(run_measurements([two, less])) if one.metric == "accuracy"} == {39}


def test_runs_without_any_good_sample_have_no_mean_of_their_score(write_run):
    failed = {"error": "no room", "num_tokens": 0, "num_forwards": 0, "trace": None}
    runs = [write_run(f"seed{seed}", [sample(0, settings={"seed": seed}, **failed)], scored=[]) for seed in (1, 2)]
    figures = run_measurements(runs)
    assert {figure.metric for figure in figures} == {"accuracy"}
    assert means_over_seeds(figures) == []


def test_the_table_has_a_line_of_the_mean_in_every_form(of_seeds, tmp_path):
    runs = [str(of_seeds(f"r{seed}", seed, seed)) for seed in (2, 4)]
    options = ["--csv", str(tmp_path / "t.csv"), "--latex", str(tmp_path / "t.tex")]
    done = CliRunner().invoke(app, ["table", *runs, *options], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "ReFusion (mean of 2 seeds)" in done.output
    assert "30.0 \u00b1 14.1" in done.output
    assert "standard deviation over runs that differ in their seed only" in " ".join(done.output.split())
    assert r"30.0 $\pm$ 14.1" in (tmp_path / "t.tex").read_text(encoding="utf-8")
    with (tmp_path / "t.csv").open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["metric"] == "accuracy"]
    assert {row["run_id"]: (row["num_seeds"], row["seed_sd"]) for row in rows}["mean of 2 seeds"] == ("2", "14.1421")
    read = read_csv(tmp_path / "t.csv")
    write_csv(read, tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "t.csv").read_bytes()


OF_FLOAT32, OF_BFLOAT16 = (f"mean of 2 seeds: {dtype}_1, {dtype}_2" for dtype in ("float32", "bfloat16"))


def test_two_means_of_one_system_stand_in_the_table_and_name_their_runs(of_two_types):
    lines = [line for line in command("table", *of_two_types).splitlines() if "(mean of" in line]
    accuracies = {name: "20.0" in line for name in (OF_FLOAT32, OF_BFLOAT16) for line in lines if f"({name})" in line}
    assert (len(lines), accuracies) == (2, {OF_FLOAT32: True, OF_BFLOAT16: False})
    rows = json.loads(command("table", *of_two_types, "--json"))
    scores = {row["run_id"]: row["value"] for row in rows if row["metric"] == "accuracy" and "mean of" in row["run_id"]}
    assert scores == pytest.approx({OF_FLOAT32: 20, OF_BFLOAT16: 60})


def test_two_means_of_one_system_are_read_from_their_file_again(of_two_types, tmp_path):
    command("table", *of_two_types, "--csv", tmp_path / "t.csv")
    speeds = {row["run_id"]: row["tps"] for row in json.loads(command("speed", tmp_path / "t.csv", "--json"))}
    assert (speeds[OF_FLOAT32], speeds[OF_BFLOAT16]) == pytest.approx((12, 6))
    text = command("speed", tmp_path / "t.csv")
    assert all(f"ReFusion [{name}]" in text for name in (OF_FLOAT32, OF_BFLOAT16))
    board = leaderboard(read_placed([tmp_path / "t.csv"]))
    of_runs = {run["id"]: run["number"] for run in board["runs"]}
    scores = {cell["run"]: cell["metrics"]["accuracy"]["value"] for cell in board["cells"]}
    assert (scores[of_runs[OF_FLOAT32]], scores[of_runs[OF_BFLOAT16]]) == pytest.approx((20, 60))


def test_the_mean_speeds_of_two_machines_both_stand_in_the_table(of_seeds):
    there = Hardware(cpu="Other CPU", cores=2, threads=1)
    runs = [of_seeds(f"here_{seed}", seed, 4) for seed in (1, 2)]
    runs += [of_seeds(f"there_{seed}", seed, 4, seconds=1.0, run={"hardware": there}) for seed in (3, 4)]
    means = means_over_seeds(run_measurements(runs))
    speeds = {one.run_id: one.value for one in means if one.metric == "tps"}
    assert speeds == {"mean of 2 seeds: here_1, here_2": 12, "mean of 2 seeds: there_3, there_4": 6}
    assert {one.run_id for one in means if one.metric == "accuracy"} == {"mean of 4 seeds"}
    text = command("table", *runs)
    assert all(f"ReFusion ({name})" in text for name in speeds)


def test_means_under_other_settings_are_told_apart_by_these(of_seeds):
    runs = [of_seeds(f"r{seed}_{tau}", seed, 4, tau_slot=tau) for seed in (1, 2) for tau in (0.5, 0.9)]
    text = command("table", *runs)
    assert all(f"ReFusion (mean of 2 seeds, tau_slot={tau})" in text for tau in (0.5, 0.9))


def of_revision(revision):
    return {"run": {"checkpoint_hash": "", "checkpoint_revision": revision}}


def with_settings(**settings):
    return {"run": {"settings": settings}}


@pytest.mark.parametrize(
    ("of_one", "of_other"),
    [
        ({}, {"run": {"checkpoint_hash": "another"}}),
        (of_revision("v1"), of_revision("v2")),
        (with_settings(server=SERVED), with_settings(server={**SERVED, "model": "m2"})),
        (with_settings(enable_thinking=False), with_settings(enable_thinking=True)),
        ({}, {"prompt": "thinking"}),
    ],
    ids=["weights", "revision", "served model", "thinking", "prompts"],
)
def test_runs_of_other_weights_or_prompts_have_no_mean(of_seeds, of_one, of_other):
    runs = [of_seeds("one", 1, 2, **of_one), of_seeds("other", 2, 6, **of_other)]
    assert means_over_seeds(run_measurements(runs)) == []
    again = of_seeds("again", 3, 4, **of_one)
    assert {one.num_seeds for one in means_over_seeds(run_measurements([*runs, again]))} == {2}


def test_the_seed_of_the_command_line_is_no_other_difference(of_seeds):
    runs = [
        of_seeds(f"r{seed}", seed, 4, run={"seed": seed, "settings": {"model_args": {"seed": seed, "gen_length": 64}}})
        for seed in (1, 2)
    ]
    assert {one.run_id for one in means_over_seeds(run_measurements(runs))} == {"mean of 2 seeds"}
