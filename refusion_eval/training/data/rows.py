"""Rows of fine-tuning data from JSON Lines and JSON lists, plain or gzipped, and from data sets of the hub.

A row is an object with the texts `query` and `response`; other keys are ignored. A query may be empty, as the chat
template is a prompt too. A response must not be empty; white space is a valid response.
"""

import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from refusion_eval.errors import DataError
from refusion_eval.training.data.hub import arrow_rows, download, first_row, is_hub_id

OnBad = Literal["fail", "skip"]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

ENDINGS = (".json", ".jsonl", ".json.gz", ".jsonl.gz")  # only such files of a folder or pattern are read
NUM_LISTED = 20  # bad rows that a report lists; the others are counted
_START_CHARACTERS = 4096  # of a file, among which a list has its bracket
_KINDS = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", int: "a number", float: "a number"}


class Row(NamedTuple):
    """One valid row: the text of the user, and the text that the model is to learn, which is never empty."""

    query: str
    response: str


class Broken(NamedTuple):
    """Why a place of a file holds no row, and whether nothing after it can be read either."""

    reason: str
    ends_file: bool = False


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
    """Counts of rows, updated while the rows are read.

    Attributes:
        cut_short: all positions after which the rest of a file is unreadable, with an unknown number of rows.
    """

    num_read: int = 0
    num_bad: int = 0
    num_too_long: int = 0
    bad: list[BadRow] = field(default_factory=list)
    cut_short: list[BadRow] = field(default_factory=list)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RowReport":
        """The inverse of `dataclasses.asdict`."""
        places = {name: [BadRow(**place) for place in values[name]] for name in ("bad", "cut_short")}
        return cls(**{**values, **places})

    def summary(self) -> str:
        """Text of several lines: the counts, then the listed malformed rows."""
        num_kept = self.num_read - self.num_bad - self.num_too_long
        lines = [
            f"{self.num_read} rows read: {num_kept} kept, {self.num_bad} bad, {self.num_too_long} too long",
            *(f"bad: {place}" for place in self.bad),
        ]
        if self.num_bad > len(self.bad):
            lines.append(f"and {self.num_bad - len(self.bad)} bad rows more")
        return "\n".join(lines + [f"not read from there on: {place}" for place in self.cut_short])

    def refuse_bad(self) -> None:
        """Raises DataError if a row is malformed; the message names the first such row."""
        if self.bad:
            raise DataError(
                f'{self.bad[0]}; expected {{"query": text, "response": text}} objects in a JSON list or one a line: '
                'mend the file, or leave bad rows out with on_bad="skip"'
            )


class RowReader:
    """The rows of one or many files; each iteration starts with the first row of the first file.

    JSON Lines are streamed. A JSON list is read as a whole, so that it needs several times its size in memory.

    Args:
        paths: one path or a list: files, folders (all files that end in `ENDINGS`, at any depth) and patterns such as
            `data/**/*.jsonl`, and data sets of the hub (`hub`). The files of a folder or pattern are sorted by name; a
            file that is named twice is read once. `.jsonl` is JSON Lines, `.arrow` a data set; other files are a list
            if they begin with a bracket, else JSON Lines.
        on_bad: "fail" stops at the first malformed row; "skip" leaves malformed rows out and counts them. A row is
            malformed if it is not JSON, is not an object, lacks a key, has a value that is not a text or not valid
            Unicode, or has an empty response. A list with a syntax error has no rows, and after damaged gzip data the
            rest of the file cannot be read.

    Raises:
        DataError: a path has no file; while iterating: a file cannot be opened, or a row is bad under "fail".
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
                broken = value if isinstance(value, Broken) else _defect(value)
                if broken is None:
                    yield Row(value["query"], value["response"])
                    continue
                place = BadRow(str(path), unit, number, broken.reason)
                report.num_bad += 1
                if len(report.bad) < NUM_LISTED:
                    report.bad.append(place)
                if broken.ends_file:
                    report.cut_short.append(place)
                if self._on_bad == "fail":
                    report.refuse_bad()


def check_rows(paths: Paths, *, on_bad: OnBad = "fail") -> None:
    """Checks the first row of each file and data set, without downloading whole data sets; see `RowReader`.

    Raises:
        DataError: a path has no file, a file has no valid row, or its first row is malformed under "fail".
    """
    entries = [paths] if isinstance(paths, str | os.PathLike) else paths
    hub_ids = [str(entry) for entry in entries if _is_on_hub(entry)]
    for name in hub_ids:
        broken = _defect(first_row(name))
        if broken is not None:
            raise DataError(f"{name}, row 1: {broken.reason}; expected rows of {{query, response}}")
    for path in _find_files([entry for entry in entries if str(entry) not in hub_ids]):
        if next(iter(RowReader(path, on_bad=on_bad)), None) is None:
            raise DataError(f"{path} holds no row of {{query, response}}; correct the file, or leave it out")


def _values(path: Path) -> Iterator[tuple[str, int, Any]]:
    """The values of a file: unit of their numbers ("line" or "row"), number, and value or `Broken`."""
    if path.suffix == ".arrow":
        yield from (("row", number, value) for number, value in arrow_rows(path))
        return
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        # Bytes that are not UTF-8 become lone surrogates, which `_defect` finds: they spoil their row alone. Only a
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
                values = whole if isinstance(whole, list) else [whole._replace(ends_file=True)]
                yield from ((unit, number, value) for number, value in enumerate(values, start=1))
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield unit, number, _parsed(line)
        except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
            yield unit, number + 1, Broken(f"the gzip data are damaged or end early ({problem})", ends_file=True)


def _parsed(text: str) -> Any:
    """The value of a text, or why it has none: a syntax error, a number that is too long, or nesting too deep."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        return Broken(f"not JSON ({problem})")


def _is_on_hub(entry: str | os.PathLike[str]) -> bool:
    """Whether an entry has the form of a data set of the hub, and there is no such path here."""
    return is_hub_id(str(entry)) and not Path(entry).exists()


def _find_files(paths: Paths) -> list[Path]:
    unique: dict[Path, Path] = {}
    for entry in [paths] if isinstance(paths, str | os.PathLike) else paths:
        path = Path(entry).expanduser()
        if path.is_file():  # tested before patterns, as names may contain brackets
            files = [path]
        elif _is_on_hub(entry):
            files = download(str(entry))
        else:
            pattern = f"{glob.escape(str(path))}/**/*" if path.is_dir() else str(path)
            names = sorted(glob.glob(pattern, recursive=True))
            files = [Path(name) for name in names if name.endswith(ENDINGS) and os.path.isfile(name)]
        if not files:
            raise DataError(
                f"{entry}: no such file, and no {', '.join(ENDINGS)} in such a folder or pattern; correct the path"
            )
        for file in files:
            unique.setdefault(file.resolve(), file)
    return list(unique.values())


def _defect(value: Any) -> Broken | None:
    """The reason why a JSON value is not a row; None for a row."""
    if not isinstance(value, dict):
        return Broken(f"expected an object, found {_KINDS.get(type(value), 'null')}")
    for name in ("query", "response"):
        if name not in value:
            return Broken(f"there is no {name}; the keys are {', '.join(map(repr, value)) or 'none'}")
        if not isinstance(value[name], str):
            return Broken(f"{name} is {_KINDS.get(type(value[name]), 'null')}, not a text")
        try:
            value[name].encode()
        except UnicodeEncodeError as problem:
            return Broken(f"{name} is not valid Unicode (character {problem.start + 1})")
    return None if value["response"] else Broken("the response is empty")
