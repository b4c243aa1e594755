"""The rows that prompts of a batch have in common, which are computed once."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import torch

from refusion_eval.models.attention import is_causal
from refusion_eval.models.cache import KVCache
from refusion_eval.types import NOTHING, Forward, causal

MIN_SHARED_ROWS = 32  # a shorter common beginning of prompts, such as a chat template's, is not worth the copy


def can_be_shared(forward: Forward) -> bool:
    # Only a causal forward: there a row depends on the rows before it alone, so it is the same in all texts.
    is_exact = forward.approximation is None and is_causal(forward.attention)
    return is_exact and len(forward.tokens) >= MIN_SHARED_ROWS


def _num_unread(forward: Forward) -> int:
    """Number of rows that need not be computed if they are known: a row that is read needs its residual stream."""
    return min((min(read.rows) for read in forward.reads if read.rows), default=len(forward.tokens) - 1)


class SharedPrefix:
    """Keys and values of the last prompt, for requests that begin with the same tokens (few-shot prompts, samples)."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int]] = []  # token and position
        self._keys = self._values = torch.empty(0)

    def begins_with(self, prompt: Sequence[int]) -> bool:
        return [token for token, _ in self._rows[: len(prompt)]] == list(prompt)

    def fill(self, cache: KVCache, sequence: int, forward: Forward) -> int:
        """Copies stored rows to where a forward would write its first rows; returns how many, which are committed."""
        if cache.lengths[sequence] or not can_be_shared(forward):
            return 0
        unread = forward.tokens[: _num_unread(forward)]
        pairs = zip(self._rows, zip(unread, forward.positions, strict=False), strict=False)
        num_rows = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if num_rows < MIN_SHARED_ROWS:
            return 0
        cache.keys[:, sequence, :, :num_rows] = self._keys[:, :, :num_rows]
        cache.values[:, sequence, :, :num_rows] = self._values[:, :, :num_rows]
        cache.lengths[sequence] = num_rows
        return num_rows

    def keep(self, cache: KVCache, sequence: int, forward: Forward, num_filled: int) -> None:
        num_rows = len(forward.tokens)
        if cache.lengths[sequence] or not can_be_shared(forward) or num_filled == _num_unread(forward):
            return
        # One prompt is kept: samples of an item follow each other, and a task has one few-shot text. A second copy
        # would take of the batch's memory.
        self._rows = list(zip(forward.tokens, forward.positions, strict=True))
        self._keys = cache.keys[:, sequence, :, :num_rows].clone()
        self._values = cache.values[:, sequence, :, :num_rows].clone()


def without_first_rows(forward: Forward, num_rows: int) -> Forward:
    """A causal forward without its first rows, whose keys and values are in the cache already."""
    if num_rows == 0:
        return forward
    return replace(
        forward,
        tokens=forward.tokens[num_rows:],
        positions=forward.positions[num_rows:],
        attention=causal(len(forward.tokens) - num_rows),
        reads=tuple(replace(read, rows=[row - num_rows for row in read.rows]) for read in forward.reads),
        commit=NOTHING,
    )
