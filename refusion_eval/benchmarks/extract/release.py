"""How the public release of ReFusion finds answers: its evaluation script, then the filters of its tasks."""

import ast
import re
import string
from functools import partial

from refusion_eval.benchmarks import Extraction, Extractor, Prompts
from refusion_eval.benchmarks.extract.frames import NOTHING
from refusion_eval.benchmarks.extract.programs import NO_CODE, parse
from refusion_eval.benchmarks.rows import Row
from refusion_eval.untrusted import parse_python

_OPENING, _CLOSING = "```python\n", "\n```"

_PUNCTUATION = str.maketrans("", "", string.punctuation)

# Lines of a program that are looked at. The bound on words is this project's: it keeps hostile text from stalling the
# scoring, and answers of 1,000 tokens stay below it.
_MOST_LINES = 100
_MOST_WORDS = 2_500_000


def release_block(text: str) -> str:
    """The text as the release's script hands it to every task: the inside of its first closed Python block, if any."""
    start = text.find(_OPENING)
    end = text.find(_CLOSING, start + len(_OPENING))
    return text if start < 0 or end < 0 else text[start + len(_OPENING) : end]


prompts = partial(Prompts, clean=release_block)


def _rule(how: str, *patterns: str, last: bool = False, is_choice: bool = False) -> Extractor:
    """Finds the first (or last) match of the first pattern that has any."""

    def extract(text: str, _row: Row) -> Extraction:
        for pattern in patterns:
            if matches := [match[match.lastindex or 0] for match in re.finditer(pattern, text)]:
                answer = matches[-1 if last else 0]
                return _choice(answer, how) if is_choice else Extraction(answer, how)
        return NOTHING

    return extract


# The first number after "The answer is ", which one more character must follow.
strict_number = _rule("strict-match", r"The answer is (\-?[0-9\.\,]+).")
# The last run of digits, points, commas and dollar signs.
last_number = _rule("flexible-extract", r"(-?[$0-9.,]{2,})|(-?[0-9]+)", last=True)
# The text behind the first "The answer is " in its line, but for the last character.
strict_choice = _rule("strict-match", r"(?<=The answer is )(.*)(?=.)", is_choice=True)
# The last letter in brackets; without any, the last letter after a colon. Between these two the release looks for the
# words of a choice. These are sealed in records, so that is left out.
last_choice = _rule("flexible-extract", r"\([A-Z]\)", r":\s*([A-D])", last=True, is_choice=True)


def same_number(gold: str, answer: str) -> bool:
    """Whether two numbers are the same text but for commas, dollar signs and a final point: 18.0 is not 18."""
    return answer.replace(",", "").replace("$", "").removesuffix(".") == gold


def whole_choice(text: str, _row: Row) -> Extraction:
    """The whole text as a letter, but for white space around it and punctuation (`remove_whitespace`)."""
    return _choice(text.strip(), "whole text")


def _choice(text: str, how: str) -> Extraction:
    answer = text.translate(_PUNCTUATION).upper()
    return Extraction(answer, how) if answer else NOTHING


def whole_text(text: str, _row: Row) -> Extraction:
    return Extraction(text, "whole text")


def function_after_prompt(text: str, row: Row) -> Extraction:
    """The prompt's code, a line end and the code of the response, reduced to what the function asked for needs."""
    code = text.split(_OPENING, 1)[-1].split("```")[0]  # of a text in which a Python block is opened it is that block
    try:
        program = _needed(f"{row['prompt']}\n{code}", row["entry_point"])
    except RecursionError:  # of a tree that is too deep to be written out
        return NO_CODE
    return Extraction(program, "create_test") if program else NO_CODE


def _needed(code: str, entry_point: str) -> str:
    """The imports, and the definitions that a function uses by name, directly or not; written anew by `ast`."""
    plain = code.replace("\t", "    ").replace("\r\n", "\n").replace("\r", "\n").strip()
    tree = parse_python(_longest_program(plain.splitlines()[:_MOST_LINES]))
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    # As in the release, functions without any `return` are no definitions, and of `a(b).c` only `c` counts as a name.
    definitions = {name: node for node in tree.body if (name := _defined_name(node))}
    needed, to_visit = set(), [entry_point]
    while to_visit:
        name = to_visit.pop()
        if name not in needed:
            needed.add(name)
            to_visit += _names(definitions[name]) if name in definitions else []
    return "\n".join(map(ast.unparse, [*imports, *(node for name, node in definitions.items() if name in needed)]))


def _longest_program(lines: list[str]) -> str:
    """The run of lines that is a program and has most lines that are not blank; the first of equally long ones."""
    filled, words = [0], [0]
    for line in lines:
        filled.append(filled[-1] + bool(line.strip()))
        words.append(words[-1] + len(re.findall(r"\w+|\S", line)))
    runs = [(start, end) for start in range(len(lines)) for end in range(start + 1, len(lines) + 1)]
    left = _MOST_WORDS
    for start, end in sorted(runs, key=lambda run: (filled[run[0]] - filled[run[1]], run)):
        left -= words[end] - words[start]
        if left < 0 or filled[end] == filled[start]:
            break
        code = "\n".join(lines[start:end])
        if isinstance(parse(code), ast.Module):
            return code
    return ""


def _defined_name(node: ast.stmt) -> str:
    """The name of a class, of a function with a `return`, or of the first variable of an assignment; else ""."""
    if isinstance(node, ast.Assign):
        return node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""
    if isinstance(node, ast.FunctionDef):
        return node.name if any(isinstance(inner, ast.Return) for inner in ast.walk(node)) else ""
    return node.name if isinstance(node, ast.ClassDef) else ""


def _names(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return [name]
    return [name for child in ast.iter_child_nodes(node) for name in _names(child)]
