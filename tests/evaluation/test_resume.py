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
from tests.faults.conftest import server
from tests.faults.runs import ForkServer

__all__ = ["server"]

NUM_ITEMS = 40
SECONDS_TO_START = 300


def command(checkpoint, run_dir, more):
    words = ["run", "--model", checkpoint, "--decoder", "autoregressive", "--run-dir", str(run_dir), "--warmup", "0"]
    return [*words, "--tasks", "mini_gsm8k", "--limit", str(NUM_ITEMS), "--set", "gen_length=48", *more]


def whole_process(_, words):
    """Starts a process from nothing, as a user does."""
    return subprocess.Popen(
        [sys.executable, "-m", "refusion_eval", *words],
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
@pytest.mark.parametrize(
    ("start", "more"),
    [(whole_process, ()), (ForkServer.start, ("--samples", "2", "--set", "temperature=1.0", "--batch-size", "3"))],
)
def test_killed_and_resumed_equals_uninterrupted(server, checkpoint, tmp_path, start, more):
    num_texts = NUM_ITEMS * (2 if more else 1)
    killed = command(checkpoint, tmp_path / "killed", more)
    process = start(server, killed)
    deadline = time.monotonic() + SECONDS_TO_START
    while len(recorded(tmp_path / "killed")[0]) < 3:
        assert time.monotonic() < deadline, "no sample was recorded"
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    interrupted = len(recorded(tmp_path / "killed")[0])
    assert 3 <= interrupted < num_texts
    assert start(server, killed).wait() == 0
    assert server.run(command(checkpoint, tmp_path / "whole", more))[0] == 0
    assert facts(tmp_path / "killed") == facts(tmp_path / "whole")
    assert len(facts(tmp_path / "whole")[0]) == num_texts
