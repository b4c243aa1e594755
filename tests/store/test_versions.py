"""Run directories of other versions: each opens, or one sentence says why it does not and what to do.

There has been one schema so far. What may change under it are the fields of the JSON in its columns.
"""

import json
import sqlite3

import pytest

from refusion_eval.errors import StoreError
from refusion_eval.results.measured import run_measurements
from refusion_eval.store.records import ScoreRow
from refusion_eval.store.run_files import DATABASE_NAME, SCHEMA_VERSION
from refusion_eval.store.run_store import RunReader, RunStore


@pytest.fixture
def directory(tmp_path, make_manifest, make_sample):
    """A run of version 0.1.0 with one judged sample."""
    sample = make_sample(7)
    with RunStore.open(tmp_path / "run", make_manifest(package_version="0.1.0")) as store:
        store.append(sample)
        store.append_scores([ScoreRow(key=sample.key, item_id="7", scorer="s", value=1.0, verdict="correct")])
    return tmp_path / "run"


def change(directory, statement, *values):
    connection = sqlite3.connect(directory / DATABASE_NAME)
    connection.execute(statement, values)
    connection.commit()
    connection.close()


def test_a_directory_of_another_version_with_the_same_texts_is_continued(directory, make_manifest, make_sample):
    with RunStore.open(directory, make_manifest(package_version="0.1.9")) as store:
        store.append(make_sample(8))
        assert [sample.item_id for sample in store.samples()] == ["7", "8"]


def test_a_fingerprint_that_an_earlier_version_wrote_in_another_form_does_not_count(directory, make_manifest):
    change(directory, "UPDATE meta SET value = ? WHERE name = 'fingerprint'", json.dumps({"package_version": "0.0.1"}))
    RunStore.open(directory, make_manifest(package_version="0.1.0")).close()


def test_a_directory_of_another_package_version_says_so(directory, make_manifest):
    with pytest.raises(
        StoreError, match=r'package_version: recorded "0.1", now "0.2"\. Use the recorded settings, remo'
    ):
        RunStore.open(directory, make_manifest(package_version="0.2.0"))
    with RunReader.open(directory) as run:
        assert len(list(run.samples())) == 1


@pytest.mark.parametrize("table", ["samples", "scores"])
def test_fields_of_a_later_version_under_the_same_schema_are_passed_over(directory, table):
    with RunReader.open(directory) as run:
        before = [*run.samples(), *run.scores()]
    change(directory, f"UPDATE {table} SET body = json_set(body, '$.invented_later', 3)")
    with RunReader.open(directory) as run:
        assert [*run.samples(), *run.scores()] == before


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 99])
def test_a_newer_schema_is_refused_with_what_to_do(directory, make_manifest, version):
    change(directory, f"PRAGMA user_version = {version}")
    before = (directory / DATABASE_NAME).read_bytes()
    for attempt in (lambda: RunStore.open(directory, make_manifest()), lambda: run_measurements([directory])):
        with pytest.raises(StoreError, match=rf"schema {version}; this one knows up to {SCHEMA_VERSION}.* upgrade"):
            attempt()
    assert (directory / DATABASE_NAME).read_bytes() == before


def test_every_schema_that_was_ever_written_is_tried_here():
    assert SCHEMA_VERSION == 1, "add a directory of the earlier schema to this file"
