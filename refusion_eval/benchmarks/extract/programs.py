"""Finds the program in what a model wrote.

Code stands in a fence, or it is the whole text. Parsing decides between the forms a model may choose (whole function,
body only, prose around it); nothing is executed here.
"""

import ast
import re
import string
import textwrap
import warnings
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice

from refusion_eval.benchmarks import Extraction
from refusion_eval.benchmarks.rows import Row

NO_CODE = Extraction(None, "no code found")

_PYTHON = ("python", "python3", "py", "py3")
_CODE_START = re.compile(r"^(?:def|class|import|from|async def)[ \t]|^@\w", re.MULTILINE)
_FENCE = re.compile(r"`{3,}([^\n]*)\n?")
_BLANK_LINE = re.compile(r"(?:(?<=\n)|\A)[ \t]+(?=\n|\Z)")
_INDENT = re.compile(r"^[ \t]*(?=[^ \t\n])", re.MULTILINE)

# A text with more characters, or more words and signs, is no solution. The bounds keep hostile or endless text from
# stalling the scoring.
_LONGEST_CODE = 8_000
_MOST_TOKENS = 2_500
_MOST_CUTS = 12
_MOST_BLOCKS = 100
_MOST_FENCES = 4_000

# The time of parsing grows with the number of words and signs, up to 2.5 us each. This is the number that may be parsed
# for one text in all; parsing an empty text costs as much as the second number.
_MOST_PARSED = 7_000
_LEAST_PARSED = 50
_IN_WORDS = (string.ascii_letters + string.digits + "_").encode()
_BETWEEN = b" \t\f"
_WORDS_ONLY = bytes(byte if byte in _IN_WORDS else ord(" ") for byte in range(256))


class _Effort:
    """Bounds how much is parsed for one text, because endless decorators or blocks would be tried one by one."""

    def __init__(self) -> None:
        self._left = _MOST_PARSED

    @property
    def is_spent(self) -> bool:
        """Whether nothing more is parsed for this text."""
        return self._left <= 0

    def parse(self, code: str) -> ast.Module | SyntaxError | None:
        """As `parse`; None where the bound is reached, from then on for all of the text."""
        needed = _num_tokens(code)
        if needed > self._left:
            self._left = 0
            return None
        tree = parse(code)
        self._left -= max(_LEAST_PARSED, _num_tokens(_read(code, tree)))
        return tree


def _num_tokens(code: str) -> int:
    """The number of words, signs and line ends of source code, those in strings and comments included."""
    plain = code.encode("ascii", "replace").replace(b"?", b"a")
    return len(plain.translate(_WORDS_ONLY).split()) + len(plain.translate(None, delete=_IN_WORDS + _BETWEEN))


def _read(code: str, tree: ast.Module | SyntaxError | None) -> str:
    """The part that the parser read: up to an error, or everything where it searched for a closing bracket."""
    if not isinstance(tree, SyntaxError) or not tree.lineno or "never closed" in tree.msg:
        return code
    return "\n".join(code.split("\n")[: tree.lineno])


def fenced(code: str) -> str:
    """A program as the prompts ask for it: in a python block."""
    return f"```python\n{code.strip()}\n```"


def fenced_blocks(text: str) -> list[str]:
    """The contents of the python fences, or of any fences if none is marked as python; the last may be unclosed.

    Of endless repetitions only the first `_MOST_BLOCKS` are returned.
    """
    text = text.replace("\r\n", "\n")
    blocks = list(_blocks(text))
    python = [block for info, *block in blocks if info in _PYTHON]
    chosen = (text[slice(*block)] for block in python or [block for _, *block in blocks])
    return [_dedented(block).rstrip() + "\n" for block in islice(filter(str.strip, chosen), _MOST_BLOCKS)]


def _blocks(text: str) -> Iterator[tuple[str, int, int]]:
    """(word after the opening fence, start, end) of each fenced block; a fence with a word also closes a block."""
    opened: tuple[str, int] | None = None
    for fence in islice(_FENCE.finditer(text), _MOST_FENCES):
        info = fence[1].strip()
        if opened is not None:
            yield *opened, fence.start()
            if not info:
                opened = None
                continue
        elif "```" in info:
            continue
        opened = info.split(" ", 1)[0].lower(), fence.end()
    if opened is not None:
        yield *opened, len(text)


def _dedented(code: str) -> str:
    """Does what `textwrap.dedent` does, which takes several times as long on endless short lines."""
    code = _BLANK_LINE.sub("", code)
    indents = set(_INDENT.findall(code))
    least, most = min(indents, default=""), max(indents, default="")  # the others lie between them
    margin = least[
        : next((at for at, pair in enumerate(zip(least, most, strict=False)) if len({*pair}) > 1), len(least))
    ]
    return f"\n{code}".replace(f"\n{margin}", "\n")[1:]


@lru_cache(maxsize=8)
def parse(code: str) -> ast.Module | SyntaxError | None:
    """Parses without warnings; None where the text cannot be source code at all (surrogates, absurd nesting)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(code)
        except SyntaxError as problem:
            return problem
        except (ValueError, MemoryError, RecursionError):
            return None


def _readable(code: str) -> str:
    """The part of source code that is looked at: whole words within the bounds."""
    code = code[:_LONGEST_CODE]
    if _num_tokens(code) <= _MOST_TOKENS:
        return code
    return code[: bisect_right(range(len(code)), _MOST_TOKENS, key=lambda end: _num_tokens(code[:end])) - 1]


def parsable_prefix(code: str, effort: _Effort | None = None) -> str:
    """Cuts off the text after a program (prose, an unfinished line), as far as needed for the rest to parse.

    Args:
        code: text that may begin with a program.
        effort: bounds the parsing for the whole text; None for a bound of its own.

    Returns:
        The longest prefix of whole lines reached by cutting at each reported error, possibly empty.
    """
    code = _readable(code)
    effort = effort or _Effort()
    for _ in range(_MOST_CUTS):
        tree = effort.parse(code)
        if isinstance(tree, ast.Module):
            return code
        lines = code.split("\n")
        if tree is None or not tree.lineno or tree.lineno > len(lines):
            break
        code = "\n".join(lines[: tree.lineno - 1])
    return ""


def function_code(text: str, row: Row) -> Extraction:
    """The program of a HumanEval answer: the function asked for, whole or as a continuation of the prompt.

    If a block (or the whole text) defines the function, the program is the prompt's imports and helper functions
    followed by that block; otherwise the text continues the prompt.
    """
    name, prompt = row["entry_point"], row["prompt"].replace("\r\n", "\n")
    blocks = fenced_blocks(text)
    sources = blocks or [_unfenced(text)]
    effort = _Effort()
    for source in sources:
        code = parsable_prefix(source, effort)
        if _defines(code, name):
            program = prompt[: _definition_start(prompt, name)] + "\n" + code
            is_whole = isinstance(effort.parse(program), ast.Module)
            return Extraction(program if is_whole else code, "whole function")
    for body in blocks or [text.replace("\r\n", "\n")]:
        for form in _bodies(_readable(body)):
            program = parsable_prefix(prompt + form, effort)
            if _has_body(program, name):
                return Extraction(program, "continuation of the prompt")
            if effort.is_spent:
                break
    return Extraction(prompt + blocks[0], "code that does not parse") if blocks else NO_CODE


def _bodies(code: str) -> Iterator[str]:
    """Forms that a function body may have: as it is, with its first line indented, and indented by one level."""
    yield code
    yield "    " + code.lstrip(" ")
    yield textwrap.indent(_dedented(code), "    ")


def module_code(text: str) -> Extraction:
    """The program of an MBPP answer: the first block that parses and defines something, else the first block."""
    blocks = fenced_blocks(text)
    effort = _Effort()
    for block in blocks:
        tree = effort.parse(_readable(block))
        if isinstance(tree, ast.Module) and _defined_names(tree):
            return Extraction(block, "fenced block")
    if blocks:
        cut = parsable_prefix(blocks[0], effort)
        return Extraction(cut or blocks[0], "fenced block, cut where it stops parsing")
    code = parsable_prefix(_unfenced(text), effort)
    tree = parse(code)
    if isinstance(tree, ast.Module) and _defined_names(tree):
        return Extraction(code, "whole text")
    return NO_CODE


def _unfenced(text: str) -> str:
    """The text from the first line on that begins a definition or an import, else all of it."""
    text = text.replace("\r\n", "\n")
    start = _CODE_START.search(text)
    return text[start.start() :] if start else text


def _defined_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def _defines(code: str, name: str) -> bool:
    tree = parse(code)
    return isinstance(tree, ast.Module) and name in _defined_names(tree)


def _has_body(code: str, name: str) -> bool:
    """Whether the last definition of the function holds more than its docstring."""
    tree = parse(code)
    if not isinstance(tree, ast.Module):
        return False
    bodies = [node.body for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return bool(bodies) and not (len(bodies[-1]) == 1 and isinstance(bodies[-1][0], ast.Expr))


def _definition_start(prompt: str, name: str) -> int:
    definition = re.search(rf"^def {re.escape(name)}\b", prompt, re.MULTILINE)
    return definition.start() if definition else len(prompt)
