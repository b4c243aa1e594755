"""Finds the letter of a choice in a model's text."""

import re

from refusion_eval.benchmarks import LETTERS, Extraction
from refusion_eval.benchmarks.extract.frames import (
    BEST,
    CLOSE,
    NOTHING,
    OPEN,
    OR,
    SENTENCE_END,
    STATEMENT_REACH,
    Reader,
    after_denial,
    concluded,
    last_stated,
    tidy,
)

_FILL = (
    r"\b(?:therefore|thus|hence|then|so|indeed|just|still|again|also|now|perhaps|maybe|most|[a-z]{2,12}ly|in fact"
    r"|of course|i think|i believe|labell?ed)\b,?|\b(?i:the )?(?i:option|choice|letter)\b"
)
_TAG = r"</?[A-Za-z]{1,10}>"
_CHOICE = re.compile(
    rf"((?:[\s*_$`\"'“‘«:,<(\[{{}}（【「『]|[-•>][ \t]"
    rf"|{_TAG}|\\[(\[]|\\boxed\b|\\(?:text|math)(?:bf|rm|it|sf)?\b|{_FILL}){{0,24}})"
    r"([A-Za-z])(?![A-Za-z0-9#]|\+\+|['’-]\w)"
)
_WRAPPERS = frozenset("([{*_`\"'“‘（【「『>")
_STRICT_CHOICE = re.compile(r"The answer is \(([A-Z])\)")
_FIRST_CHOICE = re.compile(r"answer is \(?([A-J])\)?")
_CLOSING = rf"(?:[*_$)\]}}`\"'”’»）】」』>]|{_TAG}){{0,6}}"
# What makes a letter part of a formula: "C(6, 3)", "A - B =", "x_1", "A \cap B"; "B - the text" is a choice.
_OPERATION = r"cdot|times|cap|cup|div|pm|to|leq?|geq?|approx|equiv|subset|setminus|oplus|wedge|vee|frac|sqrt"
_IN_FORMULA = re.compile(
    r"\(\s?(?:[\d\\]|[A-Za-z]\s?[,)])|[\^_](?!_)[\w{\\]|[*/][A-Za-z\d]"
    rf"|[ \t]{{0,3}}(?:[+×·]|=(?!>)|[<>][ \t]|\\(?:{_OPERATION})\b"
    r"|[-−–][ \t]?(?:[A-Za-z\d]{1,4}[ \t]?[-−+*/=^]|[A-Z](?!\w)))"
)
_DENIED = re.compile(
    rf"{_CLOSING}[ \t]{{1,3}}(?:(?:isn|wasn|can|doesn)['’]t\b|cannot\b|does not\b"
    r"|(?:is|are|was|would be|must be)[ \t]{1,3}(?:not|never|incorrect|wrong|false|invalid|ruled out|eliminated)\b"
    r"|(?:only[ \t])?(?:if|unless|provided|assuming)\b|only[ \t](?:when|for|in)\b)"
)
_FURTHER_LETTER = re.compile(
    rf"{_CLOSING}(?:{OR}|[ \t]?[,;&/]|,?[ \t]and\b)[ \t]{{0,3}}"
    r"(?i:option |choice ){0,2}[*_$`<(\[]{0,3}([A-Z])(?![A-Za-z0-9'’]|[)*\]]{0,3}[ \t]"
    r"(?!(?:and|or|because|since|as)\b)[a-z])"
)
_PART = re.compile(r"[)*\]]{1,3}:?[ \t]{1,3}(?!(?:because|since|as|is)\b)[\w$\\-]")
# A bare letter before any other word is part of a text: "A car", "B cells".
_CONNECTIVE = (
    r"because|since|as|is|was|which|who|that|and|or|but|not|with|for|from|due|given|by|based|in|on|at|when|where|while"
    r"|so|thus|therefore|although|though|if|unless|only|also|here|rather|instead|according|followed|provided|assuming"
)
_WORD = re.compile(rf"[ \t]+(?!(?:{_CONNECTIVE})\b)[a-z]")
_WORD_AFTER_SMALL = re.compile(r"[ \t]+(?!(?:because|since|as|is)\b)[a-z]")
# The label of a choice behind its text: "(C)", "option C".
_LABEL = re.compile(
    r"(?:(?i:\b(not|nor|than|except|unlike|of|like|versus)[ \t]{1,3}))?"
    r"(?:[(\[（【][*_$ ]{0,3}(?i:option |choice |answer )?([A-Za-z])[*_$ ]{0,3}[)\]）】]"
    r"|\b(?i:option|choice|letter)[ \t]{1,2}[*_$\"'“‘]{0,4}([A-Z])(?![\w'’]))"
)
# Letters of one list, and the words that rule them out.
_ONE_LETTER = rf"{OPEN}[A-Z]{CLOSE}(?![\w'’])"
_LETTERS = (
    rf"{OPEN}[A-Z]{CLOSE}(?:(?:,|/| &)[ ]?(?i:option |choice )?{OPEN}[A-Z]{CLOSE}){{0,9}}"
    rf"(?:,? (?:and|or|nor) (?i:option |choice )?{OPEN}[A-Z]{CLOSE}){{0,9}}(?![\w'’])"
)
_RULED_OUT = re.compile(
    r"(?:(?i:\b(?:not|nor|neither|never|except|unlike|than|instead of|versus|besides|aside from|none of|cannot(?: be)?"
    r"|(?:anything|all) but|other than"
    r"|(?:rul|eliminat|exclud|remov|discard|reject|dismiss|cross)(?:e|es|ed|ing|s)?(?: out)?)|n['’]t(?: be)?)"
    rf"[ ](?i:(?:either|both|the|options?|choices?|answers?)[ ]){{0,3}}{_LETTERS})"
    rf"|(?:{_ONE_LETTER}[ ](?:is|was|has been|being)|{_LETTERS}[ ](?:are|were|have been|being))[ ](?:[a-z]{{1,12}}[ ])?"
    r"(?:not|wrong|incorrect|false|out|ruled|eliminated|excluded|invalid|impossible)\b"
    rf"|{_ONE_LETTER}[ ](?:(?:is|ca|does)n['’]t\b|cannot\b|fails\b|does not\b)"
    rf"|{_LETTERS}[ ](?:(?:are|ca|do)n['’]t|fail)\b"
)
_BARE_LETTER = re.compile(
    r"(?<![A-Za-z0-9'’+#^/-])(?<![A-Za-z0-9]_)(?!I [a-z]|A (?!or |and |nor )[a-z])([A-Z])(?![A-Za-z0-9'’#+^]|-\w)"
)
# "Vitamin D, option A": the letter before the comma is a part of a name.
_LABEL_OF_A_WORD = re.compile(r"[ ]?,[ ](?i:option|choice|letter)\b")
# The place of a sentence where a letter by itself is what it says.
_ASSERTED = re.compile(
    r"(?:\A|[,:;—–=][ ]?|\b(?i:is|['’]s|are|be|say|so|thus|hence|therefore|leav(?:es|ing)|means|with|us|pick|choose"
    r"|select|to|but|option|choice|letter|only|[a-z]{2,12}ly)[ ])(?i:(?:the |option |choice |letter |answer ){0,2})"
    rf"{OPEN}([A-Z]){CLOSE}(?=[ ]?(?:\Z|[,;!—]|\.(?![ ][a-z]))|[ ](?:because|since|as|remains?|fits?|works?|holds?"
    rf"|is (?:left|true|the )|is {BEST})\b)"
)
_AFTER_LABEL = re.compile(rf"{_CLOSING}(?:\s{{0,9}}\Z|,?[ \t](?:because|since|as)\b)")
_ENDS_A_CORRECTION = re.compile(rf"{_CLOSING}(?:[.,;!?\n]|\Z|[ \t](?:because|since|as)\b)")

# An answer without any statement.
_ALONE = (
    rf"(?:[*_$`(\[ \t\"'“‘（【#<>←-⇿∴]|=(?=>)|{_TAG}){{0,8}}"
    rf"(?:(?i:option|choice|answer|letter)[ \t]{{1,2}}[*_$(]{{0,4}})?"
    rf"([A-Za-z])(?:[*_$`)\].: \t\"'”’）】>]|{_TAG}){{0,8}}"
)
_LONE_LETTER = re.compile(rf"{_ALONE}\Z")
_LONE_PARAGRAPH = re.compile(rf"\s{{0,9}}{_ALONE}\n[ \t]{{0,9}}\n")
_LABEL_END = r"[*_]{0,3}(?:[)\].:](?![a-z]\.)|[ \t][-–—][ \t](?![A-Za-z\d]{1,4}[ \t]?[-+*/=^]))"
_LABELLED_LINE = re.compile(rf"[*_(\[ \t←-⇿-]{{0,8}}(?:(?:Option|Choice) [*(]{{0,3}})?([A-Za-z]){_LABEL_END}")
_MARKED_LINE = re.compile(rf"[_ \t←-⇿]{{0,6}}(?=[*(\[]|[A-Z]\))[*(\[]{{0,3}}([A-Z]){_LABEL_END}")
# Characters of a text that is a choice with a small letter and nothing else; answers in parts "(a) ..." are longer.
_LONGEST_CHOICE = 60


def last_letter_stated(text: str, num_choices: int) -> Extraction:
    """The letter of the last statement of an answer, else of the last weaker one, else of a choice's label alone."""
    text, valid = tidy(text), LETTERS[:num_choices]

    def read(letters: str) -> Reader:
        def read(text: str, start: int, *, is_correction: bool = False) -> Extraction | None:
            choice = _CHOICE.match(text, start) if is_correction else None
            if is_correction and not (choice and _ENDS_A_CORRECTION.match(text, choice.end())):
                return None
            letter = _letter_after(text, start, letters)
            return Extraction(letter, "statement") if letter else None

        return read

    return last_stated(text, read(valid + valid.lower()), read(valid)) or _letter_line(text, valid)


def first_letter_stated(text: str, num_choices: int) -> Extraction:
    """The first "answer is (X)", by the unchanged pattern of MMLU-Pro's authors, for text that runs on."""
    del num_choices  # the letter may lie outside the row's choices, and is wrong then
    choice = _FIRST_CHOICE.search(text)
    return Extraction(choice.group(1), "first statement") if choice else NOTHING


def strict_letter(text: str, num_choices: int) -> Extraction:
    letters = [letter for letter in _STRICT_CHOICE.findall(text) if letter in LETTERS[:num_choices]]
    return Extraction(letters[-1], "asked-for form") if letters else NOTHING


def _letter_after(text: str, start: int, valid: str) -> str | None:
    """The letter after a lead, or at the end of its sentence, if it labels one choice and is not a word or formula."""
    if (begin := after_denial(text, start)) is None:
        return None
    region = text[begin : begin + STATEMENT_REACH]
    choice = _CHOICE.match(region)
    if choice is None or choice.group(2) not in valid or _RULED_OUT.match(region.lstrip(" \t\n*_:")):
        return _label_behind(region, valid)
    letter, rest = choice.group(2), region[choice.end() :]
    is_small = letter.islower() or letter == "I"
    if choice.group(1)[-1:] not in _WRAPPERS:
        if (_WORD_AFTER_SMALL if is_small else _WORD).match(rest):
            return _label_behind(region, valid)
        if re.match(r"[ \t]?\(|\.[ \t][a-z]", rest) and (label := _label_behind(region, valid)):
            return label
    if _IN_FORMULA.match(rest):
        return _label_behind(region, valid)
    further = _FURTHER_LETTER.match(rest)
    if _DENIED.match(rest) or (further and further.group(1) in valid):
        return None
    return None if letter.islower() and _is_part(letter, rest) else letter.upper()


def _label_behind(region: str, valid: str) -> str | None:
    """The only label of the first sentence, at its end; else the only letter in it that is said and not ruled out."""
    sentence = SENTENCE_END.split(region.lstrip(" \t\n*_:"), maxsplit=1)[0]
    left = _RULED_OUT.sub("", sentence)
    if any(
        (other := _FURTHER_LETTER.match(left, one.end())) and other[1] in valid
        for one in _BARE_LETTER.finditer(left)
        if not _LABEL_OF_A_WORD.match(left, one.end())
    ):
        return None
    labels = list(_LABEL.finditer(sentence))
    letters = {label[2] or label[3] for label in labels}
    if len(letters) == 1 and not labels[-1][1] and _AFTER_LABEL.match(sentence, labels[-1].end()):
        return letters.pop().upper() if letters <= set(valid) else None
    said = list(_ASSERTED.finditer(left))
    if not said or set(_BARE_LETTER.findall(left)) != {said[-1][1]}:
        return None
    return said[-1][1] if said[-1][1] in valid else None


def _is_part(letter: str, rest: str) -> bool:
    """Whether a small letter labels the first part of an answer: "(a) 5 m, (b) 6 m" or "(i) mass, (ii) time"."""
    if not _PART.match(rest):
        return False
    following = [chr(ord(letter) + 1), *(["ii"] if letter == "i" else [])]
    return any(re.search(rf"(?<![A-Za-z]){re.escape(label)}\)", rest) for label in following)


def _letter_line(text: str, valid: str) -> Extraction:
    """An answer without a statement: a letter alone on the last line or before a blank line, or one label."""
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    if not lines:
        return NOTHING
    labels = _labels(lines[:-1])
    last = concluded(lines[-1])
    lone = _LONE_LETTER.match(last) if len(last) <= 24 else None
    if lone and lone[1] != "i" and lone[1].upper() in valid:
        # After a list of choices the letter is the label of the next one, where the text was cut off.
        is_label = len(labels) > 1 or chr(ord(lone[1]) - 1) in labels
        return NOTHING if is_label else Extraction(lone[1].upper(), "letter on the last line")
    valid = valid.replace("I", "")
    alone = _LONE_PARAGRAPH.match(text)
    if alone and alone[1] in valid and set(labels) <= {alone[1]}:
        return Extraction(alone[1], "letter on the first line")
    label = _LABELLED_LINE.match(lines[0])
    if label is None or (label[1].islower() and (len(lines) > 1 or len(lines[0]) > _LONGEST_CHOICE)):
        label = _MARKED_LINE.match(lines[-1])
    if label is None or label[1].upper() not in valid or len(_labels(lines)) > 1 or lines.count(lines[0]) > 1:
        return NOTHING
    return Extraction(label[1].upper(), "label before the choice")


def _labels(lines: list[str]) -> list[str]:
    matches = map(_LABELLED_LINE.match, dict.fromkeys(lines))
    return [label[1] for label in matches if label and label[1].isupper()]
