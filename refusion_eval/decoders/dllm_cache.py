"""dLLM-Cache (arXiv 2506.06295): steps that compute only some rows of the canvas and keep the features of the others.

Steps are counted from the start of the request, over all blocks. The prompt is computed at steps 0, P, 2P, ..., the
response at 0, G, 2G, ..., each by its own interval whatever the other does; in between the prompt is left as it is, and
of the response in each layer a share of rows is computed, those whose value vector changed most. What a row that is not
computed predicts comes from its token's embedding and the outputs that attention and MLP gave it last.

From the release: similarity is the cosine of the value projections of all heads together, before and now; the values of
the whole response are renewed at every step that adapts, keys of the chosen rows alone; chosen rows attend to all rows,
stale keys included; the share is rounded down; attention and MLP outputs are kept behind their output projections.
Among equally similar rows (in the first layer all whose token did not change) the release leaves the choice to its
sort; here the first ones are taken. Not here: its cache for the other half of classifier-free guidance.
"""

from typing import Protocol

from refusion_eval.decoders import validate
from refusion_eval.types import FeatureReuse


def check(decoder: str, prompt_interval_steps: int, gen_interval_steps: int, transfer_ratio: float) -> None:
    """Raises ConfigError unless the intervals are at least 1 and the share lies between 0 and 1."""
    validate.require_integer(decoder, "prompt_interval_steps", prompt_interval_steps, at_least=1)
    validate.require_integer(decoder, "gen_interval_steps", gen_interval_steps, at_least=1)
    validate.require_number(decoder, "transfer_ratio", transfer_ratio, 0.0, 1.0)


class ReuseSettings(Protocol):
    """The settings of a decoder that reuses features."""

    @property
    def prompt_interval_steps(self) -> int:
        """The prompt is computed every so many steps."""
        ...

    @property
    def gen_interval_steps(self) -> int:
        """Likewise the response."""
        ...

    @property
    def transfer_ratio(self) -> float:
        """Share of the response that is computed in between."""
        ...


def reuse_at(settings: ReuseSettings, step: int, num_prompt: int) -> FeatureReuse | None:
    """Which rows a step computes; None where both intervals are 1, so that nothing is ever reused.

    Args:
        settings: of the decoder.
        step: number of the step, from 0 for the whole request.
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
