"""Reads the number that a statement in a model's text gives."""

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from itertools import islice

from refusion_eval.benchmarks import Extraction
from refusion_eval.benchmarks.extract.frames import (
    BOUND,
    IT_IS,
    LEAD,
    MOST_STATEMENTS,
    NOT,
    NOT_BUT,
    NOTHING,
    OR,
    STATEMENT_REACH,
    end_of,
    last_stated,
    tidy,
)

# No benchmark asks for a number of more characters; exact arithmetic on 100,000 digits would stall the scoring.
LONGEST_NUMBER = 120

# Before a number that no word or other number runs into; an underline that marks text may stand there.
APART = r"(?<![^\W_])(?<![^\W_]_)(?<![.])"
DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"

# What a plain text has in place of LaTeX and of other characters. A minus that is longer than a hyphen is mapped where
# it cannot be a dash: U+2212 and the hyphens always, the en dash where it touches a number and follows no word.
_PLAIN = {
    "{,}": ",", "\\,": "", "\\!": "", "\\;": "", "\\:": "", "\\ ": " ", "\\$": "$", "\\%": "%", "\\(": "$", "\\)": "$",
    "\u2212": "-", "\u2010": "-", "\u2011": "-", "\uff0d": "-", "\u2044": "/",
}  # fmt: skip
_BLANKS = re.compile(r"[\u00a0\u2007-\u200a\u202f]|(?<=\d)~(?=\d{3}(?!\d))")
_EN_DASH = re.compile(rf"{APART}(?<![)])\u2013(?=[\d.$])")
_EMPHASIS = re.compile(r"(?<!\d)(?<!\d )\*\*|\*\*(?!\d| \d)|__|`")  # between numbers, ** is a power
_WRAPPED_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\{([^{}]{0,80})\}")
# A minus before a blank belongs to the number where nothing but a number can follow; elsewhere it is a dash.
_MINUS_APART = re.compile(r"([={(][ \t]{0,2}|\$)-[ \t](?=\$?\.?\d)")
_MINUS_WORD = re.compile(
    r"(?i:(?:(\d[ \t]{1,3}(?:(?!but|is|and|or|so|to|not|than|rather)[a-z$%]{1,20}[ \t]{1,3})?)?\bminus|\bnegative)"
    r"[ \t]{1,3}(?=\$?\.?\d))"
)

_FRACTION = re.compile(r"(?:(\d)[ \t]?)?(?:\\[dt]?frac\{(-?\d{1,30})\}\{(\d{1,30})\}|([¼-¾⅐-⅞]))")
_MIXED = re.compile(r"(?<![\d.,/])(\d{1,9})[ \t](\d{1,9})/(\d{1,9})(?!\d)")
_GROUPS = re.compile(rf"{APART}(?<![,/])\d{{1,3}}(?:[ '’_]\d{{3}})+(?!\d|,\d|[ \t]?/|-[A-Za-z])")
_AMOUNT = r"(?:\d{1,3}(?:,\d{3}){1,12}(?!\d)|\d{1,40})(?:\.\d{1,40})?"
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"
_POWER = re.compile(
    rf"{APART}(?<![,^])(?:({_AMOUNT})[eE]([-+]?\d{{1,2}})(?!\w)"
    rf"|(?:({_AMOUNT})[ \t]?(?:[×xX*·]|\\times|\\cdot)[ \t]?(?=10[ \t]?[\^*{_SUPERSCRIPTS}]))?({_AMOUNT})"
    rf"(?:(?:[ \t]?\^[ \t]?|\*\*|[ ]\*\*[ ])"
    rf"(?:\{{(-?\d{{1,3}})\}}|\((-?\d{{1,3}})\)|(-?\d{{1,3}}))|([{_SUPERSCRIPTS}]{{1,3}})))"
)
_SIZES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SIZE = "|".join(_SIZES)
_SIZED = re.compile(
    rf"{APART}(?<!,)({_AMOUNT}(?:/\d{{1,30}})?)"
    rf"(?:((?:[ \t-]{{1,3}}(?i:{_SIZE})s?\b){{1,3}})|([kKM])\b(?![ \t]{{0,2}}[-+*/=^]))"
)
_ASKED_SIZE = re.compile(rf"(?i)\b(?:how (?:many|much)\b[^.?]{{0,40}}?|in[ \t])(?<!\d )\b({_SIZE})s?\b")

_TAIL = 4_000  # characters at the end of a text in which its last number may stand

_NUMBER = re.compile(rf"(?:{APART}(?<![)])-)?\$?(?:(?<=\$)-)?(?:{DIGITS}(?:\.\d+)?|\.\d+)(?:\s?/\s?\d+)?")
_OPENING = " \t\n*_$:\\[({\"'“‘"
_ANGLES = re.compile(r"\A<([^<>\n]{1,40})>")
_SENTENCE_END = re.compile(r"\.(?=\s|$|[*$)])|\n|;|</")
# Marks around a number or a word, which are no product: "either *5* or *6*".
_AROUND = re.compile(r"(?<![\d)][ ])(?<![\w)*])[*_`\"“”]{1,3}(?=-?\$?\w)|(?<=\w)[*_`\"“”]{1,3}(?![\w*]|\s?-?\$?\d)")
_EQUALS = re.compile(r"[=≈]|\\approx(?![a-z])")
# The mark of an item of a list is no number. Of numbered items the last one counts.
_ITEM = re.compile(r"[\s*_:]{0,8}(?:[-–—•+][ \t]{1,4}|1\)[ \t]{1,4}(?=\S))")
_MARK = r"[.)][ \t](?=[^\n]{0,200}?\d)"
_ITEMS = re.compile(rf"[ \t*_:]{{0,8}}\n[\s*_]{{0,8}}1{_MARK}(?:[^\n]{{0,400}}\n\s{{0,8}}\d{{1,2}}{_MARK}){{0,30}}")
# Blanks around a minus, because "5-6 hours" is a range.
_SIGN = r"(?:\s-\s|\s?(?:[+*×÷·]|x(?=\s?\$?\d)|\\(?:times|cdot|div)(?![a-z]))\s?)"
_UNKNOWN = r"[b-hj-z](?!\s?\$?\d)"
_TERM = rf"(?:{_NUMBER.pattern}(?:\s?{_UNKNOWN})?|{_UNKNOWN})(?![A-Za-z]|\s?\^)"
_EXPRESSION = re.compile(rf"{_TERM}(?:{_SIGN}{_TERM}){{1,9}}")
_BRACES = re.compile(r"[{}]")
_COUNT = rf"\$?{DIGITS}(?:\.\d+)?(?: {{1,3}}[A-Za-z%]{{1,20}}){{0,2}}"
_COUNTS = re.compile(rf"{_COUNT}(?:(?:,| {{1,3}}(?:and|or|&)|, (?:and|or)) {{1,3}}{_COUNT}){{1,9}}[\s*$)\].]*\Z")
_RESTATED = re.compile(rf"{_COUNT} (?:and|at|of|with) {_COUNT},? (?:or|which is|that is) ({_COUNT})[\s*$)\].]*\Z")
# What stands in brackets behind a number says it in another way, unless it rounds the number.
_ASIDE = re.compile(r"[ \t]\((?![^()\n]{0,60}\bround)[^()\n]{0,120}\)")
# Numbers that only describe: the first ones of "5 more than 10" and "3 times 14", that of "after 3 days".
_DESCRIBES = (
    r"(?:[ \t][a-z]{1,20}){0,2}"
    r"(?:[ \t](?:more|less|fewer|greater|larger|higher|lower|longer|older|younger)\b"
    r"[^.,;]{0,30}?\bthan[ \t](?:the |his |her |their )?\$?\d"
    r"|[ \t](?:times|decimals?|significant|places)\b|(?:[ \t]?%|[ \t]percent)[ \t]of\b)"
)
_DESCRIPTION = re.compile(_DESCRIBES)
# What makes a number a bound, or one of several that may be meant; and the sum of others.
_BOUND = re.compile(rf"(?:\b{BOUND}|[<>≤≥]|(?:\\|\b)[lg]eq?(?![a-z]))\s?\$?\Z")
_NO_VALUE = re.compile(
    rf"(?: [A-Za-z%]{{1,20}}){{0,2}}(?:[-–—~]|\s[–~]\s|,? (?:to|through) |{OR} )-?\$?{DIGITS}"
    r"|(?: [A-Za-z%]{1,20}){0,2}(?: (?:or|and) (?:more|less|fewer|above|below|over|under|higher|lower|greater|up)\b"
    r"|,? (?:only if|unless|depending|at (?:the )?(?:least|most)|minimum|maximum)\b)|\+(?!\s?\$?\d)"
)
_INTERVAL = re.compile(
    rf"(?i:(?:[a-z]+where )?(?:from|between)) -?\$?{DIGITS}(?:\.\d+|\s?/\s?\d+)?(?: [A-Za-z%]{{1,20}}){{0,2}}"
    rf" (?:to|and) -?\$?{DIGITS}"
)
_LONE_RANGE = re.compile(
    rf"[\W_]*?(?i:(?:it|that) is )?\$?{DIGITS}(?:\.\d+)?(?: [A-Za-z%]{{1,20}})?(?:[-–—~]|\s[-–—~]\s| to |{OR} )"
    rf"\$?{DIGITS}(?:\.\d+)?(?: [A-Za-z%]{{1,20}})?[\W_]*"
)
_TOTAL = re.compile(r"(?: [A-Za-z]{1,20}){0,3},? (?:in total|altogether|total|in all|all together|overall|combined)\b")
_COMPARED = re.compile(r",[^,()\n]{0,40} than\b[^,.\n]{0,160}")
_CIRCUMSTANCE = re.compile(
    r"(?i:\b(?:after|in|for|with|within|during|per|every|at|from|before|than|twice|double|triple|half of|sum of"
    r"|over|product of|difference (?:of|between))[ \t]{1,3}(?:the[ \t])?|\d:)\Z"
)
_SO = (
    r"so|thus|hence|therefore|round(?:s|ed|ing)?(?: it)?(?: up| down)? to"
    r"|(?:which|this|that|it) (?:makes|gives|totals|comes to)|a (?:grand )?total of|totall?ing|giving|yielding"
)


def _before_result(words: str) -> re.Pattern[str]:
    """Words that a number follows at once which describes nothing further."""
    return re.compile(
        rf"\b(?i:{words})(?:,|[ \t]{IT_IS})?[ \t]{{1,3}}(?:(?:exactly|only|just|about)[ \t])?"
        rf"(?={_NUMBER.pattern}(?![\d.,]*\d|{_DESCRIBES}))"
    )


_CONCLUSION = _before_result(_SO)
_RESULT = _before_result(rf"{_SO}|(?:which|that) (?:is|equals)|equals|or")
_SIGN_WORD = re.compile(r"(?<=\d) (plus|times|multiplied by|divided by) (?=\$?\d)")
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_NUMBER_NAMES = dict(zip([*_ONES.split(), *_TENS.split()], [*range(20), *range(20, 100, 10)], strict=True))
_NAME = rf"(?:{'|'.join(_NUMBER_NAMES)}|(?:a )?(?:{_SIZE}))"
_PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "eighth": 8}
# A number in words, directly behind a statement; "one of them" is none.
_NUMBER_WORDS = re.compile(
    rf"(?i:(?:\A(?:(?:exactly|only|just|simply|about|a total of)\s)?|(?<=\bso )|(?<=\bor )|(?<=\bto )|(?<=\bmaybe )"
    rf"|(?<=\bbetween )|(?<=\bfrom )|(?<=\bthan )|(?<=\bleast )|(?<=\bmost )|(?<=\beither ))"
    rf"({_NAME}(?:(?:-|\s|\sand\s){_NAME}){{0,12}})\b"
    rf"(?:[\s-]({'|'.join(_PARTS)})s?\b|(\sand (?:a|one) half\b))?)"
    r"(?!\s(?:of|that|which|who|way|thing|could|can|should|where|we)\b)"
)
_STRICT_NUMBER = re.compile(rf"The answer is (-?{DIGITS}(?:\.\d+)?)\.?[ \t]{{0,8}}(?:\n|\Z)")


def last_number_stated(text: str, question: str = "") -> Extraction:
    """The number of the last statement of an answer to the question; without any statement, the last number."""
    plain = plain_numbers(tidy(text), question)
    if stated := last_stated(plain, _number_after):
        return stated
    # Of the last line with numbers the last one that is no description.
    for line in reversed(plain[-_TAIL:].split("\n")):
        line = in_digits(_with_numbers(_COMPARED.sub("", _ASIDE.sub("", line)), line))
        numbers = [(number, value) for number in _NUMBER.finditer(line) if (value := _value(number[0])) is not None]
        if numbers:
            if _LONE_RANGE.fullmatch(line):
                return Extraction(None, "a range, a bound or alternatives")
            main = [value for number, value in numbers if _is_main(line, number)]
            return Extraction([*(value for _, value in numbers), *main][-1], "last number")
    return NOTHING


def first_number_stated(text: str, question: str = "") -> Extraction:
    """The number of the first statement of an answer, for text that runs on; no other number counts."""
    plain = plain_numbers(tidy(text), question)
    leads = islice(LEAD.finditer(plain), MOST_STATEMENTS)
    return next((stated for lead in leads if (stated := _number_after(plain, end_of(lead))) is not None), NOTHING)


def strict_number(text: str) -> Extraction:
    numbers = _STRICT_NUMBER.findall(text)
    return Extraction(_value(numbers[-1]), "asked-for form") if numbers else NOTHING


def _value(text: str) -> str | None:
    value = parse_number(text)
    return None if value is None else show_number(value)


def _number_after(text: str, start: int, *, is_correction: bool = False) -> Extraction | None:
    """The number of the sentence that begins at `start`; None if the sentence has no number."""
    # Of "not 5 but 6" it is the second number, of an equation the one after its last "=", of arithmetic the value, and
    # else the first one that is no description; a conclusion in the same sentence ("so 15") replaces it. A denied
    # number, a range, a bound, an expression with unknowns and several counts are a statement without a number.
    denied = NOT_BUT.match(text, start)
    negation = None if denied else NOT.match(text, start)
    item = _ITEMS.match(text, denied.end() if denied else start) or _ITEM.match(text, denied.end() if denied else start)
    start = next((found.end() for found in (item, denied, negation) if found), start)
    sentence = _ANGLES.sub(r"\1", text[start : start + STATEMENT_REACH].lstrip(_OPENING))
    sentence = _AROUND.sub("", _SENTENCE_END.split(sentence, maxsplit=1)[0])
    sentence = _SIGN_WORD.sub(_sign, _NUMBER_WORDS.sub(_digits, sentence))
    if (is_correction or negation) and not re.match(rf"(?:{BOUND} )?{_NUMBER.pattern}", sentence):
        return None
    if negation:
        return Extraction(None, "a denied number")
    sentence = _with_numbers(_ASIDE.sub("", sentence), sentence)
    first = _NUMBER.search(sentence)
    stands_alone = first is None or (_is_main(sentence, first) and not _EXPRESSION.match(sentence, first.start()))
    results = (_CONCLUSION if stands_alone else _RESULT).finditer(sentence)
    sentence = sentence[max((found.end() for found in results), default=0) :]
    *left_sides, result = _EQUALS.split(sentence)
    for part in (result.lstrip(" $("), sentence) if left_sides else (sentence,):
        expression = _EXPRESSION.match(part)
        if expression:
            return Extraction(_arithmetic(expression[0]), "statement of an expression")
        numbers = [(number, value) for number in _NUMBER.finditer(part) if (value := _value(number[0])) is not None]
        if restated := _RESTATED.match(part):
            return Extraction(_value(_NUMBER.findall(restated[1])[0]), "statement")
        total = [(number, value) for number, value in numbers if _TOTAL.match(part, number.end())]
        if not total and len({value for _, value in numbers}) > 1 and _COUNTS.match(_BRACES.sub(" ", part)):
            return Extraction(None, "a statement of several numbers")
        if numbers:
            main = [one for one in numbers if left_sides or _is_main(part, one[0])]
            number, value = [*total, *main, *numbers][0]
            if _INTERVAL.match(part) or _BOUND.search(part[: number.start()]) or _NO_VALUE.match(part, number.end()):
                return Extraction(None, "a range, a bound or alternatives")
            return Extraction(value, "statement")
    return None


def _with_numbers(shorter: str, text: str) -> str:
    return shorter if _NUMBER.search(shorter) else text


def in_digits(text: str) -> str:
    """The digits of a number in words that is all of a text, else the text."""
    words = _NUMBER_WORDS.match(text)
    return _digits(words) if words and not text[words.end() :].strip(" .") else text


def _sign(word: re.Match[str]) -> str:
    return {"p": "+", "t": "*", "m": "*", "d": "÷"}[word[1][0]]


def _digits(written: re.Match[str]) -> str:
    """The digits of a number in words."""
    total = current = 0
    for word in re.findall("[a-z]+", written[1].lower()):
        size = _SIZES.get(word, 1)
        current = max(current, 1) * size if size > 1 else current + _NUMBER_NAMES.get(word, 0)
        if size >= 1000:
            total, current = total + current, 0
    value = Fraction(total + current)
    if written[3]:
        value += Fraction(1, 2)
    return show_number(value / _PARTS.get((written[2] or "").lower().rstrip("s"), 1))


def _is_main(sentence: str, number: re.Match[str]) -> bool:
    before = sentence[max(number.start() - 60, 0) : number.start()]
    return not (_DESCRIPTION.match(sentence, number.end()) or _CIRCUMSTANCE.search(before))


def _arithmetic(expression: str) -> str | None:
    """The value of numbers between signs; None with unknowns, or after a division by zero."""
    number, *others = re.split(f"({_SIGN})", expression)
    total, product = Fraction(0), parse_number(number)
    for sign, number in zip(map(str.strip, others[::2]), others[1::2], strict=True):
        factor = parse_number(number)
        is_division = sign in ("÷", "\\div")
        if product is None or factor is None or (is_division and not factor):
            return None
        if sign in ("+", "-"):
            total, product = total + product, factor if sign == "+" else -factor
        else:
            product = product / factor if is_division else product * factor
    return None if product is None else show_number(total + product)


def parse_number(text: str) -> Fraction | None:
    """Reads a number as people write it (commas, currency, percent sign, fraction, final dot); None for other text."""
    plain = re.sub("[$, ]", "", text.replace("−", "-")).rstrip("%.")
    parts = re.fullmatch(r"(-?(?:\d+(?:\.\d+)?|\.\d+))(?:/(\d+))?", plain)
    if parts is None or len(plain) > LONGEST_NUMBER or not (denominator := int(parts[2] or 1)):
        return None
    return Fraction(parts[1]) / denominator


def show_number(value: Fraction) -> str:
    """Writes a number in one way: an integer or an exact decimal if it is one, else a fraction."""
    if value.denominator == 1:
        return format(Decimal(value.numerator), "f")  # which, unlike `str`, writes any number of digits
    scaled = value * 10**70
    if scaled.denominator != 1 or value.denominator > 10**20:
        return f"{value.numerator}/{value.denominator}"
    return format(Decimal(scaled.numerator).scaleb(-70).normalize(), "f")


def plain_numbers(text: str, question: str = "") -> str:
    """Writes every number of a text in plain digits, so that one pattern finds them all."""
    # Powers (6^2, 3e6) and sizes (3 million, 20K) become numbers such as 3000000, but a size that the question asks for
    # ("how many dozens") is a unit.
    for written, plain in _PLAIN.items():
        text = text.replace(written, plain)
    text = _WRAPPED_TEXT.sub(r"\1", _EN_DASH.sub("-", _EMPHASIS.sub("", _BLANKS.sub(" ", text))))
    text = re.sub(r"(?<=[^\s]) {2,9}(?=\S)", " ", text)
    text = _GROUPS.sub(lambda number: re.sub(r"\D", "", number[0]), _FRACTION.sub(_with_slash, text))
    text = _POWER.sub(_power, _MIXED.sub(_improper, text))
    asked = {size.lower() for size in _ASKED_SIZE.findall(question)}
    text = _SIZED.sub(lambda number: _sized(number, asked), text)
    return _MINUS_WORD.sub(lambda word: f"{word[1]}- " if word[1] else "-", _MINUS_APART.sub(r"\1-", text))


def _with_slash(fraction: re.Match[str]) -> str:
    whole, numerator, denominator, sign = fraction.groups()
    plain = unicodedata.normalize("NFKC", sign).replace("\u2044", "/") if sign else f"{numerator}/{denominator}"
    return f"{whole} {plain}" if whole else plain


def _improper(mixed: re.Match[str]) -> str:
    whole, numerator, denominator = map(int, mixed.groups())
    return f"{whole * denominator + numerator}/{denominator}"


def _power(written: re.Match[str]) -> str:
    mantissa, ten_power, factor, base, *exponents = written.groups()
    exponent = int(ten_power or unicodedata.normalize("NFKC", next(filter(None, exponents))).replace("\u2212", "-"))
    value = parse_number(base or "10")
    if value is None or abs(exponent) * len(base or "10") > LONGEST_NUMBER or (not value and exponent < 0):
        return written[0]
    return show_number(value**exponent * (parse_number(mantissa or factor or "1") or 0))


def _sized(written: re.Match[str], asked: set[str]) -> str:
    value = parse_number(written[1])
    words = re.findall(_SIZE, (written[2] or "").lower())
    if value is None or asked & set(words):
        return written[0]
    for size in words:
        value *= _SIZES[size]
    return show_number(value * {"K": 1_000, "k": 1_000, "M": 1_000_000}.get(written[3] or "", 1))
