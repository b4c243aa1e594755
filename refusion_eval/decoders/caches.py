"""What decoders of bidirectional models keep between forwards, none of it exact: keys and values, or features.

A bidirectional model has no exact cache: keys and values change with every token that is filled in. Fast-dLLM and
Sparse-dLLM keep those of one forward of the whole text, the refresh, until the block is filled.

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

dLLM-Cache (arXiv 2506.06295) computes only some rows in a step and reuses the features of the others.

Steps are counted from the start of the request, over all blocks. Prompt and response are refreshed at intervals of
their own: the prompt at steps 0, P, 2P, ..., the response at steps 0, G, 2G, .... At the other steps the prompt is left
as it is, and in each layer a share of the response rows is computed: those whose value vector changed most. The
prediction of a row that is not computed follows from the embedding of its token and the outputs of attention and MLP
that the row had when it was last computed.

| | release | here |
|---|---|---|
| similarity of a row to its past | cosine of the value projections of all heads together | as released |
| renewed between refreshes | the values of the whole response, the keys of the chosen rows only | as released |
| chosen rows attend to | all rows, stale keys included | as released |
| number of chosen rows | the share, rounded down | as released |
| reused outputs | those after the output projections of attention and MLP | as released |
| equally similar rows (in the first layer, all whose token did not change) | left to its sort | the first rows |
| classifier-free guidance | a second cache for the unconditional half | refused |
"""

from typing import Literal, Protocol

from refusion_eval.decoders.canvas import Canvas
from refusion_eval.errors import ConfigError
from refusion_eval.types import DROP_ALL, NOTHING, Commit, FeatureReuse, Forward, RowScores, bidirectional

Cache = Literal["none", "prefix", "dual", "sparse"]


def check_kernel_size(decoder: str, kernel_size: int) -> None:
    """Raises ConfigError unless the neighbourhood of pooled scores has a centre."""
    if kernel_size % 2 == 0:
        raise ConfigError(
            f"{decoder}: kernel_size is {kernel_size}; scores are pooled around each row, so set it to an odd number"
        )


def block_forward(
    canvas: Canvas, block: range, num_before: int, cache: Cache, keep_ratio: float, kernel_size: int, later_kind: str
) -> Forward:
    """A forward that fills a block, without its reads."""
    # Keys and values of masks are stale at once, those of other rows drift slowly: so the block is recomputed in each
    # forward, and the rest only when a block begins. Sparse-dLLM waits one step, until scores are more stable.
    length, own = len(canvas.tokens), range(canvas.start + block.start, canvas.start + block.stop)
    since_refresh = num_before - (1 if cache == "sparse" else 0)
    fed, commit, kind, scores = range(length), DROP_ALL, "denoise", None
    if cache != "none" and since_refresh == 0:
        kind = "refresh"
        if cache == "sparse":
            outside = _rows_outside(own, length)
            scores = RowScores(own, outside, int(len(outside) * keep_ratio), kernel_size)
    elif cache != "none" and since_refresh > 0:
        fed, commit, kind = range(own.start, length) if cache == "prefix" else own, NOTHING, later_kind
        if since_refresh == 1:
            commit = Commit(_rows_outside(fed, length))
    return Forward(canvas.tokens[fed.start : fed.stop], fed, bidirectional(len(fed)), (), commit, kind, scores)


def _rows_outside(rows: range, length: int) -> list[int]:
    return [*range(rows.start), *range(rows.stop, length)]


class ReuseSettings(Protocol):
    """Settings of a decoder that reuses features; properties, because settings are frozen."""

    @property
    def prompt_interval_steps(self) -> int: ...
    @property
    def gen_interval_steps(self) -> int: ...
    @property
    def transfer_ratio(self) -> float: ...


def reuse_at(settings: ReuseSettings, step: int, num_prompt: int) -> FeatureReuse | None:
    """Which rows a step computes; None if both intervals are 1, so that nothing is ever reused."""
    if settings.prompt_interval_steps == settings.gen_interval_steps == 1:
        return None
    return FeatureReuse(
        num_prompt,
        refresh_prompt=step % settings.prompt_interval_steps == 0,
        refresh_response=step % settings.gen_interval_steps == 0,
        transfer_ratio=settings.transfer_ratio,
    )
