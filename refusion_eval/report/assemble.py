"""Assembles the page: one HTML file without external parts, in which no recorded text can become a program.

Records are JSON or compressed JSON in script elements that the browser does not run. The content security policy of the
page allows no request, and only the scripts and styles put in here, by their hashes.
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib import resources

from refusion_eval.report.chunks import as_json

# Each script needs those before it.
SCRIPTS = (
    "dom.js",
    "store.js",
    "format.js",
    "router.js",
    "filters.js",
    "overview.js",
    "frontier.js",
    "list.js",
    "task.js",
    "player.js",
    "replay.js",
    "sample.js",
    "main.js",
)
STYLES = ("base.css", "parts.css", "replay.css")
LIBRARY = "chart.umd.min.js"

_PLACE = re.compile(r"\{\{(\w+)\}\}")
_SOURCE_MAP = re.compile(r"//# sourceMappingURL=\S+")


def page(index: object, chunks: Mapping[str, str]) -> str:
    """The whole page.

    Args:
        index: JSON value that the page reads when it opens.
        chunks: parts that it reads later, base64 by name.
    """
    scripts = [_SOURCE_MAP.sub("", _read(f"vendor/{LIBRARY}")), _bundle()]
    style = "\n".join(_read(f"css/{name}") for name in STYLES)
    parts = {
        "policy": _policy(scripts, style),
        "style": style,
        "library": scripts[0],
        "program": scripts[1],
        "index": _inert(as_json(index)),
        "chunks": "\n".join(f'<script type="text/plain" id="{name}">{text}</script>' for name, text in chunks.items()),
    }
    return _PLACE.sub(lambda place: parts[place.group(1)], _read("report.html"))


def _bundle() -> str:
    """The project's scripts as one; each defines one name for the others."""
    parts = "\n".join(_read(f"js/{name}") for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}\n}})();'


def _policy(scripts: list[str], style: str) -> str:
    hashes = " ".join(map(_hash, scripts))
    return (
        f"default-src 'none'; script-src {hashes}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _inert(json_text: str) -> str:
    """JSON that cannot end a script element: the characters that could are written as escapes."""
    return json_text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _read(name: str) -> str:
    return resources.files("refusion_eval.report").joinpath("page", *name.split("/")).read_text(encoding="utf-8")
