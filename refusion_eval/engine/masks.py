"""Attention masks from the segments of a forward, and the cheapest attention that computes them."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from refusion_eval.errors import DecodeError
from refusion_eval.models.attention import ALL, CAUSAL, PATTERN, Backend, OneByOne, OneSequence, Padded
from refusion_eval.models.cache import KVCache
from refusion_eval.models.transformer import Attend
from refusion_eval.types import Attention

BoolArray = npt.NDArray[np.bool_]

# A CPU pays for arithmetic on padding; beyond this ratio of padded to true rows separate calls were faster (16
# sequences of 1 to 300 rows: 4.9 against 29 ms a layer; all of 1 row: 1.0 against 0.4). A GPU pays for calls.
MAX_CPU_PADDING = 1.5


# Patterns of up to this many rows are cached, 256 KiB each at most; those of long prompts are computed each time.
MAX_KEPT_ROWS = 512


def check_attention(attention: Attention) -> None:
    """Raises DecodeError if a segment is empty or sees rows that are not before it."""
    start = 0
    for segment in attention:
        if segment.size < 1 or any(not 0 <= first <= last <= start for first, last in segment.sees):
            raise DecodeError(f"attention segment {segment} at row {start} is empty or sees rows not before it")
        start += segment.size


def visible(attention: Attention) -> BoolArray:
    """Which rows of a forward see which of its own rows, [Q, Q], read-only; committed rows are seen by all."""
    num_rows = sum(segment.size for segment in attention)
    return _kept_pattern(attention) if num_rows <= MAX_KEPT_ROWS else _pattern(attention)


def _pattern(attention: Attention) -> BoolArray:
    num_rows = sum(segment.size for segment in attention)
    mask_QQ = np.zeros((num_rows, num_rows), dtype=np.bool_)
    start = 0
    for segment in attention:
        end = start + segment.size
        for first, last in segment.sees:
            mask_QQ[start:end, first:last] = True
        own = np.ones((segment.size, segment.size), dtype=np.bool_)
        mask_QQ[start:end, start:end] = np.tril(own) if segment.causal else own
        start = end
    mask_QQ.flags.writeable = False
    return mask_QQ


_kept_pattern = lru_cache(maxsize=256)(_pattern)


@lru_cache(maxsize=256)
def is_causal(attention: Attention) -> bool:
    """Whether every row sees exactly the rows before it and itself."""
    if len(attention) == 1:
        return attention[0].causal
    mask_QQ = visible(attention)
    return bool(np.array_equal(mask_QQ, np.tril(np.ones_like(mask_QQ))))


@lru_cache(maxsize=256)
def sees_everything(attention: Attention) -> bool:
    """Whether every row sees every row, so that no mask is needed."""
    if len(attention) == 1 and (attention[0].size == 1 or not attention[0].causal):
        return True
    return bool(visible(attention).all())


def additive(visible_QQ: BoolArray, num_committed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The mask of one sequence, added to its scores: [Q, committed + Q], 0 where visible and -inf elsewhere."""
    # Additive, because the kernels turn a boolean mask into this once a layer.
    num_rows = visible_QQ.shape[0]
    mask_QK = _zeros((num_rows, num_committed + num_rows), dtype, device)
    hidden_QQ = torch.from_numpy(~visible_QQ).to(device)
    mask_QK[:, num_committed:].masked_fill_(hidden_QQ, float("-inf"))
    return mask_QK


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Rows begin at multiples of 8 numbers; any other mask is copied by torch's kernel in every layer.
    aligned = -(-shape[-1] // 8) * 8
    return torch.zeros((*shape[:-1], aligned), dtype=dtype, device=device)[..., : shape[-1]]


def additive_batch(
    attentions: Sequence[Attention], lengths: Sequence[int], num_groups: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """The masks of several sequences padded to one size, one for each key-value head, [S G, 1, Q, K]; None for none."""
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
    mask_SGQK = _zeros((len(patterns), num_groups, num_queries, num_keys), dtype, device)
    mask_SGQK.masked_fill_(torch.from_numpy(~seen_SQK).to(device)[:, None], float("-inf"))
    return mask_SGQK.flatten(0, 1)[:, None]


def sequence_table(
    cache: KVCache, attentions: Sequence[Attention], sequences: Sequence[int]
) -> tuple[npt.NDArray[np.int64], BoolArray]:
    """The sequences of a forward as `refusion_eval.models.native` takes them.

    Returns:
        Index, committed rows, rows, kind of pattern and its beginning in the second value, [S, 5]; the patterns, [P].
    """
    table, patterns, begin = np.empty((len(sequences), 5), dtype=np.int64), [_NO_PATTERN], 0
    for line, sequence, attention in zip(table, sequences, attentions, strict=True):
        num_rows, kind = sum(segment.size for segment in attention), _kind(attention)
        line[:] = sequence, cache.lengths[sequence], num_rows, kind, begin
        if kind == PATTERN:
            patterns.append(visible(attention).ravel())
            begin += num_rows * num_rows
    return table, np.concatenate(patterns)


_NO_PATTERN = np.empty(0, dtype=np.bool_)


@lru_cache(maxsize=256)
def _kind(attention: Attention) -> int:
    if sees_everything(attention):
        return ALL
    return CAUSAL if is_causal(attention) else PATTERN


def attend_over(
    cache: KVCache, attentions: Sequence[Attention], backend: Backend, sequences: Sequence[int] | None = None
) -> Attend:
    """The attention function of one model call.

    Args:
        sequences: indices of the sequences in the cache, ascending; None is 0 .. len(attentions) - 1. If they have
            gaps, each sequence attends in a call of its own.
    """
    sequences = range(len(attentions)) if sequences is None else sequences
    if len(attentions) == 1:
        return _attend_alone(cache, sequences[0], attentions[0], backend)
    widths = [sum(segment.size for segment in attention) for attention in attentions]
    dtype, device = cache.keys.dtype, cache.keys.device
    costly = device.type == "cpu" and len(widths) * max(widths) > MAX_CPU_PADDING * sum(widths)
    if costly or sequences[-1] >= len(widths):
        alone = [_attend_alone(cache, *pair, backend) for pair in zip(sequences, attentions, strict=True)]
        return OneByOne(alone, widths)
    return Padded(
        cache, widths, additive_batch(attentions, cache.lengths[: len(widths)], cache.keys.shape[2], dtype, device)
    )


def _attend_alone(cache: KVCache, sequence: int, attention: Attention, backend: Backend) -> OneSequence:
    # A mask is built only if the kernels need one: without it they skip half of the work of a causal text.
    num_rows, length = sum(segment.size for segment in attention), cache.lengths[sequence]
    flash = backend == "flash" and is_causal(attention)
    if flash or sees_everything(attention):
        return OneSequence(cache, sequence, num_rows, None, causal=flash, flash=flash)
    if length == 0 and is_causal(attention):  # torch's own triangle begins at the first key, not after committed ones
        return OneSequence(cache, sequence, num_rows, None, causal=True, flash=False)
    mask_QK = additive(visible(attention), length, cache.keys.dtype, cache.keys.device)
    return OneSequence(cache, sequence, num_rows, mask_QK, causal=False, flash=False)
