"""Trackers in their offline modes, each with its own package where that is installed; and what no tracker is told."""

import json
import sqlite3

import pytest

from refusion_eval.errors import ConfigError
from refusion_eval.evaluation import tracking
from refusion_eval.evaluation.loop import evaluate
from refusion_eval.results.measured import run_measurements
from refusion_eval.runs.model_args import parse_model_args

TASK = "mini_gsm8k"


class Recorder:
    """A tracker that keeps what it is told; `fails_at` counts the calls before one that fails."""

    def __init__(self, fails_at=None):
        self.opened, self.logged, self.num_ended, self._fails_at = [], [], 0, fails_at

    def open(self, name, identity, facts):
        self.opened.append((name, identity, facts))
        return self

    def log(self, figures, step):
        if len(self.logged) == self._fails_at:
            raise OSError("no server")
        self.logged.append((step, figures))

    def end(self):
        self.num_ended += 1


@pytest.fixture
def recorder(monkeypatch):
    def install(**options):
        made = Recorder(**options)
        monkeypatch.setitem(tracking.TRACKERS, "wandb", made.open)
        monkeypatch.setattr(tracking, "check_tracker", lambda name: None)
        monkeypatch.setattr("refusion_eval.evaluation.loop.check_tracker", lambda name: None)
        return made

    return install


def run(folder, limit, tracker="wandb"):
    given = {"pretrained": "embedded", "decoder": "autoregressive", "run_dir": str(folder), "gen_length": 8}
    outcome = evaluate(parse_model_args({**given, "tracker": tracker}), [TASK], limit=limit)
    assert outcome.is_complete
    return {f"{entry.task}/{entry.metric}": entry.value for entry in run_measurements([folder])}


def test_a_tracker_is_told_of_each_sample_and_at_the_end_of_the_figures_of_the_table(recorder, tmp_path):
    told = recorder()
    measured = run(tmp_path / "run", 2)
    (name, identity, facts), *others = told.opened
    assert (name, others, told.num_ended) == ("run", [], 1)
    assert (facts["decoder"], facts["seed"], facts["arguments.decoder"]) == ("autoregressive", 0, "autoregressive")
    assert "arguments.tracker" not in facts
    *samples, (step, figures) = told.logged
    assert [(step, sorted(costs)) for step, costs in samples] == [
        (number, [f"{TASK}/sample_{cost}" for cost in ("forwards", "seconds", "tokens")]) for number in (1, 2)
    ]
    assert step == 3
    assert {key: figures[key] for key in measured} == measured
    assert (figures[f"{TASK}/samples_asked_for"], figures[f"{TASK}/samples_of_task"]) == (2, 100)
    assert all(type(value) is float for _, costs in told.logged for value in costs.values())
    run(tmp_path / "run", 3)
    assert told.opened[1][:2] == ("run", identity)  # goes on as the same run
    assert [step for step, _ in told.logged[3:]] == [3, 4]


def test_a_tracker_that_fails_costs_the_run_nothing(recorder, tmp_path, caplog):
    told = recorder(fails_at=1)
    run(tmp_path / "run", 3)
    assert (len(told.logged), told.num_ended) == (1, 1)
    assert [record.message for record in caplog.records if "tracker" in record.message] == [
        "the tracker wandb failed (no server); the run goes on without it"
    ]


def test_no_tracker_is_opened_unless_it_is_asked_for(recorder, tmp_path):
    told = recorder()
    run(tmp_path / "run", 1, tracker=None)
    assert told.opened == []


def test_a_tracker_without_its_package_or_a_run_directory_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package mlflow: pip install 'refusion-eval\[mlflow\]'"):
        tracking.check_tracker("mlflow")
    with pytest.raises(ConfigError, match="tracker=wandb is for a recorded run"):
        parse_model_args({"pretrained": "embedded", "tracker": "wandb"})


@pytest.fixture
def environment(monkeypatch):
    def set_variables(package, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        return pytest.importorskip(package, reason=f"needs the extra `{package}`")

    return set_variables


def test_mlflow_keeps_the_figures_in_one_run(environment, tmp_path):
    mlflow = environment("mlflow", MLFLOW_TRACKING_URI=f"file:{tmp_path}/mlflow", MLFLOW_ALLOW_FILE_STORE="true")
    run(tmp_path / "run", 2, tracker="mlflow")
    measured = run(tmp_path / "run", 3, tracker="mlflow")
    (kept,) = mlflow.search_runs(experiment_names=[tracking.PROJECT], output_format="list")
    assert kept.data.params["decoder"] == "autoregressive"
    assert kept.data.metrics[f"{TASK}/accuracy"] == measured[f"{TASK}/accuracy"]
    assert kept.data.metrics[f"{TASK}/samples_asked_for"] == 3


def test_wandb_writes_a_run_offline(environment, tmp_path):
    environment("wandb", WANDB_MODE="offline", WANDB_DIR=tmp_path, WANDB_SILENT="true")
    run(tmp_path / "run", 2, tracker="wandb")
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert f"{TASK}/accuracy".encode() in content
    assert b"samples_asked_for" in content


def test_trackio_keeps_the_figures_on_this_machine(environment, tmp_path):
    environment("trackio", TRACKIO_DIR=tmp_path)
    measured = run(tmp_path / "run", 2, tracker="trackio")
    with sqlite3.connect(tmp_path / f"{tracking.PROJECT}.db") as kept:
        rows = kept.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    assert [step for step, _ in rows] == [1, 2, 3]
    last = json.loads(rows[-1][1])
    assert {name: last[name] for name in measured} == measured
