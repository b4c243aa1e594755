"""Files and texts of strangers: opened without waiting, read and parsed within bounds, and shown without effect."""

import json
import os
import re
import stat
from collections.abc import Callable
from typing import Any, BinaryIO

# Of a file that is read whole, and of a JSON text: the largest tokenizers have files of some 35 MB.
LARGEST = 64 << 20
# Values of one JSON text: each takes up to 200 bytes once it is parsed.
MOST_VALUES = 6_000_000
# Lists and mappings inside each other. Python's own limit is near 1000, and functions that walk through a value need
# several calls for each level.
DEEPEST = 64

_LONGEST_LINE = 1 << 16

# Control characters (C0 and C1), marks that reorder or hide text, line separators, and halves of surrogate pairs.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def visible(text: str, keep: str = "") -> str:
    r"""Text that a terminal shows and does not obey: each character with an effect is written as its escape (\x1b)."""
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a plain file, or a link to a file; OSError at once for a pipe, which may have no writer for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(21, "it is a folder", os.fspath(path))
    raise OSError(f"it is a {kind_of(mode)}, not a plain file")


def kind_of(mode: int) -> str:
    """The kind of a file in words, by its `st_mode`."""
    kinds = {
        stat.S_IFLNK: "symbolic link",
        stat.S_IFIFO: "named pipe",
        stat.S_IFSOCK: "socket",
        stat.S_IFDIR: "folder",
        stat.S_IFREG: "file",
    }
    return kinds.get(stat.S_IFMT(mode), "device")


def read_plain(path: str | os.PathLike[str]) -> bytes:
    """The content of a plain file; OSError for more than `LARGEST` bytes, and as `open_plain`."""
    with open_plain(path) as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise OSError(f"it is larger than {LARGEST >> 20} MiB")
    return content


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file with line feeds as line ends; OSError as `read_plain`, or UnicodeDecodeError."""
    return read_plain(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def first_line(path: str | os.PathLike[str]) -> str:
    """The first line of a plain file, without its end, as far as it is UTF-8; OSError as `open_plain`."""
    with open_plain(path) as file:
        return file.readline(_LONGEST_LINE).decode("utf-8", "replace").strip()


def parse_json(text: str | bytes, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a JSON text; ValueError if it is malformed, too long, or nested too deeply. See `json.loads`."""
    if len(text) > LARGEST:
        raise ValueError(f"longer than {LARGEST >> 20} MiB")
    if isinstance(text, bytes):
        text = text.decode("utf-8")  # json.loads would take other encodings
    counts = [text.count(mark) for mark in ",[{"]
    if sum(counts) > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES} values")
    try:
        value = json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if sum(counts[1:]) > DEEPEST:
        level = [value]
        for _ in range(DEEPEST):
            children = [node.values() if type(node) is dict else node for node in level if node]
            level = [child for values in children for child in values if type(child) is list or type(child) is dict]
        if level:
            raise ValueError("nested too deeply")
    return value
