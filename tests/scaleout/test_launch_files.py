"""The files that start a run on many machines: well-formed, and in step with the command line."""

import os
import re
import shlex
import subprocess
import time
from pathlib import Path

import pytest
import typer
import yaml

from refusion_eval.cli import app

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"


def parsed(words):
    """The parameters of a `refusion-eval run` command line; fails on an unknown option or value."""
    assert words[:2] == ["refusion-eval", "run"]
    if "--data" in words:  # the cluster's machines have the folder, this one does not
        words[words.index("--data") + 1] = str(ROOT)
    command = typer.main.get_command(app).get_command(None, "run")
    return command.make_context("run", words[2:]).params


@pytest.fixture(scope="module")
def kuberay():
    return yaml.safe_load((SCRIPTS / "kuberay.yaml").read_text(encoding="utf-8"))


def containers(kuberay):
    cluster = kuberay["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


def test_kubernetes_runs_a_command_that_exists(kuberay):
    assert (kuberay["apiVersion"], kuberay["kind"]) == ("ray.io/v1", "RayJob")
    params = parsed(shlex.split(kuberay["spec"]["entrypoint"]))
    assert (params["engine"], params["ray_address"], params["device"]) == ("ray", "auto", "cuda")


def test_kubernetes_keeps_records_where_every_machine_sees_them(kuberay):
    run_dir = Path(parsed(shlex.split(kuberay["spec"]["entrypoint"]))["run_dir"])
    mounted = [{mount["mountPath"] for mount in one["volumeMounts"]} for one in containers(kuberay)]
    assert len(mounted) == 2
    assert all(any(run_dir.is_relative_to(path) for path in paths) for paths in mounted)


def test_kubernetes_lets_nobody_else_in_and_decodes_nothing_on_the_head(kuberay):
    cluster = kuberay["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    gpus = [one["resources"]["limits"].get("nvidia.com/gpu") for one in containers(kuberay)]
    assert gpus == [None, "1"]


def test_the_user_of_the_image_may_write_to_the_volume_of_kubernetes(kuberay):
    user, group = re.search(r"(?m)^USER (\d+):(\d+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8")).groups()
    assert user != "0"
    cluster = kuberay["spec"]["rayClusterSpec"]
    for pods in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert pods["template"]["spec"]["securityContext"] == {"runAsNonRoot": True, "fsGroup": int(group)}


def test_kubernetes_has_the_ray_of_the_constraints(kuberay):
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"ray=={kuberay['spec']['rayClusterSpec']['rayVersion']}" in pins


def test_slurm_script_is_bash_and_runs_a_command_that_exists():
    path = SCRIPTS / "ray.sbatch"
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if "refusion-eval run" in line and not line.startswith("#")]
    words = shlex.split(line[line.index("refusion-eval run") :].replace('"$@" &', ""))
    assert parsed(words)["engine"] == "ray"


STAND_INS = {
    "scontrol": "printf 'node1\\nnode2\\nnode3\\n'",
    # Drops its own options, of which none has its value in a word of its own, and runs the rest.
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "hostname": "echo 10.0.0.1 fe80::1",
    "ray": 'echo "ray $* ${#RAY_AUTH_TOKEN} $RAY_AUTH_MODE" >> "$CALLS"; [ "$1" = status ] || sleep 0.2',
    "refusion-eval": """trap "sleep 0.3; exit 143" TERM
        echo "refusion-eval $*" >> "$CALLS"
        for _ in $(seq $TURNS); do sleep 0.1; done
        exit 3""",
}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Starts the script on three nodes that are none, and gives the process and the list of what it called."""
    for name, script in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "SLURM_JOB_NODELIST": "node[1-3]",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_GPUS_ON_NODE": "4",
    }

    def start(turns):
        command = ["bash", SCRIPTS / "ray.sbatch", "--tasks", "gsm8k"]
        return subprocess.Popen(command, env=environment | {"TURNS": str(turns)}), calls

    return start


def test_slurm_starts_a_head_then_the_rest_then_one_driver_whose_status_is_the_job_s(slurm):
    job, calls = slurm(turns=5)
    assert job.wait(60) == 3
    lines = calls.read_text().splitlines()
    head = [line for line in lines if line.startswith("ray start --head")]
    others = [line for line in lines if line.startswith("ray start --address=10.0.0.1:6379")]
    drivers = [line for line in lines if line.startswith("refusion-eval")]
    assert len(head) == 1
    assert "--num-cpus=8 --num-gpus=4" in head[0]
    assert len(others) >= 1
    assert all(line.endswith(" 64 token") for line in head + others), "a token of 32 random bytes reaches every node"
    assert drivers == ["refusion-eval run --engine ray --ray-address 10.0.0.1:6379 --tasks gsm8k"]


def test_slurm_s_signal_reaches_the_driver_and_its_last_words_are_waited_for(slurm):
    job, calls = slurm(turns=600)
    give_up = time.monotonic() + 60
    while not (calls.is_file() and "refusion-eval" in calls.read_text()):
        assert time.monotonic() < give_up
        time.sleep(0.05)
    time.sleep(0.5)
    job.terminate()
    assert job.wait(60) == 143
