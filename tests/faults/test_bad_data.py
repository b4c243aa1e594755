"""Damaged data files and outputs, through the command line: one error with file and line, and what to do."""

import gzip
import json
import resource

import pytest

from refusion_eval.benchmarks import BENCHMARKS, get_task
from refusion_eval.benchmarks.rows import LONGEST_LINE
from tests.faults.front_end import error_of, records

GSM = {"question": "How many?", "answer": "One. #### 1"}
ARC = {"id": "a", "question": "Which?", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "A"}
MMLU = {"question_id": 1, "question": "Which?", "options": ["x", "y"], "answer": "A", "category": "c"}
CODE = {"task_id": "t/0", "prompt": "p", "canonical_solution": "s", "test": "t", "entry_point": "e"}
MBPP = {"task_id": 1, "text": "t", "code": "c", "test_list": ["assert f() == 1"], "test_setup_code": ""}
MATH = {"problem": "p", "level": "l", "type": "t", "solution": "\\boxed{1}"}


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def without(row, name):
    return {key: value for key, value in row.items() if key != name}


# Benchmark, what its file holds, words that the error must hold.
CASES = {
    "missing column": ("gsm8k", lines(GSM, without(GSM, "answer")), ("row 1", "'answer' is missing", "hub")),
    "wrong type": ("gsm8k", lines(GSM, GSM | {"question": 7}), ("row 1", "'question' is 7", "must be text")),
    "null": ("gsm8k", lines(GSM | {"question": None}), ("row 0", "'question' is None", "must be text")),
    "lone surrogate": ("gsm8k", lines(GSM | {"question": "\ud800"}), ("row 0", "'question'", "surrogate")),
    "no number behind ####": ("gsm8k", lines(GSM, GSM | {"answer": "one"}), ("row 1", "gsm8k", "####", "correct")),
    "no box": ("math", lines(MATH | {"solution": "1"}), ("row 0", "math", "box", "correct")),
    "duplicate id": ("arc_challenge", lines(ARC, ARC), ("row 1", "'a'", "row 0", "rename")),
    "duplicate number": ("mmlu_pro", lines(MMLU, MMLU), ("row 1", "'1'", "row 0")),
    "answer outside the choices": ("arc_challenge", lines(ARC | {"answerKey": "C"}), ("row 0", "'C'", "A, B")),
    "letter outside the options": ("mmlu_pro", lines(MMLU | {"answer": "J"}), ("row 0", "'J'", "A, B")),
    "choices as text": ("arc_challenge", lines(ARC | {"choices": "x"}), ("row 0", "'choices'", "label")),
    "uneven choices": (
        "arc_challenge",
        lines(ARC | {"choices": {"text": ["x"], "label": ["A", "B"]}}),
        ("row 0", "equally long"),
    ),
    "no options": ("mmlu_pro", lines(MMLU | {"options": []}), ("row 0", "'options'", "list of texts")),
    "id that is a list": ("humaneval", lines(CODE | {"task_id": [1]}), ("row 0", "'task_id'")),
    "tests as text": ("mbpp", lines(MBPP | {"test_list": {"a": 1}}), ("row 0", "'test_list'", "list of texts")),
    "Latin-1": ("gsm8k", '{"question": "café", "answer": "#### 1"}'.encode("latin-1"), ("line 1", "not UTF-8", "save")),
    "UTF-16": ("gsm8k", lines(GSM).decode().encode("utf-16"), ("line 1", "not UTF-8", "save")),
    "UTF-16 without mark": ("gsm8k", lines(GSM).decode().encode("utf-16-be"), ("line 1", "not a JSON value")),
    "empty": ("gsm8k", b"", ("holds no rows", "write")),
    "blank lines": ("gsm8k", b"\n \n\t\n\r\n", ("holds no rows", "write")),
    "cut line": ("gsm8k", lines(GSM) + b'{"question": "q', ("line 2", "not a JSON value", "write")),
    "NUL bytes": ("gsm8k", lines(GSM) + b"\0" * 100, ("line 2", "not a JSON value")),
    "NUL in a text": ("gsm8k", b'{"question": "a\0b", "answer": "#### 1"}', ("line 1", "not a JSON value")),
    "a list": ("gsm8k", lines(GSM, [1]), ("line 2", "object", "list")),
    "a whole JSON file": ("gsm8k", json.dumps([GSM], indent=1).encode(), ("line 1", "not a JSON value", "a line")),
    "a key twice": ("gsm8k", b'{"question": "q", "question": "r", "answer": "#### 1"}', ("line 1", "occurs twice")),
    "deep nesting": ("gsm8k", b"[" * 100_000, ("line 1", "not a JSON value")),
    "a huge number": ("gsm8k", b'{"question": ' + b"9" * 10_000 + b"}", ("line 1", "not a JSON value")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_data_file_is_one_error_with_its_place(name, front_end, tmp_path):
    benchmark, content, words = CASES[name]
    (tmp_path / "test.jsonl").write_bytes(content)
    message = front_end.refusal("score", "--task", benchmark, "--outputs", "gold", "--data", tmp_path)
    assert all(word in message for word in words), message
    assert len(message) < 1000


@pytest.mark.parametrize(
    "name", ["missing column", "duplicate id", "no number behind ####", "UTF-16", "lone surrogate"]
)
def test_a_run_refuses_it_before_anything_is_loaded(name, front_end, tmp_path):
    benchmark, content, words = CASES[name]
    (tmp_path / "test.jsonl").write_bytes(content)
    run_dir = tmp_path / "run"
    message = front_end.refusal("run", "--tasks", f"refusion_{benchmark}", "--data", tmp_path, "--run-dir", run_dir)
    assert all(word in message for word in words), message
    assert not run_dir.exists()


@pytest.mark.parametrize("damage", [lambda packed: packed[:-20], lambda packed: packed[:30] + b"x" * 30, bytes.upper])
def test_a_damaged_archive_is_one_error(damage, front_end, tmp_path):
    (tmp_path / "test.jsonl.gz").write_bytes(damage(gzip.compress(lines(*[GSM | {"id": n} for n in range(50)]))))
    message = front_end.refusal("score", "--task", "gsm8k", "--outputs", "gold", "--data", tmp_path)
    assert "test.jsonl.gz" in message
    assert "again" in message


def test_a_byte_order_mark_is_read_over(front_end, tmp_path):
    (tmp_path / "test.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(GSM))
    command = ("score", "--task", "gsm8k", "--outputs", "gold", "--data", tmp_path, "--csv", tmp_path / "out.csv")
    assert front_end.run(*command)[0] == 0


@pytest.mark.parametrize("name", ["test.jsonl", "test.jsonl.gz"])
def test_a_line_of_100_megabytes_is_refused_without_reading_it(name, front_end, tmp_path):
    path = tmp_path / name
    piece = b"x" * 2**20
    with gzip.open(path, "wb", compresslevel=1) if name.endswith(".gz") else path.open("wb") as file:
        file.write(lines(GSM) + b'{"question": "')
        for _ in range(100):
            file.write(piece)
    # The peak of this process only grows: what reading adds to it is at most the longest line, a few times over.
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        message = front_end.refusal("score", "--task", "gsm8k", "--outputs", "gold", "--data", tmp_path)
    finally:
        path.unlink()
    assert "line 2 is longer than 16 MiB" in message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 5 * LONGEST_LINE / 1024


OUTPUTS = {
    "not an object": (b'"a"\n', ("line 1", "found str")),
    "other keys": (b'{"id": 0, "answer": "x"}\n', ("line 1", "expected the keys id and text", "answer")),
    "no text": (b'{"id": 0, "text": null}\n', ("line 1", "text must be a text")),
    "unknown id": (b'{"id": 77777, "text": "x"}\n', ("line 1", "77777")),
    "true as id": (b'{"id": true, "text": "x"}\n', ("line 1", "id must be")),
    "empty": (b"\n\n", ("is empty", "expected lines")),
    "UTF-16": ('{"id": 0, "text": "x"}'.encode("utf-16"), ("line 1", "not UTF-8", "save")),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_bad_outputs_are_one_error_and_an_earlier_table_stays(name, front_end, tmp_path):
    content, words = OUTPUTS[name]
    outputs, table = tmp_path / "outputs.jsonl", tmp_path / "outputs.scores.csv"
    outputs.write_bytes(content)
    table.write_text("what an earlier scoring found")
    message = front_end.refusal("score", "--task", "mini_gsm8k", "--outputs", outputs)
    assert all(word in message for word in (str(outputs), *words)), message
    assert table.read_text() == "what an earlier scoring found"


def test_outputs_that_are_not_there_are_one_error(front_end, tmp_path):
    assert "no.jsonl" in front_end.refusal("score", "--task", "mini_gsm8k", "--outputs", tmp_path / "no.jsonl")


def test_texts_with_lone_surrogates_and_nul_are_scored(front_end, tmp_path):
    outputs = tmp_path / "outputs.jsonl"
    answer = BENCHMARKS["gsm8k"].gold(get_task("mini_gsm8k").rows()[0])
    outputs.write_bytes(lines({"id": 0, "text": f"The answer is \ud800\0 {answer} \udfff"}))
    assert front_end.run("score", "--task", "mini_gsm8k", "--outputs", outputs)[0] == 0
    score = (tmp_path / "outputs.scores.csv").read_text(encoding="utf-8").splitlines()[1]
    assert score.startswith(f"0,0,{answer},correct")


def test_lone_surrogates_in_a_models_text_reach_every_output(front_end, monkeypatch, tmp_path):
    """From the decoder's text to the store, the CSV and Markdown table, and the report's page."""
    broken = "The answer is \ud800\0 14 \udfff"
    monkeypatch.setattr("refusion_eval.runs.job.Detokenizer.text", lambda *arguments: broken)
    run_dir, page = tmp_path / "run", tmp_path / "page.html"
    command = ("run", "--decoder", "autoregressive", "--set", "gen_length=4", "--warmup", "0", "--limit", "1")
    assert front_end.run(*command, "--tasks", "mini_gsm8k", "--run-dir", run_dir)[0] == 0
    assert b"\\ud800" in records(run_dir)[0][0][6].encode()
    assert "mini_gsm8k" in (run_dir / "table.md").read_text(encoding="utf-8")
    status, text = front_end.run("report", run_dir, "--out", page)
    assert status == 0, text
    assert page.read_text(encoding="utf-8")


def test_a_prompt_longer_than_the_context_is_told_and_the_others_are_kept(front_end, tmp_path):
    """The samples that fit are recorded; the status says that some are missing."""
    rows = [GSM, GSM | {"question": "How many? " * 2000}]
    (tmp_path / "test.jsonl").write_bytes(lines(*rows))
    command = ("run", "--decoder", "autoregressive", "--set", "gen_length=4", "--warmup", "0", "--data", tmp_path)
    status, text = front_end.run(*command, "--tasks", "refusion_gsm8k", "--run-dir", tmp_path / "run")
    assert status == 3
    assert "exceed the context of 2048" in text
    assert "1 prompts are refused, and the same command would refuse them again" in error_of(text)
    assert [bool(failed) for *_, failed, _, _, _ in sorted(records(tmp_path / "run")[0], key=lambda row: row[2])] == [
        False,
        True,
    ]
