"""Streamed rows: layouts, bad rows and their places (`refusion_eval.training.data.rows`)."""

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.errors import DataError
from refusion_eval.training.data.rows import NUM_LISTED, RowReader, RowReport, check_rows

GOOD = {"query": "how many?", "response": "12"}
GOOD_TEXT = json.dumps(GOOD)
TEXTS = st.text(st.characters(codec="utf-8"))
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ROWS = st.lists(
    st.builds(lambda extra, q, r: {**extra, "query": q, "response": r}, st.just({}), TEXTS, TEXTS.filter(bool))
    | st.builds(lambda q, r, meta: {"meta": meta, "query": q, "response": r}, TEXTS, TEXTS.filter(bool), JSON_VALUES),
    max_size=5,
)


def write(path: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def as_list(rows: list[Any], indent: int | None) -> str:
    return json.dumps(rows, indent=indent, ensure_ascii=False)


def as_lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.jsonl", "a.jsonl.gz", "lines.json"])
@given(rows=ROWS, indent=st.none() | st.integers(0, 30), ascii_only=st.booleans())
def test_any_rows_come_back_from_every_layout(
    name: str, rows: list[dict[str, str]], indent: int | None, ascii_only: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if name.startswith("a.json") and "jsonl" not in name:
            text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
        else:
            text = "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows)
        reader = RowReader(write(Path(folder, name), text))
        assert [(row.query, row.response) for row in reader] == [(row["query"], row["response"]) for row in rows]
        assert len(list(reader)) == len(rows)
        assert reader.report == RowReport(num_read=len(rows))


BAD = {
    "[1]": "expected an object, found a list",
    "null": "expected an object, found null",
    "3": "expected an object, found a number",
    '{"response": "a"}': "there is no query; the keys are 'response'",
    '{"query": "a"}': "there is no response; the keys are 'query'",
    "{}": "there is no query; the keys are none",
    '{"query": ["a"], "response": "b"}': "query is a list, not a text",
    '{"query": "a", "response": null}': "response is null, not a text",
    '{"query": "a", "response": true}': "response is a truth value, not a text",
    '{"query": "a", "response": ""}': "the response is empty",
    r'{"query": "a \ud83d", "response": "b"}': "query is not valid Unicode (character 3)",
}


@pytest.mark.parametrize(("text", "reason"), BAD.items())
@pytest.mark.parametrize("layout", ["list", "lines"])
def test_a_bad_row_is_named_with_its_place_or_skipped_and_counted(
    tmp_path: Path, layout: str, text: str, reason: str
) -> None:
    if layout == "list":
        path = write(tmp_path / "a.json", f"[{GOOD_TEXT}, {GOOD_TEXT},\n {text}, {GOOD_TEXT}]")
        place = f"{path}, row 3: {reason}"
    else:
        path = write(tmp_path / "a.jsonl", f"{GOOD_TEXT}\n\n{text}\n{GOOD_TEXT}")
        place = f"{path}, line 3: {reason}"
    with pytest.raises(DataError) as failure:
        list(RowReader(path))
    assert str(failure.value).startswith(place)
    reader = RowReader(path, on_bad="skip")
    num_good = 3 if layout == "list" else 2
    assert len(list(reader)) == num_good
    report = reader.report
    assert (report.num_read, report.num_bad) == (num_good + 1, 1)
    assert [str(bad) for bad in report.bad] == [place]
    assert not report.cut_short


def test_a_query_may_be_empty_and_a_response_blank(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"query": "", "response": " "}))
    assert [(row.query, row.response) for row in RowReader(path)] == [("", " ")]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_bytes_that_are_not_utf8_spoil_one_row_alone(tmp_path: Path, name: str) -> None:
    spoiled = GOOD_TEXT.encode().replace(b"how", b"h\xe4w")
    parts = [GOOD_TEXT.encode(), spoiled, GOOD_TEXT.encode()]
    path = write(tmp_path / name, b"\n".join(parts) if name == "a.jsonl" else b"[" + b",".join(parts) + b"]")
    reader = RowReader(path, on_bad="skip")
    assert len(list(reader)) == 2
    (place,) = reader.report.bad
    assert place.number == 2
    assert place.reason.startswith("query is not valid Unicode")


def test_a_line_that_is_not_json_spoils_itself_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", f'{GOOD_TEXT}\n{{"query": \n{GOOD_TEXT}\n')
    reader = RowReader(path, on_bad="skip")
    assert len(list(reader)) == 2
    (place,) = reader.report.bad
    assert (place.number, place.reason[:9]) == (2, "not JSON ")


@pytest.mark.parametrize(
    "text",
    [
        f"[{GOOD_TEXT}, {GOOD_TEXT[:-3]}",
        f"[{GOOD_TEXT}, {{'query': 1}}, {GOOD_TEXT}]",
        f"[{GOOD_TEXT} {GOOD_TEXT}]",
        f"[{GOOD_TEXT}",
        f"[{GOOD_TEXT},]",
        f"[{GOOD_TEXT}]\n[{GOOD_TEXT}]",
        f"[{GOOD_TEXT}, {'[' * 100_000}]",
        f"[{GOOD_TEXT}, {'9' * 5000}]",
    ],
)
def test_a_list_with_an_error_has_no_rows_and_is_said_to_be_cut_short(tmp_path: Path, text: str) -> None:
    path, next_path = write(tmp_path / "a.json", text), write(tmp_path / "b.json", as_list([GOOD], None))
    reader = RowReader([path, next_path], on_bad="skip")
    assert len(list(reader)) == 1
    assert reader.report.cut_short == reader.report.bad
    (place,) = reader.report.cut_short
    assert (place.path, place.unit, place.number) == (str(path), "row", 1)
    assert place.reason.startswith("not JSON (")
    assert f"not read from there on: {place}" in reader.report.summary()
    with pytest.raises(DataError, match=r"a\.json, row 1: not JSON"):
        list(RowReader(path))


@pytest.mark.parametrize("name", ["a.json.gz", "a.jsonl.gz"])
def test_a_truncated_archive_is_cut_short(tmp_path: Path, name: str) -> None:
    rows = [{"query": str(number), "response": str(number**9)} for number in range(50_000)]
    path = write(tmp_path / name, as_list(rows, None) if name == "a.json.gz" else as_lines(rows))
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 9 // 10])
    reader = RowReader(path, on_bad="skip")
    num_good = len(list(reader))
    assert (0 < num_good < len(rows)) if name == "a.jsonl.gz" else num_good == 0
    (place,) = reader.report.cut_short
    assert place.number == num_good + 1
    assert "gzip data are damaged or end early" in place.reason


def test_a_report_lists_the_first_bad_rows_and_counts_all(tmp_path: Path) -> None:
    reader = RowReader(write(tmp_path / "a.jsonl", "3\n" * (NUM_LISTED + 5) + GOOD_TEXT), on_bad="skip")
    assert len(list(reader)) == 1
    assert [bad.number for bad in reader.report.bad] == list(range(1, NUM_LISTED + 1))
    assert reader.report.summary().splitlines()[0] == f"{NUM_LISTED + 6} rows read: 1 kept, 25 bad, 0 too long"
    assert reader.report.summary().splitlines()[-1] == "and 5 bad rows more"


def test_a_byte_order_mark_and_line_separators_in_texts_are_no_trouble(tmp_path: Path) -> None:
    row = {"query": "a\u2028b\u0085c", "response": "\ufeff12"}
    for name, text in (("a.jsonl", as_lines([row])), ("a.json", as_list([row], 1))):
        path = write(tmp_path / name, b"\xef\xbb\xbf" + text.encode())
        assert [(found.query, found.response) for found in RowReader(path)] == [(row["query"], row["response"])]


def test_folders_and_patterns_stand_for_their_files_sorted_and_once(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.json", "a.jsonl", "sub/c.jsonl.gz", "[d].json"):
        write(tmp_path / name, as_list([GOOD], None) if name.endswith(".json") else as_lines([GOOD]))
    write(tmp_path / "README.md", "no rows")

    def names(*paths: Path | str) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in RowReader(list(paths)).files]

    assert names(tmp_path) == ["[d].json", "a.jsonl", "b.json", "sub/c.jsonl.gz"]
    assert names(tmp_path / "b.json", tmp_path / "*.json*") == ["b.json", "[d].json", "a.jsonl"]
    assert names(f"{tmp_path}/**/*.gz", tmp_path / "[d].json") == ["sub/c.jsonl.gz", "[d].json"]
    assert len(list(RowReader(tmp_path))) == 4


def test_paths_without_files_are_refused(tmp_path: Path) -> None:
    for wrong in (tmp_path, tmp_path / "a.json", f"{tmp_path}/*.jsonl"):
        with pytest.raises(DataError, match="no such file"):
            RowReader(wrong)


@pytest.fixture
def on_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that `load_dataset` reads in place of the hub, and where data sets of it are kept."""
    folder, loaded = tmp_path / "GSAI-ML" / "ReFusion", datasets.load_dataset

    def load(name: str, *, revision: str | None, **options: Any) -> Any:
        assert (name, revision) == ("GSAI-ML/ReFusion", "v1")
        return loaded(str(folder), cache_dir=str(tmp_path / "cache"), **options)

    folder.mkdir(parents=True)
    monkeypatch.setattr(datasets, "load_dataset", load)
    return folder


@pytest.mark.parametrize("name", ["train.json", "train.jsonl"])
def test_a_data_set_of_the_hub_is_read_like_a_file_of_its_rows(on_hub: Path, tmp_path: Path, name: str) -> None:
    rows = [{"query": f"q{n}", "response": f"r{n}\n", "source": "x"} for n in range(30)]
    own = write(on_hub / name, as_list(rows, 1) if name == "train.json" else as_lines(rows))
    check_rows("GSAI-ML/ReFusion@v1")
    reader = RowReader(["GSAI-ML/ReFusion@v1"])
    assert list(reader) == list(RowReader(own))
    assert [path.suffix for path in reader.files] == [".arrow"]
    assert reader.report.num_read == 30


def test_a_bad_row_of_a_data_set_is_named(on_hub: Path) -> None:
    write(on_hub / "train.jsonl", as_lines([{"query": "a", "response": "b"}, {"query": "c", "response": ""}]))
    check_rows("GSAI-ML/ReFusion@v1")
    with pytest.raises(DataError, match=r"\.arrow, row 2: the response is empty"):
        list(RowReader("GSAI-ML/ReFusion@v1"))
    write(on_hub / "train.jsonl", as_lines([{"prompt": "a", "response": "b"}]))
    with pytest.raises(DataError, match=r"GSAI-ML/ReFusion@v1, row 1: there is no query"):
        check_rows("GSAI-ML/ReFusion@v1")


def test_a_data_set_that_cannot_be_reached_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    for act in (check_rows, RowReader):
        with pytest.raises(DataError, match=r"some/where: there is no such file or folder here.*reach the Hub"):
            act("some/where")
    with pytest.raises(DataError, match=r"rows\.jsonl: no such file"):  # a path, not a data set
        RowReader("data/rows.jsonl")


def test_files_without_a_row_or_with_a_bad_first_one_are_refused_at_once(tmp_path: Path) -> None:
    good, empty, broken = (tmp_path / name for name in ("good.jsonl", "empty.jsonl", "broken.json"))
    good.write_text('{"query": "a", "response": "b"}\nnonsense\n')
    empty.write_text("")
    broken.write_text("[{")
    check_rows(good)  # reads no further than it must
    with pytest.raises(DataError, match=r"empty\.jsonl holds no row"):
        check_rows([good, empty])
    with pytest.raises(DataError, match=r"broken\.json"):
        check_rows(broken)
    with pytest.raises(DataError, match=r"broken\.json holds no row"):
        check_rows(broken, on_bad="skip")
