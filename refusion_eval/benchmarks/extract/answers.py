"""Finds the answer in a model's text: numbers and letters of choices (formulas and programs have their own modules).

Two rules hold everywhere. The last statement of an answer counts, because a model may correct itself; a base model that
runs on into invented questions needs the filter that takes the first one instead. And every scan is linear in the
length of the text: patterns repeat single characters or are bounded, so no text can stall the scoring.
"""

import re
from collections import deque
from decimal import Decimal
from fractions import Fraction
from itertools import islice

from refusion_eval.benchmarks import LETTERS, Extraction

NOTHING = Extraction(None, "no answer found")


# Characters after "the answer is" in which an answer may stand.
STATEMENT_REACH = 240

# Characters at the end of a text in which its last number may stand.
_TAIL = 4_000

# Statements that are looked at in one text, from its end (or start, where the first counts). A model that makes more
# of them is stuck.
MOST_STATEMENTS = 50

# No benchmark asks for a number of more characters; exact arithmetic on 100,000 digits would stall the scoring.
LONGEST_NUMBER = 120

_ANSWER = r"(?i:\banswers?\b[^\n.:=]{0,40}?(?:\bis\b|\bare\b|:|=))"
ANSWER_LEAD = re.compile(_ANSWER)
_NUMBER_LEAD = re.compile(_ANSWER + r"|^[ \t]{0,8}A:|####|\\boxed\b", re.MULTILINE)
_BEST = r"(?:most )?(?:correct|right|best|accurate|appropriate)"
_CHOICE_LEAD = re.compile(
    rf"(?i:\b(?:answers?|(?:{_BEST}|closest) (?:option|choice|statement))\b[^\n.:=]{{0,40}}?"
    r"(?:\b(?:is|are|(?:would|should|must|will) be)\b|:|=))"
    # "Option D is the correct answer", "D is the best choice": such a lead ends where the letter begins.
    r"|(?i:(?<!if )(?<!nor )(?<!whether )\b(?:option|choice|answer)[ \t]"
    rf"(?=[*(]{{0,3}}[a-z][*)]{{0,3}} is (?:the )?{_BEST}\b))"
    rf"|(?<!\w)(?=[*(]{{0,3}}[A-Z][*)]{{0,3}} is the {_BEST} (?:answer|option|choice)\b)"
    r"|\\boxed\b"
    r"|\bis:[ \t*_]{0,4}(?=\n\s{0,4}[*(]{0,3}[A-Z][*]{0,2}[).])"
)

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(rf"(?:(?<![\w.)])[-−]\s?)?\$?(?:(?<=\$)[-−])?(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:\s?/\s?\d+)?")
_MIXED = re.compile(r"(?<![\d.,])(\d{1,9})\s(\d{1,9})/(\d{1,9})(?!\d)")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d{1,30})\}\{(\d{1,30})\}")
_SENTENCE_END = re.compile(r"\.(?=\s|$|[*$)])|\n|;")
_NOT_BUT = re.compile(r"\s{0,4}not\b[^.\n=]{1,60}?\bbut\b")
# Blanks around a minus, because "5-6 hours" is a range.
_SIGN = r"(?:\s[-−]\s|\s?(?:[+*×÷·]|x(?=\s?\$?\d)|\\(?:times|cdot|div)(?![a-z]))\s?)"
_UNKNOWN = r"[b-hj-z](?!\s?\$?\d)"
_TERM = rf"(?:{_NUMBER.pattern}(?:\s?{_UNKNOWN})?|{_UNKNOWN})(?![A-Za-z]|\s?\^)"
_EXPRESSION = re.compile(rf"{_TERM}(?:{_SIGN}{_TERM}){{1,9}}")
_MARKUP = re.compile(r"\\(?:text|mathrm|mbox)\b|[{}]")
_COUNT = rf"\$?{_DIGITS}(?:\.\d+)?(?: {{1,3}}[A-Za-z%]{{1,20}}){{0,2}}"
_COUNTS = re.compile(rf"{_COUNT}(?:(?:,| {{1,3}}(?:and|or|&)|, (?:and|or)) {{1,3}}{_COUNT}){{1,9}}[\s*$)\].]*\Z")
_STRICT_NUMBER = re.compile(rf"The answer is (-?{_DIGITS}(?:\.\d+)?)\.?[ \t]{{0,8}}(?:\n|\Z)")

_OPENING = r"(?:[\s*_$`\"':(\[{}]|\\[(\[]|\\boxed\b|\\(?:text|math)(?:bf|rm|it|sf)?\b|\b(?i:option|choice|letter)\b)"
_CHOICE = re.compile(rf"({_OPENING}{{0,24}})([A-Za-z])(?![A-Za-z0-9'’])")
_STRICT_CHOICE = re.compile(r"The answer is \(([A-Z])\)")
_FIRST_CHOICE = re.compile(r"answer is \(?([A-J])\)?")
_CLOSING = r"[*_$)\]}`\"']{0,6}"
# What makes a letter part of a formula: "C(6, 3)", "A - B =", "x_1", "A \cap B"; "B - the text" is a choice.
_OPERATION = r"cdot|times|cap|cup|div|pm|to|leq?|geq?|approx|equiv|subset|setminus|oplus|wedge|vee|frac|sqrt"
_IN_FORMULA = re.compile(
    r"\(\s?(?:[\d\\]|[A-Za-z]\s?[,)])|[\^_][\w{\\]|[*/][A-Za-z\d]"
    rf"|[ \t]{{0,3}}(?:[+×·]|=(?!>)|[<>][ \t]|\\(?:{_OPERATION})\b"
    r"|[-−–][ \t]?(?:[A-Za-z\d]{1,4}[ \t]?[-−+*/=^]|[A-Z](?!\w)))"
)
_DENIED = re.compile(
    rf"{_CLOSING}[ \t]{{1,3}}(?:(?:isn|wasn|can|doesn)['’]t\b|cannot\b|does not\b"
    r"|(?:is|are|was|would be|must be)[ \t]{1,3}(?:not|never|incorrect|wrong|false|invalid|ruled out|eliminated)\b)"
)
_FURTHER_LETTER = re.compile(
    rf"{_CLOSING}(?:[ \t]?[,;&/]|[ \t](?:and|or)\b|,[ \t](?:and|or)\b)[ \t]{{0,3}}(?i:option |choice )?[*_$(\[]{{0,3}}"
    r"([A-Z])(?![\w'’]|[)*\]]{0,3}[ \t](?!(?:and|or|because|since|as)\b)[a-z])"
)
_PART = re.compile(r"[)*\]]{1,3}:?[ \t]{1,3}(?!(?:because|since|as|is)\b)[\w$\\-]")
_LONE_LETTER = re.compile(r"[*_$(\[ \t]{0,8}([A-Za-z])[*_$)\].: \t]{0,8}\Z")
_LABELLED_LINE = re.compile(r"[*_(\[ \t-]{0,8}([A-Z])[*_]{0,3}[)\].:]")


def parse_number(text: str) -> Fraction | None:
    """Reads a number as people write it: thousands commas, a currency or percent sign, a fraction, a final dot.

    Returns:
        The exact value (so "42", "42.00" and "84/2" are equal), or None if the text is no number.
    """
    plain = text.replace("−", "-").replace("$", "").replace(",", "").replace(" ", "").rstrip("%.")
    numerator, slash, denominator = plain.partition("/")
    if len(plain) > LONGEST_NUMBER or not re.fullmatch(r"-?(?:\d+(?:\.\d+)?|\.\d+)", numerator):
        return None
    value = Fraction(Decimal(numerator))
    if not slash:
        return value
    if not denominator.isdecimal() or int(Decimal(denominator)) == 0:
        return None
    return value / int(Decimal(denominator))


def show_number(value: Fraction) -> str:
    """Writes a number in one way: an integer or an exact decimal if it is one, else a fraction."""
    if value.denominator == 1:
        return format(Decimal(value.numerator), "f")
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    if rest != 1 or value.denominator > 10**20:
        return f"{value.numerator}/{value.denominator}"
    places = max(len(bin(value.denominator)), 1)
    scaled = value * 10**places
    return format(Decimal(scaled.numerator).scaleb(-places).normalize(), "f")


def last_number_stated(text: str) -> Extraction:
    """The number of the last statement of an answer; without any statement, the last number of the text."""
    plain = _plain_numbers(text)
    for start in last_statements(_NUMBER_LEAD, plain):
        found = _number_after(plain, start)
        if found is not None:
            return found
    written = _NUMBER.findall(_MIXED.sub(_improper, plain[-_TAIL:]))
    number = next((value for value in map(_value, reversed(written)) if value is not None), None)
    return NOTHING if number is None else Extraction(number, "last number")


def first_number_stated(text: str) -> Extraction:
    """The number of the first statement of an answer, for text that runs on; no other number counts."""
    plain = _plain_numbers(text)
    for lead in islice(_NUMBER_LEAD.finditer(plain), MOST_STATEMENTS):
        found = _number_after(plain, lead.end())
        if found is not None:
            return found
    return NOTHING


def strict_number(text: str) -> Extraction:
    """The last line that ends in exactly the form the prompt asks for: "The answer is 42."."""
    numbers = _STRICT_NUMBER.findall(text)
    return Extraction(_value(numbers[-1]), "asked-for form") if numbers else NOTHING


def last_letter_stated(text: str, num_choices: int) -> Extraction:
    """The letter of the last statement of an answer; without one, an answer that is nothing but a choice's label."""
    valid = LETTERS[:num_choices]
    for start in last_statements(_CHOICE_LEAD, text):
        letter = _letter_after(text, start, valid)
        if letter is not None:
            return Extraction(letter, "statement")
    return _letter_line(text, valid)


def first_letter_stated(text: str, num_choices: int) -> Extraction:
    """The first "answer is (X)", by the pattern of MMLU-Pro's authors, for base models whose text runs on.

    The pattern is unchanged, so that recorded results can be reproduced. The letter may lie outside the row's choices,
    and is wrong then.
    """
    del num_choices
    choice = _FIRST_CHOICE.search(text)
    return Extraction(choice.group(1), "first statement") if choice else NOTHING


def strict_letter(text: str, num_choices: int) -> Extraction:
    """The last "The answer is (X)", exactly as the prompt asks for it."""
    letters = [letter for letter in _STRICT_CHOICE.findall(text) if letter in LETTERS[:num_choices]]
    return Extraction(letters[-1], "asked-for form") if letters else NOTHING


def _plain_numbers(text: str) -> str:
    """Writes LaTeX's thousands, currency, percent signs and fractions as plain text."""
    for latex, plain in (("{,}", ","), ("\\,", ""), ("\\!", ""), ("\\$", "$"), ("\\%", "%")):
        text = text.replace(latex, plain)
    return _LATEX_FRACTION.sub(r"\1/\2", text)


def _improper(mixed: re.Match[str]) -> str:
    whole, numerator, denominator = map(int, mixed.groups())
    return f"{whole * denominator + numerator}/{denominator}"


def _value(text: str) -> str | None:
    value = parse_number(text)
    return None if value is None else show_number(value)


def _number_after(text: str, start: int) -> Extraction | None:
    """The number of the sentence that begins at `start`: after its last "=", after "not 5 but", else its first.

    Of arithmetic it is the value. An expression with unknowns and several different counts are no number, but they are
    a statement. None if the sentence has no number.
    """
    denied = _NOT_BUT.match(text, start)
    start = denied.end() if denied else start
    sentence = _MIXED.sub(_improper, text[start : start + STATEMENT_REACH]).lstrip(" \t\n*_$:\\[({")
    sentence = _SENTENCE_END.split(sentence, maxsplit=1)[0]
    _, equals, result = sentence.rpartition("=")
    for part in (result.lstrip(" $("), sentence) if equals else (sentence,):
        expression = _EXPRESSION.match(part)
        if expression:
            return Extraction(_arithmetic(expression[0]), "statement of an expression")
        numbers = [value for value in map(_value, _NUMBER.findall(part)) if value is not None]
        if len(set(numbers)) > 1 and _COUNTS.match(_MARKUP.sub(" ", part)):
            return Extraction(None, "a statement of several numbers")
        if numbers:
            return Extraction(numbers[0], "statement")
    return None


def _arithmetic(expression: str) -> str | None:
    """The value of numbers between signs; None with unknowns, or after a division by zero."""
    number, *others = re.split(f"({_SIGN})", expression)
    total, product = Fraction(0), parse_number(number)
    for sign, number in zip(map(str.strip, others[::2]), others[1::2], strict=True):
        factor = parse_number(number)
        is_division = sign in ("÷", "\\div")
        if product is None or factor is None or (is_division and not factor):
            return None
        if sign in ("+", "-", "−"):
            total, product = total + product, factor if sign == "+" else -factor
        else:
            product = product / factor if is_division else product * factor
    return None if product is None else show_number(total + product)


def _letter_after(text: str, start: int, valid: str) -> str | None:
    """The letter directly after a lead, if it is the label of one choice: no word, formula, denial, list or part."""
    found = _CHOICE.match(text[start : start + STATEMENT_REACH])
    if found is None or found.group(2).upper() not in valid:
        return None
    letter = found.group(2)
    rest = text[start + found.end() : start + found.end() + STATEMENT_REACH]
    is_wrapped = found.group(1)[-1:] in ("(", "[", "{", "*", "_", "`", '"', "'")
    is_word = re.match(r"[ \t]+(?!(?:because|since|as|is)\b)[a-z]", rest)
    if is_word and not is_wrapped and (letter.islower() or letter == "I"):
        return None
    if _IN_FORMULA.match(rest) or _DENIED.match(rest):
        return None
    further = _FURTHER_LETTER.match(rest)
    if further and further.group(1) in valid:
        return None
    if letter.islower() and _is_part(letter, rest):
        return None
    return letter.upper()


def _is_part(letter: str, rest: str) -> bool:
    """Whether a small letter labels the first part of an answer: "(a) 5 m, (b) 6 m" or "(i) mass, (ii) time"."""
    if not _PART.match(rest):
        return False
    following = [chr(ord(letter) + 1), *(["ii"] if letter == "i" else [])]
    return any(re.search(rf"(?<![A-Za-z]){re.escape(label)}\)", rest) for label in following)


def _letter_line(text: str, valid: str) -> Extraction:
    """An answer without a statement: a letter alone on the last line, or a choice with its label at the start."""
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    if not lines:
        return NOTHING
    labels = [label.group(1) for label in map(_LABELLED_LINE.match, dict.fromkeys(lines[:-1])) if label]
    lone = _LONE_LETTER.match(lines[-1]) if len(lines[-1]) <= 24 else None
    if lone and lone.group(1) != "i" and lone.group(1).upper() in valid:
        # After a list of choices the letter is the label of the next one, where the text was cut off.
        is_label = len(labels) > 1 or chr(ord(lone.group(1)) - 1) in labels
        return NOTHING if is_label else Extraction(lone.group(1).upper(), "letter on the last line")
    first = _LABELLED_LINE.match(lines[0])
    if first is None or first.group(1) not in valid.replace("I", "") or lines.count(lines[0]) > 1:
        return NOTHING
    is_only = not any(map(_LABELLED_LINE.match, lines[1:]))
    return Extraction(first.group(1), "label before the choice") if is_only else NOTHING


def last_statements(lead: re.Pattern[str], text: str) -> list[int]:
    """The end offsets of the last statements that a pattern finds, the last one first."""
    ends = deque((found.end() for found in lead.finditer(text)), maxlen=MOST_STATEMENTS)
    return list(reversed(ends))
