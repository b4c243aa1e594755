"""Reads one of two words, or a list of words or brackets, that a statement in a model's text gives."""

import re

from refusion_eval.benchmarks import Extraction
from refusion_eval.benchmarks.extract import frames
from refusion_eval.benchmarks.extract.frames import CONDITION, NOTHING, OR, REASON

PAIRS = (("True", "False"), ("Yes", "No"), ("valid", "invalid"))

_ASIDE = re.compile(r"(?<!\bor)(?<!\band)(?<!\bmaybe)(?<!\beither)[ \t]\([^()\n ]{1,40} [^()\n]{1,120}\)")
_BECAUSE = re.compile(r",? (?:because|since|given (?:that|the))\b")
_MARKUP = re.compile(
    r"\\[A-Za-z]{1,12}|</?(?i:(?:final_?)?answer|ans)>|[*_`$\"“”«»「」()\[\]{}<>（）【】]|(?<!\w)['‘’]|['‘’](?!\w)"
)
_NOT = (
    r"(?:(?:\bnot|n['’]t|\bnever|\bcannot be|\bfar from|\bneither)"
    r"(?: (?:be|a|an|the|[a-z]{2,12}ly)){0,2} |\bnot the case that (?:[a-z]{1,20} ){0,6})"
)
# Behind a word that is said, its clause ends, or a reason follows.
_ENDS = rf"(?=\s*(?:\Z|[.,;:!?—–|-])|,? {CONDITION}|\s(?:{REASON}|it|he|she|we|they|this|that|there|the|you)\b)"

# What a list is written with, beside its items.
_ITEM = re.compile(r"^[ \t]{0,9}(?:[-*•+–|]|\(?(?:\d{1,3}|[a-z])[.):])[ \t]+", re.MULTILINE)
_LINES = re.compile(r"(?:[^\n]*[,<→][ \t]*\n[ \t]*)*[^\n]*")
_MARKED_LINES = re.compile(rf"^(?:{_ITEM.pattern.removeprefix('^')}[^\n]*(?:\n\s{{0,9}}|\Z)){{2,60}}", re.MULTILINE)
_WORD_LINE = r"[ \t*\"'`]{0,4}[\w&'’-]{1,40}[ \t*\"'`,.]{0,4}"
_WORD_LINES = re.compile(
    rf"^(?:(?:{_WORD_LINE}(?:\n[ \t]{{0,9}}|\Z)){{2,60}}|(?:{_WORD_LINE}(?:\n[ \t]{{0,9}}\n|\Z)){{2,60}})", re.MULTILINE
)
_LIST_NAME = re.compile(
    r"\A(?:(?:so|thus|hence|therefore)\b[,:]? )?(?:(?:it|this|that) (?:is|gives) )?"
    r"(?:(?:the )?(?:[a-z]{2,14} ){0,2}(?:list|order|words|sequence)(?: is| of)?[: ]{1,3})?",
    re.IGNORECASE,
)
_TAIL = re.compile(rf"(?:,| [—–-])? (?:{REASON}|in alphabetical|alphabetically|when sorted|is the)")
_CLOSERS = re.compile(r"[\])}>\s,*`\"'$\\]+")


def pair_of(right: str) -> tuple[str, str] | None:
    """The two words of which the right answer is one; None for any other answer."""
    return next((pair for pair in PAIRS if right.lower() in (pair[0].lower(), pair[1].lower())), None)


def last_word_stated(text: str, pair: tuple[str, str]) -> Extraction:
    """The word of the last statement that says one of the two and not the other, else one that stands alone."""

    def read(text: str, start: int, *, is_correction: bool = False) -> Extraction | None:
        sentence, _ = frames.framed(text, start)
        return _word(sentence, pair, is_first=is_correction)

    text = frames.tidy(text)
    if stated := frames.last_stated(text, read, read):
        return stated
    lone = (
        _word(frames.SENTENCE_END.split(line, maxsplit=1)[0], pair, is_first=True)
        for line in frames.lone_lines(text)
        if len(line.split()) < 3 or "\n" not in text.strip()
    )
    return next((Extraction(word.answer, "word on a line of its own") for word in lone if word), NOTHING)


def _word(sentence: str, pair: tuple[str, str], *, is_first: bool = False) -> Extraction | None:
    """The word that a sentence says; None if it says neither or only on a condition, no answer if it leaves it open."""
    one, other = (word.lower() for word in pair)
    either = rf"\b(?:{one}|{other})\b"
    plain = sentence.lower()
    # Of an equation the right side counts, of an explained answer what stands beside brackets and before the reason.
    for outer, inner in ((_ASIDE, 0), (re.compile("="), -1), (_BECAUSE, 0)):
        parts = outer.split(plain)
        part = "".join(parts) if outer is _ASIDE else parts[inner]
        plain = part if re.search(either, part) else plain
    plain = re.sub(r"\s+", " ", _MARKUP.sub(" ", plain)).strip(" :-–—")
    ends = _ENDS if one == "yes" else ""
    said = [
        (found, pair[(found[2] == other) ^ bool(found[1])])
        for found in re.finditer(rf"({_NOT})?\b({one}|{other})\b{ends}", plain)
    ]
    if not said:
        return None
    first, (last, word) = said[0][0], said[-1]
    concludes = re.search(
        r"(?:\b(?:is|are|be|so|thus|hence|therefore|to|gives|but)|[→:]) \Z", plain[: last.start(2)]
    ) and re.fullmatch(r"[\s.!]*", plain[last.end() :])
    both = re.search(rf"{either}(?:{OR}|,? (?:and|nor)\b|\s?[/|,&])\s?{either}{ends}", plain)
    if both and not (concludes and both.end() < last.end()):
        return Extraction(None, "both words")
    is_direct = not re.sub(
        r"(?:[a-z]{2,12}ly|so|thus|hence|therefore|then|just|simply|still|,)\b|[ ,:]", "", plain[: first.start()]
    )
    if is_first and not (
        is_direct
        and re.match(rf"\s*(?:\Z|[.,;:!?—–-]|{REASON})", plain[first.end() :])
        and len({word for _, word in said}) == 1
    ):
        return None
    if re.match(rf",? {CONDITION}", plain[said[-1][0].end() :]) or re.match(rf",? {CONDITION}", plain[first.end() :]):
        return None
    if is_direct and (first[1] is None or len(said) == 1) and not both:
        return Extraction(said[0][1], "statement")
    if concludes or len({word for _, word in said}) == 1:
        return Extraction(word, "statement")
    return Extraction(None, "both words")


def last_list_stated(text: str, *, brackets: bool = False) -> Extraction:
    """The words, or the closing brackets, of the last statement; else those of the last line."""

    def read(text: str, start: int, *, is_correction: bool = False) -> Extraction | None:
        del is_correction
        begin = frames.after_denial(text, start)
        answer = None if begin is None else (_brackets if brackets else _items)(text, begin)
        return Extraction(answer, "statement") if answer else None

    text = frames.tidy(text)
    if stated := frames.last_stated(text, read, None if brackets else read):
        return stated
    last = text.rstrip().rpartition("\n\n")[2]
    lines = None if brackets else _MARKED_LINES.search(last) or _WORD_LINES.search(last)
    answer = (_brackets if brackets else _items)(last, lines.start() if lines else last.rfind("\n") + 1)
    return Extraction(answer, "last lines" if lines else "last line") if answer else NOTHING


def _brackets(text: str, start: int) -> str:
    sentence, _ = frames.framed(text, start)
    closers = _CLOSERS.match(frames.bare(sentence).replace("\\}", "}"))
    return re.sub(r"[^\])}>]", "", closers[0]) if closers else ""


def _items(text: str, start: int) -> str:
    """The items of the list that begins at `start`: in braces or a tag, over lines, or in one sentence."""
    inside, is_framed = frames.framed(text, start)
    region = text[start : start + 4 * frames.STATEMENT_REACH].lstrip(" \t\n_:`").partition("</")[0]
    lines = None if is_framed else _MARKED_LINES.match(region) or _WORD_LINES.match(region.lstrip("*`\"' "))
    if lines:
        inside = _ITEM.sub("", lines[0]).replace("\n", " , ")
    elif not is_framed:
        inside = frames.SENTENCE_END.split(_LINES.match(region)[0].replace("\n", " "), maxsplit=1)[0]  # type: ignore[index]
    inside = _LIST_NAME.sub("", inside)
    inside = re.sub(r"(?:\A|(?<=\s))\(?\d{1,2}[.)]\s", " ", inside)
    return frames.bare(_TAIL.split(_ASIDE.sub("", inside).rpartition(": ")[2], maxsplit=1)[0])


def form(answer: str) -> str:
    """Words without case, marks, "and" and what parts them; brackets without spacing."""
    if not re.search(r"\w", answer):
        return "".join(answer.split())
    plain = re.sub(r"\\[a-z]{1,9}|(?<!\w)-(?!\d)|-(?!\w)", " ", answer.lower().replace("’", "'"))
    words = (word.strip("'") for word in re.findall(r"[\w&'-]+", plain))
    return " ".join(word for word in words if word and word not in ("and", "then", "&"))
