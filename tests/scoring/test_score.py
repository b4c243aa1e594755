"""`score`: from a file of texts to printed numbers and a CSV."""

import contextlib
import csv
import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from refusion_eval.cli.texts import score
from refusion_eval.errors import ConfigError, DataError, StoreError
from refusion_eval.scoring import score as scoring
from refusion_eval.scoring.score import COLUMNS


@pytest.fixture(autouse=True)
def stands_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of gold answers are written where the user stands."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Four word problems with the answers 0, 1, 2, 3."""
    folder = tmp_path / "data" / "gsm8k"
    folder.mkdir(parents=True)
    rows = [{"question": f"q{number}", "answer": f"so it is\n#### {number}"} for number in range(4)]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "data"


def outputs(tmp_path: Path, lines: list[Any]) -> str:
    path = tmp_path / "outputs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def says(number: int) -> str:
    return f"The answer is {number}."


def run(data: Path | None, path: str, task: str = "gsm8k", **more: Any) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        score(task, path, data=data, **more)
    return printed.getvalue()


def test_the_score_its_interval_and_the_counts_are_printed(data: Path, tmp_path: Path) -> None:
    lines = [
        {"id": 0, "text": says(0)},
        {"id": "1", "text": says(9)},
        {"id": 2, "text": "?"},
        {"id": 3, "text": says(3)},
    ]
    printed = run(data, outputs(tmp_path, lines))
    assert re.match(r"gsm8k \(filter last\): acc 50\.00% \(95% interval 15\.00 to 85\.00\) over 4 of 4 rows\n", printed)
    assert "nothing extracted from 1 of 4 texts (25.0%)" in printed


def test_gold_scores_everything_right(data: Path) -> None:
    assert "acc 100.00%" in run(data, "gold")


def test_rows_without_a_text_count_as_wrong_and_are_reported(data: Path, tmp_path: Path) -> None:
    printed = run(data, outputs(tmp_path, [{"id": 0, "text": says(0)}]))
    assert "acc 25.00%" in printed
    assert "over 4 of 4 rows" in printed
    assert "3 rows have no text: counted as wrong" in printed


def test_partial_scoring_leaves_them_out_and_says_so(data: Path, tmp_path: Path) -> None:
    lines = [{"id": 0, "text": says(0)}, {"id": 1, "text": says(1)}]
    printed = run(data, outputs(tmp_path, lines), allow_partial=True)
    assert "acc 100.00%" in printed
    assert "over 2 of 4 rows" in printed
    assert "2 rows have no text: left out" in printed
    assert "missing" not in (tmp_path / "outputs.scores.csv").read_text()
    run(data, outputs(tmp_path, lines))
    assert (tmp_path / "outputs.scores.csv").read_text().count(",missing,") == 2


def test_several_texts_an_id_give_pass_at_k_and_a_majority_vote(data: Path, tmp_path: Path) -> None:
    lines = [{"id": row, "text": says(answer)} for row in range(4) for answer in (row, row, 9)]
    printed = run(data, outputs(tmp_path, lines))
    assert "acc 66.67%" in printed
    assert [line.split(" (")[0] for line in printed.splitlines() if "pass@" in line] == [
        "  pass@2 100.00%",
        "  pass@3 100.00%",
    ]
    assert "majority vote 100.00%" in printed


def test_the_csv_has_one_line_a_text(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    run(data, outputs(tmp_path, [{"id": 0, "text": says(0)}, {"id": 0, "text": says(5)}]), csv=path)
    with path.open(newline="") as file:
        lines = list(csv.reader(file))
    assert tuple(lines[0]) == COLUMNS
    assert lines[1] == ["0", "0", "0", "correct", "1", "statement; expected 0", ""]
    assert lines[2][:5] == ["0", "1", "5", "wrong", "0"]
    assert [line[3] for line in lines[3:]] == ["missing"] * 3


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.jsonl.gz", "mine"])
def test_without_a_path_the_csv_lies_beside_the_outputs(data: Path, tmp_path: Path, name: str) -> None:
    line = json.dumps({"id": 0, "text": says(0)}).encode()
    path = tmp_path / "texts" / name
    path.parent.mkdir()
    path.write_bytes(gzip.compress(line) if name.endswith(".gz") else line)
    printed = run(data, str(path))
    assert (tmp_path / "texts" / "mine.scores.csv").read_text().startswith("id,sample,")
    assert f"one line a text: {tmp_path}/texts/mine.scores.csv" in printed


def test_the_csv_of_gold_answers_lies_in_the_current_folder(data: Path, tmp_path: Path) -> None:
    printed = run(data, "gold")
    assert (tmp_path / "gsm8k.gold.csv").is_file()
    assert "one line a text: gsm8k.gold.csv" in printed


def test_the_folder_of_the_csv_is_created(data: Path, tmp_path: Path) -> None:
    run(data, "gold", csv=tmp_path / "new" / "folder" / "scores.csv")
    assert (tmp_path / "new" / "folder" / "scores.csv").is_file()


def test_a_csv_that_cannot_be_written_is_refused_before_scoring(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "score_texts", lambda *_args, **_more: pytest.fail("scored"))
    (tmp_path / "file").touch()
    refused = {tmp_path / "file" / "scores.csv": "(File exists|Not a directory)", tmp_path: "it is a folder"}
    for path, why in refused.items():
        with pytest.raises(StoreError, match=rf"cannot be written \({why}\); name another file"):
            run(data, "gold", csv=path)


def test_compressed_outputs_and_a_byte_order_mark_are_read(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "outputs.jsonl.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + json.dumps({"id": 0, "text": says(0)}).encode()))
    assert "acc 25.00%" in run(data, str(path))


def test_lone_surrogates_are_scored_and_written(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "outputs.jsonl"
    path.write_text('{"id": 0, "text": "\\ud800 The answer is 0."}\n')
    assert "acc 25.00%" in run(data, str(path), csv=tmp_path / "scores.csv")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"not json\n", r"outputs.jsonl, line 1: not a JSON value"),
        (b'{"id": 0, "text": "x"}\n{"id": 0, "te', "line 2: not a JSON value"),
        (b'[0, "x"]\n', "line 1, sample 1: expected an object"),
        (b'{"text": "x"}\n', "line 1: expected the keys id and text, found text"),
        (b'{"id": 0, "output": "x"}\n', "found id, output"),
        (b'{"id": 0, "text": "x", "more": 1}\n', "found id, more, text"),
        (b'{"id": 0, "id": 1, "text": "x"}\n', "key 'id' occurs twice"),
        (b'{"id": 77, "text": "x"}\n', "line 1: no row has the id 77"),
        (b'{"id": null, "text": "x"}\n', "id must be a text or an integer, found None"),
        (b'{"id": true, "text": "x"}\n', "found True"),
        (b'{"id": 0, "text": null}\n', "text must be a text, found NoneType"),
        (b'{"id": 0, "text": ["x"]}\n', "found list"),
        (b'{"id": 0, "text": "\xe9"}\n', "line 1: not UTF-8"),
        ('{"id": 0, "text": "x"}\n'.encode("utf-16"), "not UTF-8"),
        (b"[" * 100_000, "not a JSON value"),
    ],
)
def test_bad_outputs_are_refused_with_file_and_line(data: Path, tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "outputs.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        run(data, str(path))


def test_outputs_that_do_not_exist_are_refused(data: Path) -> None:
    with pytest.raises(DataError, match=r"/nowhere\.jsonl is not a file"):
        run(data, "/nowhere.jsonl")


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^unknown task 'gsm9k'; did you mean gsm8k\?"):
        score("gsm9k", "gold")


def test_programs_that_ran_without_isolation_are_told(tmp_path: Path) -> None:
    rows = tmp_path / "mbpp"
    rows.mkdir()
    row = {"task_id": 7, "text": "t", "code": "def f():\n    return 1", "test_setup_code": ""}
    (rows / "test.jsonl").write_text(json.dumps(row | {"test_list": ["assert f() == 1"]}))
    printed = run(tmp_path, "gold", "mbpp", sandbox="none", workers=1)
    assert "\n  1 programs ran without isolation, so their verdicts can be forged\n" in printed
    with (tmp_path / "mbpp.gold.csv").open(newline="") as file:
        assert [line["tier"] for line in csv.DictReader(file)] == ["none"]


def test_a_mini_task_says_so() -> None:
    assert run(None, "gold", "mini_gsm8k").startswith("mini gsm8k (filter last)")


@pytest.fixture
def of_math(tmp_path: Path) -> tuple[Path, str]:
    """Two problems, and one text that is right by a formula in it but states no answer."""
    folder = tmp_path / "data" / "math"
    folder.mkdir(parents=True)
    rows = [{"problem": "p", "level": "1", "type": "t", "solution": f"It is $\\boxed{{{n}}}$."} for n in (2, 3)]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "data", outputs(tmp_path, [{"id": 0, "text": "Noise $1$ noise $2$ noise."}])


def test_both_rules_of_math_and_a_warning_stand_in_the_summary(of_math: tuple[Path, str]) -> None:
    printed = run(*of_math, "refusion_math_release").splitlines()
    assert printed[0].startswith("math (filter math_verify): acc 50.00%")
    assert re.match(r"  0\.00% \(95% .*\) if the last box or stated answer counts \(this project's rule\)", printed[1])
    assert printed[2] == (
        "  warning: 1 of 1 texts have neither a box nor a stated answer; 1 of them count as right by another formula"
    )
    assert not re.search("warning|stated", run(*of_math, "math"))  # the rule of this project reads nothing else


def test_a_program_reads_what_a_score_rests_on(of_math: tuple[Path, str]) -> None:
    read = json.loads(run(*of_math, "refusion_math_release", as_json=True))
    assert (read["value"], read["unit"], read["n"]) == (50, "%", 2)
    assert (read["num_rows"], read["num_texts"], read["num_missing"]) == (2, 1, 1)
    assert (read["stated"]["value"], read["num_unstated"], read["num_right_unstated"]) == (0, 1, 1)
    assert json.loads(run(*of_math, "math", as_json=True))["stated"] is None
