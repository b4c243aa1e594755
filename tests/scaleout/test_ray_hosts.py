"""A run on two hosts, one of which falls silent during the run: the other decodes its requests."""

import importlib.util
import subprocess
import sys
import time

import pytest

from refusion_eval.evaluation.loop import evaluate
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.store.run_reader import RunReader
from tests.scaleout.hosts import two_hosts
from tests.scaleout.ray_clusters import ENVIRONMENT, MEMORY

PORT = 6379
LIMIT = 100
COMPARED = 6
# Every process would measure its own values, and forwards are fused by them.
SETTINGS = {"free_rows": 2, "row_cost": 0.1}
# Ray gives up a silent host after seconds instead of half a minute.
HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
PATIENCE_SECONDS = 300

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
START = [*RAY, "start", f"--object-store-memory={MEMORY}", "--num-cpus=1"]
# Ray gives a node half a minute to start, which a busy machine may exceed: then it is started again.
AGAIN = f'start() {{ for _ in 1 2 3 4 5; do "$@" && return; {" ".join(RAY)} stop --force; done; return 1; }};'


def start_head_and_run(host, run_dir, joined, log):
    start = [*START, "--head", f"--port={PORT}", f"--node-ip-address={host.address}", "--include-dashboard=false"]
    settings = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    run = [sys.executable, "-m", "refusion_eval", "run", "--model", "embedded", "--tasks", "gsm8k", "--engine", "ray"]
    run += [
        "--ray-address",
        f"{host.address}:{PORT}",
        "--limit",
        str(LIMIT),
        "--warmup",
        "0",
        "--run-dir",
        str(run_dir),
    ]
    script = f'{AGAIN} start {" ".join(start)} && until [ -e {joined} ]; do sleep 0.2; done && "$@"'
    words = ["sh", "-c", script, "sh", *run, *settings]
    return host.start(*words, environment=ENVIRONMENT | HEALTH, stdout=log, stderr=subprocess.STDOUT)


def start_second(host, head, joined, log):
    start = [*START, f"--address={head.address}:{PORT}", f"--node-ip-address={host.address}"]
    script = f"{AGAIN} start {' '.join(start)} && touch {joined} && sleep 1000"
    return host.start("sh", "-c", script, environment=ENVIRONMENT | HEALTH, stdout=log, stderr=subprocess.STDOUT)


def decoding_processes(run_dir):
    if not (run_dir / "run.json").is_file():
        return set()
    with RunReader.open(run_dir) as run:
        return {sample.process_id for sample in run.samples(traces=False)}


def is_close(one, other):
    """Whether two traces are equal but for the last digits of their probabilities."""
    if isinstance(one, float):
        return one == pytest.approx(other, abs=1e-4)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_close, one, other))
    return one == other


@pytest.mark.slow
def test_a_host_that_falls_silent_in_mid_run_costs_no_request(tmp_path):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install -e '.[ray]'")
    run_dir = tmp_path / "run"
    with two_hosts() as (head, second), (tmp_path / "log").open("w+") as log:
        running = start_head_and_run(head, run_dir, tmp_path / "joined", log)
        start_second(second, head, tmp_path / "joined", log)
        give_up = time.monotonic() + PATIENCE_SECONDS
        while len(decoding_processes(run_dir)) < 2:
            assert time.monotonic() < give_up, (tmp_path / "log").read_text()
            assert running.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.2)
        second.unplug()
        status = running.wait(timeout=PATIENCE_SECONDS)
        output = (tmp_path / "log").read_text()
    assert status == 0, output
    assert f"({second.address}) is lost" in output or f"on {second.address} is lost" in output
    with RunReader.open(run_dir) as run:
        samples = {sample.key: sample for sample in run.samples()}
    assert len(samples) == LIMIT
    assert not any(sample.error for sample in samples.values())
    args = parse_model_args({"pretrained": "embedded", "warmup": 0, "run_dir": str(tmp_path / "alone"), **SETTINGS})
    evaluate(args, ["mini_gsm8k"], limit=COMPARED)
    with RunReader.open(tmp_path / "alone") as run:
        for sample in run.samples():
            there = samples[sample.key]
            assert (there.text, there.tokens) == (sample.text, sample.tokens)
            assert is_close(there.trace, sample.trace)
