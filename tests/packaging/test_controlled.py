"""scripts/controlled.py: the rows, the rule that chooses settings, the commands, the time limit, what travels."""

import json
import os
import runpy
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest

from miniature.systems import NUM_EQUAL
from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.errors import DataError
from refusion_eval.protocol.spec import read_protocol
from refusion_eval.sweep.spec import read_spec

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "controlled.py")))


@pytest.fixture
def data(tmp_path):
    """Two tasks with training rows, of which some are test rows in another spelling or stand twice."""
    rows = {
        "gsm8k/test": [_sum(number) for number in range(3)],
        "gsm8k/train": [_sum(2) | {"question": "how  MUCH is 2 and 2"}, *map(_sum, (5, 6, 7, 8, 8, 9))],
        "math/test": [{"problem": "One?", "solution": r"\boxed{1}", "level": "Level 1", "type": "Algebra"}],
        "mbpp/test": [_program(11)],
        "mbpp/train": [_program(601) | {"text": "Return 11."}, _program(602), _program(603), _program(604)],
    }
    for name, of_file in rows.items():
        path = tmp_path / "data" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in of_file))
    return tmp_path / "data"


def _sum(number):
    return {"question": f"How much is {number} and 2?", "answer": f"Add.\n#### {number + 2}"}


def _program(number):
    code = f"def f():\n    return {number}"
    tests = [f"assert f() == {number}"]
    row = {"task_id": number, "text": f"Return {number}.", "code": code, "test_list": tests}
    return row | {"test_setup_code": "", "challenge_test_list": []}


def test_no_test_row_is_trained_on_and_the_held_out_rows_stay_apart(script, data, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    script.write_rows(data, ["gsm8k", "mbpp"], 1, 0, work)
    trained = [json.loads(line) for line in (work / "train.jsonl").read_text().splitlines()]
    assert {tuple(row) for row in trained} == {("query", "response")}
    questions = [script.normalised(row["query"]) for row in trained]
    assert len(questions) == len(set(questions)) == 4 + 2
    for task in ("gsm8k", "math", "mbpp"):
        tests = [json.loads(line) for line in (data / task / "test.jsonl").read_text().splitlines()]
        assert not {script.normalised(BENCHMARKS[task].ours.user(row)) for row in tests} & set(questions)
    for task in ("gsm8k", "mbpp"):
        (line,) = (work / "held_out" / task / "test.jsonl").read_text().splitlines()
        assert script.normalised(BENCHMARKS[task].ours.user(json.loads(line))) not in questions
    counts = json.loads((work / "rows.json").read_text())["counts"]
    assert counts["gsm8k"] == {"rows": 7, "as_tests_or_twice": 2, "trained": 4}
    assert counts["mbpp"] == {"rows": 4, "as_tests_or_twice": 1, "trained": 2}
    sums = [row for row in trained if "How much" in row["query"]]
    assert all(row["response"].startswith("Add.\nThe answer is ") for row in sums)

    before = (work / "train.jsonl").read_bytes()
    script.write_rows(data, ["gsm8k", "mbpp"], 1, 0, work)
    assert (work / "train.jsonl").read_bytes() == before
    with pytest.raises(script.ConfigError, match="name another --work-dir"):
        script.write_rows(data, ["gsm8k"], 1, 0, work)


def test_a_split_that_is_missing_or_small_is_refused(script, data, tmp_path):
    with pytest.raises(DataError, match=r"no train rows of math.*EleutherAI/hendrycks_math.*MIT.*--train gsm8k,mbpp"):
        script.write_rows(data, ["gsm8k", "math"], 1, 0, tmp_path)
    with pytest.raises(DataError, match="gsm8k has 5 train rows of its own; hold out fewer"):
        script.write_rows(data, ["gsm8k"], 5, 0, tmp_path)
    assert not (tmp_path / "rows.json").exists()


def test_the_time_of_decoding_is_that_of_all_its_answers(script, data):
    words = ["--data", str(data), "--train", "gsm8k,mbpp", "--held-out", "3", "--limit", "2", "--gen-length", "1000"]
    held_out, tests = 2 * 3 * (1 + 5 * NUM_EQUAL), 6 * (2 + 1 + 1)
    forwards = (held_out + tests) * 1000
    told = script.cost_of_decoding(script.parsed(words))
    assert told.startswith(f"decoding: {held_out:,} answers to held-out rows and {tests:,} to test rows, each of at")
    assert f"at most {forwards / 60_000:.0f} to {forwards / 12_000:.0f} minutes at an assumed 1,000 to 200" in told


def test_all_systems_but_ar_sft_have_as_many_settings(script):
    assert {system.name: len(system.grid) for system in script.SYSTEMS if system.name != "AR-SFT"} == dict.fromkeys(
        ("ReFusion", "ReFusion, verifier", "BD3-LM, merged", "I-DLM", "LLaDA w/ Fast-dLLM"), NUM_EQUAL
    )
    assert {system.model for system in script.SYSTEMS} == set(script.RECIPES)


def test_the_setting_with_most_tokens_a_forward_near_the_best_accuracy_is_chosen(script):
    (system,) = [system for system in script.SYSTEMS if system.name == "I-DLM"]
    # Accuracies of two tasks, whose means are 50, 49.5, 40 and less; the second is within a point and faster.
    points = [(60, 40, 10), (59, 40, 20), (40, 40, 30), *[(0, 0, 40)] * 5]
    rows = [
        {"run_id": f"i_dlm-{number}-settings", "task": task, "metric": metric, "value": value, "num_tasks": 1}
        | {"tokens": tokens, "forwards": 10}
        for number, (sums, programs, tokens) in enumerate(points)
        for task, metric, value in (("gsm8k", "accuracy", sums), ("mbpp", "pass@1", programs), ("gsm8k", "tps", 99))
    ]
    mean = {"run_id": "i_dlm-2-settings", "task": "average", "metric": "accuracy", "value": 100.0, "num_tasks": 2}
    chosen = script.chosen_settings(pandas.DataFrame([*rows, mean | {"tokens": 0, "forwards": 0}]), [system])
    assert chosen == {"i_dlm": dict(system.grid[1])}


def test_the_sweep_and_the_protocol_that_it_writes_can_be_read(script, tmp_path):
    for recipe in script.RECIPES:
        (tmp_path / recipe / "model").mkdir(parents=True)
    script.write_sweep(tmp_path / "settings.yaml", script.SYSTEMS, ["gsm8k", "mbpp"], 256)
    spec = read_spec(str(tmp_path / "settings.yaml"))
    assert len(spec.systems) == 1 + 5 * NUM_EQUAL
    assert {point.name for system in spec.systems for point in system.points} == {"settings"}
    rows = [
        {"run_id": f"{system.name}-settings", "task": "gsm8k", "metric": "accuracy", "value": 50, "num_tasks": 1}
        | {"tokens": 10, "forwards": 5}
        for system in spec.systems
    ]
    (tmp_path / "sweep").mkdir()
    pandas.DataFrame(rows).to_csv(tmp_path / "sweep" / "sweep.csv")
    given = SimpleNamespace(gen_length=256, limit=5)
    protocol = read_protocol(str(script.write_protocol(tmp_path, given)))
    assert list(protocol.systems) == [script.key_of(system) for system in script.SYSTEMS]
    assert (protocol.tasks, protocol.limit) == (("gsm8k", "math", "mbpp"), 5)


def test_a_dry_run_prints_all_commands_and_writes_nothing(script, tmp_path, capsys):
    work = tmp_path / "work"
    options = ["--work-dir", str(work), "--data", "D", "--steps", "7", "--set", "optimisation.lr=1e-3", "--limit", "5"]
    assert script.main([*options, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [
        *["train"] * 5, "sweep", "protocol", "table", "paper-table", "plot", "compare"
    ]  # fmt: skip
    assert [line.split("smollm2_")[1].split()[0] for line in lines[:5]] == list(script.RECIPES)
    for line in lines[:5]:
        assert f'data.files="{work}/train.jsonl"' in line
        assert line.endswith("--set optimisation.max_steps=7 --set optimisation.lr=1e-3")
    assert lines[6].endswith(f"protocol run {work}/comparison.yaml --out {work}/protocol_6 --data D")
    assert not work.exists()


def test_a_command_is_stopped_when_the_time_is_over(script, monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho $$ >"$0.pid"\n[ "$3" = fail ] && exit 1\nexec sleep 60\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(script.ConfigError, match="refusion-eval fail ended with status 1"):
        script.carry_out(["fail"], None)
    with pytest.raises(script.OutOfTimeError, match="the time is over during: refusion-eval wait; the same command"):
        script.carry_out(["wait"], script.time.monotonic() + 1)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "python.pid").read_text()), 0)


def test_what_travels_is_one_archive_in_small_parts(script, data, tmp_path, monkeypatch):
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(b"w" * 3_000_000)
    monkeypatch.setitem(script.pack.__globals__, "packaged_file", lambda name: weights)
    parts = script.pack(tmp_path / "carry", data, None, 2)
    assert all(path.stat().st_size <= 2 * 2**20 for path in parts)
    whole = tmp_path / "whole.tar"
    whole.write_bytes(b"".join(path.read_bytes() for path in sorted((tmp_path / "carry").iterdir())))
    with tarfile.open(whole) as archive:
        names = set(archive.getnames())
        archive.extractall(tmp_path / "there", filter="data")
    digest = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert f"cache/refusion_eval/packages/{digest}/weights.gguf" in names
    assert {"code/scripts/controlled.py", "code/tasks/settings/refusion.yaml", "data/gsm8k/train.jsonl"} <= names
    assert not [name for name in names if name.endswith(".safetensors") or "__pycache__" in name]
    assert (tmp_path / "there" / "cache" / "refusion_eval" / "packages" / digest / "weights.gguf").exists()
