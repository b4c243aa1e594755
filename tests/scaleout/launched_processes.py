"""Runs of the command line in several processes, and what they leave."""

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace

from refusion_eval.errors import StoreError
from refusion_eval.store.run_reader import RunReader

NUM_ITEMS = 12
SECONDS = 300

# The width curve is given, because every process measures its own: with another one forwards are fused differently.
SETTINGS = {"gen_length": "64", "free_rows": "16", "row_cost": "0.02"}
RUN = [
    *("-m", "refusion_eval", "run", "--model", "embedded", "--tasks", "mini_gsm8k", "--limit", str(NUM_ITEMS)),
    *(part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")),
]
PYTHON = [sys.executable]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(command, **environment):
    """A process of its own session, so that a test can end all that it starts."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, **environment},
        start_new_session=True,
    )


@dataclass
class Ended:
    """What a process said, and how it ended."""

    status: int
    out: str
    err: str


def ended(process):
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        raise
    return Ended(process.returncode, out, err)


def succeeded(command, **environment):
    result = ended(start(command, **environment))
    assert result.status == 0, result.err[-3000:]
    return result


def ranks(arguments, num_processes=2):
    """Processes as torchrun would start them, but nobody watches them and the first one holds the store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(num_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [start([*PYTHON, *arguments], RANK=str(rank), **common) for rank in range(num_processes)]


@dataclass
class Left:
    """What a run directory holds."""

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


def left(run_dir):
    try:
        with RunReader.open(run_dir) as run:
            return Left(list(run.samples()), list(run.scores()), dict(run.run.processes))
    except StoreError:
        return Left([], [], {})


def wait_for(process, condition):
    """Waits until something holds, while a process is at work."""
    until = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, f"it ended too early: {process.communicate()[1][-3000:]}"
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.05)
