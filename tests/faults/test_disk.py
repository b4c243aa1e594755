"""Disks that are full or cannot be written: one clear line, nothing recorded is lost, and the same command goes on."""

import os
import subprocess
from contextlib import contextmanager
from random import Random

import pytest

from tests.faults.front_end import error_of
from tests.faults.runs import assert_same, bytes_lost, command, records

MEGABYTE = 1 << 20
NUM_SIZES = 8


@contextmanager
def disk_of(folder, num_bytes):
    """A disk of its own; skips the test for those who may not mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=755", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs the right to mount a small disk ({done.stderr.strip()})")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder, options):
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def refused_for_space(output):
    """Whether a run ended with one line that says what to do."""
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    return len(lines) == 1 and "free some space" in lines[0] and "Traceback" not in output


def sizes(seed, number, low, high):
    """Seeded sizes, spread over the whole range."""
    rng, step = Random(seed), (high - low) / number
    return [int(low + step * (place + rng.random())) for place in range(number)]


def test_on_a_disk_that_fills_at_any_point_a_run_loses_nothing_and_goes_on(server, calm, tmp_path, report):
    num_refused = 0
    with disk_of(tmp_path / "disk", 8 * MEGABYTE) as disk:
        whole = sum(path.stat().st_size for path in calm.iterdir()) + 200_000
        for seed, size in enumerate(sizes(1, NUM_SIZES, 4096, whole)):
            run_dir, acknowledged = disk / f"run{seed}", tmp_path / f"notes{seed}"
            ballast = disk / "ballast"
            with ballast.open("wb") as file:
                free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
                file.write(bytes(max(0, free - size)))
            status, output = server.run(command(run_dir), acknowledged=str(acknowledged))
            if status != 0:
                num_refused += 1
                assert status == 1, output
                assert refused_for_space(output), output
            ballast.unlink()
            assert bytes_lost(run_dir, acknowledged) == (0, 0)
            status, output = server.run(command(run_dir), acknowledged=str(acknowledged))
            assert status == 0, output
            assert bytes_lost(run_dir, acknowledged) == (0, 0)
            assert_same(run_dir, calm)
            subprocess.run(["rm", "-r", str(run_dir)], check=True)
    report(f"full disk: {NUM_SIZES} sizes tried, {num_refused} runs refused, all continued, 0 records and 0 bytes lost")
    assert num_refused >= 5


def test_where_a_file_may_not_grow_any_more_a_run_loses_nothing_and_goes_on(server, calm, tmp_path):
    """The same without the right to mount: the limit is that of the process."""
    num_refused = 0
    for seed, size in enumerate(sizes(2, 4, 8_000, 160_000)):
        run_dir, acknowledged = tmp_path / f"run{seed}", tmp_path / f"notes{seed}"
        status, output = server.run(command(run_dir), acknowledged=str(acknowledged), largest_file=size)
        if status != 0:
            num_refused += 1
            assert status == 1, output
            assert refused_for_space(output), output
        status, output = server.run(command(run_dir), acknowledged=str(acknowledged))
        assert status == 0, output
        assert bytes_lost(run_dir, acknowledged) == (0, 0)
        assert_same(run_dir, calm)
    assert num_refused >= 2


@pytest.mark.parametrize("made_with", ["table", "report"])
def test_outputs_on_a_full_disk_leave_the_old_ones_whole(server, calm, tmp_path, made_with):
    with disk_of(tmp_path / "disk", 2 * MEGABYTE) as disk:
        if made_with == "table":
            outputs = [disk / "results.csv", disk / "table.md"]
            arguments = ["table", str(calm), "--csv", str(outputs[0]), "--markdown", str(outputs[1])]
        else:
            outputs = [disk / "page.html"]
            arguments = ["report", str(calm), "--out", str(outputs[0])]
        assert server.run(arguments)[0] == 0
        before, samples = [path.read_bytes() for path in outputs], records(calm)
        with (disk / "ballast").open("wb") as file:
            file.write(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
        status, output = server.run(arguments)
        assert status == 1, output
        assert "No space left on device" in error_of(output)
        assert refused_for_space(output)
        assert [path.read_bytes() for path in outputs] == before
        assert {path.name for path in disk.iterdir()} == {path.name for path in outputs} | {"ballast"}
        assert records(calm) == samples


@contextmanager
def read_only(folder):
    """A folder into which nothing can be written, not even by root."""
    if os.geteuid() != 0:
        folder.mkdir()
        folder.chmod(0o555)
        try:
            yield folder
        finally:
            folder.chmod(0o755)
        return
    with disk_of(folder, MEGABYTE):
        remount(folder, "ro")
        yield folder


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(server, tmp_path):
    with read_only(tmp_path / "closed") as folder:
        for run_dir in (folder, folder / "run"):
            status, output = server.run(command(run_dir))
            assert status == 1, output
            assert "writable" in error_of(output), output
        assert list(folder.iterdir()) == []


def test_a_disk_that_turns_read_only_costs_the_sample_in_flight_at_most(server, calm, tmp_path):
    with disk_of(tmp_path / "disk", 4 * MEGABYTE) as disk:
        # Each sample passes the place twice, and so does its verdict: the tenth passage is after the third sample.
        assert server.run(command(disk / "run"), fault={"place": "record", "count": 10})[0] != 0
        before = records(disk / "run")
        assert len(before[0]) == 3
        remount(disk, "ro")
        status, output = server.run(command(disk / "run"))
        assert status == 1, output
        assert "writable" in error_of(output)
        assert records(disk / "run") == before
        remount(disk, "rw")
        assert server.run(command(disk / "run"))[0] == 0
        assert_same(disk / "run", calm)
