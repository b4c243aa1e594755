"""Fast-dLLM (arXiv 2505.22618) on LLaDA and Dream: commits all confident tokens, keeps keys and values in a block.

The response is filled block after block. A block begins with a forward of the whole text; the forwards after it feed a
part of the text against the keys and values of one forward of the whole text, the refresh. They are not exact: keys and
values of a bidirectional model change with every token that is filled in. On Dream there are no blocks without a cache.

| cache | refresh | kept of the refresh | fed by later forwards |
|---|---|---|---|
| prefix | first forward of the block | rows before the block | the block and everything after it |
| dual | first forward of the block | rows outside the block | the block |
| sparse | second forward of the block | the best-scored rows outside the block | the block |

"sparse" is Sparse-dLLM (arXiv 2508.02558). In each layer the share `keep_ratio` of the rows outside the block stays:
prompt, finished blocks and later masks compete by `refusion_eval.types.RowScores`, and all heads keep the same rows. As
released, all rows of the block ask, masked or not, the number of kept rows is rounded down, and the rows next to the
block on either side are neighbours. Of equal scores, common among neighbours, the first stay; the release says nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count, repeat
from typing import ClassVar, Literal

from refusion_eval.config import Fraction, NonNegativeFloat, PositiveInt, added_setting, settings_class
from refusion_eval.decoders import Decoder, Reads, Style, at_least_or_best, dream, most_confident, num_within_factor
from refusion_eval.decoders.canvas import BlockSettings, Canvas, blocks_of, check_blocks, even_quotas
from refusion_eval.decoders.dllm_cache import reuses_features
from refusion_eval.decoders.drafts import Drafts
from refusion_eval.decoders.dream import DreamSettings
from refusion_eval.decoders.filling import Rule, at_least, fill
from refusion_eval.errors import ConfigError
from refusion_eval.types import (
    DROP_ALL,
    NOTHING,
    Commit,
    ConfidenceDtype,
    Decoding,
    Forward,
    ProbArray,
    Read,
    Readout,
    RowScores,
    Trace,
    bidirectional,
)

Cache = Literal["none", "prefix", "dual", "sparse"]
FastAlg = Literal["confidence_threshold", "origin", "maskgit_plus", "topk_margin", "entropy"]


@settings_class("fast_dllm_llada")
class FastDllmLladaSettings(BlockSettings):
    """Settings of Fast-dLLM on LLaDA, named as in its release.

    Without `threshold` and `factor` each step commits a quota, as LLaDA does. With one of them `steps` has no effect;
    the release's scripts give both.

    Attributes:
        confidence_dtype: float64 as released.
        threshold: commit every candidate whose confidence is at least this (0.9 in the release), and the best one.
        factor: commit the longest run of best candidates of which the n-th has a confidence of at least
            1 - factor / (n + 1), and always the best one.
        cache: which keys and values are kept while a block is filled (see `refusion_eval.decoders.fast_dllm`). The
            release of Sparse-dLLM commits quotas, and has confidence_dtype="model".
        keep_ratio: with cache="sparse", the share of the rows outside the block that is kept.
        kernel_size: with cache="sparse", number of neighbouring rows that share their largest score, odd; 1 for none.
        release_compatible: with `factor`, take the last candidate too if the run ends just before it, as released. With
            remasking="low_entropy", a block has two forwards or more, also where the first one fills it, as released.
        remasking: rank candidates by probability, or by low entropy (dParallel). By entropy, `threshold` commits every
            candidate whose entropy in nats is at most this, and always the lowest one.
    """

    decoder: ClassVar[str] = "fast_dllm_llada"
    kind_in_block: ClassVar[str] = "denoise"

    confidence_dtype: ConfidenceDtype = "float64"
    threshold: NonNegativeFloat | None = None
    factor: NonNegativeFloat | None = None
    cache: Cache = "dual"
    keep_ratio: Fraction = 0.5
    kernel_size: PositiveInt = 3
    release_compatible: bool = False
    remasking: Literal["low_confidence", "low_entropy"] = added_setting("low_confidence")

    def __post_init__(self) -> None:
        BlockSettings.__post_init__(self)
        if self.factor is not None and self.remasking == "low_entropy":
            where = f"{self.decoder}: factor is {self.factor}"
            raise ConfigError(
                f"{where}, which counts with probabilities; set threshold instead, or leave out remasking"
            )
        if self.threshold is not None and self.factor is not None:
            rules = f"threshold is {self.threshold} and factor {self.factor}"
            raise ConfigError(f"{self.decoder}: {rules}; they are two rules for one choice, so leave out one of them")
        _check_kernel_size(self.decoder, self.kernel_size)

    def read(self, rows: Sequence[int], step: int, positions: Sequence[int]) -> Read:
        return replace(BlockSettings.read(self, rows, step, positions), entropy=self.remasking == "low_entropy")

    def rule(self, num_masked: int) -> Rule:
        rule = Rule(quotas=even_quotas(self.block_length, self.steps_per_block))
        if self.factor is not None:
            rule = Rule(self._within_factor)
        elif self.threshold is not None:
            rule = Rule(at_least(-self.threshold if self.remasking == "low_entropy" else self.threshold))
        is_released = self.release_compatible and self.remasking == "low_entropy" and self.cache != "none"
        return rule._replace(fewest=2) if is_released else rule

    def _within_factor(self, scores: ProbArray, readout: Readout, quota: int) -> list[int]:
        assert self.factor is not None
        num_accepted = num_within_factor(scores, self.factor)
        # The release ends its loop at the last candidate without looking at it.
        if self.release_compatible and num_accepted == len(scores) - 1:
            num_accepted += 1
        return most_confident(scores, num_accepted)


@settings_class("fast_dllm_dream")
class FastDllmDreamSettings(DreamSettings):
    """Settings of Fast-dLLM on Dream, named as in its release; those of `DreamSettings` mean the same.

    Features are not reused: both intervals have to stay 1.

    Attributes:
        alg: "confidence_threshold" commits by `threshold`. The others commit quotas: without a cache they are Dream's
            decoder; with one there is only "entropy" (with "sparse", all but "origin"), on a schedule for each block.
        steps: steps of quotas for the whole response, divided evenly among the blocks. With confidence_threshold and a
            cache it has no effect; without a cache each of the first `steps` forwards adds gen_length / steps positions
            to those that may be committed (8 steps in the release's scripts).
        threshold: commit each candidate whose confidence is at least this, and always the best one.
        block_length: positions that are filled before the next ones begin; without a cache it has no effect.
        cache: which keys and values are kept while a block is filled (see `refusion_eval.decoders.fast_dllm`). The
            release of Sparse-dLLM commits quotas by entropy; its loop was read in public code derived from it.
        keep_ratio: with cache="sparse", the share of the rows outside the block that is kept.
        kernel_size: with cache="sparse", number of neighbouring rows that share their largest score, odd; 1 for none.
    """

    decoder: ClassVar[str] = "fast_dllm_dream"
    kind_in_block: ClassVar[str] = "decode"

    alg: FastAlg = "confidence_threshold"  # type: ignore[assignment]
    threshold: NonNegativeFloat = 0.9
    block_length: PositiveInt = 32
    cache: Cache = "dual"
    keep_ratio: Fraction = 0.5
    kernel_size: PositiveInt = 3

    def __post_init__(self) -> None:
        DreamSettings.__post_init__(self)
        _check_kernel_size(self.decoder, self.kernel_size)
        if reuses_features(self):
            raise ConfigError(
                f"{self.decoder}: prompt_interval_steps is {self.prompt_interval_steps} and gen_interval_steps "
                f"{self.gen_interval_steps}; only decoder dream reuses features, so leave both at 1"
            )
        if self.cache != "none":
            self._check_cached()
        elif self.by_threshold and (self.steps is None or self.gen_length % self.steps):
            sizes = f"steps is {self.steps} and gen_length {self.gen_length}"
            raise ConfigError(f"{self.decoder}: {sizes}; without a cache, set steps to a divisor of gen_length")

    def _check_cached(self) -> None:
        if self.draft_steps:
            raise ConfigError(f"{self.decoder}: draft_steps is {self.draft_steps}; with a cache nothing is drafted")
        if self.schedule != "release":
            raise ConfigError(f"{self.decoder}: schedule is {self.schedule}; with a cache there is only the release's")
        check_blocks(self.decoder, self.gen_length, self.block_length, None if self.by_threshold else self.steps)
        if self.by_threshold:
            return
        where = f"{self.decoder}: alg is {self.alg}"
        if self.cache == "sparse" and self.alg == "origin":
            raise ConfigError(f"{where}, and with cache sparse positions are ranked; set alg to entropy, for example")
        if self.cache != "sparse" and self.alg != "entropy":
            raise ConfigError(f"{where}, and with a cache quotas go by entropy; set alg to entropy, or cache to none")
        if self.steps_per_block == 1 < self.block_length:  # a block's first step commits one position alone
            fewest = 2 * len(self.blocks)
            raise ConfigError(f"{self.decoder}: steps is {self.steps}, too few; set steps to at least {fewest}")

    @property
    def by_threshold(self) -> bool:
        return self.alg == "confidence_threshold"

    @property
    def blocks(self) -> list[range]:
        return blocks_of(self.gen_length, self.block_length)

    @property
    def steps_per_block(self) -> int:
        return self.num_steps // len(self.blocks)

    def rule(self, num_masked: int) -> Rule | Drafts:
        if self.cache != "none":  # after the first forward of a block
            if self.by_threshold:
                return Rule(at_least(self.threshold))
            shares = dream.shares(self.steps_per_block, self.eps)[1:]
            return Rule(quotas=dream.quotas(self.block_length - 1, shares))
        if self.by_threshold:
            quota = self.gen_length // self.num_steps
            # Of each forward, how many positions may be filled when it is done.
            return Rule(self._accept, chain(range(quota, self.gen_length, quota), repeat(self.gen_length)))
        return DreamSettings.rule(self, num_masked)

    def _accept(self, scores: ProbArray, readout: Readout, most: int) -> list[int]:
        # The release transfers a quota a step and takes back what is below the threshold, all but the best. So
        # positions that a step did not commit are candidates of the next step again, also after the last step.
        candidates = most_confident(scores, most - (self.gen_length - len(scores)))
        return [candidates[index] for index in at_least_or_best(scores[candidates], self.threshold, readout)]


Settings = FastDllmLladaSettings | FastDllmDreamSettings


def _check_kernel_size(decoder: str, kernel_size: int) -> None:
    if kernel_size % 2 == 0:
        raise ConfigError(f"{decoder}: kernel_size is {kernel_size}; scores are pooled around each row, so make it odd")


def decode(prompt: Sequence[int], settings: Settings, trace: Trace) -> Decoding:
    """Fills block after block; a block takes one to `block_length` forwards, or with quotas its number of steps."""
    canvas, steps = Canvas(prompt, settings, trace), count()
    for block in settings.blocks:
        forward = partial(_forward, canvas, settings, block, count())
        # On Dream the row that predicts the first position of a block lies before the block and is fed only by the
        # block's first forward, which therefore commits this one position whatever its confidence. In the release
        # a second forward follows even if that fills the block; it would change nothing and is left out.
        if settings.shift:
            (readout,) = yield forward(block[:1], next(steps))
            canvas.fix(block[:1], readout.tokens)
            if reason := canvas.settled():
                return canvas.finish(reason)
        if reason := (yield from fill(canvas, [block], steps, forward, settings.rule(len(block)))):
            return canvas.finish(reason)
    return canvas.finish()


def _forward(
    canvas: Canvas, settings: Settings, block: range, numbers: Iterator[int], candidates: Sequence[int], step: int
) -> Forward:
    """A forward of a block, which reads some response indices; `numbers` counts those of the block."""
    # Keys and values of masks are stale at once, those of other rows drift slowly: so the block is recomputed in each
    # forward, and the rest only when a block begins. Sparse-dLLM waits one step, until scores are more stable.
    number, length = next(numbers), len(canvas.tokens)
    own = range(canvas.start + block.start, canvas.start + block.stop)
    since_refresh = -1 if settings.cache == "none" else number - (settings.cache == "sparse")
    fed, commit, kind, scores = range(length), DROP_ALL, "denoise", None
    if since_refresh == 0:
        kind = "refresh"
        if settings.cache == "sparse":
            outside = _rows_outside(own, length)
            scores = RowScores(own, outside, int(len(outside) * settings.keep_ratio), settings.kernel_size)
    elif since_refresh > 0:
        fed = range(own.start, length) if settings.cache == "prefix" else own
        commit = Commit(_rows_outside(fed, length)) if since_refresh == 1 else NOTHING
        kind = settings.kind_in_block
    reads = canvas.reads(candidates, step, fed.start)
    return Forward(canvas.tokens[fed.start : fed.stop], fed, bidirectional(len(fed)), reads, commit, kind, scores)


def _rows_outside(rows: range, length: int) -> list[int]:
    return [*range(rows.start), *range(rows.stop, length)]


def decode_dream(prompt: Sequence[int], settings: FastDllmDreamSettings, trace: Trace) -> Decoding:
    return (dream.decode if settings.cache == "none" else decode)(prompt, settings, trace)


DECODERS = {
    "fast_dllm_dream": Decoder(
        decode_dream,
        FastDllmDreamSettings,
        label="Dream w/ Fast-dLLM",
        reads=Reads("bidirectional", masked="next"),
        infills="gap",
        fits=("dream",),
        style=Style("#E69F00", ">", (0, (2, 1)), order=8),
    ),
    "fast_dllm_llada": Decoder(
        decode,
        FastDllmLladaSettings,
        label="LLaDA w/ Fast-dLLM",
        reads=Reads("bidirectional", masked="own"),
        infills="gap",
        fits=("llada",),
        trained_by=("llada",),
        style=Style("#E69F00", "<", (0, (4, 2)), order=5),
    ),
}
