"""Prefill shared by requests whose prompts begin alike, as few-shot prompts do: their common rows are computed once."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from refusion_eval.engine.masks import is_causal
from refusion_eval.models.cache import KVCache
from refusion_eval.types import NOTHING, Forward, causal

MIN_ROWS = 32  # a shorter common beginning, such as a chat template's, is not worth the copy


class SharedPrefix:
    """Keys and values of one prompt, for the requests after it that begin with the same tokens.

    Only a request's first forward is shortened, only where it is causal, and only by rows that nobody reads or scores.
    A prompt that has too little in common with the stored one takes its place.
    """

    def __init__(self) -> None:
        self._tokens: Sequence[int] = ()
        self._positions: Sequence[int] = ()
        self._keys = self._values = torch.empty(0)

    @torch.inference_mode()
    def fill(self, cache: KVCache, sequence: int, forward: Forward) -> int:
        """Puts stored rows where a forward would write its first ones.

        Args:
            cache: with room for the forward's rows.
            sequence: whose forward.
            forward: about to be computed.

        Returns:
            How many leading rows need not be computed any more.
        """
        if cache.lengths[sequence] or forward.scores is not None or not is_causal(forward.attention):
            return 0
        limit = min((min(read.rows) for read in forward.reads if read.rows), default=len(forward.tokens) - 1)
        num_rows = self._num_common(forward, limit)
        if num_rows < MIN_ROWS:
            return 0
        cache.keys[:, sequence, :, :num_rows] = self._keys[:, :, :num_rows]
        cache.values[:, sequence, :, :num_rows] = self._values[:, :, :num_rows]
        return num_rows

    @torch.inference_mode()
    def keep(self, cache: KVCache, sequence: int, forward: Forward, num_filled: int) -> None:
        """Stores the rows of a request's first forward, unless they came from here."""
        num_rows = len(forward.tokens)
        if num_filled or cache.lengths[sequence] or num_rows < MIN_ROWS or not is_causal(forward.attention):
            return
        self._tokens, self._positions = list(forward.tokens), list(forward.positions)
        self._keys = cache.keys[:, sequence, :, :num_rows].clone()
        self._values = cache.values[:, sequence, :, :num_rows].clone()

    def _num_common(self, forward: Forward, limit: int) -> int:
        stored = zip(self._tokens[:limit], self._positions, strict=False)
        wanted = zip(forward.tokens, forward.positions, strict=True)
        pairs = enumerate(zip(stored, wanted, strict=False))
        return next((row for row, (have, want) in pairs if have != want), min(limit, len(self._tokens)))


def behind(forward: Forward, num_rows: int) -> Forward:
    """What is left to compute of a causal forward whose first rows are there."""
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
