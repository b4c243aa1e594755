"""Forwards of one sequence with fixed shapes and buffers, on CUDA recorded as graphs.

At batch 1 the forward of a large model is a few hundred small kernels, and launching them one by one can take longer
than reading the weights from memory. A forward is padded to one of a few widths and attends over the whole buffer
through a mask that is made on the device, so that one recorded graph serves every forward of its width.

Shapes: W padded rows, K capacity of the buffer, C residual width.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from refusion_eval.engine.masks import visible
from refusion_eval.models.attention import grouped_attention
from refusion_eval.models.cache import KVCache
from refusion_eval.models.transformer import Transformer
from refusion_eval.types import Attention, Forward

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)
NUM_WARM_UPS = 3  # before a recording: libraries choose kernels and allocate workspaces in their first calls


class StaticForwards:
    """The recorded forwards of one sequence's buffer.

    Args:
        model: the transformer.
        cache: buffer for one sequence; when its size changes, all graphs are recorded again.
    """

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._keys = cache.keys
        self._recorded: dict[int, _StaticForward] = {}
        # A rotary table that grows moves, and a graph would still read the old one.
        model.prepare_positions(model.config.max_positions)

    def serves(self, forward: Forward) -> bool:
        """Whether a forward fits one of the widths, padding included, and is no prefill, which may have any length.

        Forwards that score rows or reuse features are not served, because their work differs each time.
        """
        length, num_rows = self._cache.lengths[0], len(forward.tokens)
        if forward.scores is not None or forward.reuse is not None:
            return False
        return length > 0 and num_rows <= WIDTHS[-1] and length + _padded(num_rows) <= self._cache.capacity

    def hidden(self, forward: Forward) -> Tensor:
        """The residual stream of a forward's rows, [T, C]; overwritten by the next forward of the same width."""
        if self._keys is not self._cache.keys:
            self._keys = self._cache.keys
            self._recorded.clear()
        width = _padded(len(forward.tokens))
        if width not in self._recorded:
            self._recorded[width] = _StaticForward(self._model, self._cache, width)
        return self._recorded[width](forward, self._cache.lengths[0])


def _padded(num_rows: int) -> int:
    return next(width for width in WIDTHS if width >= num_rows)


@lru_cache(maxsize=256)
def _pattern(attention: Attention, width: int, device: torch.device) -> Tensor:
    """Which rows of the forward each row sees, [W, W]; a padding row sees itself, so that no softmax is empty."""
    seen_QQ = visible(attention)
    pattern_WW = np.eye(width, dtype=np.bool_)
    pattern_WW[: len(seen_QQ), : len(seen_QQ)] = seen_QQ
    return torch.from_numpy(pattern_WW).to(device)


class _StaticForward:
    """Forwards of one width."""

    def __init__(self, model: Transformer, cache: KVCache, width: int) -> None:
        self._model, self._cache, self._width = model, cache, width
        device = model.device
        self._numbers = torch.zeros(2 * width + 1, dtype=torch.int64, device=device)
        self._pattern_WW = torch.eye(width, dtype=torch.bool, device=device)
        self._offsets_W = torch.arange(width, device=device)
        self._cache_rows_K = torch.arange(cache.capacity, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._hidden_WC = torch.empty(0)
        if device.type == "cuda":
            self._record()

    @torch.inference_mode()
    def _record(self) -> None:
        # Rows written while recording lie after all committed rows.
        self._numbers[-1] = self._cache.lengths[0]
        stream = torch.cuda.Stream(self._model.device)
        stream.wait_stream(torch.cuda.current_stream(self._model.device))
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                self._compute()
        torch.cuda.current_stream(self._model.device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._hidden_WC = self._compute()

    @torch.inference_mode()
    def __call__(self, forward: Forward, length: int) -> Tensor:
        num_rows = len(forward.tokens)
        padding: Sequence[int] = [0] * (self._width - num_rows)
        numbers = np.array([*forward.tokens, *padding, *forward.positions, *padding, length], dtype=np.int64)
        self._numbers.copy_(torch.from_numpy(numbers))
        self._pattern_WW.copy_(_pattern(forward.attention, self._width, self._model.device))
        if self._graph is None:
            self._hidden_WC = self._compute()
        else:
            self._graph.replay()
        return self._hidden_WC[:num_rows]

    def _compute(self) -> Tensor:
        tokens_W, positions_W, length_1 = self._numbers.split_with_sizes((self._width, self._width, 1))
        rows_W = length_1 + self._offsets_W
        seen_WK = (self._cache_rows_K < length_1).expand(self._width, -1).index_copy(1, rows_W, self._pattern_WW)
        dtype = self._model.dtype
        mask_WK = torch.zeros(seen_WK.shape, dtype=dtype, device=seen_WK.device).masked_fill(~seen_WK, float("-inf"))
        keys, values = self._cache.keys[:, 0], self._cache.values[:, 0]

        def attend(layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
            keys[layer].index_copy_(1, rows_W, k_TGD.transpose(0, 1))
            values[layer].index_copy_(1, rows_W, v_TGD.transpose(0, 1))
            return grouped_attention(q_THD, keys[layer], values[layer], mask_WK, is_causal=False)

        return self._model.hidden(tokens_W, positions_W, 0, attend)
