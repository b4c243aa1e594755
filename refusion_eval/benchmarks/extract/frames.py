"""Finds where in a model's text an answer stands: one grammar of frames for numbers, formulas, letters and words.

The last statement of an answer counts, with a correction behind it, because a model may correct itself. A reader of one
kind of value is given the place where a statement begins. Every scan is linear in the length of the text: patterns
repeat single characters or are bounded, so no text can stall the scoring.
"""

import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from refusion_eval.benchmarks import Extraction

NOTHING = Extraction(None, "no answer found")
STATEMENT_REACH = 240  # characters after "the answer is" in which an answer may stand
# Statements that are looked at in one text, from its end (or start, where the first counts). A model that makes more
# of them is stuck.
MOST_STATEMENTS = 50

BEST = r"(?:most )?(?:correct|right|best|accurate|appropriate)"
_IS = (
    r"(?:\b(?:is|are|equals?|(?:works|comes) out (?:to be|to|as))\b|[:：]|="
    r"|\b(?:would|should|must|will|might|may|could|has to) (?:(?:therefore|then|thus|also|have to) )?be\b"
    r"|\b(?:seems|appears|turns out|has|happens|is (?:most )?likely) to be\b)"
)
NO_CONDITION = r"(?<!\b(?i:if) )(?<!\b(?i:nor) )(?<!\b(?i:whether) )(?<!\b(?i:neither) )"
# One value in whatever marks, for a pattern that looks ahead for it.
OPEN, CLOSE = r"[*_`$(\[\"'“‘«「（【<]{0,4}", r"[*_`$)\]\"'”’»」）】>]{0,4}"
_LETTER_OR_WORD = r"[A-Z]|(?i:true|false|yes|no|valid|invalid)"
_VALUE = rf"(?:{OPEN}(?:{_LETTER_OR_WORD}|-?\$?\d[\d.,/]{{0,12}}){CLOSE}|\$[^$\n]{{1,60}}\$)"
_THE_ANSWER = rf"(?:(?:the |my |our )?(?:{BEST} (?:answer|option|choice)|(?:final )?answer))\b"


class Frame(NamedTuple):
    """One way to mark an answer: a pattern that ends where the answer begins, and an example."""

    name: str
    pattern: str
    example: str


FRAMES = (
    Frame(
        "sentence",
        rf"(?<!/)(?<!(?i:\bif the ))(?<!(?i:whether the ))(?i:\banswers?\b[^\n.:=]{{0,40}}?{_IS})",
        "So the final answer is {}.",
    ),
    Frame(
        "sentence of another language",
        r"(?:答案|(?i:\b(?:antwort|respuesta|réponse|resposta|risposta)\b))[^\n.:：=]{0,40}?"
        r"(?:[是为:：=]|\b(?:ist|es|est|é|è)\b)",
        "Die richtige Antwort ist {}.",
    ),
    Frame(
        "choice",
        rf"(?i:\b(?:{BEST}|closest|only) (?:[a-z]+ ){{0,2}}?(?:option|choice|statement|letter|value|match|one)\b"
        rf"[^\n.:=]{{0,40}}?{_IS})",
        "The correct choice is {}.",
    ),
    Frame(
        "label",
        r"^[^\w\n]{0,8}(?:(?i:(?:(?:my|final|correct) )?answer) (?:[-–—→]|[-=]>)(?=[ ])"
        r"|(?:A|(?i:(?:(?:my|final|correct|selected|chosen) )?(?:letter|choice|option|pick|guess|ans\.?)))[:：])",
        "Choice: {}",
    ),
    Frame(
        "heading",
        r"^[#*_ \t]{0,8}(?i:(?:(?:the|my|final|correct|best) ){0,2}answers?)[*_: \t]{0,8}(?=\n)",
        "## Answer\n\n{}",
    ),
    Frame(
        "answer at the end",
        rf"(?:^[^\w\n]{{0,8}}|\b(?i:final|correct|my) )(?i:answer)[ \t]{{1,3}}(?={_VALUE}[.!]?[ \t]{{0,8}}$)",
        "My final answer {}",
    ),
    Frame("row of a table", r"^\|[*_ \t]{0,4}(?i:(?:(?:final|correct) )?answer)[*_ \t]{0,4}\|", "| Answer | {} |"),
    Frame("hashes", r"####", "#### {}"),
    Frame("box", r"\\boxed\b", "\\boxed{{{}}}"),
    Frame("tag", r"[<\[](?i:(?:final[_ ]?)?answer|ans)[>\]]", "<answer>{}</answer>"),
    Frame(
        "value first",
        rf"(?<![\w$*(\[+/^={{}}\\-])(?={_VALUE} is {_THE_ANSWER}){NO_CONDITION}"
        rf"|\b(?=[oOcCaA]){NO_CONDITION}(?i:(?:option|choice|answer)[ \t]"
        rf"(?=[*(]{{0,3}}[a-z][*)]{{0,3}} is (?:the )?{BEST}\b))"
        rf"|\b(?:Therefore|Thus|Hence|So|Consequently)\b,?[ \t]{{1,3}}(?={_VALUE} is (?:the )?{BEST}\b)",
        "So {} is the answer.",
    ),
    Frame(
        "label of a choice", r"\bis:[ \t*_]{0,4}(?=\n\s{0,4}[*(]{0,3}[A-Z][*]{0,2}[).])", "The color is:\n\n({}) red"
    ),
    Frame(
        "label in a sentence",
        rf"(?<=[,:.] )(?=[(]?[A-Z][).:] [^\n]{{1,80}}? is (?:the )?{BEST}(?: (?:one|answer|option|choice)\b|[.!]))",
        "Of these, {}. red is the right one.",
    ),
)
# They mark an answer less clearly, and count where no other statement is made.
WEAKER_FRAMES = (
    Frame(
        "decision",
        r"(?i:\b(?:(?:go|going|went) (?:with|for)|pick|picked|picking|choose|chose|choosing|select|selected|selecting"
        r"|correspond(?:s|ing)? to|match(?:es)?|(?:guess|choice|pick) (?:is|would be)|leav(?:es|ing)(?: us with)?"
        r"|left with|(?:would|['’]d) say)\b(?=[ \t]))",
        "I would go with {}.",
    ),
    Frame(
        "judgement",
        rf"(?<![\w'’])(?={OPEN}(?:{_LETTER_OR_WORD}){CLOSE} is (?:the )?{BEST}\b)"
        rf"{NO_CONDITION}(?<!(?i:option) )(?<!(?i:choice|answer) )(?<!(?i:statement) )",
        "{} is correct.",
    ),
    Frame(
        "label of a result",
        r"(?:^[^\w\n]{0,8}(?i:(?:(?:the|my|our|final|correct) ){0,2}"
        r"(?:result|solution|conclusion|verdict|selection|response|output|final|therefore|thus|hence|so|ans)"
        r"[*_]{0,3}(?:[:：.]|[ ]=))"
        r"|\b(?i:(?:the|my|our) (?:final )?(?:result|solution|letter|verdict|conclusion|selection) is\b))"
        rf"[*_]{{0,3}}(?=[ \t]{{0,3}}{_VALUE}[.!]?[ \t]{{0,8}}$)",
        "Result: {}",
    ),
)


def _any(frames: tuple[Frame, ...]) -> re.Pattern[str]:
    return re.compile("|".join(frame.pattern for frame in frames), re.MULTILINE)


LEAD, WEAKER_LEAD = _any(FRAMES), _any(WEAKER_FRAMES)

# "It is" before the right answer: in a correction, and behind "not 5".
IT_IS = (
    r"(?i:\b(?:it|that|this|the (?:correct |right |actual )?(?:answer|number|total|result|letter|option|choice))"
    r"(?:['’]s|[ \t](?:is|(?:should|must|would|has to) be|should have been))\b|\bshould be\b)"
)
_SAID = re.compile(rf"{IT_IS}[ \t]{{1,3}}(?:(?:actually|really|in fact|indeed|therefore)[ \t])?")
NOT = re.compile(r"[\s*_:]{0,4}(?i:not)\b")
NOT_BUT = re.compile(
    rf"{NOT.pattern}(?:(?:[^.\n=]|\.(?=\d)){{1,60}}?\bbut\b"
    rf"|[^\n=]{{1,60}}?{IT_IS}|[^.\n=]{{1,60}}?(?:\binstead\b|[,;—–][ \t]))"
    rf"(?:[ \t]{{0,3}}(?:rather[ \t])?{IT_IS})?"
)
# Words with which a model turns against what it has just said. They begin a sentence or a part of one.
_TURNS = (
    r"(?:wait|actually|no|sorry|oops|hold on|correction|scratch that|my mistake|i meant?|make (?:that|it)|or rather"
    r"|let me (?:correct|re-?check|reconsider|redo)\b[^\n.:]{0,40}"
    r"|(?:that|this)(?:['’]s| is| was) (?:wrong|incorrect|not right|a mistake))"
)
_TURN = re.compile(
    r"(?i:[.!?…—–,;:\n*(-][ \t\n*]{0,4}"
    rf"(?:(?:but |hmm,? )?{_TURNS}\b[ \t]?(?:[,.:;!?…—–]|-(?=\s)){{0,4}}[ \t\n]{{0,3}}){{1,3}})"
)
_ENDS_A_TURN = re.compile(r"(?i:[,.:;!?…—–-]|\b(?:meant?|that|it|rather|actually))\s{1,3}\Z")

# A box whose backslash was lost or doubled, and the other commands that draw a box.
_BOX = re.compile(r"(?:\\{1,4}|(?<![A-Za-z\\]))(?:[bB]oxed|(?:[bf]|frame)box(?:\[[^\]\n]{0,9}\]){0,2})\s{0,4}(?=\{)")
_BOX_END = re.compile(r"\\[)\]]|\$|\n|</")  # what stands for the brace of a box where that is missing
# A box that is empty, or holds nothing but the words of the instruction.
_NO_ANSWER = (
    r"(?:\\(?:[,;! _]|(?:l?dots|cdots?|quad|square)\b)|[ \t.…?_~*,:$<>\[\]]|(?i:(?:your|the|my|final|correct|numerical"
    r"|answer|result|solution|number|value|letter|expression|choice|option|formula|here|goes|insert|put|in|of|to)(?![A-Za-z])))"
)
_PLACEHOLDER = re.compile(
    rf"\\boxed\s{{0,4}}\{{(?:{_NO_ANSWER}|\\(?:text|mathrm)[a-z]{{0,2}}\s?\{{{_NO_ANSWER}{{0,12}}\}}){{0,12}}\}}"
)
# Pictures, and marks of quoted lines (but no line of brackets alone).
_PICTURE = re.compile(r"[☀-➿\ufe0f\U0001f300-\U0001faff]|^ {0,3}> (?=[^\n]*\w)", re.MULTILINE)
_FORMAT = re.compile(
    r"</?(?:[bipu]|em|strong|code|span|div|h[1-6]|br ?/?)>"
    r"|\\(?:text[a-z]{0,6}|math[a-z]{2}|emph|underline|(?:sub)?section\*?)\s?\{([^{}]{0,60}[aA]nswer[^{}]{0,20})\}"
)
_FORMULA = re.compile(r"\\(?:begin|end)\{(?:align|equation|gather|displaymath)\*?\}")
SENTENCE_END = re.compile(r"[.!?](?=[*_$\"'”)\]}>]{0,4}(?:\s{1,3}[^a-z\s]|\s{0,9}\Z))|[\n。]|</|\[/")
_SO_IT_IS = re.compile(
    r"\A(?i:(?:so|thus|hence|therefore|definitely|final|i think)\b[,:]? )?"
    r"(?i:(?:it|this|that)(?:['’]s| (?:is|must be|has to be)) )?(?=\S{0,20}[.!*)\]]\Z)"
)
_MARKS = " \t\n*_`$\"'“”‘’«»:,.;!"
_PAIRS = (
    ("\\(", "\\)"), ("\\[", "\\]"), ("(", ")"), ("[", "]"), ("<", ">"), ("{", "}"), ("（", "）"),
    ("【", "】"), ("「", "」"),
)  # fmt: skip
_COMMAND = re.compile(
    r"\\(?:boxed|emph|underline|mbox|text[a-z]{0,6}|math[a-z]{2})\s{0,4}(?=\{)|</?(?i:(?:final_?)?answer|ans)>"
)
# Words behind which a sentence explains its answer.
REASON = (
    r"(?:because|since|as|given|which|where|for|due|so|but|although|though|i\.e|e\.g|that is|not|and (?:we|so|that)"
    r"|(?i:i (?:think|believe|guess))|is (?:the |my |our )?(?:final )?(?:(?:most )?(?:correct|right|best)|answer))\b"
)
CONDITION = r"(?:but )?(?:only |if and )?(?:if|when|unless|provided|assuming|depending|as long as|in case)\b"


# Words that make the number behind them a bound; and what joins alternatives, of which none is stated.
BOUND = (
    r"(?i:(?:less|fewer|more|greater|smaller|larger|higher|lower|longer|shorter) than(?: or equal to)?"
    r"|at (?:least|most)|under|below|above|over|beyond|up to|(?:minimum|maximum) of|(?:[a-z]+where )?(?:between|from)"
    r"|either)"
)
OR = (
    r"(?:,? or(?: (?:not|maybe|perhaps|even|possibly|[a-z]{2,12}ly)\b){0,3}|,? (?:maybe|perhaps|possibly|probably)\b"
    r"|[,;]? (?:(?:but|though) )?(?:it )?(?:may|might|could)(?: also| well)? be\b)"
)

# What may stand between a lead and its answer.
_FILLED = re.compile(
    r"(?:[ \t]{0,3}(?:\*{1,3}|_{1,2}|'{2,3}|:|(?:, ?)?(?:therefore|thus|hence|then|so|indeed|simply|just|now|clearly"
    r"|exactly|obviously|definitely|certainly|probably|likely|in fact|of course|that it is)\b[,:]?(?=[ \t]))){0,4}"
)


class Reader(Protocol):
    """Reads the value of a statement that begins at an offset; None if it states nothing.

    An extraction without an answer ends the search: the statement denies or leaves open what the answer is. Of a
    correction the value must stand directly at the offset.
    """

    def __call__(self, text: str, start: int, *, is_correction: bool = False) -> Extraction | None: ...


def tidy(text: str) -> str:
    """The text without tags of format, pictures and boxes that hold no answer, with formulas and boxes in one form."""
    text = re.sub("\x08(?=[a-z])", r"\\b", re.sub("\x0c(?=[a-z])", r"\\f", text))  # of \boxed and \frac
    text = _FORMULA.sub("$$", _FORMAT.sub(r"\1", _PICTURE.sub("", text)))
    return _PLACEHOLDER.sub("", _BOX.sub(r"\\boxed", text))


def last_stated(text: str, read: Reader | None, weaker: Reader | None = None) -> Extraction | None:
    """What the last statement says that a reader can read, or a correction behind it; else the last weaker one."""
    for lead, reader, how in ((LEAD, read, "statement"), (WEAKER_LEAD, weaker, "weaker statement")):
        if reader is None:
            continue
        for start in last_statements(lead, text):
            if (stated := reader(text, start)) is not None:
                stated = corrected(text, start, reader, stated)
                return Extraction(stated.answer, how) if stated.how == "statement" else stated
    return None


def last_statements(lead: re.Pattern[str], text: str) -> list[int]:
    """The end offsets of the last statements that a pattern finds, the last one first."""
    return [end_of(statement) for statement in deque(lead.finditer(text), MOST_STATEMENTS)][::-1]


def end_of(lead: re.Match[str]) -> int:
    """Where the answer begins behind a lead and the words and marks that belong to it."""
    return _FILLED.match(lead.string, lead.end()).end()  # type: ignore[union-attr]


def after_denial(text: str, start: int) -> int | None:
    """Where the answer begins: behind "not 5 but", or at `start`; None for a statement that only denies."""
    denied = NOT_BUT.match(text, start)
    return denied.end() if denied else None if NOT.match(text, start) else start


def corrected(text: str, start: int, read: Reader, stated: Extraction) -> Extraction:
    """What the last correction of a statement says that begins at `start`; what it `stated` where there is none."""
    others = (read(text, end, is_correction=True) for end in _corrections(text, start))
    return next((other for other in others if other is not None and other.answer is not None), stated)


def _corrections(text: str, start: int) -> list[int]:
    """The offsets, in falling order, at which an answer may stand that corrects the statement at `start`."""
    region = text[start : start + STATEMENT_REACH]
    turns = list(_TURN.finditer(region))
    if not turns:
        return []
    direct = [turn.end() for turn in turns if _ENDS_A_TURN.search(turn[0])]
    direct += [
        turn.start() + no.start()
        for turn in turns
        for no in re.finditer(r"(?:(?<=[a-z][:.,] )|(?<=[a-z] ))(?i:no)\b", turn[0])
    ]
    said = [found.end() for found in _SAID.finditer(region, turns[0].end())]
    return [start + end for end in sorted([*direct, *said], reverse=True)]


def framed(text: str, start: int) -> tuple[str, bool]:
    """What stands in the braces, formula signs or tag that open at `start`, else the sentence; and which it is."""
    region = text[start : start + STATEMENT_REACH].lstrip(" \t\n*_:`")
    for opening, closing in (("{", "}"), ("$$", "$$"), ("$", "$"), ("\\[", "\\]"), ("\\(", "\\)")):
        if region.startswith(opening):
            end = end_of_braces(region) if opening == "{" else region.find(closing, len(opening))
            if end > 0:
                return region[len(opening) : end].strip(), True
    return SENTENCE_END.split(region, maxsplit=1)[0], False


def end_of_braces(region: str) -> int:
    """The offset of the brace that closes the first one; that of another end of a box where the brace is missing."""
    depth = 0
    for sign in re.finditer(r"\\.|[{}]", region):
        depth += (sign[0] == "{") - (sign[0] == "}")
        if depth == 0:
            return sign.start()
    end = _BOX_END.search(region)
    return end.start() if end else len(region)


def bare(text: str) -> str:
    """A text without the marks, quotes, commands, tags and pairs of brackets around all of it."""
    text = _COMMAND.sub("", text).strip(_MARKS)
    while pair := next((pair for pair in _PAIRS if text.startswith(pair[0]) and text.endswith(pair[1])), None):
        inner = text[len(pair[0]) : -len(pair[1])]
        if (pair[0] in inner and pair[1] in inner) or len(text) < sum(map(len, pair)):
            break
        text = inner.strip(_MARKS)
    return text


def concluded(line: str) -> str:
    """A line without "So it is" and the like before the one word that it ends with."""
    return _SO_IT_IS.sub("", line.strip(), count=1)


def lone_lines(text: str) -> Iterator[str]:
    """The last line, and the first one where an empty line follows: an answer may stand there without a statement."""
    lines = text.strip().split("\n")
    yield concluded(lines[-1])
    if len(lines) > 1 and not lines[1].strip():
        yield lines[0]
