"""A run that is killed and started again ends with the records of a run that was not."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from refusion_eval.errors import StoreError
from refusion_eval.store.records import ScoreRow
from refusion_eval.store.run_store import RunReader

NUM_ITEMS = 40
SECONDS_TO_START = 300


def start(checkpoint, run_dir, more=()):
    command = ["run", "--model", checkpoint, "--decoder", "autoregressive", "--run-dir", run_dir, "--warmup", "0"]
    options = ["--tasks", "mini_gsm8k", "--limit", str(NUM_ITEMS), "--set", "gen_length=48"]
    return subprocess.Popen(
        [sys.executable, "-m", "refusion_eval", *command, *options, *more],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def recorded(run_dir):
    try:
        with RunReader.open(run_dir) as run:
            return list(run.samples(traces=False)), list(run.scores())
    except StoreError:
        return [], []


def facts(run_dir):
    """Samples without what may differ between two runs: times, process, date, and which came first in a process."""
    samples, scores = recorded(run_dir)
    timeless = {"seconds": 0, "prefill_seconds": None, "process_id": "", "created": "", "warm": True}
    return [replace(sample, **timeless) for sample in samples], sorted(scores, key=ScoreRow.body)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--samples", "2", "--set", "temperature=1.0", "--batch-size", "3")])
def test_killed_and_resumed_equals_uninterrupted(checkpoint, tmp_path, more):
    num_texts = NUM_ITEMS * (2 if more else 1)
    process = start(checkpoint, tmp_path / "killed", more)
    deadline = time.monotonic() + SECONDS_TO_START
    while len(recorded(tmp_path / "killed")[0]) < 3:
        assert time.monotonic() < deadline, "no sample was recorded"
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    interrupted = len(recorded(tmp_path / "killed")[0])
    assert 3 <= interrupted < num_texts
    assert start(checkpoint, tmp_path / "killed", more).wait() == 0
    assert start(checkpoint, tmp_path / "whole", more).wait() == 0
    assert facts(tmp_path / "killed") == facts(tmp_path / "whole")
    assert len(facts(tmp_path / "whole")[0]) == num_texts
