"""Two runs on one directory, workers that die, memory that runs out, clocks that jump: the records stay the same."""

import ast
import signal
from pathlib import Path
from random import Random

import pytest

import refusion_eval
from refusion_eval.store.run_store import RunReader
from tests.faults.front_end import error_of
from tests.faults.runs import NUM_SAMPLES, assert_same, command, num_recorded, records, wait_until

EXIT_INCOMPLETE = 3
LONG_ENOUGH = {"gen_length": 128, "slot_size": 8, "block_size": 32}  # for programs that are right


def tokens(run_dir):
    return [(sample.key, sample.tokens, sample.text) for sample in records(run_dir)[0]]


def test_a_second_run_on_a_directory_is_refused_and_the_first_is_undisturbed(server, calm, tmp_path):
    first = server.start(command(tmp_path / "run"), trouble={"take_time": {"seconds": 0.1}})
    wait_until(lambda: num_recorded(tmp_path / "run") >= 1, "the first run recorded nothing")
    status, output = server.run(command(tmp_path / "run"))
    assert status == 1, output
    assert f"(pid {first.pid} on " in error_of(output)
    assert first.wait() == 0, first.output()
    assert_same(tmp_path / "run", calm)


def test_after_a_kill_another_process_may_go_on_at_once(server, calm, tmp_path):
    first = server.start(command(tmp_path / "run"), trouble={"take_time": {"seconds": 0.1}})
    wait_until(lambda: num_recorded(tmp_path / "run") >= 2, "the first run recorded nothing")
    first.kill(signal.SIGKILL)
    second = server.start(command(tmp_path / "run"))
    assert first.wait() == -signal.SIGKILL
    assert second.wait() == 0, second.output()
    assert_same(tmp_path / "run", calm)


def test_of_two_runs_that_start_together_one_writes(server, calm, tmp_path):
    for number in range(2):
        run_dir = tmp_path / f"run{number}"
        pair = [server.start(command(run_dir)) for _ in range(2)]
        statuses = [run.wait() for run in pair]
        assert 0 in statuses
        for status, run in zip(statuses, pair, strict=True):
            if status != 0:
                assert status == 1, run.output()
                assert "is being written by another process" in error_of(run.output())
        assert_same(run_dir, calm)


@pytest.fixture(scope="module")
def judged(server, tmp_path_factory):
    """An undisturbed run whose programs are right."""
    run_dir = tmp_path_factory.mktemp("judged") / "run"
    status, output = server.run(command(run_dir, **LONG_ENOUGH))
    assert status == 0, output
    of_programs = {score.verdict for score in records(run_dir)[1] if score.key.task == "mini_mbpp"}
    assert "correct" in of_programs
    return run_dir


@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_a_sandbox_worker_that_dies_changes_no_verdict(server, judged, tmp_path, seconds):
    trouble = {"kill_workers": {"counts": [1, 3], "seconds": seconds}}
    status, output = server.run(command(tmp_path / "run", **LONG_ENOUGH), trouble=trouble)
    assert status == 0, output
    assert_same(tmp_path / "run", judged)


def test_programs_whose_workers_die_again_and_again_are_judged_by_the_next_run(server, judged, tmp_path):
    arguments = command(tmp_path / "run", **LONG_ENOUGH)
    trouble = {"kill_workers": {"counts": list(range(100)), "seconds": 0.0}}
    status, output = server.run(arguments, trouble=trouble)
    assert status == EXIT_INCOMPLETE, output
    assert "not be judged" in error_of(output)
    assert num_recorded(tmp_path / "run") == NUM_SAMPLES
    assert server.run(arguments)[0] == 0
    assert_same(tmp_path / "run", judged)


@pytest.mark.parametrize("seed", range(3))
def test_memory_that_runs_out_in_a_batch_makes_smaller_batches_of_the_same_tokens(server, calm, tmp_path, seed):
    counts = Random(seed).sample(range(1, 5), 3)  # a run of one batch takes four forwards
    arguments = command(tmp_path / "run", batch_size=6)
    status, output = server.run(arguments, trouble={"run_out_of_memory": {"counts": counts}})
    if status == EXIT_INCOMPLETE:  # the last of the three came when requests were alone
        assert server.run(arguments)[0] == 0
    else:
        assert status == 0, output
    assert "half of it is tried" in output
    assert tokens(tmp_path / "run") == tokens(calm)
    assert records(tmp_path / "run")[1] == records(calm)[1]


def test_memory_for_fewer_requests_at_a_time_is_enough(server, calm, tmp_path):
    arguments = command(tmp_path / "run", batch_size=6)
    status, output = server.run(arguments, trouble={"run_out_of_memory": {"above": 1}})
    assert status == 0, output
    assert tokens(tmp_path / "run") == tokens(calm)
    assert {sample.batch_size for sample in records(tmp_path / "run")[0]} == {1}


def test_without_memory_for_one_request_samples_are_errors_that_the_next_run_tries_again(server, calm, tmp_path):
    arguments = command(tmp_path / "run", batch_size=2)
    few = [*arguments, "--limit", "2"]  # a run gives up after five equal failures
    status, output = server.run(few, trouble={"run_out_of_memory": {"above": 0}})
    assert status == EXIT_INCOMPLETE, output
    assert "4 samples could not be decoded" in error_of(output)
    assert num_recorded(tmp_path / "run") == 0
    assert all("CUDA out of memory" in sample.error for sample in records(tmp_path / "run")[0])
    assert server.run(arguments)[0] == 0
    assert tokens(tmp_path / "run") == tokens(calm)
    assert records(tmp_path / "run")[1] == records(calm)[1]


def test_a_clock_that_jumps_by_years_changes_no_record(server, calm, tmp_path):
    trouble = {"jump_in_time": {"seed": 0}}
    killed = server.run(command(tmp_path / "run"), trouble=trouble, fault={"place": "record", "count": 5})
    assert killed[0] == -signal.SIGKILL
    status, output = server.run(command(tmp_path / "run"), trouble=trouble)
    assert status == 0, output
    with RunReader.open(tmp_path / "run") as run:
        created = [sample.created for sample in run.samples()]
        assert all(0 <= sample.seconds < 60 for sample in run.samples())
    assert len({stamp[:4] for stamp in created}) > 1
    assert_same(tmp_path / "run", calm)


def test_only_the_stamp_of_a_record_reads_the_wall_clock():
    package = Path(refusion_eval.__file__).parent
    readers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and (getattr(node.value, "id", ""), node.attr)
        in {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}
    }
    # The others are the moment that a chat template writes into the prompts of a run, which is chosen once, and the
    # date until which a server asks not to be asked again.
    assert readers == {"store/run_store.py", "runs/system.py", "runs/server_attempts.py"}
