"""The states of a text that a server showed while it decoded, as frames of a replay."""

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import pairwise

from refusion_eval.report.frames import NEW, Frame, joined

_WORD = re.compile(r"\s*\S+|\s+$")


def state_frames(states: Sequence[Sequence[object]], withheld_sign: str = "") -> Iterator[Frame]:
    """One frame for each state; a word is final from the state on after which it stays until the end.

    Args:
        states: (seconds since the request, whole text at that moment), in their order.
        withheld_sign: stands for every character of a text that must not be shown; empty if it may be.
    """
    moments = [float(str(seconds)) for seconds, _ in states]
    words = [_WORD.findall(str(text)) for _, text in states]
    # Of each word its index in the next state, if it is there, and so backwards whether it stays until the end.
    following = [_matched(one, other) for one, other in pairwise(words)]
    stays = [[True] * len(words[-1])]
    for one, after in zip(reversed(words[:-1]), reversed(following), strict=True):
        stays.insert(0, [index in after and stays[0][after[index]] for index in range(len(one))])
    old: set[int] = set()  # words of the state that were final in the state before
    for number, (seconds, one, final) in enumerate(zip(moments, words, stays, strict=True)):
        looks = [
            ("fixed" if index in old else NEW if final[index] else "draft", withheld_sign * len(word) or word)
            for index, word in enumerate(one)
        ]
        headline = f"{sum(final)} of {len(one)} words are final."
        yield Frame(joined(looks), headline, f"state {number + 1}/{len(states)}   {seconds:.3f} s")
        if number < len(following):
            old = {place for index, place in following[number].items() if final[index]}


def _matched(one: Sequence[str], other: Sequence[str]) -> dict[int, int]:
    """Index of a word -> its index in the other text."""
    blocks = SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
    return {block.a + step: block.b + step for block in blocks for step in range(block.size)}
