"""Reads texts that other tools wrote: finds the column of the texts, and the row that each line is about."""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from refusion_eval.benchmarks import Benchmark, Row
from refusion_eval.benchmarks.rows import BYTE_ORDER_MARK, byte_lines, json_lines
from refusion_eval.errors import DataError

# Bytes of a file that is one JSON document.
LARGEST_DOCUMENT = 256 * 2**20
_DEEPEST = 8  # levels of lists and objects around a text
_TEXTS = ("text", "output_text")  # types of parts that are text of the response
_ZIP = b"PK\x03\x04"


class _Form(NamedTuple):
    tool: str
    id: str
    texts: str
    is_text: bool = False  # else a list of texts, or an object with the choices of a chat
    asked: str = ""  # holds the question, by which the row is checked
    is_whole: bool = False  # whether a line has no other column

    def fits(self, line: Mapping[str, Any]) -> bool:
        if not {self.id, self.texts} <= set(line) or (self.is_whole and len(line) > 2):
            return False
        return self.is_text or not isinstance(line[self.texts], str)  # else a text is that of some other tool


# The first form whose columns a line has counts.
_FORMS = (
    _Form("this project", "id", "text", is_text=True, is_whole=True),
    _Form("OpenAI", "custom_id", "response"),
    _Form("lm-eval", "doc_id", "resps", asked="doc"),
    _Form("EvalPlus", "task_id", "solution", is_text=True),
    _Form("EvalPlus", "task_id", "completion", is_text=True),
    _Form("inspect_ai", "id", "output", asked="input"),
    _Form("OpenAI", "id", "choices"),
)
_TOOLS = ", ".join(dict.fromkeys(form.tool for form in _FORMS if not form.is_whole))


def read_outputs(path: Path, benchmark: Benchmark, rows: Mapping[str, Row]) -> dict[str, list[str]]:
    """Reads the texts of items in one of the known forms; a DataError names file and line of what is wrong."""
    items = _Items(benchmark, rows)
    texts: dict[str, list[str]] = {}
    filters: list[object] = []
    for where, line in _lines(path):
        if not isinstance(line, dict):
            raise DataError(f'{where}: expected an object {{"id": ..., "text": ...}}, found {type(line).__name__}')
        form = next((form for form in _FORMS if form.fits(line)), None)
        if form is None:
            raise DataError(
                f"{where}: expected the keys id and text, found {', '.join(sorted(line)) or 'none'}; lines that "
                f"{_TOOLS} write are read too"
            )
        # lm-eval writes the same texts once for each filter of a task.
        filters = filters or [line.get("filter")]
        if line.get("filter") not in filters:
            continue
        item = items.find(form.id, line[form.id], line.get(form.asked), where)
        of_line = _texts_of(line[form.texts]) if not form.is_text or isinstance(line[form.texts], str) else None
        if of_line is None:
            must = "be" if form.is_text else "hold"
            raise DataError(f"{where}: {form.texts} must {must} a text, found {type(line[form.texts]).__name__}")
        texts.setdefault(item, []).extend(of_line)
    if not filters:
        raise DataError(f'{path} is empty; expected lines {{"id": ..., "text": ...}}')
    return texts


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (place, value) for each line, or for each sample of a document: of a log of inspect_ai, or of a list."""
    values: Iterable[tuple[str, Any]]
    lines = byte_lines(path)
    first = next((line for line in lines if line.strip()), b"").removeprefix(BYTE_ORDER_MARK)
    if first.startswith(_ZIP):
        raise DataError(f"{path} is a zip file; write a log of inspect_ai as JSON: inspect log dump {path} > LOG.json")
    if first.strip() in (b"{", b"["):
        values = [(str(path), _document(path, chain([first], lines)))]
    else:
        values = ((f"{path}, line {number}", value) for number, value in json_lines(path))
    for where, value in values:
        samples = value.get("samples") if isinstance(value, dict) else value
        if isinstance(samples, list):
            yield from ((f"{where}, sample {number}", sample) for number, sample in enumerate(samples, start=1))
        else:
            yield where, value


def _document(path: Path, lines: Iterable[bytes]) -> Any:
    read = bytearray()
    for line in lines:
        read += line
        if len(read) > LARGEST_DOCUMENT:
            size = f"{LARGEST_DOCUMENT // 2**20} MiB"
            raise DataError(f"{path} is one JSON document of more than {size}; write one object a line")
    try:
        return json.loads(read.decode("utf-8"))
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{path}: not a JSON document ({problem}); write one JSON object a line") from problem


def _texts_of(value: object, depth: int = 0) -> list[str] | None:
    """The texts in a column: a text, lists of them, or the choices of a chat; None if there is something else."""
    inside = partial(_texts_of, depth=depth + 1)
    if depth > _DEEPEST:
        return None
    match value:
        case str():
            return [value]
        case {"choices": []} | {"output": []}:  # of a sample that failed
            return []
        case {"choices": [_, *_] as choices}:
            return inside(choices)
        case {"output": [_, *_] as parts}:  # of /v1/responses, whose messages are one text
            messages = [part for part in parts if isinstance(part, dict) and part.get("type") == "message"]
            texts = inside(messages) if messages else []
            return texts and ["".join(texts)]
        case {"body": inner} | {"message": inner} | {"text": inner} | {"completion": inner}:
            return inside(inner)
        case {"content": list(parts)}:  # of these only text is part of the response
            of_text = (part.get("text") for part in parts if isinstance(part, dict) and part.get("type") in _TEXTS)
            return ["".join(text for text in of_text if isinstance(text, str))]
        case {"content": content}:
            return inside(content or "")  # none where the model refused
        case [_, *_]:
            of_parts = [inside(part) for part in value]
            return None if None in of_parts else [text for texts in of_parts for text in texts or ()]
        case None | {"error": _}:  # of a request that failed
            return []
    return None


class _Items:
    def __init__(self, benchmark: Benchmark, rows: Mapping[str, Row]) -> None:
        self._id_column = benchmark.id_column
        self._rows = rows
        columns = [column for column in benchmark.source.columns if column != benchmark.id_column]
        first = next(iter(rows.values()), {})
        self._column = next((column for column in columns if column in first), "question")
        self._by_question: dict[str, list[str]] = {}
        for item, row in rows.items():
            self._by_question.setdefault(_plain(row.get(self._column)), []).append(item)

    def find(self, column: str, written: object, source: object, where: str) -> str:
        """The id of the row that a line means by its own id, and by the row or question (`source`) that it may hold."""
        if isinstance(written, bool) or not isinstance(written, str | int):
            raise DataError(f"{where}: {column} must be a text or an integer, found {written!r}")
        # Before a slash stands the benchmark's name. A question tells whether numbers begin with 0, and finds the row
        # where a tool counts in another way.
        asked, named = _plain(source), [str(written), str(written).rpartition("/")[2]]
        if isinstance(source, Mapping):
            asked = _plain(source.get(self._column))
            named = [str(source[self._id_column]), *named] if self._id_column in source else named
        if asked and self._id_column is None and str(written).isdecimal():
            named.append(str(int(written) - 1))  # numbers from 1
        rows = [item for item in named if item in self._rows]
        same = [item for item in rows if not asked or _plain(self._rows[item].get(self._column)) in asked]
        alike = self._by_question.get(asked, [])
        if same or (asked and len(alike) == 1):
            return (same or alike)[0]
        if rows:
            raise DataError(f"{where}: the question is not that of the row {rows[0]!r}; name the rows that were asked")
        raise DataError(
            f"{where}: no row has the id {written!r}; an id is the row's own id column, else its row number from 0"
        )


def _plain(question: object) -> str:
    if isinstance(question, list):
        question = " ".join(text for message in question for text in _texts_of(message) or ())
    return " ".join(question.split()) if isinstance(question, str) else ""
