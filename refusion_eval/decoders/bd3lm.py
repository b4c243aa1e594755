"""Block diffusion (BD3-LM, arXiv 2503.09573): the response grows by blocks of masks, which are filled one by one.

Attention is full within a block, and a block sees all blocks before it. The prompt consists of blocks as well, cut so
that one of them ends where the response begins. Finished blocks never change, so their keys and values are cached.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import ClassVar

from refusion_eval.config import NonNegativeFloat, NonNegativeInt, PositiveInt, added_setting, settings_class
from refusion_eval.decoders import Decoder, Reads, Style
from refusion_eval.decoders.aligned import AlignedCanvas
from refusion_eval.decoders.canvas import MaskedSettings, Remasking, rounded_quotas
from refusion_eval.decoders.drafts import Drafts, check_drafts
from refusion_eval.decoders.filling import Rule, at_least, fill
from refusion_eval.errors import ConfigError
from refusion_eval.types import DROP_ALL, Commit, Decoding, Forward, ProbArray, Readout, Trace, block_causal


@settings_class("bd3lm")
class Bd3lmSettings(MaskedSettings):
    """Settings of block diffusion.

    Decoding ends after the block that holds one of `eos_ids`, or at `gen_length`, which may cut the last block short.

    Attributes:
        block_length: positions of a block, as the model was trained with.
        steps: forwards for all blocks together, shared equally, rounded up; None is one for each position.
        steps_per_block: forwards for each block, instead of `steps`.
        remasking: commit the most confident candidates, or random ones. With one step for each position, random is the
            first-hitting sampler of BD3-LM.
        threshold: instead of steps: commit every candidate whose confidence is at least this, and always the best one.
        separate_commit: compute the keys and values of finished blocks in forwards of their own, as BD3-LM does,
            instead of in the first forward of the next block.
        release_compatible: make the forwards of dllm's sampler: before each block, one forward of everything before it,
            left-padded to whole blocks. No row sees the padding.
        draft_steps: most steps that a forward verifies (FreeDave, see `refusion_eval.decoders.drafts`), with as many
            copies of the block; the tokens are those of one token a step. 0 drafts nothing.
    """

    decoder: ClassVar[str] = "bd3lm"

    block_length: PositiveInt = 32
    steps: PositiveInt | None = None
    steps_per_block: PositiveInt | None = None
    remasking: Remasking = "low_confidence"
    threshold: NonNegativeFloat | None = None
    separate_commit: bool = False
    release_compatible: bool = False
    draft_steps: NonNegativeInt = added_setting(0)

    def __post_init__(self) -> None:
        MaskedSettings.__post_init__(self)
        one_token = ("temperature", "remasking", "threshold", "steps", "steps_per_block", "release_compatible")
        check_drafts(self, one_token, steps_per_block=(None, self.block_length))
        rules = {"steps": self.steps, "steps_per_block": self.steps_per_block, "threshold": self.threshold}
        if len(given := [f"{rule} {value}" for rule, value in rules.items() if value is not None]) > 1:
            raise ConfigError(f"bd3lm: {' and '.join(given)} each say how much a forward commits; give one of them")
        if self.threshold is not None and self.remasking == "random":
            where = f"bd3lm: a threshold of {self.threshold} compares confidences"
            raise ConfigError(f"{where}, and remasking=random has none; leave out one of the two")

    @property
    def draws_order(self) -> bool:
        return self.remasking == "random"

    def scores(self, readout: Readout, step: int, positions: Sequence[int]) -> ProbArray:
        return self.random_scores(step, positions) if self.remasking == "random" else readout.probs

    def rule(self, num_masked: int) -> Rule | Drafts:
        if self.draft_steps:
            return Drafts(self.draft_steps)
        if self.threshold is not None:
            return Rule(at_least(self.threshold))
        num_blocks = -(-self.gen_length // self.block_length)
        steps = self.block_length if self.steps is None else -(-self.steps // num_blocks)
        return Rule(quotas=rounded_quotas(num_masked, self.steps_per_block or steps))


def decode(prompt: Sequence[int], settings: Bd3lmSettings, trace: Trace) -> Decoding:
    """Decodes one prompt; each block enters the cache once it is finished."""
    canvas, steps = AlignedCanvas(prompt, settings, trace, origin=len(prompt)), count()
    while canvas.gen_length < settings.gen_length:
        start = len(canvas.tokens)
        if settings.release_compatible:
            yield _store_anew(canvas, settings)
        elif settings.separate_commit and canvas.num_cached < start:
            yield canvas.forward(start, "store")
        canvas.open(range(start, min(start + settings.block_length, canvas.start + settings.gen_length)))
        block = range(start, len(canvas.tokens))
        # Finished blocks see no masks, so the rows that the first forward computes for them are exact and stay; those
        # of the block itself change with every token that is filled in.
        forward, rule = partial(canvas.denoise, block), settings.rule(len(block))
        if reason := (yield from fill(canvas, [canvas.region(block)], steps, forward, rule)):
            return canvas.finish(reason)
        if canvas.has_stop(canvas.region(block)):
            break
    return canvas.finish()


def _store_anew(canvas: AlignedCanvas, settings: Bd3lmSettings) -> Forward:
    """The forward of everything before a block, left-padded to whole blocks: dllm's sampler keeps nothing."""
    canvas.num_cached, canvas.commit = 0, DROP_ALL
    store, padding = canvas.forward(len(canvas.tokens), "store"), -canvas.start % settings.block_length
    num_rows = padding + len(store.tokens)
    canvas.commit = Commit(range(padding, num_rows))
    return replace(
        store,
        tokens=[settings.mask_id] * padding + [*store.tokens],
        positions=[0] * padding + [*store.positions],
        attention=block_causal([segment.size for segment in store.attention], padding),
    )


DECODER = Decoder(
    decode,
    Bd3lmSettings,
    label="BD3-LM",
    reads=Reads("block_causal", masked="own"),
    trained_by=("bd3lm",),
    style=Style("#CC79A7", "D", (0, (6, 1, 1, 1, 1, 1)), order=2),
)
