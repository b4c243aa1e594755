import json
import logging
import os
import re
import shutil

import pytest
from typer.testing import CliRunner

from refusion_eval.benchmarks import BENCHMARKS, SUITES, get_task, main_variant
from refusion_eval.benchmarks import PUBLISHED as PUBLISHED_BENCHMARKS
from refusion_eval.cli import EXIT_INCOMPLETE, app
from refusion_eval.errors import CheckpointError, ConfigError, DataError, MissingRowsError, StoreError
from refusion_eval.evaluation.loop import evaluate
from refusion_eval.evaluation.tasks import find_tasks, task_names
from refusion_eval.results.facts import read_facts
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.measurement import TASKS as PUBLISHED
from refusion_eval.results.measurement import notes_of
from refusion_eval.results.tables import summary, summary_table
from refusion_eval.runs import hardware, system
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.plan import Turn
from refusion_eval.store.manifest import BUSY
from refusion_eval.store.records import PASSED
from refusion_eval.store.run_store import RunReader

TASKS = ["mini_gsm8k", "mini_mbpp"]


def arguments(checkpoint, run_dir, **more):
    short = {"gen_length": 8, "slot_size": 4, "block_size": 8, "warmup": 0, **more}
    return parse_model_args({"pretrained": checkpoint, "run_dir": str(run_dir), **short})


def read(run_dir):
    with RunReader.open(run_dir) as run:
        return list(run.samples()), list(run.scores())


@pytest.fixture(scope="module")
def finished(checkpoint, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    outcome = evaluate(arguments(checkpoint, run_dir), TASKS, limit=2, sandbox="none")
    return run_dir, outcome


def test_every_sample_is_recorded_and_scored_once(finished):
    run_dir, outcome = finished
    samples, scores = read(run_dir)
    assert outcome.is_complete
    assert [sample.key.task for sample in samples] == ["mini_gsm8k"] * 2 + ["mini_mbpp"] * 2
    assert {score.key for score in scores if score.metric == PASSED} == {sample.key for sample in samples}
    assert all(score.verdict and score.reason for score in scores if score.metric == PASSED)


def test_records_carry_the_task_version(finished):
    samples, _ = read(finished[0])
    for sample in samples:
        assert sample.key.task_version == BENCHMARKS[sample.benchmark].prompts.version


def test_running_again_changes_nothing_and_more_items_are_added(finished, checkpoint):
    run_dir, _ = finished
    before = read(run_dir)
    assert evaluate(arguments(checkpoint, run_dir), TASKS, limit=2, sandbox="none").is_complete
    assert read(run_dir)[0] == before[0]
    evaluate(arguments(checkpoint, run_dir), ["mini_gsm8k"], limit=3)
    assert len(read(run_dir)[0]) == len(before[0]) + 1


def test_a_sample_that_failed_has_no_score(checkpoint, tmp_path, caplog):
    with caplog.at_level(logging.ERROR):
        outcome = evaluate(arguments(checkpoint, tmp_path, gen_length=2**20), ["mini_gsm8k"], limit=2)
    samples, scores = read(tmp_path)
    assert not outcome.is_complete
    assert len(outcome.failed) == 2
    assert all(sample.error for sample in samples)
    assert scores == []


@pytest.mark.parametrize(
    ("model", "name", "meant"),
    [("embedded", "mini_gsm9k", "mini_gsm8k"), ("embedded", "gsm9k", "gsm8k"), ("GSAI-ML/ReFusion", "mat", "math")],
)
def test_an_unknown_task_is_refused_with_the_likeliest_one(model, name, meant):
    with pytest.raises(ConfigError, match=rf"^unknown task '{name}'; did you mean {meant}\?"):
        find_tasks(task_names([name], model))


def test_an_unknown_task_like_none_lists_what_there_is():
    with pytest.raises(ConfigError, match=r"^unknown task 'zzz'; known tasks: aime_2024, aime_2025, arc_challenge, "):
        find_tasks(["zzz"])


def test_a_checkpoint_that_cannot_be_had_is_refused_before_rows_are_looked_for(tmp_path):
    places = {"run_dir": str(tmp_path / "run"), "data_dir": str(tmp_path / "none")}
    with pytest.raises(CheckpointError, match="no directory '/no/such/checkpoint'"):
        evaluate(parse_model_args({"pretrained": "/no/such/checkpoint", **places}), ["refusion_gsm8k"])
    with pytest.raises(ConfigError, match="does not fit decoder=refusion"):
        evaluate(parse_model_args({"pretrained": "embedded:autoregressive", **places}), ["refusion_gsm8k"])


def test_missing_data_is_reported_before_weights_are_read(checkpoint, tmp_path):
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(f"{checkpoint}/{name}", tmp_path)
    with pytest.raises(DataError, match="data directory"):
        evaluate(arguments(str(tmp_path), tmp_path / "run", data_dir=str(tmp_path / "none")), ["refusion_gsm8k"])


@pytest.fixture
def rows_of(tmp_path, monkeypatch):
    """Writes a row of some benchmarks; without a network there are no others."""
    monkeypatch.setattr("refusion_eval.benchmarks.rows._answers", lambda endpoint: False)
    written = {
        "gsm8k": {"question": "How many is 1 and 1?", "answer": "#### 2"},
        "math_500": {"problem": "$1 + 1$", "answer": "2", "solution": "2", "unique_id": "a"},
    }

    def write(*names):
        for name in names:
            (tmp_path / "rows" / name).mkdir(parents=True)
            (tmp_path / "rows" / name / "test.jsonl").write_text(json.dumps(written[name]) + "\n", encoding="utf-8")
        return str(tmp_path / "rows")

    return write


@pytest.mark.parametrize("turns", [[None], [Turn(1, 2), Turn(2, 2)]])
def test_a_task_without_rows_stops_no_other_and_is_a_line_of_the_table_until_its_rows_are_there(
    checkpoint, tmp_path, rows_of, caplog, turns
):
    tasks, run_dir = ["refusion_gsm8k", "refusion_math_500"], tmp_path / "run"
    advice = (
        "allow the download of HuggingFaceH4/MATH-500, or put the rows, in hub columns, into DIR/math_500/test.jsonl"
    )
    args = arguments(checkpoint, run_dir, data_dir=rows_of("gsm8k"))
    for turn in turns:
        outcome = evaluate(args, tasks, turn=turn)
        assert (outcome.is_complete, outcome.missing) == (False, ["refusion_math_500"])
    assert caplog.text.count("refusion_math_500 is left out: no test rows of math_500; tried") == 1
    assert [sample.key.task for sample in read(run_dir)[0]] == ["refusion_gsm8k"]
    (_, line), notes = summary(run_measurements([run_dir])), notes_of(run_measurements([run_dir]))
    assert (line.task, line.measurement("accuracy").n) == ("refusion_math_500", 0)
    assert any(
        note.startswith(f"refusion_math_500 was not asked, because there are no rows of it: {advice}") for note in notes
    )
    assert "ReFusion [no rows]" in summary_table([line]).markdown()
    rows_of("math_500")
    outcomes = [evaluate(args, tasks, turn=turn) for turn in turns]
    assert all(outcome.is_complete for outcome in outcomes)
    first, second = summary(run_measurements([run_dir]))[:2]
    assert [first.any_measurement.n, second.any_measurement.n] == [1, 1]
    assert "no rows" not in summary_table([first, second]).markdown()


def test_a_run_that_leaves_a_task_out_says_so_at_its_end_and_by_its_status(checkpoint, tmp_path, rows_of):
    options = ["--set", "gen_length=8", "--warmup", "0", "--run-dir", str(tmp_path / "run"), "--data", rows_of("gsm8k")]
    tasks = ["--tasks", "refusion_gsm8k,refusion_math_500"]
    done = CliRunner().invoke(app, ["run", "--model", checkpoint, "--decoder", "autoregressive", *options, *tasks])
    assert done.exit_code == EXIT_INCOMPLETE
    assert "error: refusion_math_500: not asked, for want of rows" in done.stderr


def test_where_no_task_has_rows_each_is_named_and_nothing_is_recorded(checkpoint, tmp_path, rows_of):
    args = arguments(checkpoint, tmp_path / "run", data_dir=rows_of("gsm8k"))
    with pytest.raises(MissingRowsError, match=r"no test rows of math_500; .* And no train rows of gpqa_diamond; "):
        evaluate(args, ["refusion_math_500", "refusion_gpqa_diamond"])
    assert not (tmp_path / "run").exists()


def test_benchmark_names_mean_mini_tasks_for_the_embedded_checkpoint_only():
    assert task_names(["gsm8k", "mini_math"], "embedded") == ["mini_gsm8k", "mini_math"]
    assert task_names(["gsm8k"], "GSAI-ML/ReFusion", prompts="ours") == ["refusion_gsm8k"]
    assert task_names([], "embedded") == ["mini_suite"]
    assert task_names(["gsm8k"], "embedded:autoregressive_sft") == ["mini_gsm8k"]
    assert task_names([], "GSAI-ML/ReFusion", prompts="ours") == ["refusion_suite"]
    assert task_names(["parts"], "GSAI-ML/ReFusion") == ["mini_parts"]


@pytest.mark.parametrize("family", ["mmlu_redux", "humaneval_plus", "mbpp_plus", "livecodebench"])
def test_the_name_of_a_family_means_the_variant_that_its_suite_asks(family):
    (main,) = (benchmark for benchmark in SUITES["2026"] if benchmark.folder == family)
    for model in ("embedded", "some/model"):
        assert task_names([family], model) == [f"refusion_{main.name}"]
    assert get_task(family).benchmark is main


def test_every_family_has_a_default():
    of_folders = {benchmark.folder for benchmark in PUBLISHED_BENCHMARKS.values()}
    assert all(main_variant(folder) in PUBLISHED_BENCHMARKS for folder in of_folders)


@pytest.mark.parametrize("prompts", [{}, {"prompts": "release"}])
def test_a_real_checkpoint_is_asked_with_the_prompts_of_the_release_unless_others_are_wanted(prompts):
    assert task_names(["gsm8k", "mini_math"], "M", **prompts) == ["refusion_gsm8k_release", "mini_math"]
    (suite,) = task_names([], "M", **prompts)
    assert [task.name for task in find_tasks([suite])] == [f"refusion_{name}_release" for name in PUBLISHED]


@pytest.mark.parametrize("names", [["gsm8k"], [], ["mini_math", "gsm8k"]])
def test_mini_tasks_are_never_run_where_rows_or_prompts_of_the_benchmark_are_named(names, tmp_path):
    with pytest.raises(
        ConfigError, match=r"mini tasks, which do not read --data .*; name the benchmark itself.*_gsm8k"
    ):
        task_names(names, "embedded", data=tmp_path)
    with pytest.raises(ConfigError, match=r"mini tasks, which have no --prompts release; leave it out"):
        task_names(names, "embedded:llada", prompts="release")


@pytest.mark.parametrize("names", [["parts"], ["parts", "math"], []])
def test_the_task_that_a_message_suggests_is_one_that_exists(names, tmp_path):
    with pytest.raises(ConfigError, match=r"such as --tasks \w+, or") as refused:
        task_names(names, "embedded", data=tmp_path)
    (suggested,) = re.findall(r"--tasks (\w+)", str(refused.value))
    assert [task.name for task in find_tasks([suggested])] == [suggested]


def test_the_benchmark_itself_reads_the_rows_for_any_checkpoint(tmp_path):
    assert task_names(["refusion_gsm8k"], "embedded", data=tmp_path) == ["refusion_gsm8k"]
    assert task_names(["mini_gsm8k"], "embedded", data=tmp_path) == ["mini_gsm8k"]
    assert task_names(["math_500"], "embedded", data=tmp_path) == ["refusion_math_500"]  # it has no look-alike


def test_suites_hold_every_benchmark_and_a_task_that_is_named_twice_is_run_once():
    suite = find_tasks(["mini_suite"])
    assert [task.name for task in suite] == [f"mini_{name}" for name, one in BENCHMARKS.items() if one.has_mini]
    assert [task.name for task in find_tasks(["mini_math", "mini_suite"])][:2] == ["mini_math", "mini_mmlu_pro"]
    assert set(find_tasks(["mini_math", "mini_suite"])) == set(suite)
    assert [task.name for task in find_tasks(["refusion_suite"])] == [f"refusion_{name}" for name in PUBLISHED]


def test_in_turns_every_item_is_decoded_once_and_its_round_recorded(checkpoint, tmp_path):
    args = arguments(checkpoint, tmp_path)
    for number in (2, 1):
        evaluate(args, ["mini_gsm8k"], limit=5, turn=Turn(number, 2))
        with RunReader.open(tmp_path) as reader:
            run = reader.run
            rounds = [run.round(sample.process_id) for sample in reader.samples()]
        assert run.expected == {"mini_gsm8k": 5}
        assert rounds == ([2, 2] if number == 2 else [1, 2, 1, 2, 1])
    (task,) = read_facts(tmp_path).tasks
    assert [sample.round for sample in task.samples] == rounds


def test_two_runs_of_one_command_have_equal_tpf_and_intervals_of_speed_and_the_state_of_the_machine(
    checkpoint, tmp_path
):
    figures = []
    for name in ("one", "two"):
        for number in (1, 2):
            args = arguments(checkpoint, tmp_path / name, warmup=1)
            evaluate(args, ["mini_gsm8k"], limit=4, turn=Turn(number, 2))
        figures.append({figure.metric: figure for figure in run_measurements([tmp_path / name])})
        with RunReader.open(tmp_path / name) as reader:
            for process in reader.run.processes.values():
                assert process["before"].keys() == process["after"].keys() >= {"threads", "load"}
    one, two = (each["tpf"] for each in figures)
    assert (one.value, one.interval) == (two.value, two.interval)
    assert all(each[metric].has_interval for each in figures for metric in ("tps", "latency_mean"))
    assert "timed in 2 rounds" in figures[0]["tps"].notes
    assert figures[0]["tps"].num_rounds == 2


def test_a_run_stopped_before_its_first_decoding_says_how_many_were_asked_for(checkpoint, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(system.System, "resolve", stop)  # which logs the settings
    with pytest.raises(KeyboardInterrupt):
        evaluate(arguments(checkpoint, tmp_path), ["mini_gsm8k"], limit=8)
    (task,) = read_facts(tmp_path).tasks
    assert (task.extent.unfinished, task.extent.limited) == ("0 of 8", "8 of 100")


def test_a_busy_machine_and_a_run_that_goes_on_elsewhere_are_told(checkpoint, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    with caplog.at_level(logging.WARNING):
        evaluate(arguments(checkpoint, tmp_path), ["mini_gsm8k"], limit=1)
        assert "speed will be lower than need be: busy machine: other programs" in caplog.text
        assert "(load 99.0)" in caplog.text
        assert "was begun on other hardware" not in caplog.text
        (task,) = read_facts(tmp_path).tasks
        assert any(sentence.startswith(BUSY) for sentence in task.slowed_by)
        monkeypatch.setattr(hardware, "_cpu_model", lambda: "another processor")
        evaluate(arguments(checkpoint, tmp_path), ["mini_gsm8k"], limit=2)
    assert "was begun on other hardware" in caplog.text
    assert "another processor" in caplog.text


def drawn(checkpoint, run_dir, samples, **more):
    return arguments(checkpoint, run_dir, temperature=3.0, samples=samples, **more)


def texts(run_dir):
    return {(sample.item_id, sample.key.sample): sample.tokens for sample in read(run_dir)[0]}


@pytest.fixture(scope="module")
def sampled(checkpoint, tmp_path_factory):
    """The run directory of three samples of two items."""
    run_dir = tmp_path_factory.mktemp("sampled")
    assert evaluate(drawn(checkpoint, run_dir, 3), ["mini_gsm8k"], limit=2).is_complete
    return run_dir


def test_samples_of_an_item_are_different_texts_and_all_are_scored(sampled):
    samples, scores = read(sampled)
    assert [(sample.item_id, sample.key.sample) for sample in samples] == [(i, n) for i in "01" for n in range(3)]
    assert len({tuple(sample.tokens) for sample in samples}) == 6
    assert {score.key for score in scores if score.metric == PASSED} == {sample.key for sample in samples}


@pytest.mark.parametrize("more", [{"batch_size": 4}, {"batch_size": 6, "tps_samples": 1}])
def test_a_sample_does_not_depend_on_batch_order_or_what_else_is_asked(sampled, checkpoint, tmp_path, more):
    for samples, limit, number in ((1, 2, 2), (2, 1, 3), (3, 2, 6)):  # in another order
        assert evaluate(drawn(checkpoint, tmp_path, samples, **more), ["mini_gsm8k"], limit=limit).is_complete
        assert len(texts(tmp_path)) == number
    assert texts(tmp_path) == texts(sampled)
    alone = {(sample.item_id, sample.key.sample) for sample in read(tmp_path)[0] if sample.batch_size == 1}
    assert alone == ({("0", 0)} if "tps_samples" in more else set())


def test_more_samples_are_added_and_fewer_are_refused(checkpoint, tmp_path, capsys):
    evaluate(drawn(checkpoint, tmp_path, 1), ["mini_gsm8k"], limit=2)
    (task,) = read_facts(tmp_path).tasks
    assert task.extent[:3] == (2, 2, 100)
    before = read(tmp_path)[0]
    capsys.readouterr()
    evaluate(drawn(checkpoint, tmp_path, 2), ["mini_gsm8k"], limit=2)
    after = read(tmp_path)[0]
    assert [sample for sample in after if not sample.key.sample] == before
    assert len(after) == 4
    assert "4/4" in capsys.readouterr().err  # progress counts texts
    (task,) = read_facts(tmp_path).tasks
    assert task.extent[:3] == (4, 4, 200)
    with pytest.raises(StoreError, match=r"has 2 samples of an item of mini_gsm8k, and 1 are asked for; ask for 2 or"):
        evaluate(drawn(checkpoint, tmp_path, 1), ["mini_gsm8k"], limit=2)


def test_rounds_share_the_items_with_all_their_samples(sampled, checkpoint, tmp_path):
    for number in (1, 2):
        evaluate(drawn(checkpoint, tmp_path, 3), ["mini_gsm8k"], limit=2, turn=Turn(number, 2))
        assert len(texts(tmp_path)) == 3 * number
    assert texts(tmp_path) == texts(sampled)


def test_equal_samples_are_refused_before_anything_is_decoded(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"mini_gsm8k: samples=2, but refusion draws nothing .* set a temperature"):
        evaluate(arguments(checkpoint, tmp_path / "a", samples=2), ["mini_gsm8k"], limit=1)
    at_random = arguments(checkpoint, tmp_path / "b", samples=2, order="random")
    assert evaluate(at_random, ["mini_gsm8k"], limit=1).is_complete
