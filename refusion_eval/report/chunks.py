"""Parts of the page that are unpacked when they are shown: gzip in base64, so that nothing in them is markup."""

import base64
import gzip
import json
from typing import Any, NamedTuple

# About how much JSON a chunk unpacks to: few enough bytes to unpack within one frame on a phone.
CHUNK_BYTES = 200_000


class ChunkEntry(NamedTuple):
    """Where an entry is stored: the name of its chunk, and its index in that chunk."""

    chunk: str
    entry: int


class ChunkWriter:
    """Collects entries into chunks.

    Args:
        prefix: what the names of the chunks begin with.

    Attributes:
        chunks: content of the finished chunks by name.
    """

    def __init__(self, prefix: str) -> None:
        self.chunks: dict[str, str] = {}
        self._prefix = prefix
        self._entries: list[str] = []
        self._size = 0

    def add(self, entry: Any) -> ChunkEntry:
        """Adds a JSON value."""
        text = as_json(entry)
        if self._size + len(text) > CHUNK_BYTES:
            self.flush()
        self._entries.append(text)
        self._size += len(text)
        return ChunkEntry(self._name(), len(self._entries) - 1)

    def flush(self) -> None:
        """Ends the chunk; further entries go to the next one."""
        if self._entries:
            self.chunks[self._name()] = packed(f"[{','.join(self._entries)}]")
            self._entries, self._size = [], 0

    def _name(self) -> str:
        return f"{self._prefix}{len(self.chunks)}"


def as_json(value: Any) -> str:
    """ASCII JSON: lone surrogates become escapes, as `JSON.parse` reads them."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def packed(text: str) -> str:
    """ASCII text as base64 of gzip; equal texts give equal bytes."""
    return base64.b64encode(gzip.compress(text.encode("ascii"), 6, mtime=0)).decode("ascii")
