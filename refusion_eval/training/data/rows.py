"""Rows of fine-tuning data from JSON Lines and JSON lists, plain or gzipped, and from data sets of the hub.

A row is an object with the texts `query` and `response`; other keys are ignored. A query may be empty, as the chat
template is a prompt too. A response must not be empty; white space is a valid response.
"""

import glob
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import MinLen
from pydantic import TypeAdapter, ValidationError

from refusion_eval.errors import DataError

OnBad = Literal["fail", "skip"]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

ENDINGS = (".json", ".jsonl", ".json.gz", ".jsonl.gz")  # only such files of a folder or pattern are read
NUM_LISTED = 20  # bad rows that a report lists; the others are counted
SPLIT = "train"  # of a data set of the hub
_START_CHARACTERS = 4096  # of a file, among which a list has its bracket
_HUB_ID = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")  # owner/name, or owner/name@revision


@dataclass(frozen=True, slots=True)
class Row:
    query: str
    response: Annotated[str, MinLen(1)]


_ROW = TypeAdapter(Row)


class BrokenRow(NamedTuple):
    reason: str
    ends_file: bool = False  # whether nothing after it can be read either


@dataclass(frozen=True)
class BadRow:
    """The defect of a malformed row, and its place: the 1-based "line" of JSON Lines, or "row" of a JSON list."""

    path: str
    unit: str
    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, {self.unit} {self.number}: {self.reason}"


@dataclass
class RowReport:
    """Counts of rows, updated while the rows are read."""

    num_read: int = 0
    num_bad: int = 0
    num_too_long: int = 0
    bad: list[BadRow] = field(default_factory=list)
    cut_short: list[BadRow] = field(default_factory=list)  # places after which a file has an unknown number of rows

    def summary(self) -> str:
        num_kept, num_more = self.num_read - self.num_bad - self.num_too_long, self.num_bad - len(self.bad)
        lines = [f"{self.num_read} rows read: {num_kept} kept, {self.num_bad} bad, {self.num_too_long} too long"]
        lines += [f"bad: {place}" for place in self.bad]
        lines += [f"and {num_more} bad rows more"] if num_more else []
        return "\n".join(lines + [f"not read from there on: {place}" for place in self.cut_short])

    def refuse_bad(self) -> None:
        if self.bad:
            raise DataError(
                f'{self.bad[0]}; expected objects {{"query": text, "response": text}} in a JSON list or one a line; '
                'on_bad="skip" leaves bad rows out'
            )


class RowReader:
    """The rows of files, folders (at any depth), patterns such as `data/**/*.jsonl`, and data sets of the hub.

    The files of a folder or pattern are sorted by name; a file that is named twice is read once. JSON Lines are
    streamed; a JSON list needs several times its size in memory.
    """

    def __init__(self, paths: Paths, *, on_bad: OnBad = "fail") -> None:
        self._on_bad = on_bad
        self.files = _find_files(paths)
        self.report = RowReport()

    def __iter__(self) -> Iterator[Row]:
        self.report = report = RowReport()
        for path in self.files:
            for unit, number, value in _values(path):
                report.num_read += 1
                row = value if isinstance(value, BrokenRow) else _row(value)
                if isinstance(row, Row):
                    yield row
                    continue
                place = BadRow(str(path), unit, number, row.reason)
                report.num_bad += 1
                if len(report.bad) < NUM_LISTED:
                    report.bad.append(place)
                if row.ends_file:
                    report.cut_short.append(place)
                if self._on_bad == "fail":
                    report.refuse_bad()


def check_rows(paths: Paths, *, on_bad: OnBad = "fail") -> None:
    """Checks the first row of each file and data set, without downloading whole data sets; raises DataError."""
    first_rows(paths, 1, on_bad=on_bad)


def first_rows(paths: Paths, count: int, *, on_bad: OnBad = "fail") -> list[Row]:
    """The first `count` rows of each file and data set, fewer where it has fewer; as `check_rows`, which it serves."""
    found: list[Row] = []
    for entry in _listed(paths):
        if _is_on_hub(entry):
            rows = list(map(_row, islice(_load(entry, streaming=True), count))) or [_row(None)]
            if isinstance(rows[0], BrokenRow):
                raise DataError(f"{entry}, row 1: {rows[0].reason}; expected rows of {{query, response}}")
            found += [row for row in rows if isinstance(row, Row)]
            continue
        for path in _find_files(entry):
            if not (of_file := list(islice(RowReader(path, on_bad=on_bad), count))):
                raise DataError(f"{path} holds no row of {{query, response}}; correct the file, or leave it out")
            found += of_file
    return found


def _listed(paths: Paths) -> list[str]:
    return [str(entry) for entry in ([paths] if isinstance(paths, str | os.PathLike) else paths)]


def _row(value: Any) -> Row | BrokenRow:
    try:
        row = _ROW.validate_python(value)
        (row.query + row.response).encode()
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False)[0]
        return BrokenRow(": ".join([*map(str, first["loc"]), first["msg"]]))
    except UnicodeEncodeError as problem:
        return BrokenRow(f"a text is not valid Unicode (character {problem.start + 1})")
    return row


def _values(path: Path) -> Iterator[tuple[str, int, Any]]:
    """The values of a file: unit of their numbers ("line" or "row"), number, and value or `BrokenRow`."""
    if path.suffix == ".arrow":
        yield from (("row", number, value) for number, value in enumerate(_arrow_rows(path), start=1))
        return
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        # Bytes that are not UTF-8 become lone surrogates, which `_row` refuses: they spoil their row alone. Only a
        # line feed ends a line, not a separator such as U+2028 inside a text.
        file = opened(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="\n")
    except OSError as problem:
        raise DataError(f"{path} cannot be opened ({problem.strerror}); make it readable or leave it out") from problem
    unit, number = "line", 0
    with file:
        try:
            if ".jsonl" not in path.suffixes[-2:] and file.read(_START_CHARACTERS).lstrip().startswith("["):
                unit = "row"
            file.seek(0)
            if unit == "row":
                whole = _parsed(file.read())
                values = [whole._replace(ends_file=True)] if isinstance(whole, BrokenRow) else whole
                yield from ((unit, number, value) for number, value in enumerate(values, start=1))
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield unit, number, _parsed(line)
        except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
            yield unit, number + 1, BrokenRow(f"the gzip data are damaged or end early ({problem})", ends_file=True)


def _parsed(text: str) -> Any:
    """The value of a text, or why it has none: a syntax error, a number that is too long, or nesting too deep."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        return BrokenRow(f"not JSON ({problem})")


def _find_files(paths: Paths) -> list[Path]:
    unique: dict[Path, Path] = {}
    for entry in _listed(paths):
        path = Path(entry).expanduser()
        if path.is_file():  # tested before patterns, as names may contain brackets
            files = [path]
        elif _is_on_hub(entry):  # `datasets` downloads a data set once and keeps it as Arrow files
            files = [Path(file["filename"]) for file in _load(entry).cache_files]
        else:
            pattern = f"{glob.escape(str(path))}/**/*" if path.is_dir() else str(path)
            names = sorted(glob.glob(pattern, recursive=True))
            files = [Path(name) for name in names if name.endswith(ENDINGS) and os.path.isfile(name)]
        if not files:
            raise DataError(f"{entry}: no such file, and no {', '.join(ENDINGS)} in such a folder or pattern")
        for file in files:
            unique.setdefault(file.resolve(), file)
    return list(unique.values())


def is_hub_id(entry: str) -> bool:
    """Whether a text has the form of a hub id and not that of a file of rows."""
    return _HUB_ID.fullmatch(entry) is not None and not entry.endswith((".json", ".jsonl", ".gz"))


def _is_on_hub(entry: str) -> bool:
    return is_hub_id(entry) and not Path(entry).exists()


def _arrow_rows(path: Path) -> Iterator[Any]:
    import datasets
    import pyarrow

    try:
        yield from datasets.Dataset.from_file(str(path))
    except (pyarrow.ArrowException, OSError) as problem:
        raise DataError(f"{path} is not an Arrow data set ({problem}); remove it and start again") from problem


def _load(entry: str, **options: Any) -> Any:
    import datasets

    match = _HUB_ID.fullmatch(entry)
    assert match is not None
    try:
        return datasets.load_dataset(match[1], revision=match[2], split=SPLIT, **options)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as problem:  # OSError: the hub is out of reach
        raise DataError(
            f"{entry}: there is no such file or folder here, and no such data set of the hub with a split {SPLIT!r} "
            f"could be read ({problem}); correct the path, or log in if the data set is gated"
        ) from problem
