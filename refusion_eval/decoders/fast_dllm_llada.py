"""Fast-dLLM on LLaDA (arXiv 2505.22618): commits all confident tokens, keeps keys and values while it fills a block.

The response is filled block after block. A block begins with a forward of the whole text; the forwards after it feed a
part of the text against the keys and values of that forward (see `caches`).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import ClassVar

from refusion_eval.config import Fraction, NonNegativeFloat, PositiveInt, settings_class
from refusion_eval.decoders import (
    Decoder,
    Reads,
    Style,
    at_least_or_best,
    caches,
    most_confident,
    num_within_factor,
    rounded_threshold,
)
from refusion_eval.decoders.caches import Cache
from refusion_eval.decoders.canvas import BlockSettings, Canvas, even_quotas
from refusion_eval.errors import ConfigError
from refusion_eval.types import ConfidenceDtype, Decoding, Readout, Trace


@settings_class("fast_dllm_llada")
class FastDllmLladaSettings(BlockSettings):
    """Settings of Fast-dLLM on LLaDA, named as in its release.

    Without `threshold` and `factor` each step commits a quota, as LLaDA does. With one of them `steps` has no effect;
    the release's scripts give both.

    Attributes:
        confidence_dtype: float64 as released.
        threshold: commit every candidate whose confidence is at least this, and always the best one; 0.9 in the
            release.
        factor: commit the longest run of best candidates of which the n-th has a confidence of at least
            1 - factor / (n + 1), and always the best one.
        cache: which keys and values are kept while a block is filled (see `refusion_eval.decoders.caches`). The
            release of Sparse-dLLM commits quotas and computes confidences in the dtype of the weights
            (confidence_dtype="model").
        keep_ratio: with cache="sparse", the share of the rows outside the block that is kept.
        kernel_size: with cache="sparse", number of neighbouring rows that share their largest score, odd; 3 in its
            scripts, 1 for none.
        release_compatible: with `factor`, a run that ends just before the last candidate takes that one too, as the
            release does.
    """

    decoder: ClassVar[str] = "fast_dllm_llada"

    confidence_dtype: ConfidenceDtype = "float64"
    threshold: NonNegativeFloat | None = None
    factor: NonNegativeFloat | None = None
    cache: Cache = "dual"
    keep_ratio: Fraction = 0.5
    kernel_size: PositiveInt = 3
    release_compatible: bool = False

    def __post_init__(self) -> None:
        BlockSettings.__post_init__(self)
        if self.threshold is not None and self.factor is not None:
            raise ConfigError(
                f"{self.decoder}: threshold is {self.threshold} and factor {self.factor}; they are two rules for "
                "one choice, so set one of them to None"
            )
        caches.check_kernel_size(self.decoder, self.kernel_size)


def decode(prompt: Sequence[int], settings: FastDllmLladaSettings, trace: Trace) -> Decoding:
    """Decodes one prompt; a block takes one to `block_length` forwards."""
    canvas = Canvas(prompt, settings, trace)
    steps = count()
    for number in range(settings.num_blocks):
        block = settings.block(number)
        num_before = 0
        while masked := canvas.masked(block):
            forward = caches.block_forward(
                canvas, block, num_before, settings.cache, settings.keep_ratio, settings.kernel_size, "denoise"
            )
            rows = [canvas.start + position - forward.positions[0] for position in masked]
            (readout,) = yield replace(forward, reads=(settings.read(rows, next(steps), masked),))
            canvas.fix_chosen(masked, readout, readout.probs, _accepted(readout, settings, num_before))
            if reason := canvas.settled():
                return canvas.finish(reason)
            num_before += 1
    return canvas.finish()


def _accepted(readout: Readout, settings: FastDllmLladaSettings, num_before: int) -> list[int]:
    """Indices of the candidates that become final; `num_before` is the number of forwards of the block before."""
    scores = readout.probs
    if settings.threshold is not None:
        return at_least_or_best(scores, rounded_threshold(settings.threshold, readout))
    if settings.factor is None:  # LLaDA's quotas, which only the caches tell apart from LLaDA
        return most_confident(scores, even_quotas(settings.block_length, settings.steps_per_block)[num_before])
    num_accepted = num_within_factor(scores, settings.factor)
    # The release ends its loop at the last candidate without looking at it.
    if settings.release_compatible and num_accepted == len(scores) - 1:
        num_accepted += 1
    return most_confident(scores, num_accepted)


DECODER = Decoder(
    decode,
    FastDllmLladaSettings,
    label="LLaDA w/ Fast-dLLM",
    reads=Reads("bidirectional", masked="own"),
    fits=("llada",),
    trained_by=("llada",),
    style=Style("#E69F00", "<", (0, (4, 2)), order=5),
)
