"""LLaDA2 (arXiv 2512.15745) and 2.1: block diffusion by a threshold, in which tokens of the block can be rewritten.

The blocks are counted from the first token of the prompt (`refusion_eval.decoders.aligned`). The rules are those of
SGLang: `low_confidence` of LLaDA2.0 and, with editing, `joint_threshold` of LLaDA2.1.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

import numpy as np

from refusion_eval.config import NonNegativeFloat, NonNegativeInt, settings_class
from refusion_eval.decoders import Decoder, Reads, Style, above_or_best, rounded_threshold
from refusion_eval.decoders.aligned import AlignedCanvas, AlignedSettings, decode_blocks
from refusion_eval.decoders.canvas import Filling
from refusion_eval.decoders.filling import Rule, above, fill
from refusion_eval.types import Decoding, Trace


@settings_class("llada2")
class Llada2Settings(AlignedSettings):
    """Settings of LLaDA2's decoder, named as in SGLang; those of `AlignedSettings` mean the same.

    Attributes:
        threshold: a step commits all candidates whose probability exceeds this (strictly), or the best one.
        edit_threshold: a step also rewrites the tokens that it generated in this block where another token is the most
            probable one and has more than this probability. 0 always rewrites. None never does (LLaDA2.0).
        max_post_edit_steps: most steps of a block that rewrite after its last mask was filled. With editing no token is
            final before its block ends, so `early_stop` looks at whole blocks.
    """

    decoder: ClassVar[str] = "llada2"
    prefills_by_block: ClassVar[bool] = True  # every forward of SGLang's loop has the rows of one block

    threshold: NonNegativeFloat = 0.95
    edit_threshold: NonNegativeFloat | None = None
    max_post_edit_steps: NonNegativeInt = 16


def decode(prompt: Sequence[int], settings: Llada2Settings, trace: Trace) -> Decoding:
    """Decodes one prompt, block after block."""
    return decode_blocks(prompt, settings, trace, _fill)


def _fill(canvas: AlignedCanvas, block: range, settings: Llada2Settings, steps: Iterator[int]) -> Filling:
    region, num_edits_left = canvas.region(block), settings.max_post_edit_steps
    threshold = settings.edit_threshold
    if threshold is None:
        rule = Rule(above(settings.threshold))
        return (yield from fill(canvas, [region], steps, partial(canvas.denoise, block), rule))
    while True:
        (readout,) = yield canvas.denoise(block, region, next(steps))
        old = canvas.tokens[canvas.start + region.start : canvas.start + region.stop]
        is_masked = np.isin(region, canvas.masked(region))
        candidates = np.flatnonzero(is_masked)
        changed = ~is_masked & (readout.tokens != old) & (readout.probs > rounded_threshold(threshold, readout))
        if len(candidates):
            filled = above_or_best(readout.probs[candidates], rounded_threshold(settings.threshold, readout))
            changed[candidates[filled]] = True
        elif num_edits_left == 0:
            break
        else:
            num_edits_left -= 1
        if not changed.any():
            break
        canvas.fix_chosen(region, readout, readout.probs, np.flatnonzero(changed).tolist())
    return canvas.settled()


DECODER = Decoder(
    decode,
    Llada2Settings,
    label="LLaDA2",
    reads=Reads("block_causal", masked="own"),
    style=Style("#AA4499", "h", (0, (3, 1)), order=22),
)
