"""Tasks of a user and of lm-eval in runs of this project, and rows of the hub's datasets from a folder."""

import dataclasses
import json
import os

import datasets
import pytest
import yaml
from lm_eval.tasks import TaskManager

import refusion_eval
from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.errors import CheckpointError, ConfigError, DataError
from refusion_eval.lm_eval_plugin import any_task, hooks
from refusion_eval.lm_eval_plugin.any_task import split_names
from refusion_eval.lm_eval_plugin.evaluation import LocalSplits
from refusion_eval.lm_eval_plugin.tasks import find_other_tasks
from refusion_eval.paths import tasks_path
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.plan import PlannedRun, Turn
from refusion_eval.store.records import PASSED
from refusion_eval.store.run_store import RunReader
from refusion_eval.sweep.run import run_sweep
from refusion_eval.sweep.spec import read_spec

SHORT = {"gen_length": 16, "slot_size": 8, "block_size": 8, "warmup": 0, "fuse": False}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Folder with a user's task over three rows, `sums.yaml`."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"question": f"What is {n} plus 1?", "answer": str(n + 1)} for n in range(3)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "exact_match"}],
        "metadata": {"version": 1.0},
    }
    (folder / "sums.yaml").write_text(yaml.safe_dump(task))
    return folder


def arguments(checkpoint, run_dir=None, **more):
    place = {} if run_dir is None else {"run_dir": str(run_dir)}
    return parse_model_args({"pretrained": checkpoint, **SHORT, **place, **more})


def evaluate_any(args, names, include_path=None, *, turn=None, **of_run):
    run = PlannedRun(args=args, tasks=tuple(names), include_path=include_path, **of_run)
    return any_task.evaluate_any(run, turn=turn)


def load(names, include_path, args):
    return find_other_tasks(names, include_path, args).load(names)["tasks"]


def read(run_dir):
    with RunReader.open(run_dir) as run:
        return list(run.samples()), list(run.scores())


def test_a_file_and_a_task_of_this_project_go_into_one_run_which_continues(checkpoint, folder, tmp_path):
    args = arguments(checkpoint, tmp_path / "run")
    names = ["mini_gsm8k", str(folder / "sums.yaml")]
    assert evaluate_any(args, names, limit=2).is_complete
    first, scores = read(tmp_path / "run")
    assert {sample.key.task: sample.key.task_version for sample in first}["sums"] == "1.0"
    assert {score.key for score in scores if score.metric == PASSED} == {sample.key for sample in first}
    assert evaluate_any(args, names, limit=3).is_complete
    again, scores = read(tmp_path / "run")
    assert len(again) == 6
    assert {sample.created for sample in first} < {sample.created for sample in again}
    assert len([score for score in scores if score.metric == PASSED]) == 6


def test_a_task_of_the_include_path_is_found_by_its_name(checkpoint, folder):
    assert list(load(["sums"], folder, arguments(checkpoint))) == ["sums"]


def test_one_call_in_python_takes_files_and_names_of_a_folder_beside_this_projects_tasks(folder):
    model = refusion_eval.load_model("embedded", device="cpu")
    tasks = ["gsm8k", folder / "sums.yaml"]
    frame = refusion_eval.evaluate(model, tasks, limit=1, **SHORT)
    assert set(frame.task) == {"mini_gsm8k", "sums"}
    assert set(frame[frame.task == "sums"].metric) >= {"accuracy", "tpf"}
    named = refusion_eval.evaluate(model, "sums", include_path=folder, limit=1, **SHORT)
    assert set(named.task) == {"sums"}


def test_an_unknown_name_is_refused_with_the_likeliest_one(checkpoint, folder, monkeypatch):
    monkeypatch.setattr(TaskManager, "__init__", without_stock(TaskManager.__init__))
    with pytest.raises(ConfigError, match=r"^unknown task 'sum'; did you mean sums\?"):
        load(["sum"], folder, arguments(checkpoint))
    with pytest.raises(ConfigError, match=r"^unknown task 'gsm9k'; did you mean gsm8k\?"):
        load(["gsm9k"], None, arguments(checkpoint))


def without_stock(init):
    """Leaves out the 15,000 files of lm-eval's own tasks."""
    return lambda self, **options: init(self, **{**options, "include_defaults": False})


def test_a_checkpoint_that_cannot_be_had_is_refused_before_a_task_is_looked_for(folder, tmp_path):
    with pytest.raises(CheckpointError, match="no directory '/no/such/checkpoint'"):
        evaluate_any(arguments("/no/such/checkpoint", tmp_path / "run"), ["no_such_task"], folder)


def test_a_sweep_looks_for_its_checkpoint_before_its_task(folder, tmp_path):
    (tmp_path / "one.yaml").write_text("systems: {refusion: {arguments: {pretrained: /no/such/checkpoint}}}")
    spec = dataclasses.replace(read_spec(str(tmp_path / "one.yaml")), tasks=("no_such_task",))
    with pytest.raises(CheckpointError, match="no directory '/no/such/checkpoint'"):
        run_sweep(spec, tmp_path / "sweep", folder)


def test_a_task_whose_rows_are_missing_is_one_error(checkpoint, folder):
    (folder / "rows.jsonl").unlink()
    with pytest.raises(DataError, match=r"sums.yaml: lm-eval cannot load it \(FileNotFoundError"):
        load([str(folder / "sums.yaml")], None, arguments(checkpoint))


@pytest.mark.parametrize("include", ["object", "itself", "pipe", "missing", "list"])
def test_a_task_file_that_cannot_be_read_is_one_error(include, checkpoint, folder):
    os.mkfifo(folder / "pipe")
    texts = {"object": "a: !!python/object/apply:os.system [touch x]", "list": "[1]"}
    names = {"itself": "bad.yaml", "missing": "nothing.yaml"}
    (folder / "bad.yaml").write_text(texts.get(include, f"include: {names.get(include, include)}"))
    with pytest.raises(DataError, match="not a task file"):
        find_other_tasks([str(folder / "bad.yaml")], None, arguments(checkpoint))


def test_a_pipe_in_the_include_path_is_one_error(checkpoint, folder):
    os.mkfifo(folder / "pipe.yaml")
    with pytest.raises(DataError, match="not a plain file"):
        find_other_tasks(["sums"], folder, arguments(checkpoint))


def test_the_prefix_tells_lm_evals_task_from_this_projects():
    assert split_names(["mini_gsm8k", "lm_eval:gsm8k", "hellaswag"]) == (["mini_gsm8k"], ["gsm8k", "hellaswag"])


def test_lm_eval_runs_no_program_without_isolation(checkpoint, folder, tmp_path):
    task = yaml.safe_load((folder / "sums.yaml").read_text())
    (folder / "sums.yaml").write_text(yaml.safe_dump({**task, "unsafe_code": True}))
    with pytest.raises(ConfigError, match=r"sums: lm-eval runs .* without isolation; allow it with --sandbox none"):
        evaluate_any(arguments(checkpoint, tmp_path / "run"), [str(folder / "sums.yaml")])


def test_a_variant_of_this_projects_code_tasks_runs_its_programs_in_the_sandbox(checkpoint, folder):
    variant = {"include": str(tasks_path() / "mini" / "mini_mbpp.yaml"), "task": "variant", "num_fewshot": 1}
    (folder / "variant.yaml").write_text(yaml.safe_dump(variant))
    file = str(folder / "variant.yaml")
    (task,) = find_other_tasks([file], None, arguments(checkpoint)).load([file])["tasks"].values()
    assert task.config.process_results is hooks.code_metrics


def test_programs_are_isolated_again_after_an_evaluation_without_isolation(checkpoint, folder, tmp_path, monkeypatch):
    isolation = []

    def judge_texts(benchmark, items, *, filter_name, sandbox):
        isolation.append(sandbox)
        return []

    monkeypatch.delenv(hooks.SANDBOX_VARIABLE, raising=False)
    monkeypatch.setattr(hooks, "judge_texts", judge_texts)
    args = arguments(checkpoint, tmp_path / "run")
    evaluate_any(args, [str(folder / "sums.yaml")], limit=1, sandbox="none")
    hooks.score_responses(BENCHMARKS["mbpp"], [], [])
    assert isolation == ["auto"]


def test_samples_that_fail_leave_the_run_incomplete(checkpoint, folder, tmp_path, monkeypatch):
    from refusion_eval.engine.engine import Engine
    from refusion_eval.errors import DecodeError

    decoded = Engine.run

    def run(self, decode, prompt, settings):
        if len(prompt) % 2 == 0:
            raise DecodeError("no memory")
        return decoded(self, decode, prompt, settings)

    rows = [{"question": "1" * n, "answer": "1"} for n in (1, 2)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(Engine, "run", run)
    outcome = evaluate_any(arguments(checkpoint, tmp_path / "run"), [str(folder / "sums.yaml")])
    assert (len(outcome.failed), outcome.unscored) == (1, 1)


def test_turns_ask_every_item_once_under_its_own_number(checkpoint, folder, tmp_path):
    args = arguments(checkpoint, tmp_path / "run")
    for number in (1, 2):
        evaluate_any(args, ["sums"], folder, turn=Turn(number, 2))
        with RunReader.open(tmp_path / "run") as run:
            assert (run.run.expected, run.run.whole) == ({"sums": 3}, {"sums": 3})
    samples, scores = read(tmp_path / "run")
    assert sorted(sample.item_id for sample in samples) == ["0", "1", "2"]
    assert sorted(score.item_id for score in scores if score.metric == PASSED) == ["0", "1", "2"]
    evaluate_any(arguments(checkpoint, tmp_path / "whole"), ["sums"], folder)
    assert {sample.key: sample.item_id for sample in read(tmp_path / "whole")[0]} == {
        sample.key: sample.item_id for sample in samples
    }


def test_a_turn_without_items_stays_within_the_limit(checkpoint, folder, tmp_path):
    file = str(folder / "sums.yaml")
    for number in (1, 2):
        assert evaluate_any(arguments(checkpoint, tmp_path), [file], limit=1, turn=Turn(number, 2)).is_complete
    assert [sample.item_id for sample in read(tmp_path)[0]] == ["0"]


def test_a_sweep_varies_a_setting_on_a_task_of_ones_own(checkpoint, folder, tmp_path):
    short = "gen_length: 16, slot_size: 8, block_size: 16"
    (tmp_path / "two.yaml").write_text(
        f"systems: {{refusion: {{arguments: {{pretrained: {checkpoint}, warmup: 0}}, settings: {{{short}}}, "
        "around: {tau_slot: [0.5]}}}"
    )
    spec = dataclasses.replace(read_spec(str(tmp_path / "two.yaml")), tasks=("sums",), limit=1)
    done = run_sweep(spec, tmp_path / "sweep", folder)
    assert [path.name for path in done.run_dirs] == ["refusion-settings", "refusion-tau_slot=0.5"]
    assert done.incomplete == []
    assert all("sums" in (tmp_path / "sweep" / name).read_text() for name in ("sweep.csv", "points.csv"))


@pytest.fixture
def rows(tmp_path):
    """Folder with rows of two benchmarks, in hub columns."""
    content = {
        "gsm8k/test": [{"question": "What is 1 plus 1?", "answer": "It is 2.\n#### 2"}],
        "gsm8k/train": [{"question": "What is 2 plus 2?", "answer": "It is 4.\n#### 4"}] * 6,
        "math/test": [
            {"problem": "1 + 1", "level": "Level 1", "type": kind, "solution": "\\boxed{2}"}
            for kind in ("Algebra", "Counting & Probability", "Algebra")
        ],
    }
    for name, of_split in content.items():
        path = tmp_path / "data" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in of_split))
    return tmp_path / "data"


def test_a_configuration_of_a_dataset_is_its_part_of_the_rows(rows):
    def num(config):
        return len(LocalSplits("task", "EleutherAI/hendrycks_math", config, str(rows))["test"])

    assert (num("algebra"), num("counting_and_probability"), num("geometry"), num(None)) == (2, 1, 0, 3)


def test_rows_that_do_not_say_their_configuration_are_refused_in_one_line(tmp_path):
    (tmp_path / "bbh").mkdir()
    rows = [{"input": "not True", "target": "False", "config": "boolean_expressions"}, {"input": "1", "target": "1"}]
    path = tmp_path / "bbh" / "test.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:1]))
    assert len(LocalSplits("bbh", "SaylorTwift/bbh", "boolean_expressions", str(tmp_path))["test"]) == 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"test.jsonl: a row does not say .* column config, such as navigate, or leave"):
        _ = LocalSplits("bbh", "SaylorTwift/bbh", "navigate", str(tmp_path))["test"]


@pytest.mark.parametrize(("path", "config"), [("Rowan/hellaswag", None), ("allenai/ai2_arc", "ARC-Easy")])
def test_a_dataset_that_is_no_benchmark_is_refused(rows, path, config):
    with pytest.raises(DataError, match=rf"mbpp, .*; it reads {path}.* which is none of them: leave data_dir out"):
        LocalSplits("it", path, config, str(rows))


@pytest.mark.slow
def test_lm_evals_own_task_reads_the_rows_of_the_folder(checkpoint, rows, tmp_path):
    args = arguments(checkpoint, tmp_path / "run", data_dir=str(rows))
    assert evaluate_any(args, ["lm_eval:gsm8k"]).is_complete
    (sample,), scores = read(tmp_path / "run")
    assert (sample.key.task, sample.benchmark) == ("gsm8k", "gsm8k")
    assert {score.metric for score in scores} >= {PASSED, "exact_match,strict-match", "exact_match,flexible-extract"}
