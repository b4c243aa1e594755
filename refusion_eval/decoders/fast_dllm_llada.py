"""Fast-dLLM's decoding of LLaDA (arXiv 2505.22618): parallel commits by confidence, keys and values kept for a block.

The canvas is filled block after block. Each block begins with a forward of the whole canvas; those after it reuse its
keys and values outside the part that is fed again, though in a bidirectional model they change with every token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from refusion_eval.decoders import block_cache, sparse_dllm, validate
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


@dataclass(frozen=True, kw_only=True, slots=True)
class FastDllmLladaSettings(BlockSettings):
    """Settings of Fast-dLLM on LLaDA, named as in its release.

    Without `threshold` and `factor` each step commits a quota, as LLaDA does. With one of them `steps` plays no part;
    the release's scripts give both.

    Attributes:
        confidence_dtype: float64 as released.
        threshold: commit every candidate whose confidence is not below it, and always the best; 0.9 in the release.
        factor: commit the longest run of best candidates of which the n-th has a confidence of at least
            1 - factor / (n + 1), and always the best.
        cache: what is kept from a block's first forward: nothing; "prefix", all before the block, so that the block
            and everything behind it are fed again; "dual", all but the block; or "sparse", from the second forward, the
            best part of that (Sparse-dLLM, see `refusion_eval.decoders.sparse_dllm`). Sparse-dLLM's release commits
            quotas and computes confidences in the weights' dtype (confidence_dtype="model").
        keep_ratio: with cache="sparse", the share of the rows outside the block that stays, in [0, 1].
        kernel_size: with cache="sparse", neighbouring rows that share their largest score, odd; 3 in its scripts, and 1
            is none.
        release_compatible: with `factor` a run that ends just before the last candidate takes that too, as the release
            has it.

    Raises:
        ConfigError: a value is out of its range, or settings do not fit each other.
    """

    decoder: ClassVar[str] = "fast_dllm_llada"

    confidence_dtype: ConfidenceDtype = "float64"
    threshold: float | None = None
    factor: float | None = None
    cache: Cache = "dual"
    keep_ratio: float = 0.5
    kernel_size: int = 3
    release_compatible: bool = False

    def __post_init__(self) -> None:
        BlockSettings.__post_init__(self)
        name = self.decoder
        if self.threshold is not None:
            validate.require_number(name, "threshold", self.threshold, 0.0)
        if self.factor is not None:
            validate.require_number(name, "factor", self.factor, 0.0)
        if self.threshold is not None and self.factor is not None:
            raise ConfigError(
                f"{name}: threshold is {self.threshold} and factor {self.factor}; they are two rules for the same "
                "choice, so set one of them to None"
            )
        block_cache.check(name, self.cache, self.keep_ratio, self.kernel_size)
        validate.require_flags(name, release_compatible=self.release_compatible)


def decode(prompt: Sequence[int], settings: FastDllmLladaSettings, trace: Trace) -> Decoding:
    """Decodes one prompt, all of the canvas unless `early_stop`; takes one to `block_length` forwards a block."""
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
    """A step's forward; `num_before` counts those of the same block before it."""
    length, start = len(canvas.tokens), canvas.start + block.start
    own = range(start, start + len(block))
    refresh = block_cache.refresh_number(settings.cache)
    is_refresh = settings.cache != "none" and num_before == refresh
    fed, commit = range(length), DROP_ALL
    if settings.cache != "none" and num_before > refresh:
        fed, commit = block_cache.feed_behind(settings.cache, own, length, num_before, settings.keep_ratio)
    rows = [canvas.start + position - fed.start for position in masked]
    return Forward(
        canvas.tokens[fed.start : fed.stop],
        fed,
        bidirectional(len(fed)),
        (settings.read(rows, step, masked),),
        commit,
        "refresh" if is_refresh else "denoise",
        sparse_dllm.scores(own, length, settings.kernel_size) if settings.cache == "sparse" and is_refresh else None,
    )


def _choose(scores: ProbArray, settings: FastDllmLladaSettings, num_before: int) -> list[int]:
    """Which of the candidates become final; `num_before` counts the block's forwards before, for its quota."""
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
