"""Reads and writes numbers: one way to write each value, and one plain form for every way in which models write it."""

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

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
_BLANKS = re.compile(r"[\u00a0\u2007-\u200a\u202f]|(?<=\d)~(?=\d)")
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


def parse_number(text: str) -> Fraction | None:
    """Reads a number as people write it (commas, currency, percent sign, fraction, final dot); None for other text."""
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


def plain_numbers(text: str, question: str = "") -> str:
    r"""Writes every number of a text in plain digits, so that one pattern finds them all.

    Powers (`6^2`, `3 \times 10^6`, 3e6) and sizes (3 million, 20K, 3 dozen) become numbers such as 3000000, but a size
    that the question asks for ("how many dozens") is a unit.
    """
    for written, plain in _PLAIN.items():
        text = text.replace(written, plain)
    text = _WRAPPED_TEXT.sub(r"\1", _EN_DASH.sub("-", _EMPHASIS.sub("", _BLANKS.sub(" ", text))))
    text = _GROUPS.sub(lambda number: re.sub(r"\D", "", number[0]), _FRACTION.sub(_with_slash, text))
    text = _POWER.sub(_power, _MIXED.sub(_improper, text))
    asked = {size.lower() for size in _ASKED_SIZE.findall(question)}
    text = _SIZED.sub(lambda number: _sized(number, asked), text)
    return _MINUS_WORD.sub(lambda word: f"{word[1]}- " if word[1] else "-", _MINUS_APART.sub(r"\1-", text))


def _with_slash(fraction: re.Match[str]) -> str:
    """A fraction with its slash; behind a digit it is the second part of a mixed number."""
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
