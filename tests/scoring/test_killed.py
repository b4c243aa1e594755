"""`score` and `rescore` that are killed between two verdicts: the same command goes on, and judges nothing twice."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from refusion_eval.benchmarks import BENCHMARKS, get_task
from refusion_eval.runs.job import doc_hash
from refusion_eval.scoring.judge import Verdict
from refusion_eval.scoring.score import VerdictFile
from refusion_eval.store.records import Sample, SampleKey
from refusion_eval.store.run_store import RunStore
from tests.store.conftest import make_manifest

NUM_TEXTS = 6

# Runs a command whose judge writes a letter for each program, and dies before it judges the program number argv[2].
SCRIPT = """
import os, signal, sys
from refusion_eval.scoring import judge
from refusion_eval.cli import app
log, last = sys.argv[1], int(sys.argv[2])
check_program, count = judge.check_program, 0
def counted(*given, **more):
    global count
    if count == last:
        os.kill(os.getpid(), signal.SIGKILL)
    count += 1
    with open(log, "a") as file:
        file.write("x")
    return check_program(*given, **more)
judge.check_program = counted
app(sys.argv[3:])
"""


@pytest.fixture
def rows():
    return get_task("mini_mbpp").rows()[:NUM_TEXTS]


def programs(rows):
    """Right answers to the first rows, and wrong ones to the others."""
    texts = [BENCHMARKS["mbpp"].prompts.gold_text(row) for row in rows]
    return [*texts[:3], *(f"{text}\n```python\nnumber = {place}\n```" for place, text in enumerate(texts[3:]))]


def score_arguments(folder, rows):
    path = folder / "outputs.jsonl"
    ids = (BENCHMARKS["mbpp"].id_of(row, number) for number, row in enumerate(rows))
    lines = [json.dumps({"id": name, "text": text}) for name, text in zip(ids, programs(rows), strict=True)]
    path.write_text("\n".join(lines))
    result = folder / "outputs.scores.csv"
    return ["score", "--task", "mini_mbpp", "--outputs", str(path), "--allow-partial"], [result]


def rescore_arguments(folder, rows):
    """Two runs, each with half of the texts."""
    runs = [folder / "one", folder / "two"]
    for number, (row, text) in enumerate(zip(rows, programs(rows), strict=True)):
        key = SampleKey("mini_mbpp", "1.0", doc_hash(row), "prompt", 0, "settings")
        with RunStore.open(runs[number % 2], make_manifest()) as store:
            store.append(Sample(key=key, benchmark="mbpp", item_id=BENCHMARKS["mbpp"].id_of(row, number), text=text))
    return ["rescore", *map(str, runs)], [run / "rescored" / "ours.csv" for run in runs]


@pytest.mark.parametrize("arguments", [score_arguments, pytest.param(rescore_arguments, marks=pytest.mark.slow)])
def test_a_killed_command_goes_on_and_judges_nothing_twice(arguments, rows, tmp_path):
    def run(folder, last):
        given, results = commands[folder]
        more = ["--sandbox", "none", "--workers", "1"]
        command = [sys.executable, "-c", SCRIPT, str(folder / "log"), str(last), *given, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=folder)
        return done, results

    commands = {}
    for folder in (tmp_path / "whole", tmp_path / "killed"):
        folder.mkdir()
        commands[folder] = arguments(folder, rows)
    whole, expected = run(tmp_path / "whole", -1)
    assert whole.returncode == 0, whole.stderr
    for last in (2, 3):
        killed, results = run(tmp_path / "killed", last)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not results[-1].exists()
    done, results = run(tmp_path / "killed", -1)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "killed" / "log").read_text()) == NUM_TEXTS
    assert [path.read_bytes() for path in results] == [path.read_bytes() for path in expected]
    assert done.stdout.replace(f"{tmp_path}/killed", f"{tmp_path}/whole") == whole.stdout
    assert list(tmp_path.rglob("*.partial")) == []


def test_only_whole_lines_of_the_same_rule_are_read(tmp_path):
    path = tmp_path / "scores.csv"
    right, wrong = Verdict("1", "correct", "because"), Verdict(None, "wrong", "\ud800")
    kept = VerdictFile(path, "sandbox auto")
    kept["a"], kept["b"], kept["c"] = right, wrong, Verdict(None, "error", "the judge failed")
    partial = Path(f"{path}.partial")
    partial.write_bytes(partial.read_bytes() + b'\n["sandbox auto", "d", ["1", "corr')
    again = VerdictFile(path, "sandbox auto")
    again["e"] = right
    assert dict(VerdictFile(path, "sandbox auto")) == {"a": right, "b": wrong, "e": right}
    assert dict(VerdictFile(path, "sandbox none")) == {}
    again.remove()
    assert list(tmp_path.iterdir()) == []
