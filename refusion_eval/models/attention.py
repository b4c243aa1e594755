"""Attention of packed rows over the KV cache: one sequence without a copy, or several sequences padded to one width.

Shapes: T packed rows, S sequences, Q rows of the widest sequence, K keys, H query heads, G key-value heads, R = H / G
query heads a group, D head width, B words of 64 bits.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from refusion_eval.errors import DecodeError
from refusion_eval.models.cache import KVCache
from refusion_eval.types import Attention

try:
    from flash_attn import flash_attn_func as flash_attn_func
except ImportError:
    flash_attn_func = None

Backend = Literal["sdpa", "flash", "native"]
# Stores the keys and values of the rows of a layer, [T, G, D], and returns the attended values, [T, H, D].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
BoolArray = npt.NDArray[np.bool_]

# Which rows of its own forward a row sees: all, those up to itself, or those of a pattern. It sees every committed row.
ALL, CAUSAL, PATTERN = 0, 1, 2

# On a CPU in float32 two products and a softmax took 0.62 to 0.9 of the time of torch's fused kernel (1 to 90 queries,
# 90 to 130 keys), whose blocks are made for long texts. Beyond this many scores a head their memory costs more.
MAX_DENSE = 1 << 18
# A CPU pays for arithmetic on padding; beyond this ratio of padded to true rows separate calls were faster (16
# sequences of 1 to 300 rows: 4.9 against 29 ms a layer; all of 1 row: 1.0 against 0.4). A GPU pays for calls.
MAX_CPU_PADDING = 1.5
BITS = 64  # of a word of a visibility pattern
# The words whose lowest 0, 1, ..., 64 bits are set.
LOWEST = np.array([(1 << number) - 1 for number in range(BITS + 1)], dtype=np.uint64).view(np.int64)


def check_attention(attention: Attention) -> None:
    start = 0
    for segment in attention:
        is_before = True
        for first, last in segment.sees:
            is_before &= 0 <= first <= last <= start
        if segment.size < 1 or not is_before:
            raise DecodeError(f"attention segment {segment} at row {start} is empty or sees rows not before it")
        start += segment.size


def num_words(width: int) -> int:
    return -(-width // BITS)


def pattern_bits(attention: Attention, words: int) -> npt.NDArray[np.int64]:
    """Which rows of a forward see which of its own rows, as words, lowest bit first, [Q, B]."""
    # Committed rows are seen by all. A row sees ranges of rows: part of its segment, and those that the segment names.
    # A segment names one range at most in nearly all forwards, so all rows are computed at once with one such range.
    spans, sizes, start = [], [], 0
    for segment in attention:
        size = segment.size
        spans.append((start, 0 if segment.causal else start + size, *(segment.sees[0] if segment.sees else (0, 0))))
        sizes.append(size)
        start += size
    firsts_and_lasts = np.array(spans).T.repeat(sizes, axis=1)
    firsts_and_lasts[1] = np.maximum(firsts_and_lasts[1], np.arange(1, start + 1))
    before = _rows_before(firsts_and_lasts, words)
    bits_QB = (before[0] ^ before[1]) | (before[2] ^ before[3])
    for segment, (first_row, *_) in zip(attention, spans, strict=True):
        for span in segment.sees[1:]:
            first, last = _rows_before(np.array(span), words)
            bits_QB[first_row : first_row + segment.size] |= first ^ last
    return bits_QB


def _rows_before(rows: npt.NDArray[np.int64], words: int) -> npt.NDArray[np.int64]:
    """All rows before each of these rows, as words on a last axis."""
    return LOWEST[np.minimum(np.maximum(rows[..., None] - BITS * np.arange(words), 0), BITS)]


def visible(attention: Attention) -> BoolArray:
    """Which rows of a forward see which of its own rows, [Q, Q]."""
    num_rows = _num_rows(attention)
    bits_QB = pattern_bits(attention, num_words(num_rows)).astype("<i8", copy=False)
    return np.unpackbits(bits_QB.view(np.uint8), axis=1, count=num_rows, bitorder="little").view(np.bool_)


def _num_rows(attention: Attention) -> int:
    return sum([segment.size for segment in attention])


def is_causal(attention: Attention) -> bool:
    """Whether every row sees exactly the rows before it and itself."""
    start = 0
    for segment in attention:
        reached = 0
        for first, last in sorted(segment.sees):
            reached = max(reached, last) if first <= reached else reached
        if reached < start or not (segment.causal or segment.size == 1):
            return False
        start += segment.size
    return True


def sees_everything(attention: Attention) -> bool:
    """Whether every row sees every row, so that no mask is needed."""
    # No row sees a later segment.
    return len(attention) == 1 and (attention[0].size == 1 or not attention[0].causal)


def additive_mask(
    attentions: Sequence[Attention], lengths: Sequence[int], num_groups: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """The masks of sequences padded to one size, [S G, 1, Q, K], 0 where visible and -inf elsewhere; None for none."""
    # Additive, because the kernels turn a boolean mask into this once a layer.
    patterns = [visible(attention) for attention in attentions]
    sizes = {(length, len(pattern)) for length, pattern in zip(lengths, patterns, strict=True)}
    if len(sizes) == 1 and all(sees_everything(attention) for attention in attentions):
        return None
    num_queries = max(len(pattern) for pattern in patterns)
    num_keys = max(length + len(pattern) for length, pattern in zip(lengths, patterns, strict=True))
    seen_SQK = np.zeros((len(patterns), num_queries, num_keys), dtype=np.bool_)
    for seen_QK, length, pattern in zip(seen_SQK, lengths, patterns, strict=True):
        num_rows = len(pattern)
        seen_QK[:num_rows, :length] = True
        seen_QK[:num_rows, length : length + num_rows] = pattern
        seen_QK[num_rows:, 0] = True  # a padding row: an empty softmax would be NaN, which spreads
    # Rows begin at multiples of 8 numbers; any other mask is copied by torch's kernel in every layer.
    shape = (len(patterns), num_groups, num_queries, -(-num_keys // 8) * 8)
    mask_SGQK = torch.zeros(shape, dtype=dtype, device=device)[..., :num_keys]
    mask_SGQK.masked_fill_(torch.from_numpy(~seen_SQK).to(device)[:, None], float("-inf"))
    return mask_SGQK.flatten(0, 1)[:, None]


def sequence_table(
    cache: KVCache, attentions: Sequence[Attention], sequences: Sequence[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of each sequence its index, committed rows, rows, kind of pattern and its first word, [S, 5]; all words."""
    table, patterns, begin = np.empty((len(sequences), 5), dtype=np.int64), [np.empty(0, dtype=np.int64)], 0
    for line, sequence, attention in zip(table, sequences, attentions, strict=True):
        kind = ALL if sees_everything(attention) else CAUSAL if is_causal(attention) else PATTERN
        num_rows = _num_rows(attention)
        line[:] = sequence, cache.lengths[sequence], num_rows, kind, begin
        if kind == PATTERN:
            patterns.append(pattern_bits(attention, num_words(num_rows)).ravel())
            begin += patterns[-1].size
    return table, np.concatenate(patterns)


def attend_over(
    cache: KVCache, attentions: Sequence[Attention], backend: Backend, sequences: Sequence[int] | None = None
) -> Attend:
    """The attention function of one model call, for these indices of the cache, ascending, or for 0, 1, ... of it."""
    sequences = range(len(attentions)) if sequences is None else sequences
    if len(attentions) == 1:
        return OneSequence(cache, sequences[0], attentions[0], backend)
    widths = [_num_rows(attention) for attention in attentions]
    costly = cache.keys.device.type == "cpu" and len(widths) * max(widths) > MAX_CPU_PADDING * sum(widths)
    if costly or sequences[-1] >= len(widths):  # there are gaps between the sequences
        alone = [OneSequence(cache, *pair, backend) for pair in zip(sequences, attentions, strict=True)]
        return OneByOne(alone, widths)
    return Padded(cache, attentions, widths)


def grouped_attention(
    q_THD: Tensor, keys_GKD: Tensor, values_GKD: Tensor, mask: Tensor | None, is_causal: bool
) -> Tensor:
    q_GRTD = q_THD.unflatten(1, (keys_GKD.shape[0], -1)).permute(1, 2, 0, 3)
    out_GRTD = _attend(q_GRTD, keys_GKD, values_GKD, mask, is_causal)
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
    # Keys and values are expanded over the group by a view with stride 0, never repeated in memory.
    shape = (num_groups, num_shared, num_keys, head_dim)
    keys, values = keys_BKD[:, None].expand(shape), values_BKD[:, None].expand(shape)
    return scaled_dot_product_attention(q_BRQD, keys, values, attn_mask=mask, is_causal=is_causal)


@lru_cache(maxsize=16)
def _causal_mask(num_rows: int) -> Tensor:
    return torch.full((num_rows, num_rows), float("-inf")).triu_(1)


class OneSequence:
    """Attention for a forward of one sequence: writes its staged rows in place, then attends over all its rows."""

    def __init__(self, cache: KVCache, sequence: int, attention: Attention, backend: Backend) -> None:
        start, is_triangle = cache.lengths[sequence], is_causal(attention)
        end = start + _num_rows(attention)
        self._keys = cache.keys[:, sequence, :, :end]
        self._values = cache.values[:, sequence, :, :end]
        self._new_keys = self._keys[:, :, start:].transpose(1, 2)
        self._new_values = self._values[:, :, start:].transpose(1, 2)
        self._flash = backend == "flash" and is_triangle
        # torch's own triangle begins at the first key, not after committed keys. A mask is built only if the kernels
        # need it: without a mask they skip half of the work of a causal text.
        self._causal = self._flash or (start == 0 and is_triangle and not sees_everything(attention))
        self._mask = None
        if not self._causal:
            self._mask = additive_mask([attention], [start], 1, cache.keys.dtype, cache.keys.device)

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        self._new_keys[layer].copy_(k_TGD)
        self._new_values[layer].copy_(v_TGD)
        keys_GKD, values_GKD = self._keys[layer], self._values[layer]
        if self._flash:
            batch = (q_THD[None], keys_GKD.transpose(0, 1)[None], values_GKD.transpose(0, 1)[None])
            # flash-attn aligns the causal triangle with the last key, as committed rows require.
            return flash_attn_func(*batch, causal=True)[0]
        return grouped_attention(q_THD, keys_GKD, values_GKD, self._mask, self._causal)


class OneByOne:
    """Attention for a forward of several sequences, one call each: the least arithmetic, the most calls."""

    def __init__(self, sequences: Sequence[Attend], widths: Sequence[int]) -> None:
        self._sequences, self._widths = sequences, list(widths)

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        parts = zip(*(rows.split(self._widths) for rows in (q_THD, k_TGD, v_TGD)), strict=True)
        return torch.cat([attend(layer, *part) for attend, part in zip(self._sequences, parts, strict=True)])


class Padded:
    """Attention for a forward of several sequences, padded to one width: one call, arithmetic on padding."""

    # Only attention is padded; everything else of a forward runs over the packed rows.

    def __init__(self, cache: KVCache, attentions: Sequence[Attention], widths: Sequence[int]) -> None:
        num_sequences, num_queries, lengths = len(widths), max(widths), cache.lengths[: len(widths)]
        num_keys = max(length + width for length, width in zip(lengths, widths, strict=True))
        self._cache, self._num_queries = cache, num_queries
        self._mask = additive_mask(attentions, lengths, cache.keys.shape[2], cache.keys.dtype, cache.keys.device)
        self._keys = cache.keys[:, :num_sequences, :, :num_keys]
        self._values = cache.values[:, :num_sequences, :, :num_keys]
        sequences = [sequence for sequence, width in enumerate(widths) for _ in range(width)]
        rows = [row for width in widths for row in range(width)]
        cache_rows = [lengths[sequence] + row for sequence, row in zip(sequences, rows, strict=True)]
        padded = [sequence * num_queries + row for sequence, row in zip(sequences, rows, strict=True)]
        index = torch.tensor([sequences, cache_rows, padded], device=cache.keys.device)
        self._sequences_T, self._cache_rows_T, self._padded_T = index
        self._ragged = min(widths) < num_queries

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        self._cache.keys[layer, self._sequences_T, :, self._cache_rows_T] = k_TGD
        self._cache.values[layer, self._sequences_T, :, self._cache_rows_T] = v_TGD
        keys_SGKD, values_SGKD = self._keys[layer], self._values[layer]
        num_sequences, num_kv_heads, _, head_dim = keys_SGKD.shape
        num_heads, padded = q_THD.shape[1], q_THD
        if self._ragged:
            padded = q_THD.new_zeros(num_sequences * self._num_queries, num_heads, head_dim)
            padded[self._padded_T] = q_THD
        grouped = (num_sequences, self._num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
        q_BRQD = padded.reshape(grouped).permute(0, 2, 3, 1, 4).flatten(0, 1)
        out_BRQD = _attend(q_BRQD, keys_SGKD.flatten(0, 1), values_SGKD.flatten(0, 1), self._mask, is_causal=False)
        out = out_BRQD.unflatten(0, (num_sequences, num_kv_heads)).permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
        return out[self._padded_T] if self._ragged else out


def side_by_side(widths: Sequence[int], is_causal: bool = True) -> OneByOne:
    """Attention of whole packed texts: nothing is cached, and no text sees another."""

    def attend(_layer: int, q_QHD: Tensor, k_QGD: Tensor, v_QGD: Tensor) -> Tensor:
        return grouped_attention(q_QHD, k_QGD.transpose(0, 1), v_QGD.transpose(0, 1), None, is_causal)

    return OneByOne([attend] * len(widths), widths)
