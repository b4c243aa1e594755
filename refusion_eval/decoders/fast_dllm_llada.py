"""Fast-dLLM on LLaDA (arXiv 2505.22618): commits all confident tokens, keeps keys and values while it fills a block.

The response is filled block after block. A block begins with a forward of the whole text; the forwards after it feed a
part of the text against the keys and values of that forward (see `block_cache`).
"""

from collections.abc import Sequence
from itertools import count
from typing import ClassVar

from refusion_eval.config import Fraction, NonNegativeFloat, PositiveInt, settings_class
from refusion_eval.decoders import block_cache
from refusion_eval.decoders.block_cache import Cache
from refusion_eval.decoders.canvas import BlockSettings, Canvas
from refusion_eval.decoders.choose import at_least_or_best, even_quotas, most_confident, num_within_factor
from refusion_eval.decoders.decoder import Decoder, Reads, Style
from refusion_eval.errors import ConfigError
from refusion_eval.trace import Trace
from refusion_eval.types import (
    DROP_ALL,
    ConfidenceDtype,
    Decoding,
    Forward,
    ProbArray,
    bidirectional,
)


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
        cache: which keys and values are kept while a block is filled (see `refusion_eval.decoders.block_cache`). The
            release of Sparse-dLLM commits quotas and computes confidences in the dtype of the weights
            (confidence_dtype="model").
        keep_ratio: with cache="sparse", the share of the rows outside the block that is kept.
        kernel_size: with cache="sparse", number of neighbouring rows that share their largest score, odd; 3 in its
            scripts, 1 for none.
        release_compatible: with `factor`, a run that ends just before the last candidate takes that one too, as the
            release does.

    Raises:
        ConfigError: a value is out of its range, or settings do not fit each other.
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
        name = self.decoder
        if self.threshold is not None and self.factor is not None:
            raise ConfigError(
                f"{name}: threshold is {self.threshold} and factor {self.factor}; they are two rules for "
                "one choice, so set one of them to None"
            )
        block_cache.check_kernel_size(name, self.kernel_size)


def decode(prompt: Sequence[int], settings: FastDllmLladaSettings, trace: Trace) -> Decoding:
    """Decodes one prompt; a block takes one to `block_length` forwards."""
    canvas = Canvas(prompt, settings, trace)
    steps = count()
    for number in range(settings.num_blocks):
        block = settings.block(number)
        num_before = 0
        while masked := canvas.masked(block):
            (readout,) = yield _forward(canvas, settings, block, masked, num_before, next(steps))
            chosen = _choose(readout.probs, settings, num_before)
            canvas.fix_chosen(masked, readout, readout.probs, chosen)
            if reason := canvas.settled():
                return canvas.finish(reason)
            num_before += 1
    return canvas.finish()


def _forward(
    canvas: Canvas, settings: FastDllmLladaSettings, block: range, masked: Sequence[int], num_before: int, step: int
) -> Forward:
    """The forward of one step; `num_before` is the number of forwards of the same block before it."""
    length, start = len(canvas.tokens), canvas.start + block.start
    own = range(start, start + len(block))
    refresh = block_cache.refresh_number(settings.cache)
    is_refresh = settings.cache != "none" and num_before == refresh
    fed, commit = range(length), DROP_ALL
    if settings.cache != "none" and num_before > refresh:
        fed, commit = block_cache.rows_after_refresh(settings.cache, own, length, num_before, settings.keep_ratio)
    scores = None
    if settings.cache == "sparse" and is_refresh:
        scores = block_cache.sparse_scores(own, length, settings.kernel_size)
    rows = [canvas.start + position - fed.start for position in masked]
    return Forward(
        canvas.tokens[fed.start : fed.stop],
        fed,
        bidirectional(len(fed)),
        (settings.read(rows, step, masked),),
        commit,
        "refresh" if is_refresh else "denoise",
        scores,
    )


def _choose(scores: ProbArray, settings: FastDllmLladaSettings, num_before: int) -> list[int]:
    """Indices of the candidates that become final; `num_before` is the number of forwards of the block before."""
    if settings.threshold is not None:
        return at_least_or_best(scores, settings.threshold)
    if settings.factor is None:
        return most_confident(scores, even_quotas(settings.block_length, settings.steps_per_block)[num_before])
    num_chosen = num_within_factor(scores, settings.factor)
    if settings.release_compatible and num_chosen == len(scores) - 1:
        num_chosen += 1
    return most_confident(scores, num_chosen)


DECODER = Decoder(
    decode,
    FastDllmLladaSettings,
    label="LLaDA w/ Fast-dLLM",
    reads=Reads("bidirectional", masked="own"),
    fits=("llada",),
    trained_by=("llada",),
    style=Style("#E69F00", "<", (0, (4, 2)), order=5),
)
