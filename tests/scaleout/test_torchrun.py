"""A run in several processes leaves the records of a run in one, whatever happens to the processes."""

import os
import re
import shutil
import signal
import subprocess

import pytest

from refusion_eval.paths import tasks_path
from tests.scaleout.launched_processes import (
    NUM_ITEMS,
    PYTHON,
    RUN,
    SETTINGS,
    TORCHRUN,
    finish,
    ranks,
    read_run,
    run_checked,
    start,
    wait_for,
)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("single")
    run_checked([*PYTHON, *RUN, "--run-dir", run_dir])
    single = read_run(run_dir)
    assert len(single.samples) == NUM_ITEMS
    assert any(score.value for score in single.scores)
    return single


def assert_same(run, single):
    """Records equal, no request twice, judgements equal, every decoding process registered."""
    assert run.facts == single.facts
    assert len({sample.key for sample in run.samples}) == len(run.samples)
    assert sorted(score.body() for score in run.scores) == sorted(score.body() for score in single.scores)
    assert {sample.process_id for sample in run.samples} <= run.processes.keys()


def test_two_processes_leave_the_records_of_one(single, tmp_path):
    result = run_checked([*TORCHRUN, "--standalone", "--nproc-per-node", "2", *RUN, "--run-dir", tmp_path])
    run = read_run(tmp_path)
    assert_same(run, single)
    assert (run.num_decoding, len(run.processes)) == (2, 2)
    assert {process["hardware"]["num_processes"] for process in run.processes.values()} == {2}
    assert len({process["pid"] for process in run.processes.values()}) == 2
    assert len(re.findall(r"^\S mini_gsm8k ", result.out, re.MULTILINE)) == 1  # one table


@pytest.mark.slow
def test_stock_lm_eval_in_three_processes_prints_its_results_once(single, tmp_path):
    arguments = ",".join(f"{key}={value}" for key, value in {**SETTINGS, "run_dir": tmp_path}.items())
    result = run_checked(
        [
            *(*TORCHRUN, "--standalone", "--nproc-per-node", "3", "-m", "lm_eval", "--model", "refusion"),
            *(
                "--model_args",
                f"pretrained=embedded,{arguments}",
                "--tasks",
                "mini_gsm8k",
                "--include_path",
                tasks_path(),
            ),
            *("--limit", str(NUM_ITEMS), "--apply_chat_template"),
        ]
    )
    run = read_run(tmp_path)
    assert_same(run, single)
    assert run.num_decoding == len(run.processes) == 3
    assert len(re.findall(r"^\|mini_gsm8k", result.out, re.MULTILINE)) == 1


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_and_the_same_command_completes_it(single, tmp_path):
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", *RUN, "--run-dir", tmp_path]
    launched = start(command)
    wait_for(launched, lambda: read_run(tmp_path).num_decoding == 2)
    interrupted = read_run(tmp_path)
    _, worker = interrupted.processes.values()  # the driver is the first
    os.kill(worker["pid"], signal.SIGKILL)
    assert finish(launched).status != 0
    assert 2 <= len(read_run(tmp_path).samples) < NUM_ITEMS
    run_checked(command)
    run = read_run(tmp_path)
    assert_same(run, single)
    kept = {sample.key: sample for sample in run.samples}
    assert all(kept[sample.key] == sample for sample in interrupted.samples)


def test_an_error_of_the_driver_ends_the_workers(tmp_path):
    (tmp_path / "file").touch()
    driver, worker = ranks([*RUN, "--run-dir", tmp_path / "file" / "run"])  # fails at the first record
    failed = finish(driver)
    assert failed.status == 1
    assert "error: " in failed.err
    stopped = finish(worker)
    assert (stopped.status, stopped.out) == (0, "")
    assert "error" not in stopped.err


@pytest.mark.slow
def test_a_driver_that_vanishes_costs_each_worker_one_clear_line(tmp_path):
    driver, worker = ranks([*RUN, "--run-dir", tmp_path])
    wait_for(driver, lambda: read_run(tmp_path).num_decoding == 2)
    driver.kill()
    finish(driver)
    result = finish(worker)
    assert result.status == 1
    lines = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "process 1: the process that drives this run cannot be reached any more" in lines[0]
    assert "Traceback" not in result.err


def test_a_signal_to_all_processes_loses_nothing_that_was_in_flight(single, tmp_path):
    processes = ranks([*RUN, "--run-dir", tmp_path])
    wait_for(processes[0], lambda: read_run(tmp_path).num_decoding == 2)
    for process in processes:
        process.terminate()
    driver, worker = map(finish, processes)
    assert (driver.status, worker.status) == (128 + signal.SIGTERM, 128 + signal.SIGTERM), driver.err + worker.err
    run = read_run(tmp_path)
    assert f"stopped by SIGTERM: {len(run.samples)} of {NUM_ITEMS} samples are recorded" in driver.err
    assert 2 <= len(run.samples) < NUM_ITEMS
    assert all(sample in single.facts for sample in run.facts)


@pytest.fixture
def hosts():
    """Two network namespaces, each with its own network, joined by a virtual cable."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip")
    names = [f"refusion{os.getpid()}{letter}" for letter in "ab"]
    wires = [f"rf{os.getpid() % 10**7}{letter}" for letter in "ab"]
    made = []

    def ip(*arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ip("link", "add", wires[0], "netns", names[0], "type", "veth", "peer", wires[1], "netns", names[1])
            for number, (name, wire) in enumerate(zip(names, wires, strict=True), start=1):
                ip("-n", name, "addr", "add", f"10.231.7.{number}/24", "dev", wire)
                ip("-n", name, "link", "set", wire, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.mark.slow
def test_two_hosts_joined_by_a_network_leave_the_records_of_one_process(single, hosts, tmp_path):
    rendezvous = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "10.231.7.1", "--master-port", "29500"]
    nodes = [
        start([*host, *TORCHRUN, *rendezvous, "--node-rank", str(number), *RUN, "--run-dir", tmp_path])
        for number, host in enumerate(hosts)
    ]
    result = [finish(node) for node in nodes]
    assert [process.status for process in result] == [0, 0], result[0].err[-2000:] + result[1].err[-2000:]
    run = read_run(tmp_path)
    assert_same(run, single)
    assert run.num_decoding == 2
    assert {process["hardware"]["num_processes"] for process in run.processes.values()} == {1}
    assert result[1].out == ""
