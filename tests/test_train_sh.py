"""train.sh and the command that it becomes: what they would run, and one small training through them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from refusion_eval.cli import app, run_command
from refusion_eval.training.config import config_names

ROOT = Path(__file__).resolve().parents[1]
RUNNER = CliRunner()

if shutil.which("bash") is None:
    pytest.skip("needs bash", allow_module_level=True)


def train_sh(*arguments, cwd=ROOT, **environment):
    return subprocess.run(
        ["bash", ROOT / "train.sh", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "REFUSION_EVAL_VENV": "no-such-environment", **environment},
    )


def commands(*arguments, **options):
    done = train_sh("--dry-run", *arguments, **options)
    assert done.returncode == 0, done.stderr
    return [line[2:] for line in done.stdout.splitlines() if line.startswith("+ ")]


def test_a_dry_run_sets_up_then_becomes_the_command_train(tmp_path):
    *_, extra, training = commands("--config", "tiny", "--set", "a.b=c", "--processes", "2", cwd=tmp_path)
    assert extra.endswith("pip install -e .\\[train\\] -c constraints.txt")
    options = "--dry-run --config tiny --set a.b=c --processes 2"
    assert training == f"{ROOT}/no-such-environment/bin/python -m refusion_eval train {options}"
    assert not (ROOT / "no-such-environment").exists()


def test_deepspeed_is_installed_if_asked_for():
    assert not any("deepspeed" in line for line in commands("--config", "tiny"))
    *_, extra, training = commands("--config", "tiny", "--deepspeed")
    assert "deepspeed" in extra
    assert "deepspeed" not in training


def test_setup_stops_before_training():
    assert not any("refusion_eval train" in line for line in commands("--setup"))


def test_training_without_accelerate_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert run_command("train", "--config", "tiny", "--check") == 1
    assert capsys.readouterr().err == (
        "error: training needs accelerate, which is not installed: pip install -e '.[train]' in a checkout\n"
    )


def steps(*arguments):
    """What the command would run, without the interpreter."""
    done = RUNNER.invoke(app, ["train", "--dry-run", *arguments])
    assert done.exit_code == 0, done.output
    return [line.removeprefix(f"+ {sys.executable} -m ") for line in done.stdout.splitlines()]


def test_the_settings_are_checked_before_the_processes_start():
    check, training = steps("--config", "tiny", "--set", "a.b=c", "--processes", "2")
    assert check == "refusion_eval.training.run --config tiny --set a.b=c --check 2"
    assert training == (
        "torch.distributed.run --standalone --nproc-per-node 2 -m refusion_eval.training.run --config tiny --set a.b=c"
    )
    assert steps("--config", "tiny", "--check", "--processes", "1") == [
        "refusion_eval.training.run --config tiny --check 1"
    ]


def test_each_of_several_machines_knows_the_first():
    check, training = steps("--config", "tiny", "-n", "16", "-r", "3", "-m", "first:1234", "--gpus", "8")
    assert check.endswith("--check 128")
    assert "--nnodes 16 --node-rank 3 --master-addr first --master-port 1234 --nproc-per-node 8" in training
    assert "--master-port 29500" in steps("--config", "tiny", "-n", "2", "-r", "0", "-m", "first")[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--config'"),
        (["--confg", "tiny"], "No such option: --confg"),
        (["--config"], "Option '--config' requires an argument"),
        (["--config", "tiny", "--set", "lr"], "--set is 'lr'"),
        (["--config", "tiny", "--gpus", "0"], "Invalid value for '--gpus'"),
        (["--config", "tiny", "-n", "many"], "Invalid value for '-n'"),
        (["--config", "tiny", "-n", "2"], "-n 2 needs -r RANK and -m MASTER"),
        (["--config", "tiny", "-n", "2", "-r", "2", "-m", "first"], "-r is '2', with -n 2 it goes from 0 to 1"),
        (["--config", "tiny", "-r", "1"], "-r is '1', with -n 1 it goes from 0 to 0"),
    ],
)
def test_a_wrong_option_is_refused_with_status_2(arguments, message):
    done = RUNNER.invoke(app, ["train", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert done.stdout == ""
    assert message in done.stderr


def test_help_names_every_configuration_and_option():
    text = RUNNER.invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).stdout
    for word in (*config_names(), "--config", "--set", "-n", "-r", "-m", "--gpus", "--check", "--dry-run"):
        assert word in text
    assert "--setup" in train_sh("--help").stdout


@pytest.mark.slow
def test_a_small_training_runs_through(tmp_path):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    stamp = ["bash", "-c", "source ./environment.sh; stamp"]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(stamp, cwd=ROOT, capture_output=True, text=True, check=True, env=environment)
    for name in ("set-up", "set-up-train"):
        (venv / name).write_text(done.stdout)
    options = {"cwd": tmp_path, "REFUSION_EVAL_VENV": str(venv), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    arguments = ("--config", "tiny", "--set", "optimisation.max_steps=2", "--processes", "2")
    done = train_sh(*arguments, "--set", "objective.slot_sizes=[64]", **options)
    assert done.returncode == 2
    assert "b >= k" in done.stderr
    assert "Traceback" not in done.stderr
    done = train_sh(*arguments, **options)
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stderr
    assert (tmp_path / "runs" / "tiny" / "model" / "model.safetensors").exists()


def test_one_process_for_each_gpu_that_torch_may_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check, training = steps("--config", "tiny")
    assert check.endswith("--check 2")
    assert "--nproc-per-node 2" in training
