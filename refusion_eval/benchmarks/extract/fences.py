"""Finds the fenced blocks of a text, as chat models write them."""

import re
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

_PYTHON = ("python", "python3", "py", "py3")
# How a definition or an import begins.
CODE = re.compile(
    r"(?:async[ \t]+)?def[ \t]+\w+[ \t]*\(|class[ \t]+\w+[ \t]*[(:]|import[ \t]+\w|from[ \t]+[\w.]+[ \t]+import\b|@\w"
)
# With blanks around its sign, because `title="a.py"` is an attribute of the fence.
_CODE_ON_FENCE = re.compile(rf"{CODE.pattern}|[A-Za-z_]\w*[ \t]+=[ \t]")
_FENCE = re.compile(r"`{3,}([^\n`]*)")
_BLANK_LINE = re.compile(r"(?:(?<=\n)|\A)[ \t]+(?=\n|\Z)")
_INDENT = re.compile(r"^[ \t]*(?=[^ \t\n])", re.MULTILINE)

# Of endless repetitions the first ones are read.
_MOST_BLOCKS = 100
_MOST_FENCES = 4_000


def fenced(code: str) -> str:
    """A program as the prompts ask for it: in a python block."""
    return f"```python\n{code.strip()}\n```"


class Block(NamedTuple):
    """The word after an opening fence, the code up to the closing one, and whether there is a closing one."""

    language: str
    code: str
    is_closed: bool


def fenced_blocks(text: str) -> list[str]:
    """The contents of the python fences, or of any fences if none is marked as python; the last may be unclosed."""
    found = blocks_of(text.replace("\r\n", "\n"))
    return [block.code for block in found if block.language in _PYTHON] or [block.code for block in found]


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks that are not blank; of endless repetitions only the first `_MOST_BLOCKS`."""
    found = (Block(language, text[start:end], end < len(text)) for language, start, end in _fenced_parts(text))
    filled = (block._replace(code=dedented(block.code).rstrip() + "\n") for block in found if block.code.strip())
    return list(islice(filled, _MOST_BLOCKS))


def _fenced_parts(text: str) -> Iterator[tuple[str, int, int]]:
    """(language, start, end) of what stands between fences; one with a language or code also closes a block."""
    opened: tuple[str, int] | None = None
    for fence in islice(_FENCE.finditer(text), _MOST_FENCES):
        language, _, rest = fence[1].strip().partition(" ")
        is_python = language.lower() in _PYTHON
        code = _CODE_ON_FENCE.match(rest.strip() if is_python else fence[1].strip())
        if opened is not None:
            yield *opened, fence.start()
            is_inline = "\n" not in text[opened[1] - 1 : fence.start()]
            opens_another = is_python or code or (language and not rest)
            opened = None
            if is_inline or not opens_another:
                continue
        opened = language.lower(), (text.index(code[0], fence.start()) if code else fence.end() + 1)
    if opened is not None:
        yield *opened, len(text)


def dedented(code: str) -> str:
    """Does what `textwrap.dedent` does, which takes several times as long on endless short lines."""
    code = _BLANK_LINE.sub("", code)
    indents = set(_INDENT.findall(code))
    least, most = min(indents, default=""), max(indents, default="")  # the others lie between them
    margin = least[
        : next((at for at, pair in enumerate(zip(least, most, strict=False)) if len({*pair}) > 1), len(least))
    ]
    return f"\n{code}".replace(f"\n{margin}", "\n")[1:]
