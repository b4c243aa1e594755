"""Streams the values of a JSON list or of JSON Lines, plain or gzipped, without a whole file in memory."""

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
    """A position without a readable value, and whether nothing after it can be read either."""

    reason: str
    ends_file: bool = False


def _content(path: Path, file: BinaryIO) -> io.BufferedIOBase:
    content = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
    assert isinstance(content, io.BufferedIOBase)
    return content


def holds_list(path: Path, file: BinaryIO) -> bool:
    """Whether a file is a JSON list: it begins with a bracket, and its name is not that of JSON Lines."""
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return False
    try:
        start = _content(path, file).read(CHUNK_BYTES)
    except _BROKEN_GZIP:
        start = b""  # reading the file as lines reports what is wrong
    file.seek(0)
    return start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def values(path: Path, file: BinaryIO, *, is_list: bool) -> Iterator[tuple[int, Any]]:
    """Decodes a file, value by value.

    Args:
        is_list: result of `holds_list`; if it is False, each line that is not blank is a value.

    Yields:
        The 1-based number of the line or of the value in the list, and the value or `Broken`.
    """
    content, number = _content(path, file), 0
    try:
        for number, value in _list_values(content) if is_list else _line_values(content):
            yield number, value
    except _BROKEN_GZIP as problem:
        yield number + 1, Broken(f"the gzip data are damaged or end early ({problem})", ends_file=True)


def _line_values(content: io.BufferedIOBase) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(content, start=1):  # in bytes only a line feed ends a line, not U+2028
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
    text, number = _TextWindow(content), 0
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
            actual = repr(sign) if sign else "the end of the file"
            yield number + 1, Broken(f"not JSON (expected a comma or the list's end, found {actual})", ends_file=True)
            return
    text.position += 1
    if text.peek():
        yield number + 1, Broken("there is more text after the list's end", ends_file=True)


class _TextWindow:
    """A window that moves over a long UTF-8 text; bytes that are not UTF-8 become lone surrogates."""

    # If the end of the window cuts a value, the JSON decoder reports an error at most this many characters before the
    # end: the longest literal or escape sequence. Cut strings are reported where they begin.
    _LONGEST_CUT = 16

    def __init__(self, content: io.BufferedIOBase) -> None:
        self._content = content
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._json = json.JSONDecoder()
        self._text, self._ended = "", False
        self.position = 0

    def _grow(self) -> None:
        # The window doubles, so that a long value is parsed a few times, not once for each chunk.
        data = self._content.read(max(CHUNK_BYTES, len(self._text) - self.position))
        self._text = self._text[self.position :] + self._utf8.decode(data, final=not data)
        self.position, self._ended = 0, not data

    def peek(self) -> str:
        """Skips white space and returns the next character without taking it, or "" at the end."""
        while True:
            while self.position < len(self._text):
                if self._text[self.position] not in " \t\r\n":
                    return self._text[self.position]
                self.position += 1
            if self._ended:
                return ""
            self._grow()

    def take_value(self) -> tuple[Any, bool]:
        """Takes a JSON value and returns it, and whether its text is UTF-8."""
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
