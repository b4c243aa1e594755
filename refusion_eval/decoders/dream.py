"""Dream (arXiv 2508.15487): fills a masked response on a noise schedule, the most certain positions first.

Every forward computes the whole text with full attention; no keys and values are cached, and there are no blocks. Dream
was trained from a causal model and kept the way its logits are read: the row before a position predicts it.

With alg="entropy_threshold" there is no schedule: entropies decide how many positions of a block a forward fills, as in
dParallel (arXiv 2509.26488). With alg="p2" tokens are masked again where a later forward is less sure, as in P2
(arXiv 2502.03540).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from refusion_eval.config import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    added_setting,
    settings_class,
)
from refusion_eval.decoders import Decoder, Reads, Style
from refusion_eval.decoders.canvas import (
    Canvas,
    MaskedSettings,
    PositiveFraction,
    blocks_of,
    check_blocks,
    rounded_quotas,
)
from refusion_eval.decoders.dllm_cache import FEATURE_INTERVALS, reuses_features, text_forward
from refusion_eval.decoders.drafts import Drafts, check_drafts
from refusion_eval.decoders.dreamon import fill_open_gap
from refusion_eval.decoders.filling import Rule, above, fill
from refusion_eval.errors import ConfigError
from refusion_eval.types import OPEN, Confidence, Decoding, ProbArray, Read, Readout, Trace

Alg = Literal["origin", "maskgit_plus", "topk_margin", "entropy", "entropy_threshold", "p2"]
RANKING_ALGS: tuple[Alg, ...] = ("maskgit_plus", "topk_margin", "entropy")


@settings_class("dream")
class DreamSettings(MaskedSettings):
    """Settings of Dream's decoder, named as in its release.

    The release samples at temperature 0.1 with top_p 0.9. Most positions are then left with one token and equally
    certain, so that it decodes almost from left to right. At temperature 0 it does not, and is far worse: for nearly
    the official settings without sampling give `temperature=0, confidence_temperature=0.1, confidence_top_p=0.9`.

    Attributes:
        confidence_dtype: "model" as released; the token, too, is then the most probable one at that precision.
        steps: forwards, each with its share of the masks; None is one for each position.
        top_p, top_k: which tokens stay in the distribution, as in `refusion_eval.types.Read`; confidences are those of
            what stays.
        alg: how positions are ranked: by the probability of the token ("maskgit_plus"), by its distance to the second
            best ("topk_margin"), or by low entropy ("entropy"). "origin" picks positions at random. "entropy_threshold"
            fills, block after block, every position whose entropy in nats is below `threshold`, and always the lowest
            one; entropies are then those of the untempered distribution, and `steps` has no effect. "p2" ranks all
            positions by the probability of the token that the present forward would put there. After each of `steps`
            forwards an equal number more of the best ones has tokens, and the others are masks, again or still; a token
            that stays does not change. As in Open-dLLM.
        alg_temp: above 0, positions are drawn without replacement from softmax(confidence / alg_temp).
        eps: noise level at which the schedule ends.
        confidence_temperature, confidence_top_p: temperature and top_p of the confidences at temperature 0; None is 1
            and `top_p`, as released. Above temperature 0 confidences are those of the sampled distribution.
        prompt_interval_steps, gen_interval_steps: steps between refreshes of the features of prompt and response
            (dLLM-Cache, see `refusion_eval.decoders.dllm_cache`); 1 and 1 compute all rows at every step.
        transfer_ratio: share of the response rows that is computed at the other steps; 0.25 in the settings of
            dLLM-Cache. The row that predicts the first response position is the last one of the prompt.
        draft_steps: most steps that a forward verifies (FreeDave, see `refusion_eval.decoders.drafts`), with as many
            copies of the text; the tokens are those of one token a step, without a noise schedule, which draft_steps=1
            gives too. 0 drafts nothing.
        threshold: with alg="entropy_threshold", the entropy below which a position is filled.
        block_length: with alg="entropy_threshold", positions that are filled before the next ones begin; divides
            gen_length. None is all.
        schedule: how `steps` share the masks: on the noise schedule, as in Dream's release, or in equal shares of what
            is left, rounded step by step and without steps that fill nothing ("dllm", as the library dllm). "dreamon"
            fills one mask a forward and looks for masks after the forward, so that the last one finds none; a gap of
            open length then grows and shrinks (see `refusion_eval.decoders.dreamon`), whatever `steps` are.
        expand_id: the token by which DreamOn makes two masks of one; it is never chosen where no gap may grow. None for
            models that have none.
    """

    decoder: ClassVar[str] = "dream"
    shift: ClassVar[int] = 1

    steps: PositiveInt | None = None
    top_p: PositiveFraction = 1.0
    top_k: NonNegativeInt = 0
    alg: Alg = "entropy"
    alg_temp: NonNegativeFloat = 0.0
    eps: Fraction = 1e-3
    confidence_temperature: PositiveFloat | None = None
    confidence_top_p: PositiveFraction | None = None
    prompt_interval_steps: PositiveInt = 1
    gen_interval_steps: PositiveInt = 1
    transfer_ratio: Fraction = 0.0
    draft_steps: NonNegativeInt = added_setting(0)
    threshold: NonNegativeFloat = added_setting(0.5)
    block_length: PositiveInt | None = added_setting(None)
    schedule: Literal["release", "dllm", "dreamon"] = added_setting("release")
    expand_id: NonNegativeInt | None = added_setting(None)

    def __post_init__(self) -> None:
        MaskedSettings.__post_init__(self)
        check_drafts(
            self, ("temperature", "alg", "alg_temp", "steps", "schedule", *FEATURE_INTERVALS), alg=RANKING_ALGS
        )
        if self.alg_temp > 0 and self.alg not in RANKING_ALGS:
            where = f"{self.decoder}: alg_temp is {self.alg_temp}"
            raise ConfigError(f"{where}, and alg={self.alg} draws nothing by confidence; set alg_temp to 0")
        if self.schedule == "dreamon":
            if self.steps is not None and self.steps < self.gen_length:
                where = f"{self.decoder}: steps is {self.steps}"
                raise ConfigError(f"{where} and schedule dreamon, which fills one mask a forward; leave out steps")
            if reuses_features(self):
                raise ConfigError(
                    f"{self.decoder}: schedule is dreamon, which changes the length of a text, with "
                    "prompt_interval_steps or gen_interval_steps above 1; set both to 1"
                )
        if self.schedule != "release" and self.alg not in RANKING_ALGS:
            where = f"{self.decoder}: schedule is {self.schedule}"
            raise ConfigError(f"{where}, and alg={self.alg} fills no shares of what is left; leave out schedule")
        if self.alg == "p2" and self.early_stop:
            raise ConfigError(
                f"{self.decoder}: alg is p2, which masks tokens again: none is final before the last "
                "forward; leave out early_stop"
            )
        if self.alg == "entropy_threshold" and self.block_length is not None:
            check_blocks(self.decoder, self.gen_length, self.block_length, None)

    @property
    def draws_order(self) -> bool:
        return self.alg == "origin" or self.alg_temp > 0

    @property
    def finds_length(self) -> bool:
        """Whether the decoder itself finds the length of a gap of open length, so that none is searched before."""
        return self.schedule == "dreamon"

    @property
    def num_steps(self) -> int:
        return self.gen_length if self.steps is None else self.steps

    @property
    def confidence(self) -> Confidence:
        is_released = self.confidence_temperature is None and self.confidence_top_p is None
        sampled = 0.0 if self.alg == "entropy_threshold" else self.temperature
        return Confidence(
            temperature=sampled or self.confidence_temperature or 1.0,
            dtype=self.confidence_dtype,
            choose=self.confidence_dtype == "model" and self.temperature == 0 and is_released,
        )

    def read(self, rows: Sequence[int], step: int, positions: Sequence[int]) -> Read:
        return replace(
            MaskedSettings.read(self, rows, step, positions),
            # At temperature 0 top_p shapes the confidences only.
            top_p=self.top_p if self.temperature > 0 or self.confidence_top_p is None else self.confidence_top_p,
            top_k=self.top_k,
            exclude=() if self.expand_id is None else (self.expand_id,),
            entropy=self.alg in ("entropy", "entropy_threshold"),
            margin=self.alg == "topk_margin",
        )

    def scores(self, readout: Readout, step: int, positions: Sequence[int]) -> ProbArray:
        """The statistic of `alg`, with noise above `alg_temp` 0, [positions]."""
        scores = MaskedSettings.scores(self, readout, step, positions)
        if self.alg_temp == 0:
            return scores
        # The best scores after adding Gumbel noise are draws without replacement from the softmax of the scores.
        uniform = self.random_scores(step, positions).clip(2**-64, 1 - 2**-53)
        return scores.astype(np.float64) / self.alg_temp - np.log(-np.log(uniform))

    def rule(self, num_masked: int) -> Rule | Drafts:
        if self.draft_steps:
            return Drafts(self.draft_steps)
        if self.alg == "entropy_threshold":
            return Rule(above(-self.threshold))
        steps = self.steps or num_masked
        if self.schedule == "dllm":
            return Rule(quotas=rounded_quotas(num_masked, steps))
        if self.schedule == "dreamon":
            return Rule(fewest=min(self.steps or num_masked + 1, num_masked + 1))
        return Rule(quotas=quotas(num_masked, shares(steps, self.eps)))


def shares(steps: int, eps: float) -> npt.NDArray[np.float32]:
    """Share of the masks that each step fills: 1 - t[i + 1] / t[i], t falling evenly from 1 to eps; the last is 1."""
    # Masks times share is often near a whole number, and the quota is its whole part. So this repeats the arithmetic
    # of the release: float32, with levels that equal those of torch.linspace to the last bit, which counts from the
    # nearer end and rounds once after multiplying and adding.
    first, last = np.float32(1), np.float32(eps)
    stride = np.float64((last - first) / np.float32(steps))
    index = np.arange(steps + 1)
    forwards, backwards = first + stride * index, last - stride * (steps - index)
    levels = np.where(index < (steps + 1) // 2, forwards, backwards).astype(np.float32)
    share = first - levels[1:] / levels[:-1]
    share[-1] = 1  # the level eps is not 0, and no mask may be left
    return share


def quota(num_masked: int, share: np.float32) -> int:
    """Number of masks that a step fills: its share of them, rounded down."""
    return int(np.float32(num_masked) * share)


def quotas(num_masked: int, shares: Iterable[np.float32]) -> Iterator[int]:
    """Numbers of masks that the steps fill; a 0 is a forward too, as in the release."""
    for share in shares:
        num_filled = quota(num_masked, share)
        yield num_filled
        num_masked -= num_filled


def decode(prompt: Sequence[int], settings: DreamSettings, trace: Trace) -> Decoding:
    """Decodes one prompt in `steps` forwards, or fewer with `early_stop`."""
    if settings.finds_length and OPEN in prompt:
        return (yield from fill_open_gap(prompt, settings, trace))
    canvas = Canvas(prompt, settings, trace)
    if settings.alg == "origin":
        return (yield from _decode_at_random(canvas, settings, trace))
    if settings.alg == "p2":
        return (yield from _decode_with_remasking(canvas, settings))
    length = settings.gen_length
    if settings.alg == "entropy_threshold":
        length = settings.block_length or length
    regions, forward = blocks_of(settings.gen_length, length), partial(text_forward, canvas, settings)
    return canvas.finish((yield from fill(canvas, regions, count(), forward, settings.rule(len(canvas.masked())))))


def _decode_at_random(canvas: Canvas, settings: DreamSettings, trace: Trace) -> Decoding:
    for step, share in enumerate(shares(settings.steps or len(canvas.masked()), settings.eps)):
        masked = canvas.masked()
        scores = settings.random_scores(step, masked)
        # Each mask is filled with the probability `share`, independently: the number varies from step to step.
        picked = [position for position, score in zip(masked, scores, strict=True) if score >= 1 - share]
        for readout in (yield text_forward(canvas, settings, picked, step)):
            trace.select("token", masked, scores.tolist(), picked)
            canvas.fix(picked, readout.tokens)
        if reason := canvas.settled():
            return canvas.finish(reason)
    return canvas.finish()


def _decode_with_remasking(canvas: Canvas, settings: DreamSettings) -> Decoding:
    positions = canvas.masked()
    steps = settings.steps or len(positions)
    for step in range(1, steps + 1):
        masked = set(canvas.masked())
        if not masked:
            break
        (readout,) = yield text_forward(canvas, settings, positions, step - 1)
        # float32, as released, decides about the last place of the number.
        num_masks = int(np.float32(len(positions)) * np.float32(1 - step / steps))
        worst = set(np.argsort(readout.probs, kind="stable")[:num_masks].tolist())
        filled = [index for index, position in enumerate(positions) if position in masked and index not in worst]
        canvas.fix_chosen(positions, readout, readout.probs, filled)
        canvas.mask_again([positions[index] for index in sorted(worst) if positions[index] not in masked])
    return canvas.finish()


DECODER = Decoder(
    decode,
    DreamSettings,
    label="Dream",
    reads=Reads("bidirectional", masked="next"),
    infills="gaps",
    fits=("dream",),
    style=Style("#009E73", "v", (0, (1, 1)), order=7),
)
