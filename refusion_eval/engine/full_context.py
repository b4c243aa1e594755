"""The engine over a model of transformers: every forward computes the whole text again."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from refusion_eval.engine.engine import Engine
from refusion_eval.engine.readout import ReadPlan, read_out
from refusion_eval.errors import ConfigError
from refusion_eval.models.attention import visible
from refusion_eval.models.cache import KVCache
from refusion_eval.models.stock import StockModel
from refusion_eval.types import Forward, Readout


class _Rows(NamedTuple):
    tokens: list[int]
    positions: list[int]
    sees_NN: npt.NDArray[np.bool_]  # which of them each sees


_NO_ROWS = _Rows([], [], np.zeros((0, 0), dtype=np.bool_))


class ContextCache(KVCache):
    # Committed rows of each sequence in place of their keys and values, each with its token, its position and the rows
    # that it saw. A forward computes the committed rows and its own. The result is that of a cache, because a committed
    # row may not have seen a row that is gone.

    only_counts = True

    def _rows(self, sequence: int) -> _Rows:
        """Those of the last forward and before, committed rows first."""
        rows = self.states[sequence]
        return rows if isinstance(rows, _Rows) else _NO_ROWS

    def rows_of(self, sequence: int, forward: Forward) -> _Rows:
        before = self._rows(sequence)
        num_old, num_new = len(before.tokens), len(forward.tokens)
        sees_NN = np.zeros((num_old + num_new,) * 2, dtype=np.bool_)
        sees_NN[:num_old, :num_old] = before.sees_NN
        sees_NN[num_old:, :num_old] = True
        sees_NN[num_old:, num_old:] = visible(forward.attention)
        rows = _Rows([*before.tokens, *forward.tokens], [*before.positions, *forward.positions], sees_NN)
        self.states[sequence] = rows
        return rows

    def commit(self, sequence: int, rows: Sequence[int], keep: int | None = None) -> None:
        """See `KVCache.commit`; raises ConfigError if a row stays that saw a row which is gone."""
        length = self.lengths[sequence]
        super().commit(sequence, rows, keep)
        before = self._rows(sequence)
        stays = [*range(length if keep is None else keep), *(length + row for row in rows)]
        gone = sorted(set(range(len(before.tokens))) - set(stays))
        # With a cache that row would keep what it saw; computed again, it would not see the row that is gone.
        if before.sees_NN[np.ix_(stays, gone)].any():
            raise _refusal("keeps rows in a cache that were computed beside other rows than the later ones")
        tokens, positions = ([numbers[row] for row in stays] for numbers in before[:2])
        self.states[sequence] = _Rows(tokens, positions, before.sees_NN[np.ix_(stays, stays)])


class FullContextEngine(Engine):
    shares_prompts = False  # every forward computes the whole text
    cache_class = ContextCache

    def __init__(self, model: StockModel) -> None:
        super().__init__(model, "sdpa")  # type: ignore[arg-type] # the engine itself asks only for sizes and device

    @torch.inference_mode()
    def _compute(self, cache: KVCache, forwards: Sequence[Forward], sequences: Sequence[int]) -> list[Readout]:
        assert isinstance(cache, ContextCache)
        model: Any = self.model
        logits = []
        for sequence, forward in zip(sequences, forwards, strict=True):
            if forward.approximation is not None:
                raise _refusal("scores rows or reuses features")
            rows = cache.rows_of(sequence, forward)
            logits.append(model.logits(*rows)[-len(forward.tokens) :])
        return read_out(ReadPlan.of(forwards), torch.cat(logits), Tensor.float, model.config.vocab_size, model.dtype)


def _refusal(action: str) -> ConfigError:
    return ConfigError(
        f"this decoder {action}, which forwards over the whole text cannot repeat; with backend=transformers take a "
        "decoder without such a cache: autoregressive, refusion, llada, dream or bd3lm"
    )
