"""Means over runs that differ in their seed only."""

import csv
import math
from statistics import stdev

import pytest
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.results_file import read_csv, write_csv
from refusion_eval.results.seeds import means_over_seeds
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
