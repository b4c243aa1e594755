"""Signs that a model has stopped answering, which its text shows without a judge and without a tokenizer."""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from refusion_eval.benchmarks import without_thoughts

# Each is the name of a metric, too.
EMPTY, REPEATING, SPECIAL, SCRIPT = SIGNS = ("empty", "repeating", "special_tokens", "other_script")
IN_WORDS = {EMPTY: "empty", REPEATING: "repeating", SPECIAL: "with special tokens", SCRIPT: "in another script"}

# A text repeats itself if it ends in one piece of text four times in a row, or if half of its word 4-grams recur. Marks
# are text, too, but for a ruled line of a table or a comment, which is one mark many times.
_LONGEST_PIECE, _FEWEST_PIECES, _SHORTEST_LOOP = 200, 4, 60  # characters, times, characters
_RULES, _LONGEST_RULE = "-=_*#~", 120  # marks, characters
_FEWEST_GRAMS, _LEAST_SHARE_OF_KINDS = 40, 0.5
_LEAST_SHARE_OF_SCRIPT = 0.1  # of the letters
_SPECIAL_TOKEN = re.compile(r"<\|[^\s<>|]{1,40}\|>|<｜[^\s<>｜]{1,40}｜>|\[(?:MASK|PAD|UNK)\]|<(?:mask|pad|unk)>")
_OF_FORMULAS = ("LATIN", "GREEK")


def signs_of(text: str, tokens: Sequence[int] | None, settings: Mapping[str, Any]) -> frozenset[str]:
    """The signs of one answer, but for its script.

    Args:
        text: the whole answer, thoughts included.
        tokens: its ids, among which the mask of the settings may be left; None if they are not known.
    """
    holds = {
        EMPTY: not any(map(str.isalnum, without_thoughts(text))),
        REPEATING: _ends_in_a_loop(text) or _recurs(text.split()),
        SPECIAL: _SPECIAL_TOKEN.search(text) is not None or settings.get("mask_id", -1) in (tokens or ()),
    }
    return frozenset(sign for sign, is_there in holds.items() if is_there)


def scripts_of(text: str) -> frozenset[str]:
    """The scripts of at least a tenth of the letters, by the names that Unicode begins its letters' names with.

    Latin and Greek are left out: formulas have them in any language. Forms of letters, such as those of formulas and of
    full width, are letters of their script (NFKC).
    """
    if text.isascii():
        return frozenset()
    text = unicodedata.normalize("NFKC", text)
    letters = Counter(unicodedata.name(letter, "").partition(" ")[0] for letter in text if letter.isalpha())
    least = _LEAST_SHARE_OF_SCRIPT * letters.total()
    return frozenset(script for script, count in letters.items() if count >= least and script not in _OF_FORMULAS)


def _ends_in_a_loop(text: str) -> bool:
    end = " ".join(text[-4 * _LONGEST_PIECE * _FEWEST_PIECES :].split())[-_LONGEST_PIECE * _FEWEST_PIECES :]
    before = end.rstrip(end[-1:]) if end[-1:] in _RULES else end
    end = before if len(end) - len(before) <= _LONGEST_RULE else end
    for length in range(1, _LONGEST_PIECE + 1):
        size = max(_FEWEST_PIECES * length - 1, _SHORTEST_LOOP)  # the last piece has no space behind it
        loop = end[-size:]
        # A text of one period equals itself, shifted by the period.
        if len(loop) == size and loop[length:] == loop[:-length]:
            return True
    return False


def _recurs(words: Sequence[str]) -> bool:
    grams = list(zip(words, words[1:], words[2:], words[3:], strict=False))
    return len(grams) >= _FEWEST_GRAMS and len(set(grams)) < _LEAST_SHARE_OF_KINDS * len(grams)
