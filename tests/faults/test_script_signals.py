"""A signal to eval.sh or train.sh, which are the command that they started: it ends, and can be continued."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.faults.runs import REPOSITORY, num_recorded, wait_until

if shutil.which("bash") is None:
    pytest.skip("needs bash", allow_module_level=True)


def _hear_all():
    """What a process ignores from its start, as under nohup or in the background, a shell can never hear."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Script:
    """A script in a session of its own, with an environment that is set up."""

    def __init__(self, folder, python, arguments):
        self._stamp(folder, python)
        environment = {"REFUSION_EVAL_VENV": str(folder), "PYTHON": str(folder / "bin" / "python")}
        self.process = subprocess.Popen(
            ["bash", REPOSITORY / arguments[0], *arguments[1:]],
            cwd=folder,
            env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=(folder / "stderr.log").open("w"),
            text=True,
            start_new_session=True,
            preexec_fn=_hear_all,
        )
        self._folder = folder

    @staticmethod
    def _stamp(folder, python):
        (folder / "bin").mkdir()
        (folder / "bin" / "python").write_text(python)
        (folder / "bin" / "python").chmod(0o755)
        command = ["bash", "-c", "source ./environment.sh; stamp"]
        environment = {**os.environ, "PYTHON": str(folder / "bin" / "python")}
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
        for name in ("set-up", "set-up-train"):
            (folder / name).write_text(done.stdout)

    def end(self, number):
        """Sends a signal to the script alone; returns its exit status."""
        os.kill(self.process.pid, number)
        self.process.communicate(timeout=120)
        return self.process.returncode

    def errors(self):
        """What it has written to stderr."""
        return (self._folder / "stderr.log").read_text()


NUM_ITEMS = 15  # decoding them takes seconds, in which a signal comes to the first
PYTHON = f'#!/bin/sh\nexec {sys.executable} "$@"\n'


def evaluation(tmp_path, name, *arguments):
    """eval.sh on the embedded model in its own environment folder, with results beside it."""
    folder = tmp_path / name
    folder.mkdir()
    options = ["--no-baseline", "--tasks", "gsm8k", "--limit", str(NUM_ITEMS), "--results", tmp_path / "results"]
    return Script(folder, PYTHON, ["eval.sh", *options, *arguments])


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_lets_the_sample_finish_and_the_same_command_continues(number, tmp_path):
    script = evaluation(tmp_path, "first")
    run_dir = tmp_path / "results" / "runs" / "embedded-refusion-unfused"
    wait_until(lambda: script.process.poll() is not None or num_recorded(run_dir), "no sample is recorded")
    status = script.end(number)
    assert status == 128 + number, script.errors()
    recorded = num_recorded(run_dir)
    last = script.errors().rstrip().splitlines()[-1]
    assert f"stopped by {number.name}: {recorded} of " in script.errors()
    assert last.endswith("run the same command again to continue")
    assert " table " not in script.errors()
    script = evaluation(tmp_path, "second")
    script.process.communicate(timeout=300)
    assert script.process.returncode == 0, script.errors()
    assert " table " in script.errors()
    assert num_recorded(run_dir) == NUM_ITEMS


@pytest.mark.slow
def test_a_killed_evaluation_continues_with_what_is_recorded(tmp_path):
    script = evaluation(tmp_path, "first")
    run_dir = tmp_path / "results" / "runs" / "embedded-refusion-unfused"
    wait_until(lambda: script.process.poll() is not None or num_recorded(run_dir), "no sample is recorded")
    script.end(signal.SIGKILL)
    assert num_recorded(run_dir) < NUM_ITEMS
    script = evaluation(tmp_path, "second")
    script.process.communicate(timeout=300)
    assert script.process.returncode == 0, script.errors()
    assert " table " in script.errors()
    assert num_recorded(run_dir) == NUM_ITEMS


def group_is_there(number):
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_signal_ends_a_training_with_all_its_processes(tmp_path):
    script = Script(tmp_path, PYTHON, ["train.sh", "--config", "tiny", "--processes", "1"])
    wait_until(lambda: script.process.poll() is not None or "step " in script.errors(), "no step is trained")
    assert script.end(signal.SIGTERM) != 0
    wait_until(lambda: not group_is_there(script.process.pid), "a process of the training is left")
