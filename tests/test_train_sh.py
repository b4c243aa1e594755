"""train.sh up to the commands that it would run, and one small training through it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from refusion_eval.training.config_files import config_names

ROOT = Path(__file__).resolve().parents[1]

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


def test_a_dry_run_sets_up_then_checks_then_trains(tmp_path):
    *_, extra, check, training = commands("--config", "tiny", "--set", "a.b=c", "--processes", "2", cwd=tmp_path)
    python = f"{ROOT}/no-such-environment/bin/python"
    assert extra.endswith("pip install -e .\\[train\\] -c constraints.txt")
    assert check == f"{python} -m refusion_eval.training.run --config tiny --set a.b=c --check 2"
    assert training == (
        f"{python} -m torch.distributed.run --standalone --nproc-per-node 2 -m refusion_eval.training.run "
        "--config tiny --set a.b=c"
    )
    assert not (ROOT / "no-such-environment").exists()


def test_each_of_several_machines_knows_the_first():
    *_, check, training = commands("--config", "tiny", "-n", "16", "-r", "3", "-m", "first:1234", "--gpus", "8")
    assert check.endswith("--check 128")
    assert "--nnodes 16 --node-rank 3 --master-addr first --master-port 1234 --nproc-per-node 8" in training
    assert "--master-port 29500" in commands("--config", "tiny", "-n", "2", "-r", "0", "-m", "first")[-1]


def test_deepspeed_is_installed_if_asked_for():
    assert not any("deepspeed" in line for line in commands("--config", "tiny"))
    assert any("deepspeed" in line for line in commands("--config", "tiny", "--deepspeed"))


def test_setup_and_check_stop_before_training():
    assert not any("training.run" in line for line in commands("--setup"))
    assert "--check 1" in commands("--config", "tiny", "--check", "--processes", "1")[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config is missing"),
        (["--confg", "tiny"], "unknown option '--confg'"),
        (["--config"], "--config needs a value"),
        (["--config", "tiny", "--set", "lr"], "--set is 'lr'"),
        (["--config", "tiny", "--gpus", "0"], "--gpus is '0'"),
        (["--config", "tiny", "-n", "many"], "-n is 'many'"),
        (["--config", "tiny", "-n", "2"], "-n 2 needs -r RANK and -m MASTER"),
        (["--config", "tiny", "-n", "2", "-r", "2", "-m", "first"], "-r is '2', with -n 2 it goes from 0 to 1"),
        (["--config", "tiny", "-r", "1"], "there is one machine only"),
    ],
)
def test_a_wrong_option_is_one_clear_line_and_status_2(arguments, message):
    done = train_sh(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert message in line


def test_help_names_every_configuration_and_option():
    text = train_sh("--help").stdout
    for word in (*config_names(), "--config", "--set", "-n", "-r", "-m", "--gpus", "--check", "--setup", "--dry-run"):
        assert word in text


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


def test_one_process_for_each_gpu_that_torch_may_use(tmp_path):
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 2\n")
    python.chmod(0o755)
    (tmp_path / "environment" / "setup.log").touch()  # as if train.sh had made it
    *_, check, training = commands("--config", "tiny", REFUSION_EVAL_VENV=str(python.parents[1]))
    assert check.endswith("--check 2")
    assert "--nproc-per-node 2" in training
