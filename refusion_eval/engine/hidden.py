"""The forwards of a batch as model calls: all in one, save those that reuse features."""

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
        cache: holds the sequences at 0 .. len(forwards) - 1, with room for their rows.
        forwards: of each sequence.
        backend: of attention.
    """
    packed = [place for place, forward in enumerate(forwards) if forward.reuse is None]
    if len(packed) == len(forwards):
        return _packed(model, cache, forwards, packed, backend)
    parts: dict[int, Tensor] = {}
    if packed:
        together_TC = _packed(model, cache, forwards, packed, backend)
        widths = [len(forwards[place].tokens) for place in packed]
        parts.update(zip(packed, together_TC.split(widths), strict=True))
    for place, forward in enumerate(forwards):
        if forward.reuse is not None:
            parts[place] = hidden_with_reuse(model, cache, place, forward, forward.reuse)
    return torch.cat([parts[place] for place in range(len(forwards))])


def _packed(
    model: Transformer, cache: KVCache, forwards: Sequence[Forward], places: Sequence[int], backend: Backend
) -> Tensor:
    """One model call for the forwards at some places of a batch."""
    chosen = [forwards[place] for place in places]
    tokens = [token for forward in chosen for token in forward.tokens]
    positions = [position for forward in chosen for position in forward.positions]
    tokens_T, positions_T = torch.from_numpy(np.array([tokens, positions], dtype=np.int64)).to(model.device)
    attend = masks.attend_over(cache, [forward.attention for forward in chosen], backend, places)
    if all(forward.scores is None for forward in chosen):
        return model.hidden(tokens_T, positions_T, max(positions), attend)
    scoring = ScoringAttend(attend, list(zip(places, chosen, strict=True)), model.device)
    hidden_TC = model.hidden(tokens_T, positions_T, max(positions), scoring)
    scoring.store(cache)
    return hidden_TC
