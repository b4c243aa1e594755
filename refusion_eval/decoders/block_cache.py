"""Which keys and values Fast-dLLM and Sparse-dLLM keep while they fill a block of a bidirectional model.

A bidirectional model has no exact cache: keys and values change with every token that is filled in. These methods keep
those of one forward of the whole text, the refresh, until the block is filled.

| cache | refresh | kept of the refresh | fed by later forwards |
|---|---|---|---|
| prefix | first forward of the block | rows before the block | the block and everything after it |
| dual | first forward of the block | rows outside the block | the block |
| sparse | second forward of the block | the best-scored rows outside the block | the block |

"sparse" is Sparse-dLLM (arXiv 2508.02558). In each layer the share `keep_ratio` of the rows outside the block stays:
prompt, finished blocks and later masks compete by `refusion_eval.types.RowScores`, and all heads keep the same rows.

| Sparse-dLLM | its release | here |
|---|---|---|
| queries and keys | rotated, not scaled | as released |
| score of a row | its key times the mean query of all rows of the block, masked or not | as released |
| number of rows kept | rounded down | as released |
| pooling | the rows next to the block on either side are neighbours | as released |
| equal scores, common among neighbours | left to its sort | the first rows stay |
"""

from typing import Literal

from refusion_eval.errors import ConfigError
from refusion_eval.types import NOTHING, Commit, RowScores

Cache = Literal["none", "prefix", "dual", "sparse"]


def check_kernel_size(decoder: str, kernel_size: int) -> None:
    """Raises ConfigError unless the neighbourhood of pooled scores has a centre."""
    if kernel_size % 2 == 0:
        raise ConfigError(
            f"{decoder}: kernel_size is {kernel_size}; scores are pooled around each row, so set it to an odd number"
        )


def refresh_number(cache: Cache) -> int:
    """Number of the refresh among the forwards of a block, from 0."""
    return 1 if cache == "sparse" else 0


def rows_outside(block: range, length: int) -> list[int]:
    """Rows of a text of `length` rows that do not belong to a block."""
    return [*range(block.start), *range(block.stop, length)]


def sparse_scores(block: range, length: int, kernel_size: int) -> RowScores:
    """What the refresh of the sparse cache scores: all rows outside the block, by the queries of the block."""
    return RowScores(block, rows_outside(block, length), kernel_size)


def rows_after_refresh(
    cache: Cache, block: range, length: int, num_before: int, keep_ratio: float
) -> tuple[range, Commit]:
    """Which rows a forward after the refresh feeds, and which rows of the previous forward it commits.

    Args:
        cache: any but "none".
        block: rows of the block.
        length: rows of the text.
        num_before: forwards of the block before this one.
        keep_ratio: share of the rows that the sparse cache keeps.

    Returns:
        The rows to feed, and the commit: the rows outside of them if this is the first forward after the refresh.
    """
    fed = range(block.start, length) if cache == "prefix" else block
    if num_before > refresh_number(cache) + 1:
        return fed, NOTHING
    outside = rows_outside(fed, length)
    return fed, Commit(outside, best=int(len(outside) * keep_ratio) if cache == "sparse" else None)
