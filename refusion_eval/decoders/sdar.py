"""SDAR (arXiv 2510.06303) and TraDo (arXiv 2509.06949): block diffusion made from an autoregressive model.

The blocks are counted from the first token of the prompt (`refusion_eval.decoders.aligned`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import numpy as np

from refusion_eval.config import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, settings_class
from refusion_eval.decoders import Decoder, Reads, Style, above_or_most, most_confident, rounded_threshold
from refusion_eval.decoders.aligned import AlignedCanvas, AlignedSettings, decode_blocks
from refusion_eval.decoders.canvas import Filling, PositiveFraction, even_quotas
from refusion_eval.decoders.drafts import Drafts, check_drafts
from refusion_eval.decoders.filling import Rule, fill
from refusion_eval.errors import ConfigError
from refusion_eval.types import Confidence, Decoding, ProbArray, Read, Readout, Trace

Strategy = Literal["low_confidence_static", "low_confidence_dynamic", "sequential", "entropy_bounded"]


@settings_class("sdar")
class SdarSettings(AlignedSettings):
    """Settings of SDAR's decoder, named as in its `generate.py`; those of `AlignedSettings` mean the same.

    Attributes:
        denoising_steps: steps of a block, each with its quota of the positions, the first ones with one more for the
            remainder; None is one for each position.
        remasking_strategy: a step commits the most confident candidates of its quota ("low_confidence_static"); all
            above `confidence_threshold` if these are at least its quota, else the quota ("low_confidence_dynamic"); the
            leftmost of its quota ("sequential"); or, without a quota, those of the lowest entropies whose sum stays
            below `eb_threshold`, at least one ("entropy_bounded", of JetEngine).
        confidence_threshold: compared with probabilities, strictly.
        eb_threshold: sum of entropies, in nats.
        top_k, top_p: which tokens stay in the sampled distribution; top_p counts the probabilities after top_k.
        confidence_from: the distribution that confidences and entropies are taken from: that of all tokens
            ("untruncated", as in SDAR's evaluation with OpenCompass), or what top_k and top_p leave ("truncated", as in
            its `generate.py` and in JetEngine).
        confidence_temperature: temperature of that distribution where `temperature` is 0; else it is `temperature`.
        draft_steps: most steps that a forward verifies (FreeDave, see `refusion_eval.decoders.drafts`), with as many
            copies of the block; the tokens are those of one token a step. 0 drafts nothing.
        eager_acceptance_mode: drafts go on in the blocks behind, ceil(draft_steps / block_length) of them.
    """

    decoder: ClassVar[str] = "sdar"

    block_length: PositiveInt = 4
    denoising_steps: PositiveInt | None = None
    remasking_strategy: Strategy = "low_confidence_static"
    confidence_threshold: NonNegativeFloat = 0.9
    eb_threshold: NonNegativeFloat = 0.35
    top_k: NonNegativeInt = 0
    top_p: PositiveFraction = 1.0
    confidence_from: Literal["untruncated", "truncated"] = "untruncated"
    confidence_temperature: PositiveFloat = 1.0
    draft_steps: NonNegativeInt = 0
    eager_acceptance_mode: bool = False

    def __post_init__(self) -> None:
        AlignedSettings.__post_init__(self)
        one_token = ("temperature", "remasking_strategy", "denoising_steps")
        check_drafts(self, one_token, denoising_steps=(None, self.block_length))
        if self.eager_acceptance_mode and not self.draft_steps:
            raise ConfigError("sdar: eager_acceptance_mode is about drafts, and draft_steps is 0; set it to 1 or more")

    @property
    def confidence(self) -> Confidence:
        # Where nothing is truncated, the two readings are one, which is said as the cheaper one.
        truncates_sample = self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)
        return Confidence(
            temperature=self.temperature or self.confidence_temperature,
            dtype=self.confidence_dtype,
            truncate=not truncates_sample or self.confidence_from == "truncated",
        )

    def read(self, rows: Sequence[int], step: int, positions: Sequence[int]) -> Read:
        read = replace(
            AlignedSettings.read(self, rows, step, positions), entropy=self.remasking_strategy == "entropy_bounded"
        )
        if self.temperature == 0 and self.confidence_from == "untruncated":
            return read
        return replace(read, top_k=self.top_k, top_p=self.top_p, top_k_first=True)

    def rule(self, ahead: range) -> Rule | Drafts:
        if self.draft_steps:
            return Drafts(self.draft_steps, self.block_length, ahead)
        # Where the prompt's rest is in a block, it is full before its last steps; by entropy it may need further ones.
        return Rule(self._accept, even_quotas(self.block_length, self.denoising_steps or self.block_length))

    def _accept(self, scores: ProbArray, readout: Readout, quota: int) -> list[int]:
        if self.remasking_strategy == "sequential":
            return list(range(min(quota, len(scores))))
        if self.remasking_strategy == "entropy_bounded":
            quota = max(1, int((np.cumsum(np.sort(-scores)) < self.eb_threshold).sum()))
        if self.remasking_strategy == "low_confidence_dynamic":
            return above_or_most(scores, rounded_threshold(self.confidence_threshold, readout), quota)
        return most_confident(scores, quota)


def decode(prompt: Sequence[int], settings: SdarSettings, trace: Trace) -> Decoding:
    """Decodes one prompt, block after block."""
    return decode_blocks(prompt, settings, trace, _fill)


def _fill(canvas: AlignedCanvas, block: range, settings: SdarSettings, steps: Iterator[int]) -> Filling:
    region, size, end = canvas.region(block), len(block), block.stop
    if settings.eager_acceptance_mode:
        most = end + -(-settings.draft_steps // size) * size
        end = min(most, -(-(canvas.start + settings.gen_length) // size) * size)
        canvas.open(range(block.start, end))
    rule = settings.rule(range(region.stop, end - canvas.start))
    return (yield from fill(canvas, [region], steps, partial(canvas.denoise, range(block.start, end)), rule))


DECODER = Decoder(
    decode,
    SdarSettings,
    label="SDAR",
    reads=Reads("block_causal", masked="own"),
    style=Style("#332288", "d", (0, (6, 2)), order=20),
)
