"""dLLM-Cache (arXiv 2506.06295): computes only some rows of a bidirectional model and reuses features of the others.

Steps are counted from the start of the request, over all blocks. The prompt is refreshed at steps 0, P, 2P, ..., the
response at steps 0, G, 2G, .... At the other steps the prompt is left as it is, and in each layer a share of the
response rows is computed: those whose value vector changed most. The prediction of a row that is not computed follows
from the embedding of its token and the outputs of attention and MLP that the row had when it was last computed.

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

from collections.abc import Sequence
from typing import Protocol

from refusion_eval.decoders.canvas import Canvas
from refusion_eval.types import FeatureReuse, Forward, bidirectional


class ReuseSettings(Protocol):
    """Settings of a decoder that reuses features; properties, because settings are frozen."""

    @property
    def prompt_interval_steps(self) -> int: ...
    @property
    def gen_interval_steps(self) -> int: ...
    @property
    def transfer_ratio(self) -> float: ...


def reuses_features(settings: ReuseSettings) -> bool:
    return settings.prompt_interval_steps > 1 or settings.gen_interval_steps > 1


def text_forward(canvas: Canvas, settings: ReuseSettings, positions: Sequence[int], step: int) -> Forward:
    """The forward of the whole text with full attention, which reads some response indices."""
    length, reuse = len(canvas.tokens), None
    if reuses_features(settings):
        reuse = FeatureReuse(
            canvas.start,
            refresh_prompt=step % settings.prompt_interval_steps == 0,
            refresh_response=step % settings.gen_interval_steps == 0,
            transfer_ratio=settings.transfer_ratio,
        )
    reads = canvas.reads(positions, step)
    # A copy of the tokens, because the canvas changes and a forward does not.
    return Forward(canvas.tokens[:], range(length), bidirectional(length), reads, kind="denoise", approximation=reuse)
