"""The SLURM script, with stand-ins for SLURM and torchrun."""

import os
import subprocess
from pathlib import Path

import typer

from refusion_eval.cli import app

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "torchrun.sbatch"

STAND_INS = {
    "scontrol": "printf 'node7\\nnode8\\n'",
    # Runs a task on each node, as SLURM does.
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; for id in 0 1; do SLURM_NODEID=$id "$@" || exit; done',
    "torchrun": 'printf "%s|" "$@" "threads $OMP_NUM_THREADS" >> "$CALLS"; echo >> "$CALLS"; exit "${STATUS:-0}"',
}


def called(tmp_path, **environment):
    for name, script in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_GPUS_ON_NODE": "4",
    }
    done = subprocess.run(
        ["bash", SCRIPT, "--tasks", "gsm8k", "--run-dir", "a b"], env=slurm | environment, check=False
    )
    return done.returncode, [line.split("|")[:-1] for line in (tmp_path / "calls").read_text().splitlines()]


def test_one_torchrun_a_node_and_one_process_a_gpu(tmp_path):
    status, nodes = called(tmp_path)
    assert status == 0
    assert len(nodes) == 2
    for number, words in enumerate(nodes):
        *launcher, threads = words
        start = launcher.index("-m")
        options = dict(zip(launcher[:start:2], launcher[1:start:2], strict=True))
        assert options == {
            "--nnodes": "2",
            "--node-rank": str(number),
            "--nproc-per-node": "4",
            "--master-addr": "node7",
            "--master-port": "23456",
        }
        assert launcher[start : start + 3] == ["-m", "refusion_eval", "run"]
        params = typer.main.get_command(app).get_command(None, "run").make_context("run", launcher[start + 3 :]).params
        assert (params["tasks"], params["run_dir"]) == ("gsm8k", Path("a b"))
        assert threads == "threads 2"


def test_the_job_fails_as_its_processes_do(tmp_path):
    status, nodes = called(tmp_path, STATUS="3")
    assert (status, len(nodes)) == (3, 1)
