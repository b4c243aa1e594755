"""Computes the forwards of a batch: all in one model call, except those that reuse features."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from refusion_eval.engine import masks
from refusion_eval.engine.features import hidden_with_reuse
from refusion_eval.engine.row_scores import ScoringAttend
from refusion_eval.models.attention import Backend
from refusion_eval.models.cache import KVCache
from refusion_eval.models.transformer import Transformer
from refusion_eval.types import Forward


def hidden_of(model: Transformer, cache: KVCache, forwards: Sequence[Forward], backend: Backend) -> Tensor:
    """The residual stream of all rows of some forwards before the final norm, in their order, [T, C].

    Args:
        model: the transformer.
        cache: holds the sequences 0 .. len(forwards) - 1, with room for their rows.
        forwards: forward of each sequence.
        backend: attention backend.
    """
    packed = [sequence for sequence, forward in enumerate(forwards) if forward.reuse is None]
    if len(packed) == len(forwards):
        return _packed(model, cache, forwards, packed, backend)
    parts: dict[int, Tensor] = {}
    if packed:
        together_TC = _packed(model, cache, forwards, packed, backend)
        widths = [len(forwards[sequence].tokens) for sequence in packed]
        parts.update(zip(packed, together_TC.split(widths), strict=True))
    for sequence, forward in enumerate(forwards):
        if forward.reuse is not None:
            parts[sequence] = hidden_with_reuse(model, cache, sequence, forward, forward.reuse)
    return torch.cat([parts[sequence] for sequence in range(len(forwards))])


def _packed(
    model: Transformer, cache: KVCache, forwards: Sequence[Forward], sequences: Sequence[int], backend: Backend
) -> Tensor:
    """One model call for the forwards of some sequences of a batch."""
    chosen = [forwards[sequence] for sequence in sequences]
    tokens = [token for forward in chosen for token in forward.tokens]
    positions = [position for forward in chosen for position in forward.positions]
    tokens_T, positions_T = torch.from_numpy(np.array([tokens, positions], dtype=np.int64)).to(model.device)
    attend = masks.attend_over(cache, [forward.attention for forward in chosen], backend, sequences)
    if all(forward.scores is None for forward in chosen):
        return model.hidden(tokens_T, positions_T, max(positions), attend)
    scoring = ScoringAttend(attend, list(zip(sequences, chosen, strict=True)), model.device)
    hidden_TC = model.hidden(tokens_T, positions_T, max(positions), scoring)
    scoring.store(cache)
    return hidden_TC
