"""Finds the boxed answer of a solution, and a normal form in which equal answers are mostly equal texts."""

import re
from itertools import islice

from refusion_eval.benchmarks import Extraction
from refusion_eval.benchmarks.extract.answers import ANSWER_LEAD, NOTHING, STATEMENT_REACH, last_statements

_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,4}\{")
_BRACES = re.compile(rf"{_BOX.pattern}|[{{}}]")
_BARE_BOX = re.compile(r"\\boxed\s{1,4}([^\s{}$\\]{1,40})")

_SPACING = re.compile(r"(?<!\\)\\[!,;: ]|\\q?quad\b|~|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle\b")
_FRACTION = re.compile(r"\\[dt]frac(?![a-z])")
_SHORT_FRACTION = re.compile(r"\\frac(?:(\d)|\{([^{}]{1,60})\})(?:(\d)|\{([^{}]{1,60})\})")
_SHORT_ROOT = re.compile(r"\\sqrt\s{0,4}(\d)")
_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|textit|textnormal)\s{0,4}\{([^{}]{0,200})\}")
_UNIT = re.compile(
    r"(?:(?<=[\d})])|(?<=\\pi))\s{0,4}\\(?:text|mbox|mathrm)\s{0,4}\{(?!\s{0,4}[apAP]\.?\s?[mM]\b)\s{0,4}[A-Za-z]"
    r"[A-Za-z./^\s\d-]{0,40}\}(?:\^(?:[23]|\{-?[1-3]\}))?\Z"
)
_PERCENT = re.compile(r"(?<=[\d})])\s{0,4}per\s?cent\Z")
_BASED_IN_BRACKETS = re.compile(r"\((-?[0-9A-Z]{1,60})\)(?=_\d{1,3}\Z)")
_DEGREES = re.compile(r"\^\s{0,4}(?:\\circ|\{\s{0,4}\\circ\s{0,4}\})")
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NAMED = re.compile(r"[A-Za-z](?:\([a-z]\))?=(?=[^=]{1,400}\Z)")
_BASED = re.compile(r"(-?(?=[A-Z]{0,20}\d)[0-9A-Z]{1,60})_(\d{1,3})")
_BRACED_BASE = re.compile(r"_\{(\d{1,3})\}\Z")
# A space that ends a command (\pi r) is part of the command; other spaces mean nothing.
_GAP = re.compile(r"(\\[A-Za-z]{1,30})?\s+(?=([A-Za-z])?)")

# Characters. A longer text is no answer and stays as it is.
_LONGEST_ANSWER = 4_000

_CLOCK = re.compile(r"(?<![A-Za-z])([ap])\.?m\b")


def last_box(text: str) -> Extraction:
    r"""The content of the last `\boxed{}`; of several boxes (an answer in parts, a correction) the last counts."""
    return _boxed(text, last=True)


def last_box_or_statement(text: str) -> Extraction:
    """The last box; without any box, what the last "the answer is" says."""
    found = last_box(text)
    if found.answer is not None:
        return found
    for start in last_statements(ANSWER_LEAD, text):
        line = text[start : start + STATEMENT_REACH].lstrip(" \t\n*_:").split("\n", 1)[0]
        answer = re.split(r"\.(?=\s|$|\*)", line, maxsplit=1)[0].strip(" \t*$.")
        answer = answer.removeprefix("\\(").removesuffix("\\)").strip(" $")
        if answer:
            return Extraction(answer, "statement")
    return NOTHING


def first_box(text: str) -> Extraction:
    """The content of the first complete box, for text that runs on."""
    return _boxed(text, last=False)


def _boxed(text: str, *, last: bool) -> Extraction:
    """Finds a box in one pass over the braces: linear, however many boxes are nested or never closed."""
    plain = text
    for escaped in ("\\\\", "\\{", "\\}"):  # these are neither commands nor braces
        plain = plain.replace(escaped, "\0\0")
    first = _BOX.search(plain)
    marks = _BRACES.findall(plain, first.start()) if first else []
    boxes: list[tuple[int, int]] = []  # depth of braces and mark of each open box
    depth = 0
    chosen: tuple[int, int] | None = None
    for number, mark in enumerate(marks):
        if mark == "{":
            depth += 1
        elif mark == "}":
            if boxes and boxes[-1][0] == depth:
                chosen = (boxes.pop()[1], number)
                if not last and not boxes:
                    break
            depth -= 1
        else:
            depth += 1
            boxes.append((depth, number))
    if first and chosen is not None:
        found = _BRACES.finditer(plain, first.start())
        start = next(islice(found, chosen[0], None)).end()
        end = next(islice(found, chosen[1] - chosen[0] - 1, None)).start()
        content = text[start:end].strip()
        return Extraction(content, "box") if content else NOTHING
    bare = _BARE_BOX.findall(text)
    return Extraction(bare[-1 if last else 0], "box without braces") if bare else NOTHING


def normalise(answer: str) -> str:
    r"""Writes an answer in one form; what it removes does not change the value.

    Removed: spacing commands, \left and \right, currency signs, degrees, a unit in \text after a number, percent
    signs (as in MATH's own grader, a percent sign is a unit: 10\% is 10, never 0.1), a name before a single "=", the
    commas of a number that is nothing but thousands groups, a final dot. Unified: \dfrac, \frac12, \sqrt2, .5, the
    brackets of vectors, (12)_5 and 12_5.
    """
    text = answer.strip().rstrip(".").strip()
    if len(text) > _LONGEST_ANSWER:
        return text
    text = _SPACING.sub(" ", text)
    text = text.replace("\\$", "").replace("$", "").replace("\\%", "").replace("%", "")
    text = _DEGREES.sub("", text)
    text = _UNIT.sub("", text)
    text = _TEXT.sub(r"\1", text)
    text = _PERCENT.sub("", text)
    text = text.replace("\\langle", "(").replace("\\rangle", ")")
    text = _FRACTION.sub(r"\\frac", text)
    text = _SHORT_FRACTION.sub(_braced_fraction, text)
    text = _BASED_IN_BRACKETS.sub(r"\1", _BRACED_BASE.sub(r"_\1", text))
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = _GAP.sub(
        lambda gap: gap.group(1) + " " if gap.group(1) and gap.group(2) else gap.group(1) or "", text.strip()
    )
    text = _NAMED.sub("", text, count=1) if _NAMED.match(text) else text
    text = f"0{text}" if re.fullmatch(r"\.\d+", text) else text
    text = re.sub(r"\A(-?\d+)\.0+\Z", r"\1", text)
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def equal_by_form(gold: str, answer: str) -> bool | None:
    """Compares two normal forms without mathematics.

    Returns:
        True if they are the same text (a number base that one of them leaves out does not count), False if they are
        numbers in different stated bases or differ in a.m. and p.m., None if only mathematics can tell.
    """
    if gold == answer:
        return True
    clocks = [_CLOCK.search(gold), _CLOCK.search(answer)]
    if clocks[0] and clocks[1] and clocks[0].group(1) != clocks[1].group(1):
        return False
    based = [_BASED.fullmatch(gold), _BASED.fullmatch(answer)]
    if based[0] and based[1]:
        return False
    digits = [found.group(1) if found else text for found, text in zip(based, (gold, answer), strict=True)]
    return True if any(based) and digits[0] == digits[1] else None


def in_one_order(gold: str, answer: str) -> tuple[str, str] | None:
    """Makes the order count where one of two normal forms is an ordered tuple: (1,4) is not 4,1.

    Returns:
        The forms to compare, with brackets around a list that has none; None if a tuple meets a set in braces.
    """
    kinds = [_kind(gold), _kind(answer)]
    if "tuple" not in kinds or kinds[0] == kinds[1]:
        return gold, answer
    if "set" in kinds:
        return None
    first, second = (f"({form})" if kind == "list" else form for form, kind in zip((gold, answer), kinds, strict=True))
    return first, second


def _kind(form: str) -> str:
    r"""The kind of a normal form with commas: a "tuple" (1,2), a "set" \{1,2\}, a bare "list"; else ""."""
    if form.startswith("\\{") and form.endswith("\\}") and form.count("\\{") == 1:
        return "set"
    depth, least, num_commas = 0, len(form), {0: 0, 1: 0}
    for position, sign in enumerate(form):
        depth += (sign in "([{") - (sign in ")]}")
        if position < len(form) - 1:
            least = min(least, depth)
        if sign == "," and depth in num_commas:
            num_commas[depth] += 1
    if num_commas[0]:
        return "list"
    return "tuple" if num_commas[1] and least == 1 and form[0] == "(" and form[-1] == ")" else ""


def _braced_fraction(found: re.Match[str]) -> str:
    numerator = found.group(1) or found.group(2)
    denominator = found.group(3) or found.group(4)
    return f"\\frac{{{numerator}}}{{{denominator}}}"
