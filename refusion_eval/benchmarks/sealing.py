"""Keeps benchmark questions out of what is written (GPQA's authors ask that its questions not appear in plain text).

A sealed text is replaced by a marker wherever rows and prompts are stored or hashed. Only the moment before
tokenisation sees the real text again, and what a model quotes from it is withheld from its response. The texts are
held in the memory of this process alone.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from refusion_eval.errors import DataError

_MARKER = re.compile(r"\[sealed ([^\s\[\]]{1,80}) ([0-9a-f]{24})\]")
_OPTION_LABEL = re.compile(r"^\s*\(?[A-Z][).:]\s*")
_WORD = re.compile(r"\w+")

WITHHELD = "[withheld]"
LONGEST_QUOTE = 7


class Sealing:
    """Replaces texts by markers, and markers by their texts. Nothing else leads from a marker to its text."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def seal(self, key: str, text: str) -> str:
        """Replaces a text by a marker.

        Args:
            key: tells a reader what the text is, such as "gpqa/rec123/question".
            text: what must not be written.

        Returns:
            The marker: the same for the same key and text, in every process.
        """
        name = re.sub(r"[\s\[\]]", "_", key)[:80] or "_"
        digest = hashlib.sha256(f"{name}\0{text}".encode("utf-8", "surrogatepass")).hexdigest()[:24]
        self._texts[digest] = text
        return f"[sealed {name} {digest}]"

    def seal_value(self, key: str, value: str | Sequence[str]) -> str | list[str]:
        """Replaces a text, or every text of a list, by a marker."""
        return self.seal(key, value) if isinstance(value, str) else [self.seal(key, text) for text in value]

    def unseal(self, prompt: str) -> tuple[str, tuple[str, ...]]:
        """Puts the real texts in place of their markers.

        Returns:
            The real prompt, and the sealed texts in it (none for a prompt without markers).

        Raises:
            DataError: a marker whose text was never sealed here.
        """
        texts: list[str] = []

        def reveal(marker: re.Match[str]) -> str:
            name, digest = marker.groups()
            if digest not in self._texts:
                raise DataError(f"the text sealed as {name} is not known in this process; load its task here first")
            texts.append(self._texts[digest])
            return texts[-1]

        return _MARKER.sub(reveal, prompt), tuple(texts)

    def update(self, other: "Sealing") -> None:
        """Takes over everything that another object has sealed."""
        self._texts.update(other._texts)


def texts_of(doc: Mapping[str, Any], prompt: str) -> tuple[str, ...]:
    """The texts that must not be written, for an item whose task does not seal its rows (lm-eval's own tasks do not).

    The prompt is taken line by line, because its few-shot examples are questions too. The label before a choice is
    left out: a response may repeat it before the text of the choice, and it is the answer.
    """
    lines = (_OPTION_LABEL.sub("", line) for line in prompt.splitlines())
    return tuple(dict.fromkeys(text for text in (*_strings(doc.values()), *lines) if text.strip()))


def _strings(values: Iterable[Any]) -> Iterable[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from _strings(value.values())
        elif isinstance(value, list | tuple):
            yield from _strings(value)


def redact(text: str, sealed_texts: tuple[str, ...]) -> str:
    """Withholds from a response every verbatim run of more than `LONGEST_QUOTE` words of a sealed text.

    Words are compared without case, punctuation or spacing between them.
    """
    words = [(found.start(), found.end(), found.group().casefold()) for found in _WORD.finditer(text)]
    size = LONGEST_QUOTE + 1
    sealed_runs = {run for sealed in sealed_texts for run in _runs([w.casefold() for w in _WORD.findall(sealed)], size)}
    spans: list[tuple[int, int]] = []
    for start, run in enumerate(_runs([word for _, _, word in words], size)):
        if run in sealed_runs:
            begin, end = words[start][0], words[start + size - 1][1]
            if spans and begin <= spans[-1][1]:
                spans[-1] = (spans[-1][0], end)
            else:
                spans.append((begin, end))
    for begin, end in reversed(spans):
        text = text[:begin] + WITHHELD + text[end:]
    return text


def _runs(words: list[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
