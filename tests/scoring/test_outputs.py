"""Files that other tools wrote: their columns, their ids, and which row each line is about."""

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from refusion_eval.benchmarks import BENCHMARKS, Row
from refusion_eval.errors import DataError
from refusion_eval.scoring import outputs
from refusion_eval.scoring.outputs import read_outputs
from refusion_eval.scoring.score import index_rows

PROBLEMS = [{"question": f"How many\n are {number}?", "answer": f"#### {number}"} for number in range(3)]
QUESTIONS = [{"question_id": 70 + number, "question": f"Which {number}?", "options": ["a", "b"]} for number in range(2)]
FUNCTIONS = [{"task_id": f"HumanEval/{number}", "prompt": f"def f{number}():\n"} for number in range(2)]
PROGRAMS = [{"task_id": 11 + number, "text": f"Write {number}."} for number in range(2)]
ROWS = {"gsm8k": PROBLEMS, "mmlu_pro": QUESTIONS, "humaneval": FUNCTIONS, "mbpp": PROGRAMS}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Mapping[str, list[str]]]:
    def reads(benchmark: str, content: bytes | list[Any]) -> Mapping[str, list[str]]:
        path = tmp_path / "outputs.jsonl"
        lines = content if isinstance(content, bytes) else "".join(json.dumps(line) + "\n" for line in content).encode()
        path.write_bytes(lines)
        return read_outputs(path, BENCHMARKS[benchmark], index_rows(BENCHMARKS[benchmark], ROWS[benchmark]))

    return reads


def logged(doc_id: int, doc: Row, *texts: str, filter_name: str = "none") -> dict[str, Any]:
    """A line of lm-eval's `--log_samples`."""
    return {
        "doc_id": doc_id, "doc": doc, "target": "t", "arguments": {"gen_args_0": {}}, "resps": [list(texts)],
        "filtered_resps": ["[invalid]"], "filter": filter_name, "metrics": ["exact_match"], "exact_match": 0.0,
    }  # fmt: skip


def chat(*texts: Any) -> dict[str, Any]:
    return {
        "choices": [{"index": at, "message": {"role": "assistant", "content": text}} for at, text in enumerate(texts)]
    }


def inspected(item: Any, question: Any, *texts: Any) -> dict[str, Any]:
    """A sample of a log of inspect_ai."""
    return {"id": item, "epoch": 1, "input": question, "target": "t", "output": {**chat(*texts), "completion": "c"}}


def batched(custom_id: str, response: Any, error: Any = None) -> dict[str, Any]:
    return {"id": "batch_req_1", "custom_id": custom_id, "response": response, "error": error}


@pytest.mark.parametrize(
    ("benchmark", "lines", "texts"),
    [
        ("gsm8k", [{"id": 0, "text": "x"}, {"id": "0", "text": "y"}], {"0": ["x", "y"]}),
        ("gsm8k", [logged(1, PROBLEMS[1], "x", "y")], {"1": ["x", "y"]}),
        ("mmlu_pro", [logged(0, QUESTIONS[1], "x")], {"71": ["x"]}),
        ("humaneval", [{"task_id": "HumanEval/1", "completion": "x", "_identifier": "i"}], {"HumanEval/1": ["x"]}),
        ("humaneval", [{"task_id": "HumanEval/1", "completion": "y", "solution": "x"}], {"HumanEval/1": ["x"]}),
        ("mbpp", [{"task_id": "Mbpp/12", "solution": "x"}], {"12": ["x"]}),
        ("gsm8k", [batched("2", {"status_code": 200, "body": chat("x")})], {"2": ["x"]}),
        ("gsm8k", [batched("2", {"status_code": 200, "body": chat(None)})], {"2": [""]}),
        ("gsm8k", [batched("2", None, {"code": "c"})], {"2": []}),
        ("gsm8k", [batched("2", {"status_code": 500, "body": {"error": {}}})], {"2": []}),
        ("gsm8k", [{"id": 2, **chat("x", "y"), "usage": {}}], {"2": ["x", "y"]}),
        ("gsm8k", [{"id": 2, "choices": [{"text": "x"}]}], {"2": ["x"]}),
    ],
)
def test_the_columns_of_each_tool_are_known(read: Any, benchmark: str, lines: list[Any], texts: dict[str, Any]) -> None:
    assert read(benchmark, lines) == texts


def test_a_failed_sample_of_a_log_of_inspect_has_no_text(read: Any) -> None:
    failed = {"model": "m", "choices": [], "completion": "", "usage": None}
    lines = [inspected(0, PROBLEMS[0]["question"], "a"), {**inspected(1, PROBLEMS[1]["question"]), "output": failed}]
    lines[1]["error"] = {"message": "RuntimeError", "traceback": "..."}
    assert read("gsm8k", lines) == {"0": ["a"], "1": []}


def responded(*output: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A line of a batch of /v1/responses."""
    body = {"object": "response", "status": "completed", "error": None, "output": list(output), **more}
    return {"status_code": 200, "request_id": "r", "body": body}


def message(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": list(parts)}


def test_batches_of_responses_are_read(read: Any) -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    one, other = ({"type": "output_text", "text": text, "annotations": []} for text in ("The answer", " is 5."))
    lines = [
        batched("0", responded(thought, message(one, other))),
        batched("1", responded(message(one), {"type": "web_search_call", "id": "w"}, message(other))),
        batched("2", responded(thought, status="incomplete")),
    ]
    assert read("gsm8k", lines) == {"0": ["The answer is 5."], "1": ["The answer is 5."], "2": []}
    refused = {"type": "refusal", "refusal": "I cannot."}
    assert read("gsm8k", [batched("0", responded(message(refused)))]) == {"0": [""]}
    failed = responded(error={"code": "server_error"}, status="failed")
    assert read("gsm8k", [batched("0", failed)]) == {"0": []}


@pytest.mark.parametrize("part", [{"type": "text"}, {"type": "text", "text": 5}, {"type": "output_text", "text": None}])
def test_a_part_without_text_adds_none(read: Any, part: dict[str, Any]) -> None:
    assert read("gsm8k", [batched("0", responded(message(part, {"type": "text", "text": "5"})))]) == {"0": ["5"]}


def test_texts_that_are_logged_once_for_each_filter_are_read_once(read: Any) -> None:
    lines = [
        logged(number, PROBLEMS[number], f"x{number}", filter_name=name)
        for name in ("strict-match", "flexible-extract")
        for number in (0, 1)
    ]
    assert read("gsm8k", lines) == {"0": ["x0"], "1": ["x1"]}


@pytest.mark.parametrize("as_document", [True, False])
@pytest.mark.parametrize("first", [0, 1, "a"])
def test_a_log_of_inspect_is_read_however_it_numbers_its_samples(read: Any, as_document: bool, first: Any) -> None:
    parts = [{"type": "reasoning", "reasoning": "r"}, {"type": "text", "text": "y"}]
    samples = [
        inspected(first + number if isinstance(first, int) else f"{first}{number}", row["question"], text)
        for text in ("x", parts)
        for number, row in enumerate(PROBLEMS)
    ]
    log = {"version": 2, "status": "success", "eval": {}, "samples": samples}
    content = json.dumps(log, indent=2 if as_document else None).encode()
    assert read("gsm8k", b"\xef\xbb\xbf" + content) == {str(number): ["x", "y"] for number in range(3)}


def test_a_question_inside_a_longer_input_tells_the_row(read: Any) -> None:
    asked = [{"role": "system", "content": "Help."}, {"role": "user", "content": "Solve: How many are 1? Think."}]
    assert read("gsm8k", json.dumps([inspected(2, asked, "x")], indent=1).encode()) == {"1": ["x"]}


@pytest.mark.parametrize("indent", [1, None])
def test_a_list_of_samples_may_stand_on_one_line(read: Any, indent: int | None) -> None:
    written = json.dumps([{"id": number, "text": "x"} for number in (0, 2)], indent=indent)
    assert read("gsm8k", written.encode()) == {"0": ["x"], "2": ["x"]}


def test_a_name_of_a_filter_may_be_anything(read: Any) -> None:
    lines = [{**logged(0, PROBLEMS[0], text), "filter": [name]} for text, name in (("x", "one"), ("x", "other"))]
    assert read("gsm8k", lines) == {"0": ["x"]}


def test_a_row_that_a_tool_numbers_in_another_way_is_found_by_its_question(read: Any) -> None:
    assert read("gsm8k", [logged(0, PROBLEMS[2], "x")]) == {"2": ["x"]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "p", "generation": "g"}, "line 1: expected the keys id and text, found generation, prompt; lines"),
        (batched("request-1", {"body": chat("x")}), "line 1: no row has the id 'request-1'"),
        ({"id": 1, "output": "x"}, "found id, output"),
        (logged(0, {"question": "What else?"}, "x"), "line 1: the question is not that of the row '0'"),
        (inspected(1, "What else?", "x"), "the question is not that of the row '1'"),
        ({"doc_id": 0, "doc": PROBLEMS[0], "resps": [[[-1.5, False]]]}, "resps must hold a text, found list"),
        ({"task_id": "0", "solution": None}, "solution must be a text, found NoneType"),
        ({"doc_id": None, "resps": [["x"]]}, "doc_id must be a text or an integer, found None"),
        ({"doc_id": 0, "resps": json.loads("[" * 400 + "]" * 400)}, "nested too deeply"),
    ],
)
def test_a_line_that_cannot_be_read_is_refused_in_one_line(read: Any, line: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as refusal:
        read("gsm8k", [line])
    assert "\n" not in str(refusal.value)


def test_a_zip_file_is_refused_with_the_command_that_exports_it(tmp_path: Path) -> None:
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.json", "{}")
    with pytest.raises(DataError, match=r"is a zip file; .* inspect log dump .*log\.eval > LOG\.json"):
        read_outputs(path, BENCHMARKS["gsm8k"], {})


def test_a_document_that_is_too_large_or_cut_off_is_refused(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="not a JSON document"):
        read("gsm8k", b'{\n "samples": [\n')
    monkeypatch.setattr(outputs, "LARGEST_DOCUMENT", 10)
    with pytest.raises(DataError, match="one JSON document of more than"):
        read("gsm8k", b'{\n "samples": [],\n "more": 1\n}')
