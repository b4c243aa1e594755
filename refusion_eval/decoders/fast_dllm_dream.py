"""Fast-dLLM's decoding of Dream (arXiv 2505.22618): parallel commits by confidence, keys and values kept for a block.

With a cache the canvas is filled block after block. Each block begins with a forward of the whole canvas; those after
it feed the block again, or the block and what is behind it, against keys and values that age meanwhile. Without a
cache there are no blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import ClassVar

from refusion_eval.decoders import block_cache, dllm_cache, dream, sparse_dllm, validate
from refusion_eval.decoders.block_cache import Cache
from refusion_eval.decoders.canvas import Canvas, check_blocks
from refusion_eval.decoders.choose import at_least_or_best, most_confident
from refusion_eval.decoders.decoder import Decoder, Reads, Style
from refusion_eval.decoders.dream import RANKING_ALGS, Alg, DreamSettings
from refusion_eval.errors import ConfigError
from refusion_eval.trace import Trace
from refusion_eval.types import DROP_ALL, Decoding, Forward, bidirectional


@dataclass(frozen=True, kw_only=True, slots=True)
class FastDllmDreamSettings(DreamSettings):
    """Settings of Fast-dLLM on Dream, named as in its release; those of `DreamSettings` mean the same.

    Features are not reused: the two intervals stay 1.

    Attributes:
        alg: "confidence_threshold" commits by `threshold`. The others commit quotas: without a cache they are Dream's
            decoder, with one there is only "entropy" (with "sparse" all but "origin"), on a schedule for each block.
        steps: of quotas, for the whole canvas, as many for each block. With confidence_threshold and a cache it plays
            no part; without a cache each of the first `steps` forwards adds gen_length / steps positions to those that
            may be committed (8 steps in the release's scripts).
        threshold: commit each candidate whose confidence is not below it, and always the best. The release rounds it to
            the weights' dtype first: 0.9 is 0.8984375 in bfloat16.
        block_length: positions that are filled before the next ones begin; without a cache it plays no part.
        cache: what is kept from a block's first forward: nothing; "prefix", all before the block; "dual", all but the
            block; or "sparse", from the second forward, the best part of that (Sparse-dLLM, see
            `refusion_eval.decoders.sparse_dllm`). Sparse-dLLM's release commits quotas, by entropy in its scripts. Its
            layers are published code; its loop was read in public code derived from it, as the file itself was not at
            hand: the same schedule for each block as here.
        keep_ratio: with cache="sparse", the share of the rows outside the block that stays, in [0, 1].
        kernel_size: with cache="sparse", neighbouring rows that share their largest score, odd; 1 is none.

    Raises:
        ConfigError: a value is out of its range, or settings do not fit each other.
    """

    decoder: ClassVar[str] = "fast_dllm_dream"
    algs: ClassVar[tuple[Alg, ...]] = ("confidence_threshold", *DreamSettings.algs)

    alg: Alg = "confidence_threshold"
    threshold: float = 0.9
    block_length: int = 32
    cache: Cache = "dual"
    keep_ratio: float = 0.5
    kernel_size: int = 3

    def __post_init__(self) -> None:
        DreamSettings.__post_init__(self)
        name = self.decoder
        validate.require_number(name, "threshold", self.threshold, 0.0)
        block_cache.check(name, self.cache, self.keep_ratio, self.kernel_size)
        if dllm_cache.reuse_at(self, 0, 0) is not None:
            raise ConfigError(
                f"{name}: prompt_interval_steps is {self.prompt_interval_steps} and gen_interval_steps "
                f"{self.gen_interval_steps}; features are reused by decoder dream alone, so leave both at 1"
            )
        if self.cache != "none":
            self._check_cached()
        elif self.by_threshold and (self.steps is None or self.gen_length % self.steps):
            raise ConfigError(
                f"{name}: steps is {self.steps} and gen_length {self.gen_length}; without a cache each step adds "
                "gen_length / steps candidates, so set steps to a divisor of gen_length"
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
        """Blocks of the canvas; there are none without a cache."""
        return self.gen_length // self.block_length

    @property
    def steps_per_block(self) -> int:
        """Steps of each block's schedule."""
        return self.num_steps // self.num_blocks


def decode(prompt: Sequence[int], settings: FastDllmDreamSettings, trace: Trace) -> Decoding:
    """Decodes one prompt, all of the canvas unless `early_stop`."""
    if settings.cache != "none":
        return _decode_cached(prompt, settings, trace)
    if settings.by_threshold:
        return _decode_uncached(prompt, settings, trace)
    return dream.decode(prompt, settings, trace)


def _decode_uncached(prompt: Sequence[int], settings: FastDllmDreamSettings, trace: Trace) -> Decoding:
    """Commits anywhere on the canvas; takes `steps` to `gen_length` forwards."""
    canvas, step, steps = Canvas(prompt, settings, trace), 0, settings.num_steps
    while masked := canvas.masked():
        (readout,) = yield dream.canvas_forward(canvas, settings, masked, step)
        # What a step turned down is offered again by the next, and behind the last one as long as something is left.
        num_offered = settings.gen_length // steps * min(step + 1, steps) - (settings.gen_length - len(masked))
        offered = most_confident(readout.probs, num_offered)
        chosen = [offered[index] for index in at_least_or_best(readout.probs[offered], settings.threshold)]
        canvas.fix_chosen(masked, readout, readout.probs, chosen)
        if reason := canvas.settled():
            return canvas.finish(reason)
        step += 1
    return canvas.finish()


def _decode_cached(prompt: Sequence[int], settings: FastDllmDreamSettings, trace: Trace) -> Decoding:
    """Fills block after block; a block takes one to `block_length` forwards, in quotas its number of steps.

    The row that predicts a block's first position lies before the block and is fed only by the block's first forward,
    which therefore commits this one position, however sure it is. In the release a second forward follows even where
    that fills the block; it would change nothing and is left out.
    """
    canvas, steps = Canvas(prompt, settings, trace), count()
    kind = "denoise" if settings.cache == "sparse" else "refresh"
    shares = [] if settings.by_threshold else list(dream.shares(settings.steps_per_block, settings.eps))
    for first in range(0, settings.gen_length, settings.block_length):
        block = range(first, first + settings.block_length)
        (readout,) = yield dream.canvas_forward(canvas, settings, [first], next(steps), DROP_ALL, kind)
        canvas.fix([first], readout.tokens)
        if reason := canvas.settled():
            return canvas.finish(reason)
        num_before = 1
        while masked := canvas.masked(block):
            quota = None if settings.by_threshold else dream.quota(len(masked), shares[num_before])
            candidates, step = [] if quota == 0 else masked, next(steps)
            readouts = yield _later_forward(canvas, settings, block, candidates, step, num_before)
            if candidates:
                scores = settings.scores(readouts[0], step, candidates)
                if quota is None:
                    chosen = at_least_or_best(scores, settings.threshold)
                else:
                    chosen = most_confident(scores, quota)
                canvas.fix_chosen(candidates, readouts[0], scores, chosen)
            if reason := canvas.settled():
                return canvas.finish(reason)
            num_before += 1
    return canvas.finish()


def _later_forward(
    canvas: Canvas,
    settings: FastDllmDreamSettings,
    block: range,
    candidates: Sequence[int],
    step: int,
    num_before: int,
) -> Forward:
    """A forward behind the block's first: the block, with the prefix cache all behind it too.

    What it does not feed it keeps of the forward before it. With the sparse cache the second one is whole as well.
    """
    length, start = len(canvas.tokens), canvas.start + block.start
    own = range(start, start + len(block))
    if num_before == block_cache.refresh_number(settings.cache):
        whole = dream.canvas_forward(canvas, settings, candidates, step, DROP_ALL, "refresh")
        return replace(whole, scores=sparse_dllm.scores(own, length, settings.kernel_size))
    fed, commit = block_cache.feed_behind(settings.cache, own, length, num_before, settings.keep_ratio)
    return Forward(
        canvas.tokens[fed.start : fed.stop],
        fed,
        bidirectional(len(fed)),
        dream.shifted_reads(settings, -block.start, candidates, step),
        commit,
    )


DECODER = Decoder(
    decode,
    FastDllmDreamSettings,
    label="Dream w/ Fast-dLLM",
    reads=Reads("bidirectional", masked="next"),
    fits=("dream",),
    style=Style("#E69F00", ">", (0, (2, 1)), order=8),
)
