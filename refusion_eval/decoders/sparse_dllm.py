"""Sparse-dLLM's cache (arXiv 2508.02558): the dual cache, one step later, and only the rows that the block looks at.

A block's first forward is plain. The second is of the whole canvas again; of its rows outside the block the share
`keep_ratio` stays, in each layer those that score best by `refusion_eval.types.RowScores`: prompt, finished blocks and
masks behind the block compete alike, all heads of a layer keep the same rows. Later forwards feed the block alone.

From the release: queries and keys are rotated and not scaled; each key is scored by the mean query of all rows of the
block, masked or not; the number kept is rounded down; rows next to the block on its two sides count as neighbours.
Neighbours often have the same pooled score; there the first of them stay, while the release leaves it to its sort.
"""

from refusion_eval.decoders import validate
from refusion_eval.errors import ConfigError
from refusion_eval.types import Commit, RowScores


def check(decoder: str, keep_ratio: float, kernel_size: int) -> None:
    """Raises ConfigError unless the share lies between 0 and 1 and the neighbourhood has a centre."""
    validate.require_number(decoder, "keep_ratio", keep_ratio, 0.0, 1.0)
    validate.require_integer(decoder, "kernel_size", kernel_size, at_least=1)
    if kernel_size % 2 == 0:
        raise ConfigError(
            f"{decoder}: kernel_size is {kernel_size}; scores are pooled around each row, so set it to an odd number"
        )


def outside(block: range, length: int) -> list[int]:
    """Rows of a canvas that do not belong to a block."""
    return [*range(block.start), *range(block.stop, length)]


def scores(block: range, length: int, kernel_size: int) -> RowScores:
    """What the block's second forward scores: all rows of the canvas outside the block, by its queries."""
    return RowScores(block, outside(block, length), kernel_size)


def commit(block: range, length: int, keep_ratio: float) -> Commit:
    """What stays of the block's second forward."""
    rows = outside(block, length)
    return Commit(rows, best=int(len(rows) * keep_ratio))
