"""An evaluation by lm-eval leaves a complete run directory: a verdict for every text, and speed in both places."""

import json

import datasets
import lm_eval
import pytest
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from refusion_eval.errors import ConfigError
from refusion_eval.evaluation.loop import evaluate
from refusion_eval.paths import tasks_path
from refusion_eval.results.measured import run_measurements
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.store.records import PASSED
from refusion_eval.store.run_store import RunReader

DATA = """
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/test.jsonl}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
output_type: {output_type}
metadata: {{version: 2.5}}
"""
GENERATED = """
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"]}
filter_list:
  - {name: first, filter: [{function: regex, regex_pattern: "(\\\\d)"}, {function: take_first}]}
  - {name: whole, filter: [{function: take_first}]}
metric_list: [{metric: exact_match}, {metric: bleu}]
"""
CHOSEN = 'doc_to_choice: ["one", "two"]\ndoc_to_target: 1\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n'
SCORED = 'doc_to_target: " {{answer}}"\nmetric_list: [{metric: acc}, {metric: perplexity}]\n'
ROLLED = 'doc_to_target: "{{question}} {{answer}}"\nmetric_list: [{metric: word_perplexity}]\n'
TASKS = {
    "own_generated": ("generate_until", GENERATED),
    "own_chosen": ("multiple_choice", CHOSEN),
    "own_scored": ("loglikelihood", SCORED),
    "own_rolled": ("loglikelihood_rolling", ROLLED),
}
SETTINGS = "warmup=0,fuse=False,gen_length=16"


@pytest.fixture
def own_tasks(tmp_path, monkeypatch):
    """Folder with a user's task of every output type, over three rows."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"question": f"What is {n} plus 1?", "answer": str(n + 1)} for n in range(3)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "tasks"
    folder.mkdir()
    for task, (output_type, rest) in TASKS.items():
        head = DATA.format(task=task, folder=tmp_path, output_type=output_type)
        (folder / f"{task}.yaml").write_text(head + rest)
    return folder


def run(checkpoint, run_dir, tasks, folder=None, settings=SETTINGS, **options):
    where = "" if run_dir is None else f",run_dir={run_dir}"
    return lm_eval.simple_evaluate(
        "refusion",
        model_args=f"pretrained={checkpoint},{settings}{where}",
        tasks=tasks,
        task_manager=TaskManager(include_path=str(folder or tasks_path()), include_defaults=False),
        limit=3,
        bootstrap_iters=0,
        confirm_run_unsafe_code=True,
        **options,
    )


def stored(run_dir):
    with RunReader.open(run_dir) as reader:
        return list(reader.samples()), list(reader.scores()), reader.run


def test_both_doors_leave_the_same_records_and_verdicts(checkpoint, tmp_path):
    tasks = ["mini_gsm8k", "mini_humaneval"]
    run(checkpoint, tmp_path / "lm_eval", tasks, apply_chat_template=True)
    text = f"{SETTINGS},run_dir={tmp_path / 'run'}"
    arguments = {"pretrained": checkpoint, **dict(pair.split("=") for pair in text.split(","))}
    evaluate(parse_model_args(arguments), tasks, limit=3)
    (theirs, their_scores, their_run), (ours, our_scores, our_run) = map(
        stored, (tmp_path / "lm_eval", tmp_path / "run")
    )
    assert {sample.key: sample.tokens for sample in theirs} == {sample.key: sample.tokens for sample in ours}
    assert {score.body() for score in their_scores} == {score.body() for score in our_scores}
    assert (their_run.expected, their_run.manifest.tasks) == (our_run.expected, our_run.manifest.tasks)


def test_both_doors_draw_the_same_samples(checkpoint, tmp_path):
    settings = f"{SETTINGS},temperature=2.0,samples=2"
    run(checkpoint, tmp_path / "lm_eval", ["mini_gsm8k"], settings=settings, apply_chat_template=True)
    arguments = {"pretrained": checkpoint, **dict(pair.split("=") for pair in settings.split(","))}
    evaluate(parse_model_args({**arguments, "run_dir": str(tmp_path / "run")}), ["mini_gsm8k"], limit=3)
    (theirs, their_scores, their_run), (ours, our_scores, our_run) = map(
        stored, (tmp_path / "lm_eval", tmp_path / "run")
    )
    assert {sample.key: sample.tokens for sample in theirs} == {sample.key: sample.tokens for sample in ours}
    assert len(theirs) == 6
    assert {score.body() for score in their_scores} == {score.body() for score in our_scores}
    assert their_run.expected == our_run.expected == {"mini_gsm8k": 6}


def test_lm_evals_own_tasks_say_how_they_take_samples(checkpoint, own_tasks, tmp_path):
    with pytest.raises(ConfigError, match=r"own_generated: samples=2, .* set `repeats` in its task file"):
        run(checkpoint, tmp_path, ["own_generated"], own_tasks, settings=f"{SETTINGS},temperature=2.0,samples=2")


def test_a_run_of_one_door_is_continued_by_the_other(checkpoint, tmp_path):
    arguments = {"pretrained": checkpoint, **dict(pair.split("=") for pair in SETTINGS.split(","))}
    evaluate(parse_model_args({**arguments, "run_dir": str(tmp_path)}), ["mini_gsm8k"], limit=2)
    before, _, _ = stored(tmp_path)
    run(checkpoint, tmp_path, ["mini_gsm8k"], apply_chat_template=True)
    after, scores, _ = stored(tmp_path)
    assert len(after) == 3
    assert {sample.created for sample in before} < {sample.created for sample in after}
    verdicts = [score.key for score in scores if score.metric == PASSED]
    assert len(verdicts) == len(set(verdicts)) == 3


def test_every_output_type_leaves_verdicts(checkpoint, own_tasks, tmp_path):
    results = run(checkpoint, tmp_path / "run", list(TASKS), own_tasks, log_samples=False)
    assert "samples" not in results
    samples, scores, of_run = stored(tmp_path / "run")
    assert of_run.expected == dict.fromkeys(TASKS, 3)
    assert {(sample.key.task, sample.key.task_version) for sample in samples} == {(task, "2.5") for task in TASKS}
    verdicts = {task: [s.value for s in scores if (s.key.task, s.metric) == (task, PASSED)] for task in TASKS}
    shares = {"own_generated": "exact_match,first", "own_chosen": "acc,none", "own_scored": "acc,none"}
    for task, metric in shares.items():
        assert sum(verdicts[task]) / 3 == pytest.approx(results["results"][task][metric])
    assert verdicts["own_rolled"] == []
    assert {s.metric for s in scores if s.key.task == "own_generated"} == {
        PASSED,
        "exact_match,first",
        "exact_match,whole",
    }
    texts = {sample.text for sample in samples if sample.key.task == "own_chosen"}
    assert texts <= {" one", " two"}
    figures = {(figure.task, figure.metric): figure for figure in run_measurements([tmp_path / "run"])}
    assert figures["own_chosen", "accuracy"].finished
    assert ("own_chosen", "forwards_mean") not in figures
    assert "none was decoded" in figures["own_chosen", "accuracy"].note


def test_speed_stands_beside_the_scores(checkpoint, own_tasks, tmp_path):
    for run_dir in (None, tmp_path / "run"):
        results = run(checkpoint, run_dir, ["own_generated", "own_chosen"], own_tasks)
        of_task = results["results"]["own_generated"]
        samples = results["samples"]["own_generated"]
        assert len(samples) == 6  # three documents under two filters
        assert of_task["tpf,none"] * of_task["forwards_mean,none"] <= 16
        assert of_task["tps,none"] > 0
        assert of_task["latency_mean,none"] > of_task["latency_mean_stderr,none"] > 0
        assert "tpf,none" not in results["results"]["own_chosen"]
        assert "|tps" in make_table(results).replace(" ", "")
    figures = {
        figure.metric: figure.value for figure in run_measurements([tmp_path / "run"]) if figure.task == "own_generated"
    }
    assert {name: of_task[f"{name},none"] for name in ("tpf", "tps", "forwards_mean", "latency_mean")} == pytest.approx(
        {name: figures[name] for name in ("tpf", "tps", "forwards_mean", "latency_mean")}
    )


def test_a_text_of_lm_evals_cache_has_no_record_and_no_verdict(checkpoint, own_tasks, tmp_path):
    for run_dir in (tmp_path / "first", tmp_path / "second"):
        results = run(checkpoint, run_dir, ["own_generated"], own_tasks, use_cache=str(tmp_path / "kept"))
    assert "tps,none" not in results["results"]["own_generated"]
    assert stored(tmp_path / "second")[:2] == ([], [])
