"""Runs that an earlier version of the package began."""

import json
import shutil
from pathlib import Path

import pytest

import refusion_eval
from refusion_eval import cli
from refusion_eval.results.measured import run_measurements
from refusion_eval.store.run_reader import RunReader

DATA = Path(__file__).resolve().parents[1] / "data"
CHECKPOINT, ROWS = str(DATA / "parity" / "tiny"), str(DATA / "run_0.1.0_rows")
COMMAND = ["run", "--model", CHECKPOINT, "--decoder", "autoregressive", "--attention", "sdpa", "--warmup", "0"]
COMMAND += ["--tasks", "gsm8k", "--data", ROWS, "--set", "gen_length=32"]


@pytest.fixture
def run_of_0_1_0(tmp_path):
    return Path(shutil.copytree(DATA / "run_0.1.0", tmp_path / "run"))


def samples(directory):
    with RunReader.open(directory) as run:
        return list(run.samples())


def test_a_run_of_0_1_0_continues_with_its_samples_and_verdicts(run_of_0_1_0):
    recorded = samples(run_of_0_1_0)
    cli.app([*COMMAND, "--limit", "3", "--run-dir", str(run_of_0_1_0)], standalone_mode=False)
    assert len(recorded) == 2
    assert samples(run_of_0_1_0)[:2] == recorded
    figures = {figure.metric: figure for figure in run_measurements([run_of_0_1_0]) if figure.task == "refusion_gsm8k"}
    assert figures["accuracy"].n == 3
    assert figures["accuracy"].finished
    assert figures["accuracy"].scored


def test_a_run_that_this_version_repeats_gives_the_texts_of_0_1_0(run_of_0_1_0, tmp_path):
    again = tmp_path / "again"
    cli.app([*COMMAND, "--limit", "2", "--run-dir", str(again)], standalone_mode=False)
    assert [sample.text for sample in samples(again)] == [sample.text for sample in samples(run_of_0_1_0)]
    assert json.loads((again / "run.json").read_text())["manifest"]["package_version"] == refusion_eval.__version__
