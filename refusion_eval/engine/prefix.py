"""Shares the prefill of prompts with a common beginning, such as few-shot prompts: its rows are computed once."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from refusion_eval.engine.masks import is_causal
from refusion_eval.models.cache import KVCache
from refusion_eval.types import NOTHING, Forward, causal

MIN_ROWS = 32  # a shorter common beginning, such as a chat template's, is not worth the copy


class SharedPrefix:
    """Keys and values of one prompt, for the requests after it that begin with the same tokens."""

    def __init__(self) -> None:
        self._tokens: Sequence[int] = ()
        self._positions: Sequence[int] = ()
        self._keys = self._values = torch.empty(0)

    @torch.inference_mode()
    def fill(self, cache: KVCache, sequence: int, forward: Forward) -> int:
        """Copies stored rows to where a forward would write its first rows; returns their number."""
        # Only a causal first forward: there a row depends on the rows before it alone, so it is the same in all texts.
        if cache.lengths[sequence] or forward.approximation is not None or not is_causal(forward.attention):
            return 0
        # A row that is read has to be computed, as its residual stream is not stored.
        limit = min((min(read.rows) for read in forward.reads if read.rows), default=len(forward.tokens) - 1)
        num_rows = self._num_common(forward, limit)
        if num_rows < MIN_ROWS:
            return 0
        cache.keys[:, sequence, :, :num_rows] = self._keys[:, :, :num_rows]
        cache.values[:, sequence, :, :num_rows] = self._values[:, :, :num_rows]
        return num_rows

    @torch.inference_mode()
    def keep(self, cache: KVCache, sequence: int, forward: Forward, num_filled: int) -> None:
        """Stores the rows of a request's first forward, unless they were copied from the stored ones."""
        num_rows = len(forward.tokens)
        if num_filled or cache.lengths[sequence] or num_rows < MIN_ROWS or not is_causal(forward.attention):
            return
        # One prompt is kept: a task has one few-shot text, and a second copy would take of the batch's memory.
        self._tokens, self._positions = list(forward.tokens), list(forward.positions)
        self._keys = cache.keys[:, sequence, :, :num_rows].clone()
        self._values = cache.values[:, sequence, :, :num_rows].clone()

    def _num_common(self, forward: Forward, limit: int) -> int:
        stored = zip(self._tokens[:limit], self._positions, strict=False)
        wanted = zip(forward.tokens, forward.positions, strict=True)
        pairs = enumerate(zip(stored, wanted, strict=False))
        return next((row for row, (have, want) in pairs if have != want), min(limit, len(self._tokens)))


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
