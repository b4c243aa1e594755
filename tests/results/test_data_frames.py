"""Runs as data frames."""

import json
import math
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import refusion_eval.results as results
from refusion_eval.cli import app
from refusion_eval.errors import StoreError
from refusion_eval.results.data_frames import SAMPLE_COLUMNS
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.render import csv_text
from refusion_eval.results.results_file import write_csv
from tests.results.conftest import sample

RUNNER = CliRunner()


@pytest.fixture
def run(write_run):
    broken = sample(2, error="out of memory", num_tokens=0, num_forwards=0, trace=None)
    samples = [sample(0), sample(1), broken]
    return write_run("run", samples, right={"0"}, scored=samples[:1])


def test_every_sample_is_a_row_with_what_was_recorded_of_it(run):
    frame = results.load(run)
    assert list(frame.columns) == list(SAMPLE_COLUMNS)
    assert list(frame["item_id"]) == ["0", "1", "2"]
    first, unscored, failed = (row for _, row in frame.iterrows())
    assert (first["run_id"], first["system"], first["decoder"], first["benchmark"]) == (
        "run",
        "ReFusion",
        "refusion",
        "gsm8k",
    )
    assert (first["passed"], first["mini"], first["tokens"], first["tpf"]) == (True, True, 6, 2.0)
    assert json.loads(first["settings"]) == {"slot_size": 4}
    assert frame["passed"].isna().tolist() == [False, True, True]
    assert unscored["verdict"] is None
    assert (failed["error"], failed["forwards"]) == ("out of memory", 0)


def test_a_response_may_hold_what_utf8_cannot_encode(write_run):
    run = write_run("run", [sample(0, text="\ud800 lone")], scored=[])
    assert results.load(run)["text"].tolist() == ["\ud800 lone"]
    assert csv_text(["text"], [["\ud800"]]) == "text\n\\ud800\n"


def test_exported_lines_are_the_rows_of_the_frame(run, write_run, tmp_path):
    other = write_run("other", [sample(0, text="\ud800 lone\nline")], system="AR")
    runs = [str(run), str(other)]
    printed = RUNNER.invoke(app, ["export", *runs])
    said = RUNNER.invoke(app, ["export", *runs, "--out", str(tmp_path / "new" / "samples.jsonl")])
    assert said.stdout.endswith("samples.jsonl (4 samples)\n")
    assert (tmp_path / "new" / "samples.jsonl").read_text() == printed.stdout
    exported = [json.loads(line) for line in printed.stdout.splitlines()]
    assert [row.pop("settings") for row in exported] == [{"slot_size": 4}] * 4
    frame = results.load(runs).drop(columns="settings").astype(object)
    assert exported == frame.where(frame.notna(), None).to_dict("records")


def test_several_runs_stand_one_below_the_other(run, write_run):
    other = write_run("other", [sample(0, seconds=1.0)], right={"0"}, system="AR")
    frame = results.load([run, other])
    assert frame.groupby("run_id")["seconds"].count().to_dict() == {"other": 1, "run": 3}


def test_every_figure_is_a_row_with_its_interval_and_facts(run, tmp_path):
    frame = results.figures(run).set_index("metric")
    accuracy = frame.loc["accuracy"]
    assert (accuracy["n"], accuracy["errors"], math.isnan(accuracy["value"])) == (0, 1, True)  # not all is scored
    assert (accuracy["scored"], accuracy["isolated"], accuracy["fused"], accuracy["complete"]) == (
        False,
        True,
        False,
        False,
    )
    assert accuracy["system_key"] == "refusion"
    assert accuracy["setting_slot_size"] == "4"
    tpf = frame.loc["tpf"]
    assert tpf["ci_low"] <= tpf["value"] <= tpf["ci_high"]
    write_csv(run_measurements([run]), tmp_path / "table.csv")
    header = (tmp_path / "table.csv").read_text().splitlines()[0].split(",")
    assert header.pop() == "scored"  # a file has a column of a fact only where the fact is unusual
    assert header == list(results.figures(run).columns[: len(header)])


def test_figures_of_several_batch_sizes_or_of_no_sample_have_a_row(write_run):
    several = write_run("several", [sample(0, batch_size=1), sample(1, batch_size=8)])
    assert set(results.figures(several)["batch_size"]) == {"1", "1|8"}
    failed = sample(0, error="out of memory", num_tokens=0, num_forwards=0, trace=None)
    frame = results.figures(write_run("failed", [failed], scored=[]))
    assert list(frame["batch_size"]) == [""]
    assert results.figures(write_run("one", [sample(0)]))["batch_size"].dtype == "int64"


def test_no_runs_give_frames_without_rows_and_no_run_is_refused(tmp_path):
    assert results.load([]).empty
    assert results.figures([]).empty
    with pytest.raises(StoreError, match="holds no records"):
        results.load(tmp_path)


def test_pandas_is_loaded_only_by_those_who_ask_for_a_frame():
    code = "import sys, refusion_eval.results.measured, refusion_eval.results as r; print('pandas' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
