"""What Fast-dLLM keeps of a forward of the whole canvas while it fills a block, on LLaDA and Dream alike."""

from typing import Literal

from refusion_eval.decoders import sparse_dllm, validate
from refusion_eval.types import NOTHING, Commit

Cache = Literal["none", "prefix", "dual", "sparse"]


def check(decoder: str, cache: Cache, keep_ratio: float, kernel_size: int) -> None:
    """Raises ConfigError unless the cache is known and the settings of the sparse one are in their ranges."""
    validate.require_choice(decoder, "cache", cache, ("none", "prefix", "dual", "sparse"))
    sparse_dllm.check(decoder, keep_ratio, kernel_size)


def refresh_number(cache: Cache) -> int:
    """Which forward of a block, counted from 0, is the one of which rows stay."""
    return 1 if cache == "sparse" else 0


def feed_behind(cache: Cache, block: range, length: int, num_before: int, keep_ratio: float) -> tuple[range, Commit]:
    """What a forward behind the refresh feeds, and what it commits of the forward before it.

    Args:
        cache: not "none".
        block: rows of the canvas that belong to the block.
        length: rows of the canvas.
        num_before: forwards of the block before this one.
        keep_ratio: of the sparse cache.

    Returns:
        The block, with the prefix cache all behind it too; and, right behind the refresh, what else the canvas has.
    """
    fed = range(block.start, length) if cache == "prefix" else block
    if num_before > refresh_number(cache) + 1:
        return fed, NOTHING
    if cache == "sparse":
        return fed, sparse_dllm.commit(block, length, keep_ratio)
    return fed, Commit(sparse_dllm.outside(fed, length))
