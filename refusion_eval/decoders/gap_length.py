"""The length of a gap of open length, searched before it is filled (CAL, arXiv 2602.00476).

A prompt has `HOLE` for each token of the length at which the search begins, and `OPEN` behind them for each further
token that the gap may have. One forward for each length that is tried reads the masks of a gap of that length. The
length with the highest mean probability of the best tokens wins, after division by what that mean is for short gaps
whatever the text. The search climbs from the first length upwards, then downwards, and ends each way at the border or
after some lengths in a row without a new best one.
"""

import math
from collections.abc import Generator, Sequence
from typing import NamedTuple

from refusion_eval.decoders import Reads
from refusion_eval.types import HOLE, OPEN, Forward, Read, Readout, bidirectional, causal


class Search(NamedTuple):
    """How lengths are tried; the defaults are published.

    Attributes:
        step: difference between lengths that are tried one after the other, >= 1.
        patience: lengths in a row without a new best one that end a direction, >= 1.
        calibrated: whether mean probabilities are divided by `usual_confidence`.
    """

    step: int = 1
    patience: int = 4
    calibrated: bool = True


PUBLISHED = Search()


def holes(length: int, longest: int | None = None) -> list[int]:
    """The ids of a gap in a prompt; with `longest` its length is open, and the search begins at `length`."""
    return [HOLE] * length + [OPEN] * ((longest or length) - length)


def usual_confidence(length: int) -> float:
    """What mean probabilities are divided by; fitted by the authors on code, with LLaDA and Dream-Coder."""
    return math.exp(-1.77 * length) + 0.56 * math.exp(-0.06 * length) + 0.24


def searched_length(
    reads: Reads, prompt: Sequence[int], places: range, mask_id: int, search: Search
) -> Generator[Forward, tuple[Readout, ...], int]:
    """Finds the length of the gap at `places` of a prompt, in one forward for each length that is tried."""
    before, behind, first = prompt[: places.start], prompt[places.stop :], prompt.count(HOLE)
    best, best_score = first, -math.inf
    for step, start in ((search.step, first), (-search.step, first - search.step)):
        length, misses = start, 0
        while 1 <= length <= len(places) and misses < search.patience:
            (readout,) = yield _probe(reads, before, behind, length, mask_id)
            score = float(readout.probs.mean()) / (usual_confidence(length) if search.calibrated else 1)
            is_best = score > best_score
            misses = 0 if is_best else misses + 1
            if is_best:
                best, best_score = length, score
            length += step
    return best


def _probe(reads: Reads, before: Sequence[int], behind: Sequence[int], length: int, mask_id: int) -> Forward:
    """The forward of a text with so many masks between its known parts, which reads all masks."""
    start, size = len(before), len(before) + length + len(behind)
    masks = range(start, start + length)
    if reads.attention == "causal":  # known text comes first, so that masks see it
        order, attention = [*range(start), *range(masks.stop, size), *masks], causal(size)
        rows: Sequence[int] = range(size - length, size)
    else:
        order, attention = list(range(size)), bidirectional(size)
        rows = [max(0, place - (reads.masked == "next")) for place in masks]
    text = [*before, *[mask_id] * length, *behind]
    read = Read(rows, suppress=(mask_id,))
    return Forward([text[place] for place in order], order, attention, (read,), kind="search")
