"""What can be made to happen inside a run: something, at the N-th time that it passes a place."""

import functools
import hashlib
import os
import signal
import sqlite3
import threading
import time
from collections import Counter
from datetime import datetime as real_datetime
from datetime import timedelta
from random import Random

import torch

from refusion_eval.engine.engine import Engine
from refusion_eval.sandbox.pool import WorkerProcess
from refusion_eval.store import run_store
from refusion_eval.store.run_store import RunStore

# Every place is passed twice: just before something is done, and just after.
PLACES = {
    "forward": "a forward of the model",
    "statement": "a statement to the database, commits included",
    "file": "fsync, rename, truncation or a write to the lock",
    "record": "a sample or the scores handed to the store",
    "verdict": "the check of one program",
    "commit": "some moment after a commit began",
}


def die():
    """As by kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_soon(seconds):
    """As by kill -9 from outside, while this process goes on."""
    threading.Thread(target=lambda: (time.sleep(seconds), die()), daemon=True).start()


class Places:
    """Counts passages of every place, and lets the fault happen at its own.

    Args:
        fault: place and count of the passage; the signal that comes there, SIGKILL if not said, and how many passages
            have one; for "commit" the seconds until it comes.
    """

    def __init__(self, fault):
        self.passed = Counter()
        self._fault = fault

    def watch(self):
        """Puts itself around everything that is a place."""
        self._around(Engine, "_step", "forward")
        for name in ("append", "append_scores"):
            self._around(RunStore, name, "record")
        self._around(WorkerProcess, "check", "verdict")
        for name in ("fsync", "replace", "ftruncate", "pwrite", "chmod"):
            self._around(os, name, "file")
        places, connect = self, sqlite3.connect

        class Watched(sqlite3.Connection):
            def execute(self, statement, *parameters):
                if statement == "COMMIT":
                    places.passing("commit")
                places.passing("statement")
                result = super().execute(statement, *parameters)
                places.passing("statement")
                return result

        sqlite3.connect = functools.partial(connect, factory=Watched)

    def passing(self, place):
        """Counts one passage."""
        self.passed[place] += 1
        fault = self._fault
        if fault.get("place") != place or not 0 <= self.passed[place] - fault["count"] < fault.get("times", 1):
            return
        if place == "commit":
            die_soon(fault["seconds"])
        else:
            os.kill(os.getpid(), fault.get("signal", signal.SIGKILL))

    def _around(self, owner, name, place):
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def watched(*arguments, **options):
            self.passing(place)
            result = inner(*arguments, **options)
            self.passing(place)
            return result

        setattr(owner, name, watched)


def acknowledge(path):
    """Notes every sample and score, and its content, when the store has said that it is written."""
    notes = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    append, append_scores = RunStore.append, RunStore.append_scores

    def note(store, table, key):
        for row in store._connection.execute(f"SELECT * FROM {table} WHERE key = ?", (key,)):
            os.write(notes, (" ".join([table, *fingerprint(row)]) + "\n").encode())

    def noting_append(store, sample):
        append(store, sample)
        note(store, "samples", sample.key.digest())

    def noting_append_scores(store, scores):
        append_scores(store, scores)
        for key in {score.key.digest() for score in scores}:
            note(store, "scores", key)

    RunStore.append, RunStore.append_scores = noting_append, noting_append_scores


def fingerprint(row):
    """Hash and number of bytes of a row."""
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in row]
    return hashlib.sha256(b"\0".join(parts)).hexdigest(), str(sum(map(len, parts)))


def run_out_of_memory(*, counts=(), above=None):
    """Forwards that fail as on a full device.

    Args:
        counts: which forwards of the process.
        above: those of more sequences than this.
    """
    compute, number = Engine._compute, Counter()

    def failing(engine, cache, forwards, sequences):
        number["forwards"] += 1
        if number["forwards"] in counts or (above is not None and len(forwards) > above):
            raise torch.OutOfMemoryError("CUDA out of memory, by design")
        return compute(engine, cache, forwards, sequences)

    Engine._compute = failing


def jump_in_time(seed):
    """A clock that goes back and forth by years whenever it is read."""
    rng, now = Random(seed), time.time

    class Jumping(real_datetime):
        @classmethod
        def now(cls, zone=None):
            return real_datetime.now(zone) + timedelta(days=rng.uniform(-10_000, 10_000))

    run_store.datetime = Jumping
    time.time = lambda: now() + rng.uniform(-1e9, 1e9)


def kill_workers(counts, seconds):
    """Ends sandbox workers, with all below them, shortly after they were given a program: as many as are counted."""
    exchange, number = WorkerProcess._exchange, Counter()

    def dying(worker, program):
        number["programs"] += 1
        if number["programs"] in counts:
            threading.Timer(seconds, worker._process.kill).start()
        return exchange(worker, program)

    WorkerProcess._exchange = dying


def take_time(seconds):
    """Makes every forward last longer."""
    step = Engine._step

    def slow(*arguments):
        time.sleep(seconds)
        step(*arguments)

    Engine._step = slow
