"""dLLM-Cache (arXiv 2506.06295): steps that compute only some rows and reuse the features of the others.

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

from typing import Protocol

from refusion_eval.types import FeatureReuse


class ReuseSettings(Protocol):
    """Settings of a decoder that reuses features."""

    @property
    def prompt_interval_steps(self) -> int:
        """Steps from one refresh of the prompt to the next."""
        ...

    @property
    def gen_interval_steps(self) -> int:
        """Steps from one refresh of the response to the next."""
        ...

    @property
    def transfer_ratio(self) -> float:
        """Share of the response rows that is computed at the other steps."""
        ...


def reuse_at(settings: ReuseSettings, step: int, num_prompt: int) -> FeatureReuse | None:
    """Which rows a step computes; None if both intervals are 1, so that nothing is ever reused.

    Args:
        settings: settings of the decoder.
        step: number of the step in the request, from 0.
        num_prompt: rows of the prompt.
    """
    if settings.prompt_interval_steps == settings.gen_interval_steps == 1:
        return None
    return FeatureReuse(
        num_prompt,
        refresh_prompt=step % settings.prompt_interval_steps == 0,
        refresh_response=step % settings.gen_interval_steps == 0,
        transfer_ratio=settings.transfer_ratio,
    )
