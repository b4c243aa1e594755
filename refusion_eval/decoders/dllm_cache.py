"""dLLM-Cache (arXiv 2506.06295): computes only some rows of a bidirectional model and reuses features of the others.

Steps are counted from the start of the request, over all blocks. The prompt is refreshed at steps 0, P, 2P, ..., the
response at steps 0, G, 2G, .... At the other steps the prompt is left as it is, and in each layer a share of the
response rows is computed: those whose value vector changed most. The prediction of a row that is not computed follows
from the embedding of its token and the outputs of attention and MLP that the row had when it was last computed.

As released, the similarity of a row to its past is the cosine of the value projections of all heads together; between
refreshes the values of the whole response are renewed, but the keys of the chosen rows only, which attend to all rows,
stale keys included; their number is rounded down; and the outputs that are reused are those after the output
projections. Among rows that did not change (in the first layer, all with the same token as before) rounding chooses in
the release; here they are equal up to rounding, and the first are chosen. Classifier-free guidance, a second cache in
the release, is refused.
"""

from collections.abc import Sequence
from typing import Any

from refusion_eval.decoders.canvas import Canvas
from refusion_eval.types import FeatureReuse, Forward, bidirectional

# Settings of LLaDA and Dream, which no class of settings joins, have these and the transfer ratio; others have none.
FEATURE_INTERVALS = ("prompt_interval_steps", "gen_interval_steps")


def reuses_features(settings: Any) -> bool:
    return any(getattr(settings, name, 1) > 1 for name in FEATURE_INTERVALS)


def text_forward(canvas: Canvas, settings: Any, positions: Sequence[int], step: int) -> Forward:
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
