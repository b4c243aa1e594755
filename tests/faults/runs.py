"""The runs that faults happen to: started from the fork server, looked at from outside."""

import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from refusion_eval.errors import StoreError
from refusion_eval.results.results_file import read_csv
from refusion_eval.store.run_store import RunReader
from tests.faults.places import fingerprint

REPOSITORY = Path(__file__).parents[2]
SETTINGS = {"gen_length": 16, "slot_size": 4, "block_size": 8, "fuse": "false"}
TASKS = ("mini_gsm8k", "mini_mbpp")
NUM_ITEMS = 3
NUM_SAMPLES = NUM_ITEMS * len(TASKS)
SECONDS_TO_WAIT = 240


def command(run_dir, *more, batch_size=1, **changes):
    """A run of two short tasks, one of them judged by running programs; `changes` are other decoder settings."""
    settings = [text for name, value in {**SETTINGS, **changes}.items() for text in ("--set", f"{name}={value}")]
    tasks = ["--tasks", ",".join(TASKS), "--limit", str(NUM_ITEMS), "--warmup", "0"]
    return ["run", *tasks, "--batch-size", str(batch_size), "--run-dir", str(run_dir), *settings, *more]


class ForkedRun:
    """One run in a process of its own."""

    def __init__(self, server, pid, log):
        self.pid, self._server, self._log, self._status = pid, server, log, None

    def poll(self):
        """Its exit status, minus the signal's number where one ended it, or None."""
        if self._status is None:
            self._status = self._server.ask({"poll": self.pid})
        return self._status

    def wait(self):
        """Waits until it has ended."""
        deadline = time.monotonic() + SECONDS_TO_WAIT
        while (status := self.poll()) is None:
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.004)
        return status

    def kill(self, number):
        """Sends a signal, unless it has ended; it stays a zombie, whose pid is nobody else's, until `poll` says so."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def output(self):
        """What it has printed."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""


class ForkServer:
    """Starts runs; see `fork_server`."""

    def __init__(self, folder):
        self._folder, self._mutex, self._number = folder, threading.Lock(), 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.fork_server"],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "server.log").open("w"),
            text=True,
            bufsize=1,
        )
        assert self._process.stdout.readline() == '"ready"\n', (folder / "server.log").read_text()

    def ask(self, request):
        """One question and its answer."""
        with self._mutex:
            self._process.stdin.write(json.dumps(request) + "\n")
            return json.loads(self._process.stdout.readline())

    def start(self, arguments, **options):
        """Starts a command; options are those of `fork_server._run`."""
        self._number += 1
        log = self._folder / f"run{self._number}.log"
        return ForkedRun(self, self.ask({"start": {"command": arguments, "log": str(log), **options}}), log)

    def run(self, arguments, **options):
        """Runs a command to its end and returns exit status and output."""
        run = self.start(arguments, **options)
        return run.wait(), run.output()

    @staticmethod
    def read(path):
        """What a run wrote as JSON."""
        return json.loads(path.read_text())

    def close(self):
        """Ends it."""
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@functools.cache
def shared_server(folder):
    """The fork server of a session, whichever files of tests ask for it: its start takes as long as a run."""
    (folder / "fork_server").mkdir()
    return ForkServer(folder / "fork_server")


def num_recorded(run_dir):
    """Samples recorded so far, in a run that may not have begun."""
    try:
        with RunReader.open(run_dir) as run:
            return run.num_recorded()
    except StoreError:
        return 0


def wait_until(condition, what):
    """Waits for something to become true."""
    deadline = time.monotonic() + SECONDS_TO_WAIT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.004)


def records(run_dir):
    """Samples and scores, without what may differ between runs: times, process, and which came first in a process."""
    timeless = {"seconds": 0, "prefill_seconds": None, "process_id": "", "created": "", "warm": True}
    with RunReader.open(run_dir) as run:
        samples = [replace(sample, **timeless) for sample in run.samples()]
        scores = sorted(run.scores(), key=lambda score: (score.key.digest(), score.scorer, score.metric))
    return samples, scores


def counted(run_dir):
    """The figures of a run's table that are no measure of time."""
    rows = read_csv(run_dir / "results.csv")
    return {
        (row.task, row.metric): (row.value, row.n, row.samples)
        for row in rows
        if row.unit not in ("s", "x", "tokens/s", "forwards/s") and row.metric not in ("mbu", "one_token_share")
    }


def assert_same(run_dir, calm):
    """Holds a run against one that nothing happened to."""
    assert records(run_dir) == records(calm)
    assert len(records(calm)[0]) == NUM_SAMPLES
    assert counted(run_dir) == counted(calm)
    assert ("mini_mbpp", "pass@1") in counted(calm)


def verdicts_made_twice(acknowledged):
    """Scores that the store was given more than once."""
    if not acknowledged.exists():
        return []
    counts = Counter(line for line in acknowledged.read_text().splitlines() if line.startswith("scores "))
    return [line for line, count in counts.items() if count > 1]


def bytes_lost(run_dir, acknowledged):
    """Records, and their bytes, that the store had called written and that are not there as they were."""
    if not acknowledged.exists():
        return 0, 0
    noted = {tuple(line.split()) for line in acknowledged.read_text().splitlines()}
    if not noted:
        return 0, 0
    with RunReader.open(run_dir) as run:
        there = {
            (table, *fingerprint(row))
            for table in ("samples", "scores")
            for row in run._connection.execute(f"SELECT * FROM {table}")
        }
    lost = noted - there
    return len(lost), sum(int(num_bytes) for _, _, num_bytes in lost)
