"""Assembles the page: one HTML file without external parts, in which no recorded text can become a program.

Records are JSON or compressed JSON in script elements that the browser does not run. The content security policy allows
no request, and only the scripts and styles put in here, by their hashes.
"""

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

# Each script needs those before it.
SCRIPTS = (
    *("dom.js", "store.js", "format.js", "router.js", "theme.js", "filters.js", "files.js", "overview.js", "matrix.js"),
    *("runs.js", "frontier.js", "list.js", "task.js", "player.js", "replay.js", "sample.js", "pair.js", "board.js"),
    "main.js",
)
STYLES = ("base.css", "parts.css", "replay.css", "print.css")
LIBRARY = "chart.umd.min.js"
# About how much JSON a chunk unpacks to: few enough bytes to unpack within one frame on a phone.
CHUNK_BYTES = 200_000

_PLACE = re.compile(r"\{\{(\w+)\}\}")
_SOURCE_MAP = re.compile(r"//# sourceMappingURL=\S+")


class ChunkWriter:
    """Collects JSON values into chunks, which the page unpacks when they are shown: gzip in base64, without markup."""

    def __init__(self, prefix: str) -> None:
        self.chunks: dict[str, str] = {}
        self._prefix = prefix
        self._entries: list[str] = []
        self._size = 0

    def add(self, entry: Any) -> tuple[str, int]:
        """Adds a JSON value; the name of its chunk and its index in that chunk."""
        text = _as_json(entry)
        if self._size + len(text) > CHUNK_BYTES:
            self.flush()
        self._entries.append(text)
        self._size += len(text)
        return self._name(), len(self._entries) - 1

    def flush(self) -> None:
        """Ends the chunk; further entries go to the next one."""
        if self._entries:
            packed = gzip.compress(f"[{','.join(self._entries)}]".encode("ascii"), 6, mtime=0)
            self.chunks[self._name()] = base64.b64encode(packed).decode("ascii")
            self._entries, self._size = [], 0

    def _name(self) -> str:
        return f"{self._prefix}{len(self.chunks)}"


def page(index: Mapping[str, Any], chunks: Mapping[str, str]) -> str:
    # Each of the project's scripts defines one name for the others.
    program = "\n".join(_read(f"js/{name}") for name in SCRIPTS)
    scripts = [_SOURCE_MAP.sub("", _read(f"vendor/{LIBRARY}")), f'(() => {{\n"use strict";\n{program}\n}})();']
    style = "\n".join(_read(f"css/{name}") for name in STYLES)
    sources = f"script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; img-src data:"
    policy = f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"
    parts = {
        "title": html.escape(index["title"]),
        "policy": policy,
        "style": style,
        "library": scripts[0],
        "program": scripts[1],
        # Characters that could end a script element are written as escapes.
        "index": _as_json(index).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
        "chunks": "\n".join(f'<script type="text/plain" id="{name}">{text}</script>' for name, text in chunks.items()),
    }
    return _PLACE.sub(lambda place: parts[place.group(1)], _read("report.html"))


def _as_json(value: Any) -> str:
    """ASCII JSON: lone surrogates become escapes, as `JSON.parse` reads them."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), check_circular=False)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return resources.files("refusion_eval.report").joinpath("page", name).read_text(encoding="utf-8")
