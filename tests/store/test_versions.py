"""Run directories of other versions: each opens, or one sentence says why it does not and what to do.

There has been one schema so far. What has changed under it are the fields of the JSON in its columns: the directory
made here has those of the first version that wrote records.
"""

import hashlib
import json
import sqlite3
import zlib

import pytest

from refusion_eval.errors import StoreError
from refusion_eval.results.measured import run_measurements
from refusion_eval.store.run_reader import DATABASE_NAME, SCHEMA_VERSION, RunReader
from refusion_eval.store.run_store import RunStore

FIRST_SCHEMA = """
PRAGMA application_id = 1380336982;
PRAGMA user_version = 1;
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE processes (process_id TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE samples (
    key BLOB PRIMARY KEY, task TEXT NOT NULL, item_id TEXT NOT NULL, sample INTEGER NOT NULL,
    failed INTEGER NOT NULL, attempts INTEGER NOT NULL, body TEXT NOT NULL, trace BLOB);
CREATE INDEX samples_in_order ON samples (task, item_id, sample, key);
CREATE TABLE scores (
    key BLOB NOT NULL REFERENCES samples (key), scorer TEXT NOT NULL, metric TEXT NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (key, scorer, metric));
"""
MANIFEST = {
    "system": "ReFusion",
    "backbone": "tiny",
    "decoder": "refusion",
    "settings": {"refusion": {"tau_slot": 0.9, "slot_size": 4}},
    "checkpoint": "/weights/tiny",
    "checkpoint_revision": "",
    "checkpoint_hash": "c0ffee",
    "tasks": {"mini_gsm8k": "1"},
    "seed": 0,
    "dtype": "float32",
    "device": "cpu",
    "attention": "sdpa",
    "package_version": "0.1",
    "batch_size": 1,
    "warmup": 0,
    "hardware": {"cpu": "Test CPU", "cores": 2, "threads": 1, "memory_gib": 8, "gpu": "", "gpu_driver": ""},
    "versions": {},
    "git_commit": None,
    "command": ["refusion-eval"],
    "roofline": {},
}
FINGERPRINT = ("system", "backbone", "decoder", "settings", "seed", "dtype", "device", "attention", "package_version")
KEY = {
    "task": "mini_gsm8k",
    "task_version": "1",
    "doc_hash": "doc-7",
    "prompt_hash": "prompt-7",
    "sample": 0,
    "settings_hash": "settings",
}
SAMPLE = {
    "key": KEY,
    "benchmark": "gsm8k",
    "item_id": "7",
    "text": "The answer is 7.",
    "tokens": [1, 2, 3],
    "num_tokens": 3,
    "num_forwards": 2,
    "seconds": 0.5,
    "stop": "eos",
    "settings": {"tau_slot": 0.9},
    "settings_source": {"tau_slot": "table"},
    "prompt_num_tokens": 10,
    "batch_size": 1,
    "process_id": "first",
    "warm": True,
    "error": None,
    "created": "2024-01-01T00:00:00.000+00:00",
}
SCORE = {
    "key": KEY,
    "item_id": "7",
    "scorer": "mini_gsm8k/first 0.1",
    "metric": "passed",
    "value": 1.0,
    "extracted": "7",
    "verdict": "correct",
    "reason": "expected 7",
}
TRACE = [["forward", 0, "plan", 4, 0], ["fix", 0, [0, 1, 2], [1, 2, 3]]]


def plain(value):
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), sort_keys=True)


def key_digest():
    return hashlib.sha256(plain(list(KEY.values())).encode()).digest()


def write_first_version(directory, **changes):
    directory.mkdir()
    fingerprint = {**{name: MANIFEST[name] for name in FINGERPRINT}, "checkpoint": MANIFEST["checkpoint_hash"]}
    process = {"hardware": MANIFEST["hardware"], "pid": 4, "started": SAMPLE["created"], "tasks": MANIFEST["tasks"]}
    connection = sqlite3.connect(directory / DATABASE_NAME)
    connection.executescript(FIRST_SCHEMA)
    for name, value in (("fingerprint", fingerprint), ("manifest", MANIFEST)):
        connection.execute("INSERT INTO meta VALUES (?, ?)", (name, plain(value)))
    connection.execute("INSERT INTO processes VALUES ('first', ?)", (plain(process),))
    trace = b"z" + zlib.compress(plain(TRACE).encode())
    row = (key_digest(), "mini_gsm8k", "7", 0, 0, 1, plain({**SAMPLE, **changes}), trace)
    connection.execute("INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    score = (key_digest(), SCORE["scorer"], SCORE["metric"], plain({**SCORE, **changes}))
    connection.execute("INSERT INTO scores VALUES (?, ?, ?, ?)", score)
    connection.commit()
    connection.close()
    return directory


def test_a_directory_of_the_first_version_can_be_read_and_made_a_table_of(tmp_path):
    directory = write_first_version(tmp_path / "run")
    with RunReader.open(directory) as run:
        (sample,), (score,) = run.samples(), run.scores()
        assert run.run.manifest.arguments == {}
        assert run.run.expected == {}
    assert (sample.text, sample.tokens, sample.trace, sample.prefill_seconds) == (
        SAMPLE["text"],
        [1, 2, 3],
        TRACE,
        None,
    )
    assert (score.verdict, score.tier) == ("correct", "")
    figures = {row.metric: row.value for row in run_measurements([directory]) if row.task == "mini_gsm8k"}
    assert (figures["accuracy"], figures["tpf"], figures["tps"]) == (100.0, 1.5, 6.0)


def test_a_directory_of_the_first_version_can_be_continued_by_the_same_system(tmp_path, make_manifest, make_sample):
    directory = write_first_version(tmp_path / "run")
    with RunStore.open(directory, make_manifest()) as store:
        store.append(make_sample(8))
        assert [sample.item_id for sample in store.samples()] == ["7", "8"]
    assert (directory / "run.json").is_file()


def test_a_directory_of_another_package_version_says_so(tmp_path, make_manifest):
    directory = write_first_version(tmp_path / "run")
    with pytest.raises(
        StoreError, match=r'package_version: recorded "0.1", now "0.2"\. Use the recorded settings, remo'
    ):
        RunStore.open(directory, make_manifest(package_version="0.2"))
    with RunReader.open(directory) as run:
        assert len(list(run.samples())) == 1


def test_fields_of_a_later_version_under_the_same_schema_are_passed_over(tmp_path):
    directory = write_first_version(tmp_path / "run", invented_later=3)
    with RunReader.open(directory) as run:
        assert [sample.text for sample in run.samples()] == [SAMPLE["text"]]
        assert [score.verdict for score in run.scores()] == ["correct"]


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 99])
def test_a_newer_schema_is_refused_with_what_to_do(tmp_path, make_manifest, version):
    directory = write_first_version(tmp_path / "run")
    connection = sqlite3.connect(directory / DATABASE_NAME)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    before = (directory / DATABASE_NAME).read_bytes()
    for attempt in (lambda: RunStore.open(directory, make_manifest()), lambda: run_measurements([directory])):
        with pytest.raises(StoreError, match=rf"schema {version}; this one knows up to {SCHEMA_VERSION}.* upgrade"):
            attempt()
    assert (directory / DATABASE_NAME).read_bytes() == before


def test_every_schema_that_was_ever_written_is_tried_here():
    assert SCHEMA_VERSION == 1, "add a directory of the earlier schema to this file"
