"""Runs of the command line in several processes, and their run directories."""

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace

from refusion_eval.errors import StoreError
from refusion_eval.store.run_store import RunReader

NUM_ITEMS = 40
SECONDS = 300

# The width curve is given, because every process measures its own, and forwards are fused by it.
SETTINGS = {"gen_length": "64", "free_rows": "16", "row_cost": "0.02"}
RUN = [
    *("-m", "refusion_eval", "run", "--model", "embedded", "--tasks", "mini_gsm8k", "--limit", str(NUM_ITEMS)),
    *(part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")),
]
PYTHON = [sys.executable]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(command, **environment):
    """Starts a process in its own session, so that a test can end all of its children."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, **environment},
        start_new_session=True,
    )


@dataclass
class ProcessResult:
    """Exit status and output of a process."""

    status: int
    out: str
    err: str


def finish(process):
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        raise
    return ProcessResult(process.returncode, out, err)


def run_checked(command, **environment):
    result = finish(start(command, **environment))
    assert result.status == 0, result.err[-3000:]
    return result


def ranks(arguments, num_processes=2):
    """Processes as torchrun would start them, but without a launcher: rank 0 holds the store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(num_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [start([*PYTHON, *arguments], RANK=str(rank), **common) for rank in range(num_processes)]


@dataclass
class RecordedRun:
    """Contents of a run directory."""

    samples: list
    scores: list
    processes: dict

    @property
    def facts(self):
        """The samples without what may differ between two runs: times, processes, and which was the first of one."""
        changes = {"seconds": 0, "prefill_seconds": None, "process_id": "", "created": "", "warm": True}
        return [replace(sample, **changes) for sample in self.samples]

    @property
    def num_decoding(self):
        """How many processes made a sample."""
        return len({sample.process_id for sample in self.samples})


def read_run(run_dir):
    try:
        with RunReader.open(run_dir) as run:
            return RecordedRun(list(run.samples()), list(run.scores()), dict(run.run.processes))
    except StoreError:
        return RecordedRun([], [], {})


def wait_for(process, condition):
    """Waits until a condition holds; fails if the process ends before."""
    until = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, f"the process ended too early: {process.communicate()[1][-3000:]}"
        assert time.monotonic() < until, "the condition did not hold in time"
        time.sleep(0.05)
