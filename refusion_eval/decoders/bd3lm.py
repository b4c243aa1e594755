"""Block diffusion (BD3-LM, arXiv 2503.09573): the response grows by blocks of masks, which are filled one by one.

Attention is full within a block, and a block sees all blocks before it. The prompt consists of blocks as well, cut so
that one of them ends where the response begins. Finished blocks never change, so their keys and values are cached.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import ClassVar

from refusion_eval.config import NonNegativeFloat, NonNegativeInt, PositiveInt, added_setting, settings_class
from refusion_eval.decoders import Decoder, Reads, Style, at_least_or_best, first_eos, most_confident
from refusion_eval.decoders.canvas import Canvas, MaskedSettings, Remasking, rounded_quotas
from refusion_eval.decoders.drafts import check_drafts, fill_by_drafts
from refusion_eval.errors import ConfigError
from refusion_eval.types import DROP_ALL, NOTHING, Commit, Decoding, Forward, Read, Trace, block_causal


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
        check_drafts(
            self,
            self.draft_steps,
            temperature=self.temperature > 0,
            remasking=self.remasking == "random",
            threshold=self.threshold is not None,
            steps=self.steps is not None,
            steps_per_block=self.steps_per_block not in (None, self.block_length),
            release_compatible=self.release_compatible,
        )
        rules = {"steps": self.steps, "steps_per_block": self.steps_per_block, "threshold": self.threshold}
        if len(given := [f"{rule} {value}" for rule, value in rules.items() if value is not None]) > 1:
            raise ConfigError(f"bd3lm: {' and '.join(given)} each say how much a forward commits; give one of them")
        if self.threshold is not None and self.remasking == "random":
            where = f"bd3lm: a threshold of {self.threshold} compares confidences"
            raise ConfigError(f"{where}, and remasking=random has none; leave out one of the two")

    @property
    def draws_order(self) -> bool:
        return self.remasking == "random"

    def quotas(self, num_masked: int) -> list[int]:
        num_blocks = -(-self.gen_length // self.block_length)
        steps = self.block_length if self.steps is None else -(-self.steps // num_blocks)
        return rounded_quotas(num_masked, self.steps_per_block or steps)


def decode(prompt: Sequence[int], settings: Bd3lmSettings, trace: Trace) -> Decoding:
    """Decodes one prompt; each block enters the cache once it is finished."""
    canvas, steps = Canvas(prompt, settings, trace, gen_length=0), count()
    # The first `num_cached` tokens are cached as soon as `commit` is done.
    start, num_cached, commit = canvas.start, 0, NOTHING

    def denoise(reads: tuple[Read, ...] = ()) -> Forward:
        nonlocal num_cached, commit
        forward = replace(_forward(canvas, settings, num_cached, commit, reads), kind="denoise")
        # Finished blocks see no masks, so the rows that this forward computes for them are exact and stay; those of
        # the block itself change with every token that is filled in.
        commit, num_cached = Commit(range(start - num_cached)), start
        return forward

    while canvas.gen_length < settings.gen_length:
        start = len(canvas.tokens)
        if settings.release_compatible:  # dllm's sampler keeps nothing from block to block
            num_cached, commit = 0, DROP_ALL
        if num_cached < start and (settings.separate_commit or settings.release_compatible):
            store = _forward(canvas, settings, num_cached, commit)
            yield store
            num_rows = len(store.tokens)  # padding first, which is not kept
            commit, num_cached = Commit(range(num_rows - start + num_cached, num_rows)), start
        canvas.extend(min(settings.block_length, settings.gen_length - canvas.gen_length))
        block = range(start - canvas.start, canvas.gen_length)
        if settings.draft_steps:  # leaves no mask for the steps below
            reason = yield from fill_by_drafts(canvas, settings, block, settings.draft_steps, denoise)
            if reason:
                return canvas.finish(reason)
        quotas = iter(settings.quotas(len(block)))
        while masked := canvas.masked(block):
            step = next(steps)
            (readout,) = yield denoise(canvas.reads(masked, step, num_cached))
            scores = settings.random_scores(step, masked) if settings.remasking == "random" else readout.probs
            if settings.threshold is None:
                accepted = most_confident(scores, next(quotas))
            else:
                accepted = at_least_or_best(scores, settings.threshold, readout)
            canvas.fix_chosen(masked, readout, scores, accepted)
            if reason := canvas.settled():
                return canvas.finish(reason)
        if first_eos(canvas.tokens[start:], settings.eos_ids) is not None:
            break
    return canvas.finish()


def _forward(
    canvas: Canvas, settings: Bd3lmSettings, num_cached: int, commit: Commit, reads: tuple[Read, ...] = ()
) -> Forward:
    """The forward of all tokens that are not cached yet; without a read it is made for their keys and values only."""
    padding = -canvas.start % settings.block_length if settings.release_compatible and not reads else 0
    # Floor division also cuts the prompt, whose positions are negative, so that a block ends where the response begins.
    fed = range(num_cached, len(canvas.tokens))
    sizes = Counter((position - canvas.start) // settings.block_length for position in fed)
    attention = block_causal(list(sizes.values()), padding)
    tokens = [settings.mask_id] * padding + canvas.tokens[num_cached:]
    return Forward(tokens, [0] * padding + list(fed), attention, reads, commit, "denoise" if reads else "store")


DECODER = Decoder(
    decode,
    Bd3lmSettings,
    label="BD3-LM",
    reads=Reads("block_causal", masked="own"),
    trained_by=("bd3lm",),
    style=Style("#CC79A7", "D", (0, (6, 1, 1, 1, 1, 1)), order=2),
)
