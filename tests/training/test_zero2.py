"""DeepSpeed's ZeRO-2 run for real, on DeepSpeed's CPU accelerator with two processes.

DeepSpeed is installed into a folder of its own, because transformers imports it wherever it finds it.
"""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed compiles its communication with g++"),
]
ROOT = Path(__file__).resolve().parents[2]
# What DeepSpeed needs beside the libraries of this project.
PACKAGES = ("deepspeed", "einops", "hjson", "msgpack", "ninja", "nvidia-ml-py", "py-cpuinfo")
ZERO2 = ("parallelism=zero2", "backbone.dtype=bfloat16", "optimisation.compute_dtype=bfloat16")
SETTINGS = (
    "optimisation.max_steps=12",
    "output.log_every=1",
    "output.save_every=6",
)


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with DeepSpeed."""
    folder = tmp_path_factory.mktemp("deepspeed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    done = subprocess.run(
        [*command, "--constraint", str(ROOT / "constraints.txt"), *PACKAGES],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"DeepSpeed cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return folder


def train(deepspeed: Path, run_dir: Path, *settings: str) -> list[dict[str, str]]:
    """Runs the configuration "tiny" under torchrun and returns the rows of its log."""
    changes = [*SETTINGS, *settings, f"output.run_dir={run_dir}", f"data.cache_dir={run_dir.parent / 'tokens'}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "refusion_eval.training.run", "--config", "tiny"]
    command += [word for change in changes for word in ("--set", change)]
    path = os.pathsep.join([str(ROOT), str(deepspeed)])
    scripts = os.pathsep.join([str(deepspeed / "bin"), os.environ["PATH"]])  # ninja
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PATH": scripts}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with (run_dir / "log.csv").open() as lines:
        return list(csv.DictReader(lines))


def test_two_processes_of_zero2_follow_the_curve_of_float32(tmp_path: Path, deepspeed: Path) -> None:
    sharded = train(deepspeed, tmp_path / "zero2", *ZERO2)
    whole = train(deepspeed, tmp_path / "ddp")
    assert (tmp_path / "zero2" / "model" / "model.safetensors").exists()
    assert len(sharded) == len(whole) == 12
    for ours, exact in zip(sharded, whole, strict=True):
        assert float(ours["total"]) == pytest.approx(float(exact["total"]), rel=1e-3)
        assert float(ours["grad_norm"]) == pytest.approx(float(exact["grad_norm"]), rel=0.01)
