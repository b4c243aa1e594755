"""Finds the program in a response: in its fences, or between lines of prose. It is parsed, never executed, here."""

import ast
import builtins
import os
import re
import symtable
import textwrap
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from refusion_eval.benchmarks import Extraction
from refusion_eval.benchmarks.rows import Row
from refusion_eval.untrusted import parse_python, python_parser

NO_CODE = Extraction(None, "no code found")

_PYTHON = ("python", "python3", "py", "py3")
# How a definition or an import begins.
CODE = re.compile(
    r"(?:async[ \t]+)?def[ \t]+\w+[ \t]*\(|class[ \t]+\w+[ \t]*[(:]|import[ \t]+\w|from[ \t]+[\w.]+[ \t]+import\b|@\w"
    r"|\w+[ \t]*=[ \t]*lambda\b"
)
# With blanks around its sign, because `title="a.py"` is an attribute of the fence.
_CODE_ON_FENCE = re.compile(rf"{CODE.pattern}|[A-Za-z_]\w*[ \t]+=[ \t]")
# What Markdown and tags put around code where no fence is: quotes, one line between backquotes, indents, and tags.
_QUOTE = re.compile(r"^ {0,3}>(?!>>)[ ]?", re.MULTILINE)
_INLINE = re.compile(rf"(`{{1,2}})[ ]?((?:{CODE.pattern})[^`\n]*)\1")
_TAG = r"(?:</?[A-Za-z_][\w=]{0,20}(?: [a-z]+=[^<>\n]{1,60})?>|<[|｜][^\s<>|｜]{1,40}[|｜]>|\[/?[A-Z]{3,12}\])"
_TAGS = re.compile(
    rf"^[ \t]*{_TAG}(?:[ \t]*{_TAG}){{0,5}}[ \t]*(?={_CODE_ON_FENCE.pattern})"
    r"|(?<=[^\s>])(?:</(?i:(?:final_)?answer|code|pre|solution|program"
    r"|python|output|response|result|function)>|<[|｜][^\s<>|｜]{1,40}[|｜]>|\[/[A-Z]{3,12}\]|\[DONE\]){1,6}(?!['\"])",
    re.MULTILINE,
)
_INDENTED_LINES = re.compile(r"(?:\A|(?<=\n\n))(?:(?: {4}|\t)[^\n]*(?:\n|\Z)|[ \t]*\n(?= {4}|\t|[ \t]*\n))+")
_LANGUAGE_LINE = re.compile(r"\A\s*(?i:python3?|py3?)[ \t]*\n")
_FENCE = re.compile(r"`{3,}([^\n`]*)")
_BLANK_LINE = re.compile(r"(?:(?<=\n)|\A)[ \t]+(?=\n|\Z)")
_INDENT = re.compile(r"^[ \t]*(?=[^ \t\n])", re.MULTILINE)
_PROMPT = re.compile(r"^(?:>>>|\.\.\.)(?: |$)", re.MULTILINE)  # of Python's own terminal
# What editors and web pages put in front of lines, and no program has there.
_NO_BREAK = re.compile(r"^[ \t]*\xa0[ \t\xa0]*|\ufeff", re.MULTILINE)

# Of endless repetitions the first ones are read.
_MOST_BLOCKS = 100
_MOST_FENCES = 4_000

_BUILTINS = frozenset(dir(builtins))
# Assignments and comments that stand in front of a definition or an import belong to it.
_CODE_LINES = re.compile(
    rf"^(?:(?:[A-Za-z_]\w*[ \t]*=|#)[^\n]*\n{{1,3}}){{0,20}}(?P<code>{CODE.pattern})", re.MULTILINE
)
# How a line of a program begins that prose does not begin with.
_STATEMENT = re.compile(
    rf"^(?P<code>{CODE.pattern}|[A-Za-z_][\w.,\[\] \t]*[ \t]*[-+*/%|&^]?=[^=]"
    r"|[A-Za-z_][\w.]*\(|(?:for|while|if|with|try)\b[^\n]*:[ \t]*$|#)",
    re.MULTILINE,
)
_DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_INDENTED = re.compile(r"^(?: {4}|\t)[ \t]*[^ \t\n]", re.MULTILINE)
_FUTURE = re.compile(r"^from __future__ import[^\n]*\n", re.MULTILINE)

# A text with more characters, or more words and signs, is no solution. The bounds keep hostile or endless text from
# stalling the scoring.
_LONGEST_CODE = 8_000
_MOST_TOKENS = 2_500
_MOST_CUTS = 12

# The time of parsing grows with the number of words and signs, up to 2.5 us each. This is the number that may be parsed
# for one text in all; parsing an empty text costs as much as the second number.
_MOST_PARSED = 7_000
_LEAST_PARSED = 50
_TOKEN = re.compile(r"\w+|[^\w\s]|\n")


def fenced(code: str) -> str:
    return f"```python\n{code.strip()}\n```"


class Block(NamedTuple):
    language: str  # the word after the opening fence
    code: str
    is_closed: bool


def fenced_blocks(text: str) -> list[str]:
    """The contents of the python fences, or of any fences if none is marked as python; the last may be unclosed."""
    blocks = blocks_of(as_typed(text))
    return [block.code for block in blocks if block.language in _PYTHON] or [block.code for block in blocks]


def as_typed(text: str) -> str:
    """A text with plain line ends, without byte order marks, and with plain spaces at the beginnings of lines."""
    return _NO_BREAK.sub(lambda found: found[0].replace("\xa0", " ").strip("\ufeff"), text.replace("\r\n", "\n"))


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks that are not blank; of endless repetitions only the first `_MOST_BLOCKS`."""
    if "```" in (quoted := _QUOTE.sub("", text)) and not re.search(r"^[ \t]*```", text, re.MULTILINE):
        text = quoted
    blocks = (Block(language, text[start:end], end < len(text)) for language, start, end in _fenced_parts(text))
    plain = (block._replace(code=_LANGUAGE_LINE.sub("", block.code)) for block in blocks)
    filled = (block._replace(code=dedented(block.code).rstrip() + "\n") for block in plain if block.code.strip())
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
    margin = os.path.commonprefix(list(set(_INDENT.findall(code))))  # noqa: RUF071 - indents are no paths
    return f"\n{code}".replace(f"\n{margin}", "\n")[1:]


def _without_tags(text: str) -> str:
    return _TAGS.sub(lambda tags: "\n" if tags.string[tags.start() - 1 : tags.start()].strip() else "", text)


def _unwrapped(text: str) -> Iterator[str]:
    """A text without fences, without its tags; then with its code out of quotes, backquotes and Markdown's indents."""
    yield _without_tags(text)
    text = _INLINE.sub(r"\n\2\n", _without_tags(_QUOTE.sub("", text)))
    yield text if _CODE_LINES.search(text) else _INDENTED_LINES.sub(lambda lines: dedented(lines[0]), text)
    if _PROMPT.search(text):
        yield _PROMPT.sub("", text)


class _Effort:
    """Bounds how much is parsed for one text, because endless decorators or blocks would be tried one by one."""

    def __init__(self) -> None:
        self._left = _MOST_PARSED

    @property
    def is_spent(self) -> bool:
        return self._left <= 0

    def parse(self, code: str) -> ast.Module | SyntaxError | None:
        """As `parse`; None where the bound is reached, from then on for all of the text."""
        needed = _num_tokens(code)
        if needed > self._left:
            self._left = 0
            return None
        tree = parse(code)
        # The parser stops at an error, but reads everything where it searches for a closing bracket.
        if isinstance(tree, SyntaxError) and tree.lineno and "never closed" not in tree.msg:
            code = "\n".join(code.split("\n")[: tree.lineno])
        self._left -= max(_LEAST_PARSED, _num_tokens(code))
        return tree


def _num_tokens(code: str) -> int:
    """The number of words, signs and line ends of source code, those in strings and comments included."""
    return len(_TOKEN.findall(code))


@lru_cache(maxsize=8)
def parse(code: str) -> ast.Module | SyntaxError | None:
    """The program, or what is wrong with it; None where it is no source code at all (surrogates, absurd nesting)."""
    try:
        return parse_python(code)
    except SyntaxError as problem:
        return problem
    except (ValueError, MemoryError, RecursionError):
        return None


def _readable(code: str) -> str:
    """The part of source code that is looked at: whole words within the bounds."""
    code = code[:_LONGEST_CODE]
    first_left_out = next(islice(_TOKEN.finditer(code), _MOST_TOKENS, None), None)
    return code[: first_left_out.start()] if first_left_out else code


def parsable_prefix(code: str, effort: _Effort | None = None) -> str:
    """Cuts off the text after a program (prose, an unfinished line), as far as needed for the rest to parse."""
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
    """The program of a HumanEval answer: the function asked for, whole or as a continuation of the prompt."""
    # A block that defines the function follows the prompt's imports and helper functions; otherwise the last block that
    # completes the function continues the prompt, else the code before the first fence, which the prompt opened.
    text, name, prompt = as_typed(text), row["entry_point"], row["prompt"].replace("\r\n", "\n")
    effort = _Effort()
    before = re.split(rf"^def {re.escape(name)}\b", prompt, maxsplit=1, flags=re.MULTILINE)[0]
    if whole_program := _find_program(text, {name}, effort, before=before):
        return Extraction(whole_program, "whole function")
    blocks = [block.code for block in blocks_of(text)]
    unfenced = text.partition("```")[0]
    indented = _INDENTED.search(unfenced)
    started = ""
    for body in reversed([unfenced[indented.start() if indented else 0 :], unfenced, *blocks]):
        for form in _bodies(_readable(body)):
            program = parsable_prefix(prompt + form, effort)
            if _defines(program, {name}):
                return Extraction(program, "continuation of the prompt")
            if not started and program[len(prompt) :].strip():
                started = program
            if effort.is_spent:
                break
    started = started or (prompt + blocks[-1] if blocks else "")
    return Extraction(started, "code that does not complete the function") if started else NO_CODE


def _bodies(code: str) -> Iterator[str]:
    yield code
    yield "    " + code.lstrip(" ")  # a model that continues the prompt leaves out the indent that stands there
    yield textwrap.indent(dedented(code), "    ")


def module_code(text: str, row: Row) -> Extraction:
    """The program of an MBPP answer: the block with the function that the tests call, else another one."""
    tests = "\n".join(str(test).strip() for test in row["test_list"])
    setup = str(row.get("test_setup_code") or "")
    text = as_typed(text)
    called = _names(tests).unbound - _names(setup).bound
    effort = _Effort()
    if program := _find_program(text, called - _BUILTINS or called, effort, after=f"{setup}\n{tests}"):
        return Extraction(program, "the tested function")
    blocks = blocks_of(text)
    for block in reversed(blocks or list(_unfenced(text, effort))):
        code = parsable_prefix(block.code, effort)
        if _defines(code, _names(code).bound):
            return Extraction(code, "another function")
    return Extraction(blocks[-1].code, "code without a function") if blocks else NO_CODE


def whole_program(text: str, marks: Sequence[str]) -> Extraction:
    """The last python block with one of the marks, else the last block, else what parses of a text without blocks."""
    text = as_typed(text)
    blocks = blocks_of(text)
    labelled = [block for block in blocks if block.language in _PYTHON] or blocks
    marked = [block for block in labelled if any(mark in block.code for mark in marks)]
    closed = [block for block in marked if block.is_closed]
    for how, found in (("last program", closed), ("program that is cut off", marked), ("another block", labelled)):
        if found:
            code = found[-1].code
            is_whole = found[-1].is_closed or isinstance(parse(code), ast.Module)
            return Extraction(code if is_whole else parsable_prefix(code) or code, how)
    effort = _Effort()
    runs = [block.code for form in _unwrapped(text) for block in _unfenced(form, effort, _STATEMENT)]
    longest = max((code for code in runs if any(mark in code for mark in marks)), key=len, default=None)
    return Extraction(longest, "without a block") if longest else NO_CODE


def _find_program(text: str, names: Set[str], effort: _Effort, *, before: str = "", after: str = "") -> str:
    """The last block of a text that defines one of the names, behind what it needs of the other blocks."""
    blocks = blocks_of(text)
    code = _last_definition(blocks, names, effort)
    forms = _unwrapped(text)
    while not code and (form := next(forms, None)) is not None:
        blocks = list(_unfenced(form, effort))
        code = _last_definition(blocks, names, effort)
    if not code:
        return ""
    missing = _names(f"{before}\n{code}\n{after}").unbound - _BUILTINS
    program = "\n".join(filter(None, (before, _helpers(missing, blocks, effort), code)))
    return "".join(_FUTURE.findall(program)) + _FUTURE.sub("", program)


def _last_definition(blocks: Sequence[Block], names: Set[str], effort: _Effort) -> str:
    """The code of the last block that defines one of the names; one that was cut off comes after all others."""
    cut_off = ""
    for block in reversed(blocks):
        if any(name in block.code for name in names):
            code = parsable_prefix(block.code, effort)
            if _defines(code, names):
                if block.is_closed or code == block.code:
                    return code
                cut_off = code
    return cut_off


def _helpers(missing: Iterable[str], blocks: Sequence[Block], effort: _Effort) -> str:
    """The imports, definitions and assignments of missing names, with what they need themselves, in text order."""
    wanted = list(missing)
    parts = [part for block in blocks if wanted for part in _statements(parsable_prefix(block.code, effort))]
    names = [_names(part) for part in parts]
    last = {name: number for number, part in enumerate(names) for name in part.bound}
    chosen: set[int] = set()
    for name in wanted:
        number = last.get(name)
        if number is not None and number not in chosen:
            chosen.add(number)
            wanted += names[number].unbound
    return "\n".join(parts[number] for number in sorted(chosen))


def _statements(code: str) -> Iterator[str]:
    """The source of each statement at top level that does nothing but bind names."""
    tree, lines = parse(code), code.split("\n")
    for node in tree.body if isinstance(tree, ast.Module) else ():
        if isinstance(node, _DEFINITION | ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign):
            decorators = [decorator.lineno for decorator in getattr(node, "decorator_list", ())]
            yield "\n".join(lines[min([node.lineno, *decorators]) - 1 : node.end_lineno])


def _unfenced(text: str, effort: _Effort, beginning: re.Pattern[str] = _CODE_LINES) -> Iterator[Block]:
    """The runs of lines that parse, each from a line that begins code; other lines are prose."""
    end = 0
    for lines in beginning.finditer(text):
        for start in (lines.start(), lines.start("code")):
            if effort.is_spent:
                return
            if start >= end:
                code = _before_words(parsable_prefix(text[start : start + _LONGEST_CODE], effort))
                if start + len(code) > lines.start("code"):
                    end = start + len(code)
                    yield Block("", code, True)


def _before_words(code: str) -> str:
    """Cuts a program off at a line that is only a word, a list or a set, such as `[DONE]` or `{code}`."""
    tree = parse(code)
    for node in tree.body if isinstance(tree, ast.Module) else ():
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Name | ast.List | ast.Set):
            return "\n".join(code.split("\n")[: node.lineno - 1])
    return code


class _Names(NamedTuple):
    bound: Set[str]  # at the top level of source code
    unbound: Set[str]  # read without being bound


def _names(code: str) -> _Names:
    try:
        with python_parser():
            module = symtable.symtable(code, "answer", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return _Names(frozenset(), frozenset())
    symbols = module.get_symbols()
    bound = {name.get_name() for name in symbols if name.is_assigned() or name.is_imported() or name.is_namespace()}
    scopes, read = [module], set()
    for scope in scopes:
        scopes += scope.get_children()
        read |= {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global() and symbol.is_referenced()}
    return _Names(bound, read - bound)


def _defines(code: str, names: Set[str]) -> bool:
    """Whether source code binds one of the names to a function that returns something, or to a class."""
    tree = parse(code)
    if not isinstance(tree, ast.Module) or _returns(tree.body):  # which parses, but is no program
        return False
    bound = _names(code).bound & names
    return bool(bound) and any(_is_definition(node, bound) for node in ast.walk(tree))


def _is_definition(node: ast.AST, names: Set[str]) -> bool:
    """Whether a node defines one of the names in earnest: no stub, no result of a call of itself."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return node.name in names and _returns(node.body)
        case ast.ClassDef():
            return node.name in names
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id=called))):
            return name in names and name != called
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda() | ast.Name() | ast.Attribute() | ast.Call()):
            return name in names
    return False


def _returns(body: Iterable[ast.AST]) -> bool:
    """Whether statements return or yield more than None; functions inside of them do not count."""
    inside = list(body)
    for node in inside:
        match node:
            case ast.Return(value=None | ast.Constant(value=None)):
                continue
            case ast.Return() | ast.Yield() | ast.YieldFrom():
                return True
        if not isinstance(node, _DEFINITION | ast.Lambda):
            inside += ast.iter_child_nodes(node)
    return False
