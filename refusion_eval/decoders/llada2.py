"""LLaDA2 (arXiv 2512.15745) and 2.1: block diffusion by a threshold, in which tokens of the block can be rewritten.

The blocks are counted from the first token of the prompt (`refusion_eval.decoders.aligned`). The rules are those of
SGLang, `low_confidence` of LLaDA2.0 and, with editing, `joint_threshold` of LLaDA2.1, and those of the `generate` that
each of the two models brings.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import ClassVar, Literal

import numpy as np

from refusion_eval.config import NonNegativeFloat, NonNegativeInt, PositiveInt, added_setting, settings_class
from refusion_eval.decoders import Decoder, Reads, Style, above_or_most, rounded_threshold
from refusion_eval.decoders.aligned import AlignedCanvas, AlignedSettings, decode_blocks
from refusion_eval.decoders.canvas import Filling, PositiveFraction, even_quotas
from refusion_eval.errors import ConfigError
from refusion_eval.types import DROP_ALL, Confidence, Decoding, Read, Readout, Trace

PUBLISHED_EDIT_THRESHOLD = 0.9  # of LLaDA2.1's `generate`
# Settings that only one of the models' own rules has.
_OWN = {
    "generate_2.0": ("steps_per_block", "minimal_topk", "eos_early_stop", "top_k", "top_p"),
    "generate_2.1": ("num_to_transfer", "eos_early_stop", "top_k", "top_p", "edit_threshold", "max_post_edit_steps"),
    "sglang": ("edit_threshold", "max_post_edit_steps"),
}


@settings_class("llada2")
class Llada2Settings(AlignedSettings):
    """Settings of LLaDA2's decoder, named as in SGLang; those of `AlignedSettings` mean the same.

    Attributes:
        rule: SGLang's, or that of the model's own `generate` ("generate_2.0", "generate_2.1"). With the latter,
            `release_compatible` makes the forwards of a release without a cache: each has all rows up to the end of its
            block, and none only stores. In "generate_2.1" a stop token ends nothing: the response is cut behind it.
        threshold: a step commits all candidates whose probability exceeds this (strictly), or the best ones: as many as
            its quota, which is 1 in SGLang, `num_to_transfer`, or that of `steps_per_block`.
        edit_threshold: a step also rewrites the tokens that it generated in this block where another token is the most
            probable one and has more than this probability. 0 always rewrites. None never does (LLaDA2.0); in
            "generate_2.1", where it is named editing_threshold, None is 0.9, as published.
        max_post_edit_steps: most steps of a block that rewrite after its last mask was filled (max_post_steps in
            "generate_2.1"). With editing no token is final before its block ends, so `early_stop` looks at whole
            blocks.
        steps_per_block, minimal_topk: of "generate_2.0", where the first is named steps: a block has as many steps, at
            most gen_length // minimal_topk, which share its positions; the first ones have one more for the remainder.
        num_to_transfer: of "generate_2.1": masks that each step fills at least.
        eos_early_stop: of "generate_2.0": end as soon as a step fills in a stop token while no mask is before the first
            one. Of "generate_2.1": end after the block that holds one.
        top_k, top_p: of the models' own rules: which tokens stay in the sampled distribution, after which confidences
            are taken too; top_p counts the probabilities after top_k. Without effect at temperature 0.
    """

    decoder: ClassVar[str] = "llada2"
    prefills_by_block: ClassVar[bool] = True  # every forward of SGLang's loop has the rows of one block

    threshold: NonNegativeFloat = 0.95
    edit_threshold: NonNegativeFloat | None = None
    max_post_edit_steps: NonNegativeInt = 16
    rule: Literal["sglang", "generate_2.0", "generate_2.1"] = added_setting("sglang")
    steps_per_block: PositiveInt = added_setting(32)
    minimal_topk: PositiveInt = added_setting(1)
    num_to_transfer: PositiveInt = added_setting(1)
    eos_early_stop: bool = added_setting(False)
    top_k: NonNegativeInt = added_setting(0)
    top_p: PositiveFraction = added_setting(1.0)

    def __post_init__(self) -> None:
        AlignedSettings.__post_init__(self)
        others = {name for names in _OWN.values() for name in names} - {*_OWN[self.rule]}
        for entry in fields(self):
            if entry.name in others and (value := getattr(self, entry.name)) != entry.default:
                raise ConfigError(f"llada2: {entry.name}={value} has no effect with rule={self.rule}; leave it out")
        if self.rule == "generate_2.0" and self.minimal_topk > self.gen_length:
            sizes = f"minimal_topk is {self.minimal_topk} and gen_length {self.gen_length}"
            raise ConfigError(f"llada2: {sizes}, so that no step would fill a mask; lower minimal_topk")

    @property
    def is_own_rule(self) -> bool:
        """Whether the rule is that of a model's own `generate`."""
        return self.rule != "sglang"

    @property
    def stores_apart(self) -> bool:
        if self.is_own_rule:
            return self.separate_commit and not self.release_compatible
        return self.separate_commit or self.release_compatible

    @property
    def ends_with_stop(self) -> bool:
        return self.rule != "generate_2.1" or self.eos_early_stop

    @property
    def editing(self) -> float | None:
        """The threshold of editing; None for none."""
        if self.rule == "generate_2.1" and self.edit_threshold is None:
            return PUBLISHED_EDIT_THRESHOLD
        return self.edit_threshold

    @property
    def quotas(self) -> Iterator[int]:
        """The least number of masks that each step of a block fills; a step after these fills one."""
        if self.rule == "generate_2.0":
            return iter(even_quotas(self.block_length, min(self.steps_per_block, self.gen_length // self.minimal_topk)))
        return iter([self.num_to_transfer] * self.block_length)

    @property
    def confidence(self) -> Confidence:
        if self.is_own_rule and self.temperature > 0:
            return Confidence(temperature=self.temperature, dtype=self.confidence_dtype, truncate=True)
        return Confidence(dtype=self.confidence_dtype)

    def read(self, rows: Sequence[int], step: int, positions: Sequence[int]) -> Read:
        read = AlignedSettings.read(self, rows, step, positions)
        if self.temperature == 0 or not (self.top_k or self.top_p < 1):
            return read
        return replace(read, top_k=self.top_k, top_p=self.top_p, top_k_first=True)


def decode(prompt: Sequence[int], settings: Llada2Settings, trace: Trace) -> Decoding:
    """Decodes one prompt, block after block."""
    return decode_blocks(prompt, settings, trace, _fill)


def _fill(canvas: AlignedCanvas, block: range, settings: Llada2Settings, steps: Iterator[int]) -> Filling:
    region, edits, num_edits_left = canvas.region(block), settings.editing is not None, settings.max_post_edit_steps
    quotas = settings.quotas
    while True:
        masked = canvas.masked(region)
        # SGLang makes one more forward before it sees that no edit is left.
        if not masked and not (edits and (num_edits_left or not settings.is_own_rule)):
            break
        positions = region if edits else masked
        if settings.is_own_rule and settings.release_compatible:
            canvas.num_cached, canvas.commit = 0, DROP_ALL  # the releases keep nothing
        (readout,) = yield canvas.denoise(block, positions, next(steps))
        chosen = _chosen(canvas, settings, positions, readout, next(quotas, 1))
        if not masked:
            if not chosen or num_edits_left == 0:
                break
            num_edits_left -= 1
        canvas.fix_chosen(positions, readout, readout.probs, chosen)
        if edits:
            continue
        if reason := canvas.settled():
            return reason
        fills_stop = any(token in settings.eos_ids for token in readout.tokens[chosen].tolist())
        if settings.eos_early_stop and fills_stop and canvas.has_final_stop():
            return "length"  # unless the stop token is within `gen_length`
    return canvas.settled()


def _chosen(
    canvas: AlignedCanvas, settings: Llada2Settings, positions: Sequence[int], readout: Readout, quota: int
) -> list[int]:
    """Indices of the positions whose token a step fills in or rewrites, ascending."""
    is_masked = np.isin(positions, canvas.masked(positions))
    is_chosen = np.zeros(len(positions), dtype=bool)
    if settings.editing is not None:
        old = np.array([canvas.tokens[canvas.start + position] for position in positions])
        is_probable = readout.probs > rounded_threshold(settings.editing, readout)
        is_chosen = ~is_masked & (readout.tokens != old) & is_probable
    if len(candidates := np.flatnonzero(is_masked)):
        threshold = rounded_threshold(settings.threshold, readout)
        is_chosen[candidates[above_or_most(readout.probs[candidates], threshold, quota)]] = True
    return np.flatnonzero(is_chosen).tolist()


DECODER = Decoder(
    decode,
    Llada2Settings,
    label="LLaDA2",
    reads=Reads("block_causal", masked="own"),
    style=Style("#AA4499", "h", (0, (3, 1)), order=22),
)
