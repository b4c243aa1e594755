"""Attention of packed rows over the KV cache: one sequence without a copy, or several sequences padded to one width.

Query heads that share a key-value head form a group. Keys and values are expanded over the group by a view with stride
0, never repeated in memory.

Shapes: T packed rows, S sequences, Q rows of the widest sequence, K keys, H query heads, G key-value heads, R = H / G
query heads a group, D head width.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from refusion_eval.models.cache import KVCache

try:
    from flash_attn import flash_attn_func as flash_attn_func
except ImportError:
    flash_attn_func = None

Backend = Literal["sdpa", "flash", "native"]

# Which rows of its own forward a row sees: all, those up to itself, or those of a pattern. It sees every committed row.
ALL, CAUSAL, PATTERN = 0, 1, 2

# On a CPU in float32 two products and a softmax took 0.62 to 0.9 of the time of torch's fused kernel (1 to 90 queries,
# 90 to 130 keys), whose blocks are made for long texts. Beyond this many scores a head their memory costs more.
MAX_DENSE = 1 << 18


def grouped_attention(
    q_THD: Tensor, keys_GKD: Tensor, values_GKD: Tensor, mask_TK: Tensor | None, is_causal: bool
) -> Tensor:
    """Attention of one sequence's queries, [T, H, D]."""
    q_GRTD = q_THD.unflatten(1, (keys_GKD.shape[0], -1)).permute(1, 2, 0, 3)
    out_GRTD = _attend(q_GRTD, keys_GKD, values_GKD, mask_TK, is_causal)
    return out_GRTD.permute(2, 0, 1, 3).flatten(1, 2)


def _attend(q_BRQD: Tensor, keys_BKD: Tensor, values_BKD: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Attention of R query heads to one key-value head, B times; the mask is broadcast over missing axes."""
    num_groups, num_shared, num_queries, head_dim = q_BRQD.shape
    num_keys = keys_BKD.shape[1]
    if q_BRQD.dtype == torch.float32 and not q_BRQD.is_cuda and num_queries * num_keys <= MAX_DENSE:
        if is_causal:
            mask = _causal_mask(num_queries)
        # The queries of a group are rows of one product, so that keys are read once for all of them.
        scaled = q_BRQD.reshape(num_groups, -1, head_dim) * head_dim**-0.5
        scores = torch.bmm(scaled, keys_BKD.mT)
        if mask is not None:
            scores.view(num_groups, num_shared, num_queries, num_keys).add_(mask)
        return torch.bmm(scores.softmax(dim=-1), values_BKD).view(q_BRQD.shape)
    shape = (num_groups, num_shared, num_keys, head_dim)
    keys, values = keys_BKD[:, None].expand(shape), values_BKD[:, None].expand(shape)
    return scaled_dot_product_attention(q_BRQD, keys, values, attn_mask=mask, is_causal=is_causal)


@lru_cache(maxsize=16)
def _causal_mask(num_rows: int) -> Tensor:
    return torch.full((num_rows, num_rows), float("-inf")).triu_(1)


class OneSequence:
    """Attention for a forward of one sequence: writes its staged rows in place, then attends over all its rows.

    Args:
        mask_QK: additive mask over committed and staged rows; None if every row sees all of them, or with `causal`.
        causal: whether every row sees the committed rows, the staged rows before it and itself. There is then no mask,
            and either nothing is committed or `flash` is used.
    """

    def __init__(
        self, cache: KVCache, sequence: int, num_rows: int, mask_QK: Tensor | None, causal: bool, flash: bool
    ) -> None:
        start = cache.lengths[sequence]
        end = start + num_rows
        self._keys = cache.keys[:, sequence, :, :end]
        self._values = cache.values[:, sequence, :, :end]
        self._new_keys = self._keys[:, :, start:].transpose(1, 2)
        self._new_values = self._values[:, :, start:].transpose(1, 2)
        self._mask_QK, self._causal, self._flash = mask_QK, causal, flash

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Stores the rows of one layer and attends; returns [T, H, D]."""
        self._new_keys[layer].copy_(k_TGD)
        self._new_values[layer].copy_(v_TGD)
        keys_GKD, values_GKD = self._keys[layer], self._values[layer]
        if self._flash:
            batch = (q_THD[None], keys_GKD.transpose(0, 1)[None], values_GKD.transpose(0, 1)[None])
            # flash-attn aligns the causal triangle with the last key, as committed rows require.
            return flash_attn_func(*batch, causal=self._causal)[0]
        return grouped_attention(q_THD, keys_GKD, values_GKD, self._mask_QK, self._causal)


class OneByOne:
    """Attention for a forward of several sequences, one call each: the least arithmetic, the most calls."""

    def __init__(self, sequences: Sequence[OneSequence], widths: Sequence[int]) -> None:
        self._sequences, self._widths = sequences, list(widths)

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Stores the rows of one layer and attends; returns [T, H, D]."""
        parts = zip(*(rows.split(self._widths) for rows in (q_THD, k_TGD, v_TGD)), strict=True)
        return torch.cat([attend(layer, *part) for attend, part in zip(self._sequences, parts, strict=True)])


class Padded:
    """Attention for a forward of several sequences, padded to one width: one call, arithmetic on padding.

    Args:
        cache: holds the sequences at 0 .. len(widths) - 1; room for the rows must have been reserved.
        mask: additive mask for each sequence and key-value head, [S G, 1, Q, K], in which a padding row sees at least
            one key; None if every row sees all.
    """

    # Only attention is padded; everything else of a forward runs over the packed rows.

    def __init__(self, cache: KVCache, widths: Sequence[int], mask: Tensor | None) -> None:
        num_sequences, num_queries = len(widths), max(widths)
        num_keys = max(length + width for length, width in zip(cache.lengths, widths, strict=False))
        self._cache = cache
        self._keys = cache.keys[:, :num_sequences, :, :num_keys]
        self._values = cache.values[:, :num_sequences, :, :num_keys]
        self._num_queries = num_queries
        self._mask = mask

        sequences = [sequence for sequence, width in enumerate(widths) for _ in range(width)]
        rows = [row for width in widths for row in range(width)]
        cache_rows = [cache.lengths[sequence] + row for sequence, row in zip(sequences, rows, strict=True)]
        padded = [sequence * num_queries + row for sequence, row in zip(sequences, rows, strict=True)]
        index = torch.tensor([sequences, cache_rows, padded], device=cache.keys.device)
        self._sequences_T, self._cache_rows_T, self._padded_T = index
        self._ragged = min(widths) < num_queries

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Stores the rows of one layer and attends; returns [T, H, D]."""
        self._cache.keys[layer, self._sequences_T, :, self._cache_rows_T] = k_TGD
        self._cache.values[layer, self._sequences_T, :, self._cache_rows_T] = v_TGD
        keys_SGKD, values_SGKD = self._keys[layer], self._values[layer]
        num_sequences, num_kv_heads, _, head_dim = keys_SGKD.shape
        _, num_heads, _ = q_THD.shape
        if self._ragged:
            padded = q_THD.new_zeros(num_sequences * self._num_queries, num_heads, head_dim)
            padded[self._padded_T] = q_THD
        else:
            padded = q_THD
        grouped = (num_sequences, self._num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
        q_BRQD = padded.reshape(grouped).permute(0, 2, 3, 1, 4).flatten(0, 1)
        out_BRQD = _attend(q_BRQD, keys_SGKD.flatten(0, 1), values_SGKD.flatten(0, 1), self._mask, is_causal=False)
        out = out_BRQD.unflatten(0, (num_sequences, num_kv_heads)).permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
        return out[self._padded_T] if self._ragged else out


class SideBySide:
    """Attention of whole packed texts: nothing is cached, and no text sees another."""

    def __init__(self, widths: Sequence[int], is_causal: bool = True) -> None:
        self._widths, self._is_causal = list(widths), is_causal

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Attends in one layer; returns [T, H, D]."""
        outputs = []
        for q_QHD, k_QGD, v_QGD in zip(*(rows.split(self._widths) for rows in (q_THD, k_TGD, v_TGD)), strict=True):
            keys_GQD, values_GQD = k_QGD.transpose(0, 1), v_QGD.transpose(0, 1)
            outputs.append(grouped_attention(q_QHD, keys_GQD, values_GQD, None, self._is_causal))
        return torch.cat(outputs)
