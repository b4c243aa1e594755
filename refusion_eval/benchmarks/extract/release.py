"""How the public release of ReFusion finds answers: its evaluation script, then the filters of its tasks.

Where a filter compares answers as texts, extraction leaves them in one form: what the comparison ignores is removed.
"""

import ast
import re
import string

from refusion_eval.benchmarks import Extraction
from refusion_eval.benchmarks.extract.answers import NOTHING
from refusion_eval.benchmarks.extract.programs import NO_CODE, parse
from refusion_eval.benchmarks.rows import Row

_OPENING, _CLOSING = "```python\n", "\n```"

_STRICT_NUMBER = re.compile(r"The answer is (\-?[0-9\.\,]+).")
_ANY_NUMBER = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_STRICT_CHOICE = re.compile(r"(?<=The answer is )(.*)(?=.)")
_CHOICE_IN_BRACKETS = re.compile(r"\([A-Z]\)")
_CHOICE_AFTER_COLON = re.compile(r":\s*([A-D])")
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


def strict_number(text: str, _row: Row) -> Extraction:
    """The first number after "The answer is ", which one more character must follow (`strict-match`)."""
    found = _STRICT_NUMBER.search(text)
    return Extraction(found.group(1), "strict-match") if found else NOTHING


def last_number(text: str, _row: Row) -> Extraction:
    """The last run of digits, points, commas and dollar signs (`flexible-extract`)."""
    found = _ANY_NUMBER.findall(text)
    return Extraction(found[-1][0] or found[-1][1], "flexible-extract") if found else NOTHING


def same_number(gold: str, answer: str) -> bool:
    """Whether two numbers are the same text but for commas, dollar signs and a final point: 18.0 is not 18."""
    return answer.replace(",", "").replace("$", "").removesuffix(".") == gold


def strict_choice(text: str, _row: Row) -> Extraction:
    """The text behind the first "The answer is " in its line, but for the last character (`strict-match`)."""
    found = _STRICT_CHOICE.search(text)
    return _choice(found.group(), "strict-match") if found else NOTHING


def last_choice(text: str, _row: Row) -> Extraction:
    """The last letter in brackets; without any, the last letter after a colon (`flexible-extract`).

    Between these two the release looks for the words of a choice. These are sealed in records, so that is left out.
    """
    found = _CHOICE_IN_BRACKETS.findall(text) or _CHOICE_AFTER_COLON.findall(text)
    return _choice(found[-1], "flexible-extract") if found else NOTHING


def whole_choice(text: str, _row: Row) -> Extraction:
    """The whole text as a letter, but for white space around it and punctuation (`remove_whitespace`)."""
    return _choice(text.strip(), "whole text")


def _choice(text: str, how: str) -> Extraction:
    answer = text.translate(_PUNCTUATION).upper()
    return Extraction(answer, how) if answer else NOTHING


def whole_text(text: str, _row: Row) -> Extraction:
    """The whole text."""
    return Extraction(text, "whole text")


def function_after_prompt(text: str, row: Row) -> Extraction:
    """The prompt's code, a line end and the code of the response, reduced to what the function asked for needs.

    The code of the response ends at three backticks. Of a text in which a Python block is opened it is that block.
    """
    code = text.split(_OPENING, 1)[-1].split("```")[0]
    try:
        program = _needed(f"{row['prompt']}\n{code}", row["entry_point"])
    except RecursionError:  # of a tree that is too deep to be written out
        return NO_CODE
    return Extraction(program, "create_test") if program else NO_CODE


def _needed(code: str, entry_point: str) -> str:
    """The imports, and the definitions that a function uses by name, directly or not; written anew by `ast`.

    As in the release, functions without any `return` are no definitions, and of `a(b).c` only `c` counts as a name.
    """
    plain = code.replace("\t", "    ").replace("\r\n", "\n").replace("\r", "\n").strip()
    tree = ast.parse(_longest_program(plain.splitlines()[:_MOST_LINES]))
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    definitions = {name: node for node in tree.body if (name := _defined_name(node))}
    needed, found = set(), [entry_point]
    while found:
        name = found.pop()
        if name not in needed:
            needed.add(name)
            found += _names(definitions[name]) if name in definitions else []
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
    names: list[str] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Name):
            names.append(child.id)
        elif isinstance(child, ast.Attribute):
            names.append(child.attr)
        else:
            names += _names(child)
    return names
