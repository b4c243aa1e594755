"""Run directories made by hand, quickly: rows go into the database at once, not one transaction each."""

import sqlite3
from dataclasses import replace

import pytest

from refusion_eval.report.collect import Asked
from refusion_eval.store.manifest import Hardware, Manifest
from refusion_eval.store.records import Sample, SampleKey, ScoreRow, pack
from refusion_eval.store.run_store import RunStore

LETTERS = " abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,<>/&"
# Two slots of two: the second is planned first, one draft of it is rejected, drawn again and accepted.
TRACE = [
    ["forward", 0, "plan", 14, 0],
    ["select", 0, "slot", [0, 2], [0.4, 0.9], [2]],
    ["draft", 0, [2, 3], [3, 4]],
    ["forward", 1, "verify", 2, 10],
    ["fix", 1, [2], [3]],
    ["draft", 1, [3], [5]],
    ["forward", 2, "verify", 2, 10],
    ["fix", 2, [3], [5]],
    ["forward", 3, "plan", 2, 12],
    ["select", 3, "slot", [0], [0.7], [0]],
    ["draft", 3, [0, 1], [1, 2]],
    ["forward", 4, "verify", 2, 12],
    ["fix", 4, [0, 1], [1, 2]],
    ["stop", 4, "length", 4],
]
TOKENS = [1, 2, 3, 5]


def spell(tokens):
    """Tokens of the tests are letters."""
    return "".join(LETTERS[token % len(LETTERS)] for token in tokens)


class NoSources:
    """Nothing but the records."""

    def asked(self, run, sample):
        return Asked(None, None, "The benchmark's rows are not at hand.")

    def spell(self, run):
        return None


class LetterSources(NoSources):
    """Knows the letters, and of every item what it was asked."""

    def __init__(self, asked=None):
        self._asked = asked or Asked("What comes next?", "abce", "as it was sent")

    def asked(self, run, sample):
        return self._asked

    def spell(self, run):
        return spell


def make_manifest(**changes):
    fields = {
        "system": "ReFusion",
        "backbone": "tiny",
        "decoder": "refusion",
        "settings": {},
        "checkpoint": "/weights/tiny",
        "checkpoint_hash": "c0ffee",
        "tasks": {"mini_gsm8k": "1"},
        "seed": 0,
        "dtype": "float32",
        "device": "cpu",
        "attention": "sdpa",
        "package_version": "0.1",
        "hardware": Hardware(cpu="Test CPU", cores=2, threads=1, memory_gib=8),
    }
    return Manifest(**{**fields, **changes})


def make_sample(item, *, task="mini_gsm8k", version="1", number=0, settings_hash="settings", **changes):
    fields = {
        "benchmark": task.removeprefix("mini_").removeprefix("refusion_"),
        "item_id": str(item),
        "text": "abce",
        "tokens": TOKENS,
        "num_tokens": len(TOKENS),
        "num_forwards": 5,
        "seconds": 0.25,
        "stop": "length",
        "settings": {"slot_size": 2, "tau_slot": 0.6},
        "settings_source": {"slot_size": "table"},
        "trace": TRACE,
        "prompt_num_tokens": 10,
    }
    key = SampleKey(task, version, f"doc-{item}", f"prompt-{item}", number, settings_hash)
    return Sample(key=key, **{**fields, **changes})


def make_score(sample, value=1.0, **changes):
    fields = {"extracted": "abce", "verdict": "correct" if value else "wrong", "reason": "statement"}
    return ScoreRow(key=sample.key, item_id=sample.item_id, scorer="test 1", value=value, **{**fields, **changes})


def write_run(directory, samples, scores=None, expected=(), whole=(), load=None, **manifest):
    """A run directory; without scores every sample that did not fail is right. `load` counts other programs."""
    with RunStore.open(directory, make_manifest(**manifest)) as store:
        store.expect(dict(expected), dict(whole))
        process = store.register_process(Hardware(cpu="Test CPU", cores=2, threads=1, memory_gib=8))
        store.note(process, before={"load": load})
    if scores is None:
        scores = [make_score(sample) for sample in samples if sample.error is None]
    rows = []
    for one in samples:
        names = (one.key.digest(), one.key.task, one.item_id, one.key.sample)
        trace = None if one.trace is None else pack(one.trace)
        rows.append((*names, one.error is not None, 1, replace(one, process_id=process).body(), trace))
    with sqlite3.connect(directory / "records.sqlite") as connection:
        connection.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        connection.executemany(
            "INSERT INTO scores VALUES (?, ?, ?, ?)",
            ((one.key.digest(), one.scorer, one.metric, one.body()) for one in scores),
        )
    connection.close()
    return directory


@pytest.fixture
def small_run(tmp_path):
    """Three items: right, wrong, failed."""
    samples = [
        make_sample("1"),
        make_sample("2"),
        make_sample("3", error="it broke", trace=None, tokens=None, num_tokens=0),
    ]
    return write_run(tmp_path / "small", samples, [make_score(samples[0]), make_score(samples[1], 0.0)])
