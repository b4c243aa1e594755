"""Fast-dLLM on Dream (arXiv 2505.22618): commits all confident tokens, keeps keys and values while it fills a block.

With a cache the response is filled block after block: each block begins with a forward of the whole text, and the
forwards after it feed a part of the text against the keys and values of that forward (see `caches`). Without a
cache there are no blocks.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import ClassVar, Literal

from refusion_eval.config import Fraction, NonNegativeFloat, PositiveInt, settings_class
from refusion_eval.decoders import (
    Decoder,
    Reads,
    Style,
    at_least_or_best,
    caches,
    dream,
    most_confident,
    rounded_threshold,
)
from refusion_eval.decoders.caches import Cache
from refusion_eval.decoders.canvas import Canvas, check_blocks
from refusion_eval.decoders.dream import RANKING_ALGS, DreamSettings
from refusion_eval.errors import ConfigError
from refusion_eval.types import Decoding, Forward, Trace

FastAlg = Literal["confidence_threshold", "origin", "maskgit_plus", "topk_margin", "entropy"]


@settings_class("fast_dllm_dream")
class FastDllmDreamSettings(DreamSettings):
    """Settings of Fast-dLLM on Dream, named as in its release; those of `DreamSettings` mean the same.

    Features are not reused: both intervals have to stay 1.

    Attributes:
        alg: "confidence_threshold" commits by `threshold`. The others commit quotas. Without a cache they are Dream's
            decoder. With a cache there is only "entropy" (with "sparse", all but "origin"), on a schedule for each
            block.
        steps: steps of quotas for the whole response, divided evenly among the blocks. With confidence_threshold and a
            cache it has no effect; without a cache each of the first `steps` forwards adds gen_length / steps positions
            to those that may be committed (8 steps in the release's scripts).
        threshold: commit each candidate whose confidence is at least this, and always the best one.
        block_length: positions that are filled before the next ones begin; without a cache it has no effect.
        cache: which keys and values are kept while a block is filled (see `refusion_eval.decoders.caches`). The
            release of Sparse-dLLM commits quotas, by entropy in its scripts. Its layers are published code; its loop
            was read in public code derived from it, because the file itself was not available: the same schedule for
            each block as here.
        keep_ratio: with cache="sparse", the share of the rows outside the block that is kept.
        kernel_size: with cache="sparse", number of neighbouring rows that share their largest score, odd; 1 for none.
    """

    decoder: ClassVar[str] = "fast_dllm_dream"

    alg: FastAlg = "confidence_threshold"  # type: ignore[assignment]
    threshold: NonNegativeFloat = 0.9
    block_length: PositiveInt = 32
    cache: Cache = "dual"
    keep_ratio: Fraction = 0.5
    kernel_size: PositiveInt = 3

    def __post_init__(self) -> None:
        DreamSettings.__post_init__(self)
        caches.check_kernel_size(self.decoder, self.kernel_size)
        if caches.reuse_at(self, 0, 0) is not None:
            raise ConfigError(
                f"{self.decoder}: prompt_interval_steps is {self.prompt_interval_steps} and gen_interval_steps "
                f"{self.gen_interval_steps}; only decoder dream reuses features, so leave both at 1"
            )
        if self.cache != "none":
            self._check_cached()
        elif self.by_threshold and (self.steps is None or self.gen_length % self.steps):
            raise ConfigError(
                f"{self.decoder}: steps is {self.steps} and gen_length {self.gen_length}; without a cache each step "
                "adds gen_length / steps candidates, so set steps to a divisor of gen_length"
            )

    def _check_cached(self) -> None:
        check_blocks(self.decoder, self.gen_length, self.block_length, None if self.by_threshold else self.steps)
        if self.by_threshold:
            return
        if self.cache == "sparse" and self.alg == "origin":
            raise ConfigError(
                f"{self.decoder}: alg is origin, and with cache sparse positions are ranked; set alg to one of "
                f"{', '.join(RANKING_ALGS)}"
            )
        if self.cache != "sparse" and self.alg != "entropy":
            raise ConfigError(
                f"{self.decoder}: alg is {self.alg}, and with a cache quotas go by entropy whatever it is; set alg to "
                "entropy or confidence_threshold, or cache to none"
            )
        if self.steps_per_block == 1 < self.block_length:
            raise ConfigError(
                f"{self.decoder}: steps is {self.steps} for {self.num_blocks} blocks; a block's first step commits one "
                f"position alone, so set steps to at least {2 * self.num_blocks}"
            )

    @property
    def by_threshold(self) -> bool:
        """Whether confidence alone decides how many candidates become final."""
        return self.alg == "confidence_threshold"

    @property
    def num_blocks(self) -> int:
        """Number of blocks; there are none without a cache."""
        return self.gen_length // self.block_length

    @property
    def steps_per_block(self) -> int:
        """Number of steps of each block's schedule."""
        return self.num_steps // self.num_blocks


def decode(prompt: Sequence[int], settings: FastDllmDreamSettings, trace: Trace) -> Decoding:
    """Decodes one prompt, all response positions unless `early_stop`."""
    if settings.cache != "none":
        return _decode_cached(prompt, settings, trace)
    if settings.by_threshold:
        return _decode_uncached(prompt, settings, trace)
    return dream.decode(prompt, settings, trace)


def _decode_uncached(prompt: Sequence[int], settings: FastDllmDreamSettings, trace: Trace) -> Decoding:
    """Commits anywhere in the response; takes `steps` to `gen_length` forwards."""
    canvas, step, steps = Canvas(prompt, settings, trace), 0, settings.num_steps
    while masked := canvas.masked():
        (readout,) = yield dream.canvas_forward(canvas, settings, masked, step)
        # The release transfers a quota a step and takes back what is below the threshold, all but the best. So
        # positions that a step did not commit are candidates of the next step again, also after the last step.
        num_candidates = settings.gen_length // steps * min(step + 1, steps) - (settings.gen_length - len(masked))
        candidates = most_confident(readout.probs, num_candidates)
        threshold = rounded_threshold(settings.threshold, readout)
        accepted = [candidates[index] for index in at_least_or_best(readout.probs[candidates], threshold)]
        canvas.fix_chosen(masked, readout, readout.probs, accepted)
        if reason := canvas.settled():
            return canvas.finish(reason)
        step += 1
    return canvas.finish()


def _decode_cached(prompt: Sequence[int], settings: FastDllmDreamSettings, trace: Trace) -> Decoding:
    """Fills block after block; a block takes one to `block_length` forwards, or with quotas its number of steps."""
    canvas, steps = Canvas(prompt, settings, trace), count()
    shares = [] if settings.by_threshold else list(dream.shares(settings.steps_per_block, settings.eps))
    for first in range(0, settings.gen_length, settings.block_length):
        block = range(first, first + settings.block_length)
        # The row that predicts the first position of a block lies before the block and is fed only by the block's first
        # forward, which therefore commits this one position whatever its confidence. In the release a second forward
        # follows even if that fills the block; it would change nothing and is left out.
        (readout,) = yield _forward(canvas, settings, block, [first], next(steps), 0)
        canvas.fix([first], readout.tokens)
        if reason := canvas.settled():
            return canvas.finish(reason)
        num_before = 1
        while masked := canvas.masked(block):
            quota = None if settings.by_threshold else dream.quota(len(masked), shares[num_before])
            candidates, step = [] if quota == 0 else masked, next(steps)
            readouts = yield _forward(canvas, settings, block, candidates, step, num_before)
            if candidates:
                scores = settings.scores(readouts[0], step, candidates)
                if quota is None:
                    accepted = at_least_or_best(scores, rounded_threshold(settings.threshold, readouts[0]))
                else:
                    accepted = most_confident(scores, quota)
                canvas.fix_chosen(candidates, readouts[0], scores, accepted)
            if reason := canvas.settled():
                return canvas.finish(reason)
            num_before += 1
    return canvas.finish()


def _forward(
    canvas: Canvas, settings: FastDllmDreamSettings, block: range, candidates: Sequence[int], step: int, num_before: int
) -> Forward:
    """A forward of a block with a cache, which reads the predictions of some response indices."""
    forward = caches.block_forward(
        canvas, block, num_before, settings.cache, settings.keep_ratio, settings.kernel_size, later_kind="decode"
    )
    reads = dream.shifted_reads(settings, canvas.start - forward.positions[0], candidates, step)
    return replace(forward, reads=reads)


DECODER = Decoder(
    decode,
    FastDllmDreamSettings,
    label="Dream w/ Fast-dLLM",
    reads=Reads("bidirectional", masked="next"),
    fits=("dream",),
    style=Style("#E69F00", ">", (0, (2, 1)), order=8),
)
