"""The answer filters: what each finds in a text, and what it calls right."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from refusion_eval.benchmarks import BENCHMARKS, get_task
from refusion_eval.benchmarks.extract.release import release_block
from refusion_eval.benchmarks.rows import json_lines
from refusion_eval.cli import app
from refusion_eval.errors import ConfigError
from refusion_eval.lm_eval_plugin.filters import FILTERS, describe, find_filter
from refusion_eval.scoring.judge import judge_texts
from tests.examples import examples


def first(filter_name: str, benchmark: str, text: str, row: dict[str, Any] | None = None) -> tuple[str | None, bool]:
    """What a filter finds in one text, and whether it calls that right."""
    rule = FILTERS[filter_name].rules[benchmark]
    row = row or {"gsm8k": {"answer": "#### 1,042"}, "mmlu_pro": {"answer": "A"}}[benchmark]
    (found,) = rule.find([(row, text)])
    assert rule.is_right is not None
    return found.answer, found.answer is not None and rule.is_right(BENCHMARKS[benchmark].gold(row), found.answer)


@pytest.mark.parametrize(
    ("filter_name", "text", "answer", "right"),
    [
        ("flexible-extract", "so $1,042.", "$1,042.", True),
        ("flexible-extract", "1042 apples, 100% done", "100", False),
        ("flexible-extract", "It is 1042.00", "1042.00", False),
        ("flexible-extract", "no idea", None, False),
        ("strict-match", "#### 1,042\n#### 7", "1,042", True),
        ("strict-match", "The answer is 1042.", None, False),
        ("cot-strict-match", "The answer is 1042.", "1042.", True),
        ("cot-strict-match", "The answer is 1042", "104", False),
    ],
)
def test_numbers_are_found_and_compared_as_lm_eval_does(
    filter_name: str, text: str, answer: str | None, right: bool
) -> None:
    found, is_right = first(filter_name, "gsm8k", text)
    assert is_right == right
    assert (found or "").rstrip(".") == (answer or "").rstrip(".")


@pytest.mark.parametrize(
    ("text", "answer"),
    [("the answer is (A). No, the answer is (B).", "A"), ("answer is Apples", "A"), ("answer is: A", None)],
)
def test_letters_of_mmlu_pro_are_found_as_lm_eval_does(text: str, answer: str | None) -> None:
    assert first("custom-extract", "mmlu_pro", text) == (answer, answer == "A")


@pytest.mark.parametrize(
    ("filter_name", "text", "answer", "right"),
    [
        ("flexible-extract", "(A) first, then (B)", "(B)", True),
        ("flexible-extract", "it must be green cheese", "(B)", True),
        ("flexible-extract", "Answer: B", "(B)", True),
        ("flexible-extract", "B", None, False),
        ("strict-match", "The answer is (B).", "(B)", True),
    ],
)
def test_letters_of_gpqa_are_found_as_lm_eval_does(filter_name: str, text: str, answer: str, right: bool) -> None:
    row = {"choices": ["red wine", "Green cheese!", "blue sky", "rain"], "answer": "B"}
    assert first(filter_name, "gpqa", text, row) == (answer, right)


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("minerva-box", "\\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("minerva-box", "\\fbox{1}", None),
        ("minerva-box", "none", None),
        ("minerva-statement", "Final Answer: The final answer is $5$. I hope it is correct.", "$5$"),
        ("minerva-statement", "\\boxed{5}", None),
    ],
)
def test_mathematics_is_found_as_lm_eval_does(name: str, text: str, answer: str | None) -> None:
    (found,) = FILTERS[name].rules["math"].find([({}, text)])
    assert found.answer == answer


def test_a_body_behind_the_prompt_is_a_program() -> None:
    row = {"prompt": "def f():\n", "entry_point": "f"}
    rules = {name: FILTERS[name].rules["humaneval"] for name in ("raw-continuation", "first-fenced-block")}
    assert rules["raw-continuation"].find([(row, "    return 1")])[0].answer == "def f():\n    return 1"
    assert rules["first-fenced-block"].find([(row, "no block")])[0].answer is None
    (block,) = rules["first-fenced-block"].find([(row, "```python\ndef f():\n    return 1\n```\n```\n2\n```")])
    assert block.answer == "def f():\n\ndef f():\n    return 1\n"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("so\n```python\n1\n2\n```\nand\n```python\n3\n```", "1\n2"),
        ("```python\nnever closed", "```python\nnever closed"),
        ("```\n1\n```", "```\n1\n```"),
    ],
)
def test_the_release_keeps_the_first_closed_python_block(text: str, kept: str) -> None:
    assert release_block(text) == kept


# Every column that rules of the other benchmarks read.
ROW = {"choices": ["a", "b"], "input": "(A) a\n(B) b", "target": "(A)", "func_name": "f"}
ROWS: dict[str, dict[str, Any]] = {
    "mmlu_pro": {"options": list("abc"), "answer": "A"},
    "arc_challenge": {"choices": {"text": list("abc"), "label": list("ABC")}, "answerKey": "A"},
    "gsm8k": {"answer": "#### 1"},
    "math": {"solution": "\\boxed{1}"},
    "gpqa": {"choices": list("abcd"), "answer": "A"},
    "humaneval": {"prompt": "def f():\n", "entry_point": "f"},
    "humaneval_plus_v0_1_10": {"prompt": "def f():\n", "entry_point": "f"},
    "mbpp": {"test_list": []},
    "mbpp_plus_v0_1_0": {"entry_point": "f"},
    "mbpp_plus_v0_2_0": {"entry_point": "f"},
    "parts": {"answer": "1"},
}
PIECES = st.sampled_from(
    ["The answer is ", "(A)", "####", "\\boxed", "\\boxed ", "{", "}", "```python\n", "\n```", " 5", "."]
)


TEXTS = st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=12).map("".join)


@examples(4)  # one example is many texts: some filters are slow to set up
@given(st.lists(TEXTS, min_size=20, max_size=60))
def test_no_filter_fails_on_any_text(texts: list[str]) -> None:
    for answer_filter in FILTERS.values():
        for benchmark, rule in answer_filter.rules.items():
            found = rule.find([(ROWS.get(benchmark, ROW), text) for text in texts])
            assert len(found) == len(texts)
            for it in found:
                if rule.is_right is not None and it.answer is not None:
                    assert rule.is_right("5", it.answer) in (True, False)


def test_every_filter_is_described_in_one_line() -> None:
    lines = describe()
    assert [line.split()[0] for line in lines] == [*FILTERS, "module:function"]
    assert all(it.description and it.source and it.rules for it in FILTERS.values())


@pytest.mark.parametrize("arguments", [["--filter", "list"], ["--list-filters"]])
def test_the_command_line_lists_them(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["rescore", *arguments])
    assert result.exit_code == 0
    assert result.stdout.splitlines() == describe()


def test_the_command_line_asks_for_a_run() -> None:
    problem = CliRunner().invoke(app, ["rescore", "--filter", "strict"]).exception
    assert isinstance(problem, ConfigError)
    assert "no run directory is given" in str(problem)


def test_a_filter_that_changes_the_search_path_itself_leaves_what_it_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adds_a_folder.py").write_text(
        "import sys\nsys.path.insert(0, '/added')\ndef answer(text, doc):\n    return text\n"
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", [*before])
    find_filter("adds_a_folder:answer")
    assert sys.path == ["/added", *before]


def test_lm_eval_s_filters_agree_with_published_verdicts_on_real_answers(reference_data: Path) -> None:
    rows = get_task("gsm8k").rows(reference_data / "benchmarks")
    rule = FILTERS["flexible-extract"].rules["gsm8k"]
    assert rule.is_right is not None
    outputs = [row for _, row in json_lines(reference_data / "outputs" / "gsm8k_openai_solutions.jsonl.gz")]
    for model in outputs[0]["outputs"]:
        found = rule.find([(rows[line["idx"]], line["outputs"][model]["solution"]) for line in outputs])
        golds = [BENCHMARKS["gsm8k"].gold(rows[line["idx"]]) for line in outputs]
        right = [
            it.answer is not None and rule.is_right(gold, it.answer) for gold, it in zip(golds, found, strict=True)
        ]
        assert right == [line["outputs"][model]["is_correct"] for line in outputs]


def test_lm_eval_s_letters_are_the_published_ones_on_real_answers(reference_data: Path) -> None:
    rows = {row["question_id"]: row for row in get_task("mmlu_pro").rows(reference_data / "benchmarks")}
    outputs = [row for _, row in json_lines(reference_data / "outputs" / "mmlu_pro_llama-3-8b.jsonl.gz")]
    rule = FILTERS["custom-extract"].rules["mmlu_pro"]
    found = rule.find([(rows[line["question_id"]], line["model_output"]) for line in outputs])
    assert [it.answer for it in found] == [line["pred"] for line in outputs]


def test_gold_answers_are_right_in_the_form_that_lm_eval_asks_for(reference_data: Path) -> None:
    rows = get_task("gsm8k").rows(reference_data / "benchmarks")
    rule = FILTERS["strict-match"].rules["gsm8k"]
    assert rule.is_right is not None
    found = rule.find([(row, row["answer"]) for row in rows])
    assert all(
        rule.is_right(BENCHMARKS["gsm8k"].gold(row), it.answer or "") for row, it in zip(rows, found, strict=True)
    )


def test_bodies_behind_the_prompt_get_their_published_verdicts(reference_data: Path) -> None:
    rows = {row["task_id"]: row for row in get_task("humaneval").rows(reference_data / "benchmarks")}
    outputs = [row for _, row in json_lines(reference_data / "outputs" / "humaneval_gpt-4_body_only.jsonl.gz")]
    rule = FILTERS["raw-continuation"].rules["humaneval"]
    of_text = {"raw": lambda text, row: rule.find([(row, text)])[0]}
    bench = replace(BENCHMARKS["humaneval"], ours=replace(BENCHMARKS["humaneval"].ours, filters=of_text))
    judged = judge_texts(bench, [(rows[line["task_id"]], line["solution"]) for line in outputs])
    assert [it.passed for it in judged] == [line["is_solved"] for line in outputs]
