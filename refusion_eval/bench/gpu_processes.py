"""Checks of the GPU path that start programs of the project: the tests of recorded decodings, and a training."""

import csv
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import torch

from refusion_eval.bench.checkpoints import Shape
from refusion_eval.bench.gpu_report import Result
from refusion_eval.errors import DataError

ROOT = Path(__file__).resolve().parents[2]
# Tests that decode what public releases decoded, and the variable that tells them the device.
GOLDEN_TESTS = tuple(
    f"tests/decoders/test_{name}.py"
    for name in ("goldens", "autoregressive", "bd3lm", "d2f", "dream", "llada", "fast_dllm_dream", "fast_dllm_llada")
)
GOLDEN_DEVICE = "REFUSION_EVAL_GOLDEN_DEVICE"
TRAINING_STEPS = 20
HEAD_WIDTH = 64
MAX_SECONDS = 600


def recorded_decodings(device: torch.device, folder: Path) -> Result:
    """Decodes the recorded cases of the public releases in float32, by the tests that hold them."""
    if not (ROOT / GOLDEN_TESTS[0]).is_file() or importlib.util.find_spec("pytest") is None:
        return Result(None, "the recorded cases are part of a clone of the repository, and need pytest", {})
    report = folder / "recorded.xml"
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "golden", f"--junitxml={report}", *GOLDEN_TESTS]
    output = _python(command, ROOT, {GOLDEN_DEVICE: str(device)})
    if not report.is_file():
        raise DataError(f"the tests of recorded decodings did not start: {output[-500:]}")
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [case.get("name") for case in cases if {"failure", "error"} & {part.tag for part in case}]
    text = f"{len(cases) - len(failed)} of {len(cases)} tests of recorded decodings pass"
    return Result(bool(cases) and not failed, text, {"tests": len(cases), "failed": failed})


def training(device: torch.device, folder: Path, shape: Shape) -> Result:
    """Trains a random model on the package's tiny data; its loss must be finite and fall."""
    run_dir = folder / "training"
    sizes = {name: size for name, size in asdict(shape).items() if name != "vocab_size"}
    settings = {
        "backbone.shape": json.dumps(sizes | {"model_type": "qwen3", "head_dim": HEAD_WIDTH}),
        "optimisation.compute_dtype": "bfloat16",
        "optimisation.max_steps": TRAINING_STEPS,
        "optimisation.lr": 3e-4,
        "output.run_dir": run_dir,
        "output.log_every": 1,
        "output.save_every": TRAINING_STEPS,
        "data.cache_dir": folder / "training-tokens",
    }
    changes = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    hidden = {} if device.type == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    output = _python(["-m", "refusion_eval.training.run", "--config", "tiny", *changes], folder, hidden)
    log = run_dir / "log.csv"
    if not log.is_file():
        raise DataError(f"the training wrote no log: {output[-500:]}")
    with log.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    losses = [float(row["total"]) for row in rows]
    speed = statistics.median(float(row["tokens_per_second"]) for row in rows[len(rows) // 2 :])
    learned = len(losses) == TRAINING_STEPS and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    text = f"{len(losses)} of {TRAINING_STEPS} steps, loss {losses[0]:.2f} to {losses[-1]:.2f}, {speed:.0f} tokens/s"
    return Result(learned, text, {"losses": losses, "tokens_per_second": speed})


def _python(arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Runs Python in a process of its own; returns all that it prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=MAX_SECONDS,
        check=False,
    )
    return done.stdout
