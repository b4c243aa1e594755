"""Where rows come from, and what is said when they cannot be found."""

import gzip
import json
import re
import ssl
import time
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import pytest

from refusion_eval.benchmarks import BENCHMARKS, get_task
from refusion_eval.benchmarks.gpqa import normalise
from refusion_eval.benchmarks.rows import DATA_VARIABLE, _answers
from refusion_eval.errors import DataError, MissingRowsError

ANSWERS = "refusion_eval.benchmarks.rows._answers"
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
    monkeypatch.setattr(ANSWERS, lambda endpoint: True)
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


@pytest.mark.parametrize("name", ["gpqa", "gpqa_diamond"])
def test_missing_rows_with_a_licence_are_reported_with_licence_token_and_place(name: str) -> None:
    dataset = "Idavidrein/gpqa"
    advice = (
        rf"accept the licence at https://huggingface\.co/datasets/{dataset}, log in \(`hf auth login` or HF_TOKEN\) "
        rf"and allow the download of {dataset}, or put the rows, in hub columns, into DIR/{name}/train\.jsonl and name "
        "DIR"
    )
    with pytest.raises(MissingRowsError, match=rf"^no train rows of {name}; .* To go on: {advice}$") as refused:
        get_task(name).rows()
    assert re.fullmatch(advice, refused.value.advice)


def test_a_hub_that_does_not_answer_is_asked_once_and_its_caches_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from huggingface_hub import constants

    asked, offline = [], []

    def refuse(request: Any, **_: Any) -> Any:
        asked.append(request.full_url)
        raise URLError("no network")

    def load_dataset(*_: Any, **__: Any) -> Any:
        offline.append(constants.HF_HUB_OFFLINE)
        if len(offline) > 1:
            raise ConnectionError("not in the cache")
        return [{"question": "q", "answer": "#### 1"}]

    def wait(seconds: float) -> None:
        pytest.fail(f"the hub is asked again after {seconds} seconds")

    monkeypatch.setattr(ANSWERS, _answers)
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr(time, "sleep", wait)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    assert len(get_task("gsm8k").rows()) == 1
    for name in ("mbpp", "livecodebench_v6_2025_02_2025_05"):
        with pytest.raises(MissingRowsError, match="the hub is not reached, and its cache has no such rows"):
            get_task(name).rows()
    assert asked == ["https://hub.invalid"]
    assert offline == [True, True]
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    ("problem", "answers"),
    [
        (HTTPError("https://hub.invalid", 401, "no token", Message(), None), True),
        (URLError(ssl.SSLError("unknown certificate")), True),
        (URLError(TimeoutError()), False),
        (TimeoutError(), False),
    ],
)
def test_a_hub_answers_also_where_it_refuses(problem: OSError, answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise problem

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    assert _answers.__wrapped__("https://hub.invalid") == answers


def test_rows_from_elsewhere_than_the_directory_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    get_task("humaneval").rows(tmp_path)
    assert "humaneval/test.jsonl[.gz] (no such file); the rows of humaneval are those of" in caplog.text


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


@pytest.mark.parametrize(
    ("notes", "reason"),
    [
        (("1", '"one"'), "several types"),
        (("1", str(2**63)), "a whole number of more than 64 bits"),
        (("null", f'{{"a": [{-(2**70)}]}}'), "a whole number of more than 64 bits"),
        (("null", r'"\ud800"'), "half of a character"),
    ],
)
def test_a_column_that_no_table_holds_is_named(tmp_path: Path, notes: tuple[str, str], reason: str) -> None:
    rows = [f'{{"question": "q", "answer": "#### 1", "note": {note}}}\n' for note in notes]
    (tmp_path / "test.jsonl").write_text("".join(rows), encoding="utf-8")
    with pytest.raises(DataError, match=f"column 'note' holds {reason}"):
        get_task("gsm8k").items(tmp_path)


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
