"""Puts the page together: one file that needs nothing else, and that no text in it can turn into a program.

What comes from records is JSON or compressed JSON in scripts that the browser does not run. The page's policy allows no
request at all, and no script or style but the ones put in here, by their hashes.
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib import resources

from refusion_eval.report.chunks import as_json

# In the order in which they need each other.
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
        index: what the page reads when it opens.
        chunks: name -> base64, what it reads later.
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
    """Our scripts as one: each gives the others one name."""
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
    """JSON that ends no script element: what could is written as escapes."""
    return json_text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _read(name: str) -> str:
    return resources.files("refusion_eval.report").joinpath("page", *name.split("/")).read_text(encoding="utf-8")
