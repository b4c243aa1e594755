"""Where rows come from, and what is said when they cannot be found."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from refusion_eval.benchmarks import BENCHMARKS, get_task
from refusion_eval.benchmarks.gpqa import normalise
from refusion_eval.benchmarks.rows import DATA_VARIABLE
from refusion_eval.errors import DataError

GPQA_ROW = {
    "Record ID": "rec1",
    "Question": "Which of these invented things is blue?",
    "Correct Answer": "the blue one\n",
    "Incorrect Answer 1": "the red one",
    "Incorrect Answer 2": "the green one",
    "Incorrect Answer 3": "the grey one",
    "High-level domain": "Invention",
}


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for a machine without a network."""
    import datasets

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.delenv(DATA_VARIABLE, raising=False)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_rows_come_from_the_benchmarks_folder_of_the_directory(tmp_path: Path) -> None:
    write(tmp_path / "gsm8k" / "test.jsonl", [{"question": "q", "answer": "#### 1"}])
    assert get_task("gsm8k").rows(tmp_path) == [{"question": "q", "answer": "#### 1"}]


def test_the_directory_may_be_the_benchmarks_own(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", [{"question": "q", "answer": "#### 1"}])
    assert len(get_task("gsm8k").rows(tmp_path)) == 1


def test_compressed_rows_are_read(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl.gz").write_bytes(gzip.compress(b'{"question": "q", "answer": "#### 1"}\n'))
    assert len(get_task("gsm8k").rows(tmp_path)) == 1


def test_the_environment_names_the_directory_where_no_argument_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "gsm8k" / "test.jsonl", [{"question": "q", "answer": "#### 1"}])
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert len(get_task("gsm8k").rows()) == 1


def test_humaneval_comes_from_its_installed_package() -> None:
    rows = get_task("humaneval").rows()
    assert [row["task_id"] for row in rows] == [f"HumanEval/{number}" for number in range(164)]


def test_the_directory_goes_before_the_package(tmp_path: Path) -> None:
    row = dict.fromkeys(BENCHMARKS["humaneval"].source.columns, "x")
    write(tmp_path / "humaneval" / "test.jsonl", [row])
    assert get_task("humaneval").rows(tmp_path) == [row]


def test_the_hub_is_asked_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    asked = []

    def load_dataset(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        asked.append((args, kwargs))
        return [{"question": "q", "answer": "#### 1"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(get_task("gsm8k").rows(tmp_path)) == 1
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]


def test_missing_rows_are_reported_with_every_place_tried(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mbpp/test\.jsonl.*google-research-datasets/mbpp.*no network.*put the rows"):
        get_task("mbpp").rows(tmp_path)


def test_missing_gpqa_is_reported_with_licence_and_token_and_the_tasks_that_need_none() -> None:
    others = "mmlu_pro,arc_challenge,gsm8k,math,humaneval,mbpp"
    with pytest.raises(DataError, match=rf"accept the licence.*HF_TOKEN, or leave gpqa out with --tasks {others}$"):
        get_task("gpqa").rows()


def test_a_directory_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(DataError, match="does not exist"):
        get_task("gsm8k").rows("/nowhere/at/all")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"question": "q"}\n', r"row 0 \(from 0\): column 'answer' is missing"),
        (b'{"question": "q", "answer": "1"}\n{"question"\n', "line 2: not a JSON value"),
        (b"\n[1]\n", "line 2: expected a JSON object"),
        (b'{"question": "\xff", "answer": "1"}\n', "line 1: not UTF-8"),
        (b'{"question": "q", "question": "r", "answer": "1"}\n', "'question' occurs twice"),
        (b"", "holds no rows"),
    ],
)
def test_malformed_rows_are_reported_with_their_place(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "test.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        get_task("gsm8k").rows(tmp_path)


def test_only_a_line_feed_ends_a_row(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_bytes('{"question": "a\u0085b\u2028c", "answer": "#### 1"}\n'.encode())
    assert get_task("gsm8k").rows(tmp_path)[0]["question"] == "a\u0085b\u2028c"


def test_gpqa_choices_are_shuffled_by_id_and_the_letter_points_at_the_right_one() -> None:
    first, again = normalise(GPQA_ROW), normalise(dict(reversed(GPQA_ROW.items())))
    assert first == again
    assert first["choices"]["ABCD".index(first["answer"])] == "the blue one"
    assert sorted(first["choices"]) == ["the blue one", "the green one", "the grey one", "the red one"]
    answers = {normalise({**GPQA_ROW, "Record ID": f"rec{number}"})["answer"] for number in range(50)}
    assert answers == set("ABCD")


def test_a_gpqa_row_without_a_record_id_gets_one_that_does_not_show_its_question() -> None:
    row = {key: value for key, value in GPQA_ROW.items() if key != "Record ID"}
    assert len(normalise(row)["id"]) == 16


@pytest.mark.parametrize("benchmark", [name for name, one in BENCHMARKS.items() if one.has_mini])
def test_the_mini_rows_ship_with_the_project(benchmark: str) -> None:
    assert get_task(f"mini_{benchmark}").rows()
