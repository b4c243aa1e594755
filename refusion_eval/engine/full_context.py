"""The engine over a model of transformers: every forward computes the whole text again.

What a decoder commits to the cache are rows here, not keys and values: each with its token, its position and the rows
that it saw. A forward computes the committed rows and its own. The result is that of a cache, because a committed row
may not have seen a row that is gone.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from refusion_eval.engine.engine import Engine
from refusion_eval.engine.masks import visible
from refusion_eval.engine.prefix import SharedPrefix
from refusion_eval.engine.readout import PackedRead, ReadPlan, read_out
from refusion_eval.errors import ConfigError
from refusion_eval.models.cache import KVCache
from refusion_eval.models.stock import StockModel
from refusion_eval.types import Forward, Readout


class FullContextEngine(Engine):
    """Runs decoders on a model of transformers, one call of the model a forward, in a batch as well."""

    def __init__(self, model: StockModel) -> None:
        super().__init__(model, "sdpa")  # type: ignore[arg-type] # the engine itself asks only for sizes and device

    def _new_cache(self, num_sequences: int, capacity: int) -> "ContextCache":
        return ContextCache(self.model.config, num_sequences, capacity, self.model.dtype, self.model.device)

    def _compute_shared(self, cache: KVCache, forwards: Sequence[Forward], recorded: Any, shared: SharedPrefix) -> Any:
        # Nothing can be shared: every forward computes the whole text.
        return self._compute(cache, forwards, recorded)

    @torch.inference_mode()
    def _compute(self, cache: KVCache, forwards: Sequence[Forward], recorded: Any) -> list[Readout]:
        assert isinstance(cache, ContextCache)
        model: Any = self.model
        reads, logits, first_row = [], [], 0
        for sequence, forward in enumerate(forwards):
            if forward.approximation is not None:
                raise _refusal("scores rows or reuses features")
            rows = cache.rows_of(sequence, forward)
            logits.append(model.logits(*rows)[-len(forward.tokens) :])
            reads += [PackedRead(read, first_row) for read in forward.reads]
            first_row += len(forward.tokens)
        return read_out(
            ReadPlan(reads), torch.cat(logits), lambda rows_NV: rows_NV, model.config.vocab_size, model.dtype
        )


class _Rows(NamedTuple):
    """Rows of one sequence: token, position, and which of them each sees."""

    tokens: list[int]
    positions: list[int]
    sees_NN: npt.NDArray[np.bool_]


_NO_ROWS = _Rows([], [], np.zeros((0, 0), dtype=np.bool_))


class ContextCache(KVCache):
    """Committed rows of each sequence in place of their keys and values; arguments as for `KVCache`."""

    def __init__(
        self, config: Any, num_sequences: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # No layers: the bookkeeping of rows is the cache's own, and no keys and values take memory.
        super().__init__(replace(config, num_layers=0), num_sequences, capacity, dtype, device)
        self._rows = [_NO_ROWS] * num_sequences  # of the last forward and before, committed ones first

    def rows_of(self, sequence: int, forward: Forward) -> _Rows:
        """The committed rows of a sequence and those of its forward, which they become."""
        before = self._rows[sequence]
        num_old, num_new = len(before.tokens), len(forward.tokens)
        sees_NN = np.zeros((num_old + num_new,) * 2, dtype=np.bool_)
        sees_NN[:num_old, :num_old] = before.sees_NN
        sees_NN[num_old:, :num_old] = True
        sees_NN[num_old:, num_old:] = visible(forward.attention)
        rows = _Rows([*before.tokens, *forward.tokens], [*before.positions, *forward.positions], sees_NN)
        self._rows[sequence] = rows
        return rows

    def resize(self, num_sequences: int, capacity: int) -> None:
        """See `KVCache.resize`."""
        num_more = num_sequences - self.num_sequences
        super().resize(num_sequences, capacity)
        self._rows = self._rows[:num_sequences] + [_NO_ROWS] * num_more

    def clear(self, sequence: int) -> None:
        """See `KVCache.clear`."""
        super().clear(sequence)
        self._rows[sequence] = _NO_ROWS

    def move(self, source: int, target: int) -> None:
        """See `KVCache.move`."""
        super().move(source, target)
        self._rows[target] = self._rows[source]

    def commit(
        self, sequence: int, rows: Sequence[int], replace: Sequence[int] | None = None, keep: int | None = None
    ) -> None:
        """See `KVCache.commit`.

        Raises:
            ConfigError: rows replace others, or a row stays that saw one which does not.
        """
        if replace is not None:
            raise _refusal("replaces rows of a cache")
        length = self.lengths[sequence]
        super().commit(sequence, rows, keep=keep)
        before = self._rows[sequence]
        stays = [*range(length if keep is None else keep), *(length + row for row in rows)]
        gone = sorted(set(range(len(before.tokens))) - set(stays))
        # With a cache that row would keep what it saw; computed again, it would not see the row that is gone.
        if before.sees_NN[np.ix_(stays, gone)].any():
            raise _refusal("keeps rows in a cache that were computed beside other rows than the later ones")
        self._rows[sequence] = _Rows(
            [before.tokens[row] for row in stays],
            [before.positions[row] for row in stays],
            before.sees_NN[np.ix_(stays, stays)],
        )


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"this decoder {what}, which forwards over the whole text cannot repeat; with backend=transformers take a "
        "decoder without such a cache: autoregressive, refusion, llada, dream or bd3lm"
    )
