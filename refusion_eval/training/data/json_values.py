"""The values of a JSON list or of JSON Lines, plain or gzipped, one after the other: no file is held in memory."""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

CHUNK_BYTES = 1 << 20
_BROKEN_GZIP = (EOFError, zlib.error, gzip.BadGzipFile)


@dataclass(frozen=True)
class Broken:
    """A place that yields no value: why, and whether nothing after it in the file can be read."""

    reason: str
    ends_file: bool = False


def _content(path: Path, file: BinaryIO) -> io.BufferedIOBase:
    content = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
    assert isinstance(content, io.BufferedIOBase)
    return content


def holds_list(path: Path, file: BinaryIO) -> bool:
    """Whether a file is a JSON list: it begins with a bracket, and its name does not say that it is JSON Lines.

    Args:
        path: for the name's ending.
        file: at its beginning, where it is put back.
    """
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return False
    try:
        start = _content(path, file).read(CHUNK_BYTES)
    except _BROKEN_GZIP:
        start = b""  # reading it as lines says what is wrong
    file.seek(0)
    return start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def values(path: Path, file: BinaryIO, *, is_list: bool) -> Iterator[tuple[int, Any]]:
    """Decodes a file, value by value.

    Args:
        path: `.gz` is decompressed.
        file: at its beginning.
        is_list: as `holds_list` says; otherwise each line that is not blank is a value.

    Yields:
        The number of the line, or of the value in the list, from 1; and the value, or `Broken`.
    """
    content, number = _content(path, file), 0
    try:
        for number, value in _list_values(content) if is_list else _line_values(content):
            yield number, value
    except _BROKEN_GZIP as problem:
        yield number + 1, Broken(f"the gzip data are damaged or end early ({problem})", ends_file=True)


def _line_values(content: io.BufferedIOBase) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(content, start=1):  # of bytes: a line feed ends a line, U+2028 and its kin do not
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield number, _line_value(line)


def _line_value(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as problem:
        return Broken(f"not UTF-8 (byte {problem.start + 1}: {problem.reason})")
    except json.JSONDecodeError as problem:
        return Broken(f"not JSON (character {problem.pos + 1}: {problem.msg})")
    except (ValueError, RecursionError) as problem:
        return Broken(f"not readable as JSON ({problem})")


def _list_values(content: io.BufferedIOBase) -> Iterator[tuple[int, Any]]:
    text, number = _LongText(content), 0
    text.peek()
    text.position += 1  # the bracket that `holds_list` saw
    if text.peek() != "]":
        while True:
            number += 1
            text.peek()
            try:
                value, is_utf8 = text.take_value()
            except json.JSONDecodeError as problem:
                yield number, Broken(f"not JSON ({problem.msg})", ends_file=True)
                return
            except (ValueError, RecursionError) as problem:
                yield number, Broken(f"not readable as JSON ({problem})", ends_file=True)
                return
            yield number, value if is_utf8 else Broken("not UTF-8")
            sign = text.peek()
            if sign != ",":
                break
            text.position += 1
        if sign != "]":
            found = repr(sign) if sign else "the end of the file"
            yield number + 1, Broken(f"not JSON (expected a comma or the list's end, found {found})", ends_file=True)
            return
    text.position += 1
    if text.peek():
        yield number + 1, Broken("there is more text after the list's end", ends_file=True)


class _LongText:
    """A window that moves over a long UTF-8 text; bytes that are not UTF-8 are there as lone surrogates.

    Attributes:
        position: of what comes next, within the window.
    """

    # A value that the window's end cuts is reported as wrong no further than this before the end: the longest literal
    # or escape that may be cut. Strings are the exception: they are reported where they begin.
    _LONGEST_CUT = 16

    def __init__(self, content: io.BufferedIOBase) -> None:
        self._content = content
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._json = json.JSONDecoder()
        self._text, self._ended = "", False
        self.position = 0

    def _grow(self) -> None:
        # As much again as is kept, so that a long value is parsed a few times, not once a chunk.
        data = self._content.read(max(CHUNK_BYTES, len(self._text) - self.position))
        self._text = self._text[self.position :] + self._utf8.decode(data, final=not data)
        self.position, self._ended = 0, not data

    def peek(self) -> str:
        """Passes over blanks; the next character, or "" at the end."""
        while True:
            while self.position < len(self._text):
                if self._text[self.position] not in " \t\r\n":
                    return self._text[self.position]
                self.position += 1
            if self._ended:
                return ""
            self._grow()

    def take_value(self) -> tuple[Any, bool]:
        """Passes over a JSON value; the value, and whether its text is UTF-8.

        Raises:
            ValueError: it is not JSON, or beyond what Python reads of it.
        """
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self.position)
            except json.JSONDecodeError as problem:
                is_cut = problem.msg.startswith("Unterminated") or problem.pos > len(self._text) - self._LONGEST_CUT
                if self._ended or not is_cut:
                    raise
            else:
                if end <= len(self._text) - self._LONGEST_CUT or self._ended:  # else a number may go on, as 1 | .5
                    break
            self._grow()
        try:
            self._text[self.position : end].encode()
            is_utf8 = True
        except UnicodeEncodeError:
            is_utf8 = False
        self.position = end
        return value, is_utf8
