"""lm-eval's own options and tasks of its own kind, through its evaluator to the run store."""

import json

import datasets
import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from refusion_eval.errors import ConfigError
from refusion_eval.lm_eval_plugin import adapter as lm_eval_adapter  # noqa: F401  registers the model
from refusion_eval.lm_eval_plugin.evaluation import leave_question_out
from refusion_eval.paths import tasks_path
from refusion_eval.store.run_store import RunReader

# What lm-eval's gsm8k.yaml says, its data apart.
STOCK_GSM8K = """
task: gsm8k
dataset_path: json
dataset_kwargs:
  data_files: {{train: {folder}/train.jsonl, test: {folder}/test.jsonl}}
output_type: generate_until
training_split: train
fewshot_split: train
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: true
    regexes_to_ignore: [",", "\\\\$", "(?s).*#### ", "\\\\.$"]
generation_kwargs:
  until: ["Question:", "</s>", "<|im_end|>"]
  do_sample: false
  temperature: 0.0
num_fewshot: 2
filter_list:
  - name: flexible-extract
    filter:
      - function: regex
        group_select: -1
        regex_pattern: "(-?[$0-9.,]{{2,}})|(-?[0-9]+)"
      - function: take_first
metadata:
  version: 3.0
"""


@pytest.fixture
def stock_tasks(tmp_path, monkeypatch):
    """Folder of a task file like lm-eval's own gsm8k, over a few rows beside it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"question": f"What is {n} plus {n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(3, 9)]
    for name, part in (("train", rows[:4]), ("test", rows[4:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "gsm8k.yaml").write_text(STOCK_GSM8K.format(folder=tmp_path))
    return folder


@pytest.fixture
def run(checkpoint, tmp_path):
    """Evaluates one item of a task as lm-eval's command line does; returns its results and what was recorded."""

    def evaluate(task, *, include=None, model_args="", **options):
        folder = tmp_path / "run"
        arguments = f"pretrained={checkpoint},warmup=0,fuse=False,run_dir={folder}{model_args}"
        results = lm_eval.simple_evaluate(
            "refusion",
            model_args=arguments,
            tasks=[task],
            task_manager=TaskManager(include_path=str(include or tasks_path()), include_defaults=False),
            limit=1,
            bootstrap_iters=0,
            **options,
        )
        with RunReader.open(folder) as reader:
            (sample,) = reader.samples()
        (logged,) = results["samples"][task]
        return results, sample, logged

    return evaluate


def test_gen_kwargs_outrank_the_settings_table_and_end_the_text(run):
    _, sample, _ = run("mini_gsm8k", gen_kwargs="max_gen_toks=16,tau_token=0.7,temperature=0,until=zzz")
    assert sample.num_tokens <= sample.settings["gen_length"] == 16
    assert (sample.settings["tau_token"], sample.settings["until"]) == (0.7, ["zzz"])
    for key in ("gen_length", "tau_token", "temperature"):
        assert sample.settings_source[key] == "generation_kwargs"
    assert sample.settings_source["tau_slot"] == "tasks/settings/mini_refusion.yaml:gsm8k"


def test_model_args_outrank_gen_kwargs(run):
    _, sample, _ = run("mini_gsm8k", model_args=",gen_length=8", gen_kwargs="max_gen_toks=16")
    assert (sample.settings["gen_length"], sample.settings_source["gen_length"]) == (8, "model_args")


def test_an_unknown_key_in_gen_kwargs_is_refused(run):
    with pytest.raises(ConfigError, match=r"mini_gsm8k: generation_kwargs.*did you mean tau_token"):
        run("mini_gsm8k", gen_kwargs="tau_tokn=0.7")


@pytest.mark.parametrize("num_fewshot", [1, 3])
@pytest.mark.parametrize(("chat", "turn"), [(False, "Answer:"), (True, "<|im_start|>assistant")])
def test_num_fewshot_puts_examples_with_their_answers_before_the_question(run, stock_tasks, num_fewshot, chat, turn):
    options = {"num_fewshot": num_fewshot, "apply_chat_template": chat}
    results, _, logged = run("gsm8k", include=stock_tasks, model_args=",gen_length=32", **options)
    prompt = logged["arguments"][0][0]
    assert prompt.count("Question:") == prompt.count(turn) == num_fewshot + 1
    assert prompt.count("####") == num_fewshot
    assert prompt.index(logged["doc"]["question"]) > prompt.rindex("####")
    assert results["n-shot"]["gsm8k"] == num_fewshot


def test_num_fewshot_leaves_the_papers_zero_shot_prompts_alone(run):
    results, _, logged = run("mini_gsm8k", num_fewshot=2, model_args=",gen_length=8")
    assert logged["arguments"][0][0].startswith(logged["doc"]["question"])
    assert results["n-shot"]["mini_gsm8k"] == 0


NUM_ASKED = 60


def examples_of(name, text, folder, prepare=leave_question_out):
    """The requests of a task file of a user with three examples, as a model of this project asks them."""
    (folder / f"{name}.yaml").write_text(text)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    task = manager.load([name])["tasks"][name]
    prepare(task)
    task.set_fewshot_seed(1234)
    task.build_all_requests(limit=NUM_ASKED)
    return task, task.instances


@pytest.mark.parametrize("path", sorted((tasks_path() / "mini").glob("*.yaml")), ids=lambda path: path.stem)
def test_no_example_is_the_question_itself_where_a_file_includes_a_task(tmp_path, path):
    included = f"include: {path}\ntask: own\nnum_fewshot: 3\n"
    task, requests = examples_of("own", included, tmp_path, prepare=lambda task: None)  # as for any model of lm-eval
    assert len(requests) == NUM_ASKED
    assert {request.args[0].count(task.doc_to_text(request.doc)) for request in requests} == {1}


@pytest.mark.parametrize(
    "splits",
    [
        "fewshot_split: null",
        "test_split: null\nvalidation_split: test",
        "test_split: null\nvalidation_split: test\nfewshot_split: null",
        "test_split: null\nvalidation_split: test\nfewshot_config: {sampler: first_n, split: test}",
        "fewshot_split: null\nfewshot_config: {sampler: first_n}",
    ],
)
def test_no_example_is_the_question_itself_whatever_the_splits_are_called(tmp_path, splits):
    included = f"include: {tasks_path()}/mini/mini_gsm8k.yaml\ntask: own\nnum_fewshot: 3\n{splits}\n"
    task, requests = examples_of("own", included, tmp_path)
    assert {request.args[0].count(task.doc_to_text(request.doc)) for request in requests} == {1}


def test_examples_of_other_documents_are_drawn_as_lm_eval_draws_them(stock_tasks):
    task = TaskManager(include_path=str(stock_tasks), include_defaults=False).load(["gsm8k"])["tasks"]["gsm8k"]
    leave_question_out(task)
    assert task.fewshot_cfg.split == "train"


def test_predict_only_records_the_text_and_computes_no_score(run):
    results, sample, logged = run("mini_gsm8k", model_args=",gen_length=8", predict_only=True)
    assert sample.error is None
    assert logged["resps"] == [[sample.text]]
    assert {key for key in results["results"]["mini_gsm8k"] if key.startswith(("acc", "strict", "extracted"))} == set()


def test_a_task_of_lm_evals_own_kind_gets_the_settings_of_its_benchmark(run, stock_tasks):
    results, sample, logged = run("gsm8k", include=stock_tasks, model_args=",gen_length=64")
    assert (sample.benchmark, sample.item_id, sample.text) == ("gsm8k", "0", logged["resps"][0][0])
    for key, value in {"slot_size": 32, "block_size": 128, "tau_slot": 0.9, "tau_token": 0.4}.items():
        assert (sample.settings[key], sample.settings_source[key]) == (value, "tasks/settings/refusion.yaml:gsm8k")
    assert sample.settings_source["temperature"] == "generation_kwargs"
    assert sample.settings["until"] == ["Question:", "</s>", "<|im_end|>"]
    assert logged["arguments"][0][0].count("Question:") == 3
    assert 0 <= results["results"]["gsm8k"]["exact_match,flexible-extract"] <= 1
