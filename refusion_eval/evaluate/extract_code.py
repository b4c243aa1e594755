"""Finds the program in what a model wrote.

Code stands in a fence, or it is the whole text. Parsing decides between the forms a model may choose (whole function,
body only, prose around it); nothing is executed here.
"""

import ast
import re
import textwrap
import warnings
from functools import lru_cache
from itertools import islice

from refusion_eval.evaluate.extract import Extraction
from refusion_eval.evaluate.prompts import Row

NO_CODE = Extraction(None, "no code found")

_PYTHON = ("python", "python3", "py", "py3")
_CODE_START = re.compile(r"^(?:def|class|import|from|async def)[ \t]|^@\w", re.MULTILINE)

# A solution of more characters is none; the bounds keep hostile or endless text from stalling the scoring.
_LONGEST_CODE = 8_000
_MOST_CUTS = 12
_MOST_BLOCKS = 100

# Characters that are parsed for one text, in all: some 15 ms. Parsing costs at least as much as some characters do.
_MOST_PARSED = 12_000
_LEAST_PARSED = 200


class _Effort:
    """How much may still be parsed for one text: endless decorators, or blocks, would each be tried again and again."""

    def __init__(self) -> None:
        self._left = _MOST_PARSED

    def parse(self, code: str) -> ast.Module | SyntaxError | None:
        """As `parse`; None when the effort is spent. What lies behind an error costs nothing."""
        if self._left <= 0:
            return None
        tree = parse(code)
        read = len(code)
        if isinstance(tree, SyntaxError) and tree.lineno:
            read = min(read, sum(len(line) + 1 for line in code.split("\n")[: tree.lineno]))
        self._left -= max(_LEAST_PARSED, read)
        return tree


def fenced_blocks(text: str) -> list[str]:
    """The contents of the python fences, or of any fences if none is marked as python; the last may be unclosed.

    Of endless repetitions the first `_MOST_BLOCKS`.
    """
    blocks: list[tuple[str, list[str]]] = []
    inside = False
    for line in text.replace("\r\n", "\n").split("\n"):
        at = line.find("```")
        if at < 0:
            if inside:
                blocks[-1][1].append(line)
            continue
        info = line[at:].lstrip("`").strip()
        if inside:
            blocks[-1][1].append(line[:at])
            inside = bool(info)
            if not inside:
                continue
        elif "```" in info:
            continue
        blocks.append((info.split(" ", 1)[0].lower(), []))
        inside = True
    python = [lines for info, lines in blocks if info in _PYTHON]
    chosen = python or [lines for _, lines in blocks]
    written = (lines for lines in chosen if any(map(str.strip, lines)))
    return [textwrap.dedent("\n".join(lines)).rstrip() + "\n" for lines in islice(written, _MOST_BLOCKS)]


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


def parsable_prefix(code: str, effort: _Effort | None = None) -> str:
    """Cuts what follows the program (prose, an unfinished line), as far as needed for the rest to parse.

    Args:
        code: what may be a program.
        effort: what may still be parsed of the text that it stands in; None for the most.

    Returns:
        The longest prefix of whole lines reached by cutting at each reported error, possibly empty.
    """
    code = code[:_LONGEST_CODE]
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
            is_whole = isinstance(parse(program), ast.Module)
            return Extraction(program if is_whole else code, "whole function")
    for body in blocks or [text.replace("\r\n", "\n")]:
        for form in (body, "    " + body.lstrip(" "), textwrap.indent(textwrap.dedent(body), "    ")):
            program = parsable_prefix(prompt + form, effort)
            if _has_body(program, name):
                return Extraction(program, "continuation of the prompt")
    return Extraction(prompt + blocks[0], "code that does not parse") if blocks else NO_CODE


def module_code(text: str) -> Extraction:
    """The program of an MBPP answer: the first block that parses and defines something, else the first block."""
    blocks = fenced_blocks(text)
    effort = _Effort()
    for block in blocks:
        tree = effort.parse(block[:_LONGEST_CODE])
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
    found = _CODE_START.search(text)
    return text[found.start() :] if found else text


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
    found = re.search(rf"^def {re.escape(name)}\b", prompt, re.MULTILINE)
    return found.start() if found else len(prompt)
