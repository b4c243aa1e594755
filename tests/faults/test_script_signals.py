"""A signal to eval.sh or train.sh alone, not to what it runs: that is asked to end, and the script ends after it."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.faults.runs import REPOSITORY, num_recorded, wait_until

if shutil.which("bash") is None:
    pytest.skip("needs bash", allow_module_level=True)

# Ends a moment after the signal, as what has to finish first; what a real run does is tested below and in test_signals.
LONG = "n=0; while [ $n -lt 2000 ]; do sleep 0.05; n=$((n + 1)); done"
PATIENT = "trap 'sleep 0.2; echo recorded; exit {status}' {name}; echo running; " + LONG + "; echo not asked"
EVALUATION = ("eval.sh", "--model", "model", "--baseline", "other")
# Script, and the word of the command during which the signal comes.
SCENES = {
    "the first run": (EVALUATION, "refusion_eval run"),
    "the baseline": (EVALUATION, "other-autoregressive"),
    "the table": (EVALUATION, "refusion_eval table"),
    "an artefact": (("eval.sh", "--artefacts", "--model", "model", "--baseline", "other"), "paper-table"),
    "the check of a training": (("train.sh", "--config", "tiny"), "--check"),
    "a training": (("train.sh", "--config", "tiny"), "torch.distributed.run"),
}


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

    def until(self, line):
        """Reads what it prints up to a line."""
        said = ""
        while not said.endswith(f"{line}\n"):
            read = self.process.stdout.readline()
            assert read, f"it ended: {said}{self.errors()}"
            said += read
        return said

    def end(self, number):
        """Sends a signal to the script alone; returns its exit status and what it still printed."""
        os.kill(self.process.pid, number)
        said = self.process.communicate(timeout=120)[0]
        return self.process.returncode, said

    def errors(self):
        """What it has written to stderr."""
        return (self._folder / "stderr.log").read_text()


def patient(number, status):
    """A command of the shell that waits for a signal."""
    return PATIENT.format(name=number.name.removeprefix("SIG"), status=status)


def pretended(word, patient):
    """A Python that runs a command of the shell where its own arguments hold a word, and does nothing elsewhere."""
    own_steps = f'"-m refusion_eval.scripts"*) exec {sys.executable} "$@";;'
    return f'#!/bin/sh\ncase "$*" in {own_steps} *"{word}"*) {patient};; -) cat >/dev/null; echo stamp;; esac\n'


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("scene", SCENES)
def test_what_runs_ends_first_and_the_script_with_its_status(scene, number, tmp_path):
    arguments, word = SCENES[scene]
    more = ("--results", tmp_path / "results") if arguments[0] == "eval.sh" else ()
    script = Script(tmp_path, pretended(word, patient(number, 128 + number)), [*arguments, *more])
    script.until("running")
    assert script.end(number) == (128 + number, "recorded\n")


@pytest.mark.parametrize("status", [0, 1])
def test_what_ends_in_its_own_way_ends_the_script_by_the_signal(status, tmp_path):
    """One that had just finished, or that calls an interruption a failure; nothing else is begun."""
    python = pretended("refusion_eval run", patient(signal.SIGTERM, status))
    script = Script(tmp_path, python, [*EVALUATION, "--results", tmp_path / "results"])
    script.until("running")
    assert script.end(signal.SIGTERM) == (128 + signal.SIGTERM, "recorded\n")


def test_a_second_signal_is_handed_on_too(tmp_path):
    twice = "trap 'trap \"echo at once; exit 143\" TERM; echo asked' TERM; echo running; " + LONG
    python = pretended("refusion_eval run", twice)
    script = Script(tmp_path, python, [*EVALUATION, "--results", tmp_path / "results"])
    script.until("running")
    os.kill(script.process.pid, signal.SIGTERM)
    script.until("asked")
    time.sleep(1.1)  # within the same second it counts as the same
    assert script.end(signal.SIGTERM) == (128 + signal.SIGTERM, "at once\n")


def test_a_real_run_finishes_its_sample_and_says_how_to_continue(tmp_path):
    python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    results = tmp_path / "results"
    options = ["--no-baseline", "--tasks", "gsm8k", "--limit", "40", "--results", results]
    script = Script(tmp_path, python, ["eval.sh", *options])
    run_dir = results / "runs" / "embedded-refusion-unfused"
    wait_until(lambda: script.process.poll() is not None or num_recorded(run_dir), "no sample is recorded")
    status, said = script.end(signal.SIGTERM)
    assert status == 128 + signal.SIGTERM, script.errors()
    last = script.errors().rstrip().splitlines()[-1]
    assert last.startswith(f"stopped by SIGTERM: {num_recorded(run_dir)} of ")
    assert last.endswith("run the same command again to continue")
    assert " table " not in said
