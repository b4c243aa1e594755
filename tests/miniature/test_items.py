"""The files of the mini tasks: columns, disjointness, correct gold (`miniature.data`)."""

import json
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from miniature.data import NUM_TEST_ITEMS, held_out_items, held_out_text, items, normalised
from miniature.family import EMBEDDED
from refusion_eval.benchmarks import BENCHMARKS

MINI = Path(__file__).parents[2] / "tasks" / "mini"
COLUMNS = {
    "mmlu_pro": {
        "question_id", "question", "options", "answer", "answer_index", "cot_content", "category", "src",
    },
    "arc_challenge": {"id", "question", "choices", "answerKey"},
    "gsm8k": {"question", "answer"},
    "math": {"problem", "level", "type", "solution"},
    "gpqa": {
        "Record ID", "Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3",
        "High-level domain",
    },
    "humaneval": {"task_id", "prompt", "canonical_solution", "test", "entry_point"},
    "mbpp": {"task_id", "text", "code", "test_list", "test_setup_code", "challenge_test_list"},
    "parts": {"question", "answer"},
}  # fmt: skip
ENDINGS = {
    "mmlu_pro": r"The answer is \(([A-J])\)\.",
    "arc_challenge": r"The answer is \(([A-D])\)\.",
    "gpqa": r"The answer is \(([A-D])\)\.",
    "gsm8k": r"The answer is (\d+)\.",
    "math": r"\\boxed\{(.+)\}\$\.",
    "humaneval": r"```",
    "mbpp": r"```",
    "parts": r"[\w.)]",
}


def _rows(benchmark: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (MINI / benchmark / "test.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("benchmark", EMBEDDED.draws)
def test_the_generator_gives_the_committed_file_byte_for_byte(benchmark: str) -> None:
    assert (MINI / benchmark / "test.jsonl").read_bytes() == held_out_text(benchmark).encode()


@pytest.mark.parametrize("benchmark", EMBEDDED.draws)
def test_each_task_has_its_items_in_the_hub_columns(benchmark: str) -> None:
    rows = _rows(benchmark)
    assert len(rows) == NUM_TEST_ITEMS
    assert all(set(row) == COLUMNS[benchmark] for row in rows)


@pytest.mark.parametrize("benchmark", EMBEDDED.draws)
def test_ids_and_prompts_are_unique(benchmark: str) -> None:
    rows = _rows(benchmark)
    for column in {"question_id", "id", "Record ID", "task_id"} & set(rows[0]):
        assert len({row[column] for row in rows}) == NUM_TEST_ITEMS
    assert (
        len({normalised(BENCHMARKS[benchmark].prompts.user(item.prompt_row)) for item in held_out_items(benchmark)})
        == NUM_TEST_ITEMS
    )


@pytest.mark.parametrize("benchmark", EMBEDDED.draws)
def test_training_items_share_no_prompt_with_the_test_items(benchmark: str) -> None:
    tested = {normalised(BENCHMARKS[benchmark].prompts.user(item.prompt_row)) for item in held_out_items(benchmark)}
    trained = (
        normalised(BENCHMARKS[benchmark].prompts.user(item.prompt_row)) for item in islice(_train(benchmark), 3000)
    )
    assert tested.isdisjoint(trained)


def _train(benchmark: str) -> Any:
    return items(benchmark, test=False, seed=1)


@pytest.mark.parametrize("benchmark", EMBEDDED.draws)
def test_each_response_ends_as_the_prompt_asks(benchmark: str) -> None:
    for item in islice(_train(benchmark), 200):
        assert re.search(ENDINGS[benchmark] + r"\Z", item.response), item.response


def test_word_problem_answers_agree_with_their_steps() -> None:
    for row in _rows("gsm8k"):
        steps = re.findall(r"<<(.+?)=(\d+)>>", row["answer"])
        for term, value in steps:
            left, operation, right = re.fullmatch(r"(\d+)([-+*/])(\d+)", term).groups()
            exact = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
            assert int(value) == exact.get(operation, int(left) // int(right))
        assert row["answer"].endswith(f"#### {steps[-1][1]}")


def test_gold_programs_pass_their_tests() -> None:
    programs = [
        f"{row['prompt']}{row['canonical_solution']}\n{row['test']}\ncheck({row['entry_point']})\n"
        for row in _rows("humaneval")
    ]
    programs += [
        "\n".join([row["code"], row["test_setup_code"], *row["test_list"], *row["challenge_test_list"]])
        for row in _rows("mbpp")
    ]
    runner = "import json, sys\nfor text in json.load(sys.stdin):\n    exec(text, {})\nprint('passed')"
    done = subprocess.run(
        [sys.executable, "-c", runner],
        input=json.dumps(programs),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "passed\n", done.stderr
