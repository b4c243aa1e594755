"""Finds the boxed answer of a solution, and reads it as a list of formulas in one spelling."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from itertools import product

from refusion_eval.benchmarks import Extraction
from refusion_eval.benchmarks.extract import answers, frames
from refusion_eval.benchmarks.extract.frames import NOTHING, STATEMENT_REACH

_BOX = re.compile(r"\\boxed\s{0,4}(?=\{)")
# Formulas of a line between their signs, joined by words of lists; and what stands around them.
_ONE = r"(?:\$[^$\n]{1,200}\$|\\\([^\n]{1,200}?\\\))"
_INLINE = re.compile(rf"{_ONE}(?:(?:,|,? (?:and|or)) {_ONE}){{0,9}}")
_LAST = re.compile(rf"\s{{0,9}}(?:{_ONE}|[^\s$]{{1,60}}?)[\s.!*]{{0,9}}\Z")
_INLINE_SIGNS = re.compile(r"(?<!\\)\$|\\[()]")
_WORDS_BEFORE = re.compile(r"[A-Za-z ,'’:*_=-]{0,200}")
_EXPLANATION = re.compile(
    rf",? (?:{frames.REASON}|or (?:about|approximately|roughly)\b|\(|[—–] |- (?=[a-z]{{2}}))"
    r"|\.(?=\s|$|\*)|[;!]\s|[ ]\|\s{0,4}\Z"
)
# The mark of a list, a quote or a fence, or the braces of JSON, before a formula.
_MARK = re.compile(r"\s{0,9}(?:[->•]\s{1,4}|```[a-z]{0,9}\n|(?=\"))")
_QUOTES = " \t\n*_`\"'“”‘’«»「」"
_BRACKETED = re.compile(r"\A\[?[<\[(（]([^,<>()\[\]]{1,80})[>\])）]\]?\Z")
_SHORT = re.compile(r"(?![a-z]{3}|[a-z]{1,2} [a-z])[-+*/=^\d\s.,\\{}()a-z]{1,40}")
_ALONE = re.compile(
    r"(?:\A|\n[ \t]{0,9}\n)(?:[ \t*>`→∴[]|=>"
    r"|\b(?:So|Thus|Hence|Therefore|(?:It|This|That) (?:is|must be)|We get)\b,?){0,9}"
    r"(?:\$\$?\s{0,4}([^$\n]{1,200}?)\s{0,4}\$?\$"
    r"|\\[(\[]\s{0,4}([^\n]{1,200}?)\s{0,4}\\[)\]]"
    r"|((?:[A-Za-z] ?= ?)?-?[\d.,/]{1,40}|-?\d{0,40}\\(?:[dt]?frac|sqrt)[^\s$]{1,200}?))[ \t*.`\]]{0,9}\s{0,9}\Z"
)
_BOUND = re.compile(rf"\s{{0,9}}(?:a )?{frames.BOUND}\b")
_BARE_BOX = re.compile(r"\\boxed\s{1,4}([^\s{}$\\]{1,40})")

# Signs that Unicode does not take apart, as TeX writes them.
_TEX = {
    "−–—‐‑": "-", "·∙⋅": "\\cdot ", "≤⩽": "\\le ", "≥⩾": "\\ge ", "⁄∕": "/", "°º": "^\\circ ", "≈": "\\approx ",
    "✓✔✅": "", "…": "...", "±": "\\pm ", "∓": "\\mp ", "≠": "\\ne ", "∞": "\\infty ", "∪": "\\cup ", "∩": "\\cap ",
    "∈": "\\in ", "∅": "\\emptyset ", "∨": "\\lor ", "∧": "\\land ", "π": "\\pi ", "√": "\\sqrt ", "⟨": "(", "⟩": ")",
}  # fmt: skip
_SIGNS = str.maketrans({sign: command for signs, command in _TEX.items() for sign in signs})
_RAISED = re.compile("[\u00b2\u00b3\u00b9\u2070-\u207f]{1,60}")
_LOWERED = re.compile("[\u2080-\u208e]{1,60}")
_FRACTION_SIGN = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_ROOT_SIGN = re.compile(r"√\s{0,4}(\d{1,60}(?:\.\d{1,60})?|[A-Za-z]|\([^()]{1,200}\))")

_MARKDOWN = re.compile(r"""\A([*_`"]{1,3})([^*_`"].*)\1\Z""", re.DOTALL)
_DOUBLED = re.compile(r"(?<!\\)\\\\(?=[A-Za-z])")
_ENDS = re.compile(r"\A[\s=]{1,20}|(?:\\\\|[\s.,;]){1,20}\Z")
_AFTER_VALUE = r"(?:(?<=[\d})!])|(?<=\\pi)|(?<=\\pi ))\s{0,4}"
_AT_END = r"(?:\^(?:[23]|\{-?[1-3]\}))?(?=\s{0,4}(?:\Z|[,;)\]}&]|\\\}|\\\\|\\l(?:or|and)(?![A-Za-z])))"
_HALF_OF_DAY = r"[apAP]\.?\s?[mM]\b"
_ARGUMENT = r"(?:(\\pi(?![A-Za-z])|[A-Za-z\d])|\{([^{}]{1,60})\})"
_NUMBER = r"(?<![\d.,_^])\d{1,60}"

_BRACKET = re.compile(r"[(\[]|\\\{")
_THOUSANDS = re.compile(r"(?<![\d.,_^])[1-9]\d{0,2}(?:(?:,\d{3}){1,20}(?!\d|,\d)|(?:\s{1,4}\d{3}){1,20}(?!\s{0,4}\d))")


def _one_number(groups: re.Match[str]) -> str:
    """Joins groups of three digits; but between brackets a comma may part coordinates."""
    number = groups.group()
    return number if "," in number and _BRACKET.search(groups.string) else re.sub(r"[,\s]", "", number)


_LEAD_WORDS = (
    r"(?i:(?:(?:the|final|correct|so|thus|hence|therefore)[\s,]{1,4}){0,4}(?:(?:answer|ans|result|solution|value|number|total)\b"
    r"(?:\s{1,4}(?:is|equals)\b)?|(?:so|thus|hence|therefore)\b)[\s:=,.]{0,9})"
)
_DEGREES = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)?\s{0,4}\^\s{0,4}(?:\\circ(?![A-Za-z])|\{\s{0,4}\\circ\s{0,4}\})")


def _radians(degrees: re.Match[str]) -> str:
    return f"\\frac{{{degrees[1]}\\pi}}{{180}}" if degrees[1] else "\\cdot\\frac{\\pi}{180}"


def _endless(decimal: re.Match[str]) -> str:
    """The fraction of a decimal whose last digits repeat without end; one that only goes on stays rounded."""
    whole, digits, block = decimal[1] or "0", decimal[2], decimal[3] or decimal[4]
    if not block:
        repeated = re.search(r"(\d{1,9}?)\1{1,60}\Z", digits)
        if repeated is None and len(digits) > 2:
            return f"{whole}.{digits}"
        block = repeated[1] if repeated else digits[-1:]
        digits = digits[: repeated.start() if repeated else -1]
    nines = 10 ** len(block) - 1
    return f"\\frac{{{int(whole + digits) * nines + int(block)}}}{{{10 ** len(digits) * nines}}}"


# Pattern and replacement, in the order of replacing. The repetitions are bounded, so that the time stays linear.
SPELLINGS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Ends of rows, space, and marks around the whole answer.
        (r"\\\\\s{0,4}\[\s{0,4}-?[\d.]{1,9}\s{0,4}[a-z]{2}\s{0,4}\]|\\(?:cr|(?:tabular)?newline)(?![A-Za-z])", r"\\\\"),
        (r"(?<=\d)(?:,\s?\\!|\{,\})\s?(?=\d{3}(?!\d))", ""),
        (r"(?<!\\)\\!|\{\s{0,4}\}", ""),
        (
            r"(?<!\\)((?:\\\\){0,4})\\[,;:> ]|\\(?:q?quad|(?:thin|en)?space)(?![A-Za-z])|~"
            r"|\\[hv]space\*?\s{0,4}\{[^{}]{0,40}\}",
            r"\1 ",
        ),
        # Marks, lead words and a sign for "about" before or behind an answer; dots behind digits repeat them.
        (r"\\(?:checkmark|blacksquare|Box|qed)(?![A-Za-z])", ""),
        (r"\A\s{0,9}(?:\\(?:approx|simeq|sim|cong|implies|Rightarrow|therefore)(?![A-Za-z])\s{0,4})", ""),
        (
            rf"\A(\s{{0,9}}(?:\\(?:text|mathrm|mbox)[a-z]{{0,2}}\s{{0,4}}\{{)?)\s{{0,4}}{_LEAD_WORDS}(?=[\w\\$(\[-]|\}}\s{{0,9}}\S)",
            r"\1",
        ),
        (r"\A\s{0,9}([A-Za-z])\s{0,4}\\approx(?![A-Za-z])", r"\1="),
        (
            r"(\d{0,60})\.(\d{0,60})(?:\\(?:overline|bar|dot)\s?(?:\{(\d{1,9})\}|(\d))|(?<=\d)\s{0,4}(?:\\[lc]?dots(?![A-Za-z])|\.{3}))",
            _endless,
        ),
        # Size, colour and font do not change a value, nor do currency, degrees and percent signs: these are units.
        (
            r"(?<!\\)\\[()\[\]]|\\(?:(?:left|middle|right|[bB]igg?[lrm]?)(?![A-Za-z])\.?"
            r"|(?:(?:display|text|script)style|(?:script|normal)size|normalfont|tiny|small|[lL]arge|LARGE|[hH]uge)(?![A-Za-z]))",
            "",
        ),
        (r"\\(?:text)?color(?:box)?\s{0,4}\{[^{}]{0,40}\}", ""),
        (r"\{\s{0,4}\\(?:rm|bf|it|sf|tt)(?![A-Za-z])([^{}]{0,200})\}", r"\\text{\1}"),
        (
            r"\\(?:text(?:[a-z]{2}|normal)|[mh]box|math(?:rm|bf|it|sf|tt)|operatorname\*?|emph|rm|bf|it)"
            r"\s{0,4}(?=\{|\\text)",
            r"\\text",
        ),
        (r"\\(?:underline|boxed|fbox|framebox|boldsymbol|bm|rm|bf|it|sf|tt)(?![A-Za-z])", ""),
        # A degree is a unit, but beside a function it is pi/180.
        (r"(?s)\A.*\\?(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z]).*\Z", lambda form: _DEGREES.sub(_radians, form[0])),
        (r"\\?[$%]|\^\s{0,4}(?:\\circ(?![A-Za-z])|\{\s{0,4}\\circ\s{0,4}\})", ""),
        (_ENDS.pattern, ""),
        # Other ways to write binomials, powers, matrices, open ends and conditions.
        (
            r"\{([^{}]{1,60})\\choose(?![A-Za-z])([^{}]{1,60})\}|\A([^{}]{1,60})\\choose(?![A-Za-z])([^{}]{1,60})\Z",
            r"\\binom{\1\3}{\2\4}",
        ),
        (r"(?<=[\w)}\]])\s?\*\*\s?(?=[\w({\\-])", "^"),
        (r"\^(-\d{1,60})", r"^{\1}"),
        (r"\\(begin|end)\s{0,4}\{([pbvBV]?)smallmatrix\*?\}", r"\\\1{\2matrix}"),
        (
            r"[(\[]\s{0,4}\\begin\{matrix\}((?:[^\\]|\\(?!end)){0,400})\\end\{matrix\}\s{0,4}[)\]]",
            r"\\begin{pmatrix}\1\\end{pmatrix}",
        ),
        (r"(\A|\\cup|\\cap|\\in)\s{0,4}\](?=[^\[\]()]{1,80}[,;])", r"\1 ("),
        (r"([,;][^\[\]()]{1,80})\[\s{0,4}(?=\Z|\\cup|\\cap)", r"\1)"),
        (
            r"\A\s{0,9}\\\{\s{0,4}[A-Za-z]\s{0,4}(?:\\in\s{0,4}(?:\\(?:mathbb|text)\s{0,4})?\{?\s?R\s?\}?\s{0,4})?"
            r"(?:\\(?:mid|colon|vert)(?![A-Za-z])|[|:])([^|]{1,300})\\\}\s{0,9}\Z",
            r"\1",
        ),
        # One spelling of fractions, vectors and words between answers.
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (rf"\\(frac|binom)\s{{0,4}}{_ARGUMENT}\s{{0,4}}{_ARGUMENT}", r"\\\1{\2\3}{\4\5}"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"(?<![A-Za-z\\])(and|or)(?![A-Za-z])", r"\\l\1 "),
        (r"\\vee(?![A-Za-z])", r"\\lor "),
        (r"\\\}\s{0,4}\\cup\s{0,4}\\\{", ","),
        (r"\\text\s{0,4}\{\s{0,4}[,;]?\s{0,4}(\\l(?:and|or) )\s{0,4}[,;]?\s{0,4}\}", r"\1"),
        (r"\A[A-Za-z]\s?\([a-z]\)\s?=", "y="),
        # Digits: groups of three are one number, a fraction behind a number is added, other numbers are several.
        (r"([_^])(\d{1,60})\s{1,4}(?=\d)", r"\1{\2}"),
        (_THOUSANDS.pattern, _one_number),
        (rf"({_NUMBER})\s{{1,4}}(\d{{1,60}})/(\d{{1,60}})(?![\d.])", r"\1\\frac{\2}{\3}"),
        (rf"({_NUMBER}(?:\.\d{{1,60}})?)\s{{1,20}}(?=\d)", r"\1,"),
        (r"(?<!\d)\.(?=\d)", "0."),
        (r"\((-?[0-9A-Z]{1,60})\)(?=_(?:\d{1,3}|\{\d{1,3}\})\Z)", r"\1"),
        (r"_\{(\d{1,3})\}\Z", r"_\1"),
    )
)
# A unit is a text behind a value or, without \text, a word behind a value that is no product of letters.
_UNIT = re.compile(
    rf"{_AFTER_VALUE}(?:"
    rf"(?:\\text\s{{0,4}}\{{(?!\s{{0,4}}{_HALF_OF_DAY})\s{{0,4}}\(?[A-Za-z][A-Za-z./^\s\d()-]{{0,40}}\}}\s{{0,4}}/?){{1,3}}"
    r"|(?:(?:pct|percent|[ckm]m|[km]g|ft|sq|hr|min|sec|mph)\b|(?<=\s)\(?[A-Za-z]{4})[A-Za-z./\s]{0,40}\)?"
    rf"){_AT_END}"
)
_TEXT = re.compile(r"\\text\s{0,4}\{([^{}]{0,200})\}")
_FORMULA_IN_TEXT = re.compile(r"\\text(?!\{[a-z]{2,200}\})")
_WORD = re.compile(r"(?<!\\)\b[A-Za-z](?:[A-Za-z .']{0,200}[A-Za-z])?\.?")
_CLOCK = re.compile(rf"(?:(?<=:\d\d)|(?<=\d)(?=\s?[ap]\.))\s?({_HALF_OF_DAY})\.?")
# A space that ends a command (\pi r) is part of the command; other spaces mean nothing.
_GAP = re.compile(r"(\\[A-Za-z]{1,30})?\s+(?=([A-Za-z])?)")

_MARKS = re.compile(r"\\(?:begin|end|lor|land)(?![A-Za-z]) ?|\\[{}]|[()\[\]{},;]")
_OPENING = ("\\begin", "\\{", "(", "[", "{")
_CLOSING = ("\\end", "\\}", ")", "]", "}")
_RANGE = re.compile(r"\A\[|\]\Z|[<>]|\\(?:[lg]eq?(?:slant)?|lt|gt|ne|in|infty)(?![A-Za-z])")
_NAME = r"(?:\\text\{[a-z]{1,40}\}|[A-Za-z]{1,40}(?:_\{?\w{1,9}\}?|'|\([A-Za-z]\))?)"
_NAMED = re.compile(rf"\A{_NAME}(?:=|\\in ?(?![A-Za-z]))([^=]+)\Z|\A([^=]+)={_NAME}\Z")
_EQUATION = re.compile(r"=|\\in(?![A-Za-z])")
_BASED = re.compile(r"(-?(?=[A-Z]{0,20}\d)[0-9A-Z]{1,60})_(\d{1,3})")
_DOUBLE_SIGN = re.compile(r"(\\(?:pm|mp))(?![A-Za-z]) ?")
_LEADING_PLUS = re.compile(r"(?<![\w)}\]!])\+")
_PRODUCT = re.compile(r"[a-z]{1,3}")

# Characters. A longer text is not an answer and stays as it is.
_LONGEST_ANSWER = 1_000
_MOST_DOUBLE_SIGNS = 3


def last_box_or_statement(text: str) -> Extraction:
    """The last box, else the last statement, with a correction behind it; else a formula that is the last paragraph."""
    text = frames.tidy(text)
    boxed = box(text)
    if boxed.answer is not None:
        end = text.rindex(boxed.answer) + len(boxed.answer)
        return frames.corrected(text, end, _formula_after, boxed)
    if stated := frames.last_stated(text, _formula_after):
        return stated
    if alone := _ALONE.search(text):
        return Extraction(next(filter(None, alone.groups())).strip(), "formula on the last line")
    return frames.last_stated(text, None, _last_formula) or NOTHING


def _last_formula(text: str, start: int, *, is_correction: bool = False) -> Extraction | None:
    """The formula of a weaker statement, with which the text ends: "choose $k=3$" before other words states nothing."""
    return _formula_after(text, start, is_correction=is_correction) if _LAST.match(text, start) else None


def _formula_after(text: str, start: int, *, is_correction: bool = False) -> Extraction | None:
    """The formulas between signs of formulas, or the line up to its explanation."""
    if (begin := frames.after_denial(text, start)) is None:
        return Extraction(None, "a denied answer")
    mark = _MARK.match(text, begin)
    start = mark.end() if mark else begin
    line = frames.SENTENCE_END.split(text[start : start + STATEMENT_REACH].lstrip(" \t\n*_:`"), maxsplit=1)[0]
    inline = _INLINE.search(line)
    if inline and _WORDS_BEFORE.fullmatch(line[: inline.start()]) and not (is_correction and inline.start()):
        answer = inline[0]
    else:
        answer, is_framed = frames.framed(text, start)
        answer = answer if is_framed else _EXPLANATION.split(answer, maxsplit=1)[0].strip(_QUOTES).removesuffix(".")
        if is_correction and not (is_framed or _SHORT.fullmatch(answer)):
            return None
        answer = _BRACKETED.sub(r"\1", answer)
    if answer.count("}") > answer.count("{"):  # of JSON
        answer = answer[: answer.rindex("}")].strip(_QUOTES)
    if _BOUND.match(line) or _BOUND.match(answer):
        return Extraction(None, "a range, a bound or alternatives")
    answer = answers.in_digits(_INLINE_SIGNS.sub("", answer).strip())
    return Extraction(answer, "statement") if answer else None


def box(text: str, *, last: bool = True) -> Extraction:
    """The content of the last box, which of several (an answer in parts, a correction) counts, or of the first one."""
    text = frames.tidy(text)
    if boxes := list(_BOX.finditer(text)):
        region = text[boxes[-1 if last else 0].end() :]
        if content := region[1 : frames.end_of_braces(region)].strip():
            return Extraction(content, "box")
    bare = _BARE_BOX.findall(text)
    return Extraction(bare[-1 if last else 0], "box without braces") if bare else NOTHING


def normalise(answer: str, has_units: bool = False) -> str:
    """Writes an answer in one spelling; what it removes does not change the value."""
    # As in MATH's own grader, a percent sign is a unit: 10\% is 10, never 0.1. Words stay \text{word} in small letters.
    text = answer.strip()
    if len(text) > _LONGEST_ANSWER:
        return text
    words = frames.bare(text)
    if (digits := answers.in_digits(words)) != words:
        return digits
    text = _MARKDOWN.sub(r"\2", _in_ascii(text))
    if "\\begin" not in text:
        text = _DOUBLED.sub(r"\\", text)
    for pattern, replacement in SPELLINGS:
        text = pattern.sub(replacement, text)
    text = text if has_units else _UNIT.sub("", text)
    text = _TEXT.sub(lambda found: _WORD.sub(_word, found.group(1)), text)
    text = _CLOCK.sub(_word, _FORMULA_IN_TEXT.sub("", text))
    return _without_braces(_GAP.sub(lambda gap: (gap[1] or "") + (" " if gap[1] and gap[2] else ""), text.strip()))


def normal_form(kind: str, answer: str | None) -> str | None:
    """The form by which extracted answers to a benchmark of some kind are counted; only formulas have several forms."""
    return normalise(answer) if answer is not None and kind == "mathematics" else answer


def _without_braces(form: str) -> str:
    """Takes off the braces around a whole form, and the marks at the ends inside them, as in {= 12.}."""
    form = _ENDS.sub("", form)
    while (inner := _inside(form, "{", "}")) is not None:
        form = _ENDS.sub("", inner)
    return form


def _in_ascii(text: str) -> str:
    if text.isascii():
        return text
    text = _RAISED.sub(lambda run: f"^{{{run.group()}}}", text)
    text = _LOWERED.sub(lambda run: f"_{{{run.group()}}}", text)
    text = _FRACTION_SIGN.sub(
        lambda sign: "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", sign.group()).split("⁄")), text
    )
    text = _ROOT_SIGN.sub(r"\\sqrt{\1}", text)
    return unicodedata.normalize("NFKC", text.translate(_SIGNS)).translate(_SIGNS)


def _word(found: re.Match[str]) -> str:
    letters = re.sub(r"[^A-Za-z]", "", found.group())
    return letters if len(letters) == 1 else f"\\text{{{letters.lower()}}}"


def equal_answers(gold: str, answer: str, by_mathematics: Callable[[str, str], bool]) -> bool:
    """Compares the contents of two boxes as lists of answers."""
    # A list (also in braces) has no order, and \pm makes two answers of one. A tuple has an order, also beside a list
    # without brackets: (1,4) is 1,4 but neither 4,1 nor a set.
    if normalise(gold, has_units=True) == normalise(answer, has_units=True):
        return True
    if max(len(gold), len(answer)) > _LONGEST_ANSWER:
        return False

    def equal(one: str, other: str) -> bool:
        one, other = _without_name(one, other), _without_name(other, one)
        verdict = _equal_by_form(one, other)
        return by_mathematics(one, other) if verdict is None else verdict

    def equal_in_order(ones: list[str], others: list[str]) -> bool:
        return len(ones) == len(others) and all(map(equal, ones, others))

    def equal_items(one: str, other: str) -> bool:
        ones, others = _coordinates(one), _coordinates(other)
        return equal_in_order(ones, others) if ones and others else equal(one, other)

    gold, answer = normalise(gold), normalise(answer)
    gold, answer = _without_name(gold, answer), _without_name(answer, gold)
    if _equal_by_form(gold, answer):
        return True
    golds, answers = _items(gold), _items(answer)
    for ones, others, form in ((golds, answers, answer), (answers, golds, gold)):
        if len(ones) == 1 and len(others) > 1:
            return not form.startswith("\\{") and equal_in_order(_coordinates(ones[0]), others)
    for item in golds:
        match = next((number for number, other in enumerate(answers) if equal_items(item, other)), None)
        if match is None:
            return False
        del answers[match]
    return not answers


def _items(form: str) -> list[str]:
    r"""The answers that a form lists outside brackets or in braces \{ \}; ranges in a list are one answer."""
    inner = _inside(form, "\\{", "\\}")
    pieces, joints = _split(form if inner is None else inner)
    joint, needed = ("\\lor ", any) if "\\lor" in joints else ("\\land ", all)
    if len(pieces) > 1 and needed(map(_RANGE.search, pieces)):
        return [joint.join(pieces)]
    return [choice for piece in pieces if piece for choice in _choices(piece)]


def _coordinates(form: str) -> list[str]:
    """The coordinates of an ordered tuple, such as (1,2); none for any other form."""
    inner = _inside(form, "(", ")")
    pieces = [] if inner is None else [piece for piece in _split(inner)[0] if piece]
    return pieces if len(pieces) > 1 else []


def _without_name(form: str, other: str) -> str:
    """Cuts "x=" off a normal form that is an equation, if the other is not."""
    named = None if _EQUATION.search(other) else _NAMED.match(form)
    return _without_braces(named[1] or named[2]) if named else form


def _equal_by_form(gold: str, answer: str) -> bool | None:
    """Compares two normal forms as texts: True or False, or None if only mathematics can tell."""
    # A number base that one of them leaves out does not count; numbers in different stated bases differ, and so do
    # words. Letters alone are a word if they are set as text, have a capital or are more than three.
    if gold == answer or _joined(gold) == _joined(answer):
        return True
    words = [_TEXT.sub(r"\1", form).strip("()") for form in (gold, answer)]
    if all(map(str.isalpha, words)) and not (_PRODUCT.fullmatch(gold) and _PRODUCT.fullmatch(answer)):
        return words[0] == words[1] or (len(words[0]) > 1 and words[0].lower() == words[1].lower())
    if "\\text{" in gold + answer and words[0].lower() == words[1].lower():
        return True
    based = [_BASED.fullmatch(gold), _BASED.fullmatch(answer)]
    if based[0] and based[1]:
        return False
    digits = [found.group(1) if found else text for found, text in zip(based, (gold, answer), strict=True)]
    return True if any(based) and digits[0] == digits[1] else None


def _joined(form: str) -> str:
    return form.replace(",", "") if _THOUSANDS.fullmatch(form) else form


def _choices(form: str) -> list[str]:
    r"""The values of a form with \pm: several are independent of each other, unless \mp ties them together."""
    parts = _DOUBLE_SIGN.split(form)
    signs = parts[1::2]
    if not 0 < len(signs) <= _MOST_DOUBLE_SIGNS:
        return [form]
    combinations: Iterable[Sequence[str]] = product("+-", repeat=len(signs))
    if "\\mp" in signs:
        combinations = [["+-"[(sign == "\\mp") ^ lower] for sign in signs] for lower in (False, True)]
    values = ("".join(map("".join, zip(parts[::2], [*choice, ""], strict=True))) for choice in combinations)
    return [_LEADING_PLUS.sub("", value) for value in values]


def _split(form: str) -> tuple[list[str], list[str]]:
    """The pieces between the separators outside all brackets, and the separators."""
    pieces, joints, depth, start = [], [], 0, 0
    for mark in _MARKS.finditer(form):
        sign = mark.group().strip()
        depth += (sign in _OPENING) - (sign in _CLOSING)
        if depth == 0 and sign not in _CLOSING:
            pieces.append(form[start : mark.start()])
            joints.append(sign)
            start = mark.end()
    return [*pieces, form[start:]], joints


def _inside(form: str, opening: str, closing: str) -> str | None:
    """The content of two brackets that enclose the whole form; None if none do."""
    if not form.startswith(opening) or not form.endswith(closing):
        return None
    depth = 0
    for mark in _MARKS.finditer(form):
        depth += (mark.group() in _OPENING) - (mark.group() in _CLOSING)
        if depth == 0:
            return form[len(opening) : -len(closing)] if mark.end() == len(form) else None
    return None
