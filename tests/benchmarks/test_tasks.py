"""What names of tasks mean, and what a task knows of itself."""

import pickle
import time

import pytest
import yaml

from refusion_eval.benchmarks import (
    BENCHMARKS,
    SUITES,
    Task,
    find_task,
    get_task,
    is_mini,
    is_sealed,
    without_control_tokens,
    without_thoughts,
)
from refusion_eval.errors import ConfigError
from refusion_eval.evaluation.tasks import own_tasks
from refusion_eval.paths import tasks_path
from refusion_eval.runs.job import doc_hash


@pytest.mark.parametrize(
    ("task", "name", "mini"),
    [
        ("refusion_gsm8k", "gsm8k", False),
        ("mini_math", "math", True),
        ("refusion_mmlu_pro_law", "mmlu_pro", False),
        ("gsm8k", "gsm8k", False),
        ("gsm8k_cot", "gsm8k", False),
        ("minerva_math_algebra", "math", False),
        ("minerva_math500", "math_500", False),
        ("refusion_mmlu_redux_as_is", "mmlu_redux_as_is", False),
        ("bbh_cot_zeroshot_navigate", "bbh", False),
        ("aime24", "aime_2024", False),
        ("refusion_gpqa_diamond", "gpqa_diamond", False),
        ("arc_challenge_chat", "arc_challenge", False),
        ("gpqa_main_generative_n_shot", "gpqa", False),
        ("gpqa_diamond_cot_zeroshot", "gpqa_diamond", False),
        ("mmlu_pro_biology", "mmlu_pro", False),
        ("humaneval_instruct", "humaneval", False),
        ("mbpp_plus", "mbpp_plus_v0_2_0", False),
        ("humaneval_plus", "humaneval_plus_v0_1_10", False),
    ],
)
def test_tasks_of_the_benchmarks_are_recognised(task, name, mini):
    assert find_task(task) == Task(BENCHMARKS[name], mini)


@pytest.mark.parametrize(
    "task", ["hellaswag", "arc_challenge", "mmlu", "gpqa_main_n_shot", "gsm_plus", "humaneval_xyz", "mbpp_plus_v9"]
)
def test_other_tasks_are_not(task):
    assert find_task(task) is None


def test_benchmarks_come_in_the_order_of_the_paper():
    names = ["mmlu_pro", "arc_challenge", "gsm8k", "math", "gpqa", "humaneval", "mbpp", "parts"]
    assert list(BENCHMARKS)[: len(names)] == names
    assert [one.name for one in SUITES["paper"]] == names[:-1]


def test_the_suite_of_2026_has_no_benchmark_of_the_paper_and_asks_each_with_one_prompt():
    suite = SUITES["2026"]
    assert [one.name for one in suite if one.in_paper or one.release] == []
    assert {"math_500", "aime_2024", "aime_2025", "gpqa_diamond"} <= {one.name for one in suite}
    assert all(one.settings_of in BENCHMARKS for one in suite)


@pytest.mark.parametrize("mini", [False, True])
@pytest.mark.parametrize("benchmark", BENCHMARKS.values(), ids=lambda benchmark: benchmark.name)
def test_a_task_is_found_by_its_own_name_and_survives_pickling(benchmark, mini):
    task = Task(benchmark, mini)
    assert find_task(task.name) == get_task(task.name) == task
    assert pickle.loads(pickle.dumps(task)) == task
    assert is_mini(task.name) == mini


def test_the_plain_name_of_one_that_is_not_published_means_its_synthetic_items():
    assert get_task("parts") == Task(BENCHMARKS["parts"], mini=True)


def test_a_plain_name_means_the_benchmark_and_an_unknown_one_is_refused():
    assert get_task("arc_challenge") == Task(BENCHMARKS["arc_challenge"])
    with pytest.raises(ConfigError, match=r"^unknown task 'hellaswag'; known tasks: aime_2024"):
        get_task("hellaswag")


@pytest.mark.parametrize("name", ["refusion_gpqa", "refusion_gpqa_diamond", "gpqa_main_n_shot", "my_GPQA_variant"])
def test_questions_of_gpqa_are_sealed_under_any_name(name):
    assert is_sealed(name)
    assert is_sealed("some_task", "gpqa")


@pytest.mark.parametrize("name", ["mini_gpqa", "refusion_gsm8k"])
def test_other_questions_are_not_sealed(name):
    assert not is_sealed(name)


ALL_TASKS = [task for tasks in own_tasks().values() for task in tasks]


@pytest.mark.parametrize("task", ALL_TASKS, ids=lambda task: task.name)
def test_lm_eval_prints_the_version_that_records_have(task):
    folder = tasks_path() / ("mini" if task.mini else task.benchmark.folder)
    text = (folder / f"{task.name}.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text.replace("!function", ""))
    assert str(content["metadata"]["version"]) == task.benchmark.prompts.version


def test_items_are_hashed_as_lm_eval_hands_rows_over(tmp_path):
    import datasets

    rows = [
        {"question": "q", "answer": "#### 1", "level": 1, "more": {"a": 1}},
        {"answer": "#### 2", "question": "r", "level": 2.5, "more": {"b": "x"}, "only_here": 1},
        {"question": "s", "answer": "#### 3", "more": None},
    ]
    import json

    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    items = get_task("gsm8k").items(tmp_path)
    handed_over = datasets.Dataset.from_list(rows).to_list()
    assert [doc_hash(item.row) for item in items] == [doc_hash(row) for row in handed_over]
    assert [(item.id, item.number) for item in items] == [("0", 0), ("1", 1), ("2", 2)]


@pytest.mark.parametrize("name", ["gpqa", "gpqa_diamond"])
def test_sealed_items_hold_markers_and_the_way_back(name, tmp_path):
    row = {f"Incorrect Answer {number}": f"wrong {number}" for number in (1, 2, 3)}
    row |= {"Record ID": "rec1", "Question": "What is asked?", "Correct Answer": "right"}
    import json

    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    task = get_task(name)
    (item,), (real,) = task.items(tmp_path), task.rows(tmp_path)
    assert not any(text in str(item.row) + item.turns.user for text in ("asked", "right", "wrong"))
    prompt, texts = item.sealing.unseal(item.turns.user)
    assert prompt == task.benchmark.prompts.user(real)
    assert texts == (real["question"], *real["choices"])


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("a<think>b", "a"),
        ("a<think>b</think>c<think>d</think>e", "ace"),
        ("a</think>b<think>c", "b"),
        ("<think>a<think>b</think>c", "c"),
        ("plain", "plain"),
    ],
)
def test_what_stands_inside_a_thinking_block_is_left_out(text, kept):
    assert without_thoughts(text) == kept


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("x<|im_end|>", "x"),
        ("x</s></s> ", "x"),
        ("x<eos>" + "<pad>" * 3, "x"),
        ("x<|eot_id|>\r\n```\r\n", "x\n```\n"),
        ("x<｜end▁of▁sentence｜>", "x"),
        ("a <|im_end|> b", "a <|im_end|> b"),
        ("'</s>'", "'</s>'"),
        ("a <|> b", "a <|> b"),
    ],
)
def test_control_tokens_at_the_ends_of_lines_are_no_text(text, kept):
    assert without_control_tokens(text) == kept


def test_without_its_control_tokens_a_long_text_stays_quick():
    # Half a second where each token is read once; with a second pass for each token, many times the limit.
    start = time.process_time()
    assert without_control_tokens("<pad>" * 20_000) == ""
    assert without_control_tokens("<pad>" * 20_000 + "x") != ""
    assert time.process_time() - start < 15


def test_a_thought_is_no_answer():
    row = {"answer": "#### 6"}
    assert BENCHMARKS["gsm8k"].extract("<think>The answer is 5.", row).answer is None
    assert BENCHMARKS["gsm8k"].extract("The answer is 6.<think>The answer is 5.</think>", row).answer == "6"
    code = "<think>```python\ndef f():\n    return 1\n```</think>\n```python\ndef f():\n    return 2\n```"
    assert "return 2" in str(BENCHMARKS["mbpp"].extract(code, {"test_list": ["assert f() == 2"]}).answer)
