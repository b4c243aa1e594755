import json
import shutil
import sqlite3
from dataclasses import asdict
from pathlib import Path

import pytest

from refusion_eval.errors import ConfigError, StoreError
from refusion_eval.evaluation.loop import Outcome, evaluate
from refusion_eval.evaluation.rerun import arguments_of, plan_of_rerun, rerun
from refusion_eval.runs.model_args import ModelArgs, parse_model_args
from refusion_eval.runs.system import run_arguments
from refusion_eval.store.run_store import RunReader

ARGUMENTS = {"pretrained": "embedded", "decoder": "refusion", "tau_slot": 0.8, "warmup": 0}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("rerun") / "first"
    args = parse_model_args({**ARGUMENTS, "run_dir": str(run_dir)})
    evaluate(args, ["mini_gsm8k"], limit=2)
    evaluate(args, ["mini_mbpp"], limit=1)
    return run_dir


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(recorded, tmp_path / "copied")


def _change(run_dir: Path, table: str, change: dict[str, object], where: str) -> None:
    """Overwrites fields of one stored body, as if the run had given something else."""
    with sqlite3.connect(run_dir / "records.sqlite") as connection:
        rowid, body = connection.execute(f"SELECT rowid, body FROM {table} WHERE body LIKE ?", (where,)).fetchone()
        connection.execute(
            f"UPDATE {table} SET body = ? WHERE rowid = ?", (json.dumps(json.loads(body) | change), rowid)
        )


def test_a_run_is_made_again_with_its_own_settings_tasks_and_limits(recorded: Path, tmp_path: Path) -> None:
    result = rerun(recorded, tmp_path / "again")
    assert (result.is_same, result.num_samples, list(result.other_conditions)) == (True, 3, [])
    with RunReader.open(tmp_path / "again") as reader:
        assert reader.run.expected == {"mini_gsm8k": 2, "mini_mbpp": 1}
        assert {sample.settings["tau_slot"] for sample in reader.samples()} == {0.8}
    assert "3 samples" in result.in_words()
    assert "all as recorded" in result.in_words()


def test_a_repetition_is_a_plan_with_a_run_for_each_number_of_items(recorded: Path, tmp_path: Path) -> None:
    with RunReader.open(recorded) as reader:
        plan = plan_of_rerun(reader.run, [sample.key for sample in reader.samples()], tmp_path, sandbox="none")
    assert [(run.tasks, run.limit) for run in plan.runs] == [(("mini_mbpp",), 1), (("mini_gsm8k",), 2)]
    assert {(run.run_dir, run.sandbox, run.args.samples) for run in plan.runs} == {(tmp_path, "none", 1)}


def test_all_samples_of_a_run_are_made_again(tmp_path: Path) -> None:
    drawn = {**ARGUMENTS, "gen_length": 16, "temperature": 2.0, "run_dir": str(tmp_path / "first")}
    for samples in (1, 2):  # the run is continued with more, which its manifest does not say
        evaluate(parse_model_args({**drawn, "samples": samples}), ["mini_gsm8k"], limit=2)
    result = rerun(tmp_path / "first", tmp_path / "again")
    assert (result.is_same, result.num_samples) == (True, 4)


@pytest.mark.parametrize("number", [2, 10**9, 2**53 - 1])
def test_a_sample_number_above_the_number_of_samples_asks_for_nothing(copied: Path, tmp_path: Path, number) -> None:
    with sqlite3.connect(copied / "records.sqlite") as connection:
        connection.execute("UPDATE meta SET value = ? WHERE name = 'expected:mini_gsm8k'", (str(2**53),))
    with RunReader.open(copied) as reader:
        assert reader.run.expected["mini_gsm8k"] == 2**53
        key = asdict(next(sample.key for sample in reader.samples() if sample.key.task == "mini_gsm8k"))
    _change(copied, "samples", {"key": {**key, "sample": number}}, "%mini_gsm8k%")
    with pytest.raises(StoreError, match=f"mini_gsm8k has a sample with the number {number}, and 2 samples"):
        rerun(copied, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_other_tokens_and_other_verdicts_are_named(copied: Path, tmp_path: Path) -> None:
    _change(copied, "samples", {"text": "something else"}, "%mini_gsm8k%")
    _change(copied, "scores", {"value": 0.5}, "%mini_mbpp%")
    result = rerun(copied, tmp_path / "again")
    assert not result.is_same
    assert [len(items) for items in result.differing.values()] == [0, 1, 1]
    assert "1 other tokens: mini_gsm8k" in result.in_words()


def test_another_machine_and_other_versions_are_named(copied: Path, tmp_path: Path) -> None:
    with sqlite3.connect(copied / "records.sqlite") as connection:
        (text,) = connection.execute("SELECT value FROM meta WHERE name = 'manifest'").fetchone()
        manifest = json.loads(text)
        manifest["hardware"] |= {"cpu": "another processor"}
        manifest["versions"] |= {"torch": "0.1"}
        connection.execute("UPDATE meta SET value = ? WHERE name = 'manifest'", (json.dumps(manifest),))
    result = rerun(copied, tmp_path / "again")
    assert result.is_same
    assert {"hardware.cpu", "versions.torch"} <= {condition.split(": ")[0] for condition in result.other_conditions}
    assert "another processor" in result.in_words()


def test_arguments_survive_the_record(recorded: Path) -> None:
    args = ModelArgs(pretrained="x", decoder="refusion", adapter="y", batch_size=None, settings={"eos_ids": (1, 2)})
    assert parse_model_args(run_arguments(args)) == args
    with RunReader.open(recorded) as reader:
        again = arguments_of(reader.run)
    assert (again.settings, again.dtype, again.warmup) == ({"tau_slot": 0.8}, "float32", 0)


def test_what_cannot_be_made_again_is_refused_before_decoding(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is the run itself"):
        rerun(copied, copied)
    with sqlite3.connect(copied / "records.sqlite") as connection:
        (text,) = connection.execute("SELECT value FROM meta WHERE name = 'manifest'").fetchone()
        manifest = json.loads(text)
        for change, error, message in (
            ({"checkpoint_hash": "0" * 32}, StoreError, "cannot be made again here: checkpoint"),
            ({"arguments": {}}, ConfigError, "kept no arguments"),
            ({"arguments": {"decoder": "evil.py:DECODER"}}, ConfigError, "a record must not choose"),
            ({"arguments": {"decoder": "refusion", "ray_address": "ray://x"}}, ConfigError, "must not choose"),
            ({"settings": {"release_loop": {"code": "0" * 64}}}, ConfigError, "code of its checkpoint, which a record"),
        ):
            changed = json.dumps(manifest | change)
            connection.execute("UPDATE meta SET value = ? WHERE name = 'manifest'", (changed,))
            connection.commit()
            with pytest.raises(error, match=message):
                rerun(copied, tmp_path / "again")
            assert not (tmp_path / "again").exists()


def _fused(run_dir: Path) -> list[bool | None]:
    with RunReader.open(run_dir) as reader:
        return [sample.settings["fuse"] for sample in reader.samples()]


def test_forwards_are_the_papers_unless_asked(recorded: Path) -> None:
    assert _fused(recorded) == [False] * 3


def test_a_run_that_fused_by_an_option_that_is_gone_says_how_to_go_on(copied: Path) -> None:
    with sqlite3.connect(copied / "records.sqlite") as connection:
        (text,) = connection.execute("SELECT value FROM meta WHERE name = 'manifest'").fetchone()
        manifest = json.loads(text)
        for given in (False, True):  # 1.0.0 recorded the option, also where it was not given
            manifest["arguments"]["fuse_by_default"] = given
            connection.execute("UPDATE meta SET value = ? WHERE name = 'manifest'", (json.dumps(manifest),))
            connection.commit()
            with RunReader.open(copied) as reader:
                if given:
                    with pytest.raises(ConfigError, match="--set fuse=true"):
                        arguments_of(reader.run)
                else:
                    assert "fuse_by_default" not in arguments_of(reader.run).settings


def test_a_repetition_without_the_rows_of_a_task_is_refused(copied: Path, tmp_path: Path, monkeypatch) -> None:
    def without_rows(*_args: object, **_options: object) -> Outcome:
        return Outcome([], 0, ["mini_mbpp"])

    monkeypatch.setattr("refusion_eval.evaluation.rerun.evaluate", without_rows)
    with pytest.raises(ConfigError, match="mini_mbpp: there are no rows to ask again; name their folder with --data"):
        rerun(copied, tmp_path / "again")
