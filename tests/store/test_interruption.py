"""Killed processes, second writers, full disks, damaged and foreign files."""

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from refusion_eval.errors import StoreError
from refusion_eval.store.run_files import DATABASE_NAME, RUN_JSON, SCHEMA_VERSION
from refusion_eval.store.run_store import RunReader, RunStore

WRITER = Path(__file__).with_name("interrupted_writer.py")
REPOSITORY = Path(__file__).parents[2]


def start_writer(run_dir, num_items, pause=0.0, **options):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(WRITER), str(run_dir), str(num_items), str(pause)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **options)


def facts(run_dir):
    with RunReader.open(run_dir) as reader:
        return [replace(sample, process_id="", created="") for sample in reader.samples()]


def finish(run_dir, num_items):
    writer = start_writer(run_dir, num_items)
    writer.communicate(timeout=60)
    assert writer.returncode == 0


@pytest.mark.process
def test_a_run_killed_at_random_instants_and_resumed_equals_an_undisturbed_one(tmp_path):
    rng = random.Random(0)
    num_items = 40
    for name in ("calm", "killed"):
        if name == "killed":
            for _ in range(8):
                writer = start_writer(tmp_path / name, num_items, 0.002)
                if rng.random() < 0.6:
                    writer.stdout.readline()
                time.sleep(rng.random() * 0.12)
                writer.kill()
                reported = [int(line) for line in writer.communicate()[0].split()]
                if (tmp_path / name / DATABASE_NAME).is_file() and reported:
                    assert {str(item) for item in reported} <= {sample.item_id for sample in facts(tmp_path / name)}
        finish(tmp_path / name, num_items)
        finish(tmp_path / name, num_items)
    assert len(facts(tmp_path / "calm")) == num_items
    assert facts(tmp_path / "killed") == facts(tmp_path / "calm")


@pytest.mark.process
def test_a_process_killed_while_the_run_is_created_leaves_a_directory_that_can_be_used(tmp_path):
    for number, delay in enumerate((0.05, 0.1, 0.15, 0.2, 0.25, 0.3)):
        writer = start_writer(tmp_path / str(number), 3)
        time.sleep(delay)
        writer.kill()
        writer.communicate()
        finish(tmp_path / str(number), 3)
        assert len(facts(tmp_path / str(number))) == 3


@pytest.mark.process
def test_a_second_process_is_refused_by_pid_and_directory(tmp_path, make_manifest):
    writer = start_writer(tmp_path, 1000, 0.05)
    try:
        writer.stdout.readline()
        with pytest.raises(StoreError) as refusal:
            RunStore.open(tmp_path, make_manifest())
        assert f"pid {writer.pid} " in str(refusal.value)
        assert str(tmp_path) in str(refusal.value)
        assert facts(tmp_path)
    finally:
        writer.kill()
        writer.communicate()
    RunStore.open(tmp_path, make_manifest()).close()


def test_a_second_writer_in_the_same_process_is_refused(tmp_path, make_manifest):
    with RunStore.open(tmp_path, make_manifest()), pytest.raises(StoreError, match=f"pid {os.getpid()}"):
        RunStore.open(tmp_path / ".." / tmp_path.name, make_manifest())
    RunStore.open(tmp_path, make_manifest()).close()


@pytest.mark.process
def test_a_worker_that_outlives_a_killed_run_does_not_keep_it_locked(tmp_path, make_manifest):
    code = (
        "import os, sys, time; sys.path.insert(0, sys.argv[2]); from conftest import make_manifest;"
        "from refusion_eval.store.run_store import RunStore;"
        "store = RunStore.open(sys.argv[1], make_manifest());"
        "child = os.fork();"
        "time.sleep(30) if child == 0 else (print(child, flush=True), time.sleep(30))"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(WRITER.parent)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    worker = int(run.stdout.readline())
    run.kill()
    run.wait()
    try:
        RunStore.open(tmp_path, make_manifest()).close()
    finally:
        os.kill(worker, signal.SIGKILL)
        run.stdout.close()


def test_a_full_disk_is_one_clear_error_and_loses_nothing_finished(tmp_path, make_manifest, make_sample):
    with RunStore.open(tmp_path, make_manifest()) as store:
        store.append(make_sample(1))
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(StoreError, match="free some space"):
            store.append(make_sample(2, text="x" * 100_000))
        assert store.get(make_sample(2).key) is None
        store._connection.execute("PRAGMA max_page_count = 1000000")
        store.append(make_sample(2))
    assert [sample.item_id for sample in facts(tmp_path)] == ["1", "2"]


def test_a_write_the_system_refuses_is_one_clear_error(tmp_path, make_manifest):
    code = (
        "import resource, sys; sys.path.insert(0, sys.argv[2]); from conftest import make_manifest, make_sample;"
        "from refusion_eval.errors import StoreError; from refusion_eval.store.run_store import RunStore;"
        "store = RunStore.open(sys.argv[1], make_manifest()); store.append(make_sample(0));"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "try:\n"
        "    for item in range(1, 100): store.append(make_sample(item, text='x' * 10_000)); print(item)\n"
        "except StoreError as error: print('refused', error)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(WRITER.parent)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    *written, last = answer.stdout.splitlines()
    assert last.startswith(f"refused {tmp_path}: ")
    assert "free some space" in last
    assert {sample.item_id for sample in facts(tmp_path)} == {"0", *written}
    RunStore.open(tmp_path, make_manifest()).close()


def test_a_run_directory_below_a_file_is_one_clear_error(tmp_path, make_manifest):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="directory"):
        RunStore.open(tmp_path / "file" / "run", make_manifest())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into any directory")
def test_a_read_only_directory_is_refused_for_writing(tmp_path, make_manifest):
    tmp_path.chmod(0o555)
    with pytest.raises(StoreError, match="writable"):
        RunStore.open(tmp_path, make_manifest())


def test_a_run_in_a_directory_that_cannot_be_written_can_be_read(tmp_path, make_manifest, make_sample):
    with RunStore.open(tmp_path / "open", make_manifest()) as store:
        store.append(make_sample(1))
        shutil.copytree(tmp_path / "open", tmp_path / "killed")
    shutil.copytree(tmp_path / "open", tmp_path / "closed")
    for name in ("killed", "closed"):
        (tmp_path / name / f"{DATABASE_NAME}-shm").unlink(missing_ok=True)
        (tmp_path / name).chmod(0o555)
        try:
            assert [sample.item_id for sample in facts(tmp_path / name)] == ["1"]
        finally:
            (tmp_path / name).chmod(0o755)


@pytest.mark.parametrize("damage", ["header", "middle", "emptied"])
def test_a_damaged_database_is_one_clear_error(tmp_path, make_manifest, make_sample, damage):
    with RunStore.open(tmp_path, make_manifest()) as store:
        for item in range(50):
            store.append(make_sample(item, text="x" * 2000))
    path = tmp_path / DATABASE_NAME
    content = bytearray(path.read_bytes())
    if damage == "header":
        content[:100] = b"?" * 100
    elif damage == "middle":
        content[8192:-4096] = b"\xff" * (len(content) - 12288)
    path.write_bytes(b"" if damage == "emptied" else bytes(content))
    if damage == "emptied":
        for attempt in (lambda: facts(tmp_path), lambda: RunStore.open(tmp_path, make_manifest())):
            with pytest.raises(StoreError, match="its records are gone; restore them, remove the folder"):
                attempt()
        return
    with pytest.raises(StoreError, match="damaged"):
        facts(tmp_path)
    with pytest.raises(StoreError, match="damaged"):
        RunStore.open(tmp_path, make_manifest())


def test_a_torn_wal_costs_only_the_sample_in_flight(tmp_path, make_manifest, make_sample):
    with RunStore.open(tmp_path / "open", make_manifest()) as store:
        for item in range(5):
            store.append(make_sample(item))
        shutil.copytree(tmp_path / "open", tmp_path / "torn")
    wal = tmp_path / "torn" / f"{DATABASE_NAME}-wal"
    wal.write_bytes(wal.read_bytes()[:-1000])
    (tmp_path / "torn" / f"{DATABASE_NAME}-shm").unlink()
    assert [sample.item_id for sample in facts(tmp_path / "torn")] == ["0", "1", "2", "3"]
    with RunStore.open(tmp_path / "torn", make_manifest()) as store:
        store.append(make_sample(4))
    assert facts(tmp_path / "torn") == facts(tmp_path / "open")


def test_a_newer_schema_is_refused(tmp_path, make_manifest):
    RunStore.open(tmp_path, make_manifest()).close()
    connection = sqlite3.connect(tmp_path / DATABASE_NAME)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    for attempt in (lambda: RunStore.open(tmp_path, make_manifest()), lambda: facts(tmp_path)):
        with pytest.raises(StoreError, match="upgrade refusion_eval"):
            attempt()


def test_a_database_of_another_program_is_refused(tmp_path, make_manifest):
    connection = sqlite3.connect(tmp_path / DATABASE_NAME)
    connection.execute("CREATE TABLE theirs (a)")
    connection.close()
    with pytest.raises(StoreError, match="another program"):
        RunStore.open(tmp_path, make_manifest())


def test_a_directory_without_records_is_named(tmp_path):
    with pytest.raises(StoreError, match="holds no records"):
        facts(tmp_path)


def test_a_refused_opening_leaves_the_directory_free(tmp_path, make_manifest, make_sample):
    with RunStore.open(tmp_path, make_manifest()) as store:
        store.append(make_sample(1))
    with pytest.raises(StoreError):
        RunStore.open(tmp_path, make_manifest(seed=1))
    RunStore.open(tmp_path, make_manifest()).close()


def test_a_lost_run_json_is_written_again(tmp_path, make_manifest):
    RunStore.open(tmp_path, make_manifest()).close()
    (tmp_path / RUN_JSON).unlink()
    RunStore.open(tmp_path, make_manifest()).close()
    assert (tmp_path / RUN_JSON).is_file()
