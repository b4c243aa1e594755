"""LLaDA (arXiv 2502.09992): each step commits a quota of the most confident tokens of a masked response.

Every forward computes the whole text with full attention; no keys and values are cached. The response is filled block
after block (semi-autoregressive remasking), each block in the same number of steps. With `threshold` the entropies of
the candidates decide how many are committed, as in dParallel (arXiv 2509.26488).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import ClassVar, Literal

from refusion_eval.config import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, added_setting, settings_class
from refusion_eval.decoders import Decoder, Reads, Style
from refusion_eval.decoders.canvas import BlockSettings, Canvas, even_quotas
from refusion_eval.decoders.dllm_cache import FEATURE_INTERVALS, reuses_features, text_forward
from refusion_eval.decoders.drafts import Drafts, check_drafts
from refusion_eval.decoders.filling import Rule, at_least, fill
from refusion_eval.errors import ConfigError
from refusion_eval.types import Confidence, Decoding, Forward, Guidance, ProbArray, Read, Readout, Segment, Trace


@settings_class("llada")
class LladaSettings(BlockSettings):
    """Settings of LLaDA's decoder, named as in its release.

    Attributes:
        remasking: commit the candidates of a step with the highest probability, random ones, or those with the lowest
            entropy ("low_entropy").
        cfg_scale: scale of classifier-free guidance, 0 for none. The unconditional half sees a masked prompt.
        logits_eos_inf: never choose the first of `eos_ids`.
        confidence_eos_eot_inf: give stop tokens confidence 0, so that they are committed last.
        prompt_interval_steps, gen_interval_steps: steps between refreshes of the features of prompt and response
            (dLLM-Cache, see `refusion_eval.decoders.dllm_cache`); 1 and 1 compute all rows at every step.
        transfer_ratio: share of the response rows that is computed at the other steps; 0.25 in dLLM-Cache's settings.
        release_compatible: above temperature 0, `confidence_eos_eot_inf` spares the first of `eos_ids`, as released.
        draft_steps: most steps that a forward verifies (FreeDave, see `refusion_eval.decoders.drafts`), with as many
            copies of the text; the tokens are those of one token a step. 0 drafts nothing.
        threshold: with remasking="low_entropy", commit every candidate whose entropy in nats is at most this, and
            always the lowest one (dParallel); `steps` then has no effect.
    """

    decoder: ClassVar[str] = "llada"

    remasking: Literal["low_confidence", "random", "low_entropy"] = "low_confidence"
    cfg_scale: NonNegativeFloat = 0.0
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    prompt_interval_steps: PositiveInt = 1
    gen_interval_steps: PositiveInt = 1
    transfer_ratio: Fraction = 0.0
    release_compatible: bool = False
    draft_steps: NonNegativeInt = added_setting(0)
    threshold: NonNegativeFloat | None = added_setting(None)

    def __post_init__(self) -> None:
        BlockSettings.__post_init__(self)
        one_token = ("temperature", "remasking", "steps", "cfg_scale", "threshold", *FEATURE_INTERVALS)
        ranked = ("low_confidence", "low_entropy")
        check_drafts(self, one_token, remasking=ranked, steps=(None, self.gen_length))
        if (self.logits_eos_inf or self.confidence_eos_eot_inf) and not self.eos_ids:
            raise ConfigError("llada: logits_eos_inf and confidence_eos_eot_inf need eos_ids, and there are none")
        if self.cfg_scale > 0 and reuses_features(self):
            raise ConfigError(
                f"llada: cfg_scale is {self.cfg_scale} with prompt_interval_steps {self.prompt_interval_steps} and "
                f"gen_interval_steps {self.gen_interval_steps}; set it to 0, or both intervals to 1"
            )
        if self.threshold is not None and self.remasking != "low_entropy":
            where = f"llada: threshold is {self.threshold} and remasking {self.remasking}"
            raise ConfigError(f"{where}; entropies are compared with it, so set remasking to low_entropy")

    @property
    def draws_order(self) -> bool:
        return self.remasking == "random"

    @property
    def confidence(self) -> Confidence:
        # Stop tokens may be chosen, but commit last: the model fills the end of a response with them, confidently.
        exclude = self.eos_ids if self.confidence_eos_eot_inf else ()
        if self.release_compatible and self.temperature > 0:
            exclude = exclude[1:]
        return Confidence(dtype=self.confidence_dtype, exclude=exclude)

    def read(self, rows: Sequence[int], step: int, positions: Sequence[int]) -> Read:
        read = replace(BlockSettings.read(self, rows, step, positions), entropy=self.remasking == "low_entropy")
        return replace(read, exclude=self.eos_ids[:1]) if self.logits_eos_inf else read

    def scores(self, readout: Readout, step: int, positions: Sequence[int]) -> ProbArray:
        if self.remasking == "random":
            return self.random_scores(step, positions)
        return BlockSettings.scores(self, readout, step, positions)

    def rule(self) -> Rule | Drafts:
        if self.draft_steps:
            return Drafts(self.draft_steps, self.block_length)
        if self.threshold is not None:
            return Rule(at_least(-self.threshold))
        # With more steps than positions the last quotas are 0, and the release makes these forwards too.
        return Rule(quotas=even_quotas(self.block_length, self.steps_per_block), fewest=self.steps_per_block)


def decode(prompt: Sequence[int], settings: LladaSettings, trace: Trace) -> Decoding:
    """Decodes one prompt; takes `steps` forwards, fewer only with `early_stop`, `threshold` or drafts."""
    canvas = Canvas(prompt, settings, trace)

    def forward(positions: Sequence[int], step: int) -> Forward:
        return _guided(text_forward(canvas, settings, positions, step), canvas, settings)

    regions = [range(settings.gen_length)] if settings.draft_steps else settings.blocks
    return canvas.finish((yield from fill(canvas, regions, count(), forward, settings.rule())))


def _guided(forward: Forward, canvas: Canvas, settings: LladaSettings) -> Forward:
    """With guidance, the text is followed by the text with a masked prompt; neither half sees the other."""
    if settings.cfg_scale == 0:
        return forward
    # One forward of twice the length instead of two forwards: both halves read the weights once.
    length = len(forward.tokens)
    return replace(
        forward,
        tokens=[*forward.tokens, *[settings.mask_id] * canvas.start, *forward.tokens[canvas.start :]],
        positions=[*forward.positions] * 2,
        attention=(Segment(length, causal=False),) * 2,
        reads=tuple(
            replace(read, guidance=Guidance([length + row for row in read.rows], settings.cfg_scale))
            for read in forward.reads
        ),
    )


DECODER = Decoder(
    decode,
    LladaSettings,
    label="LLaDA",
    reads=Reads("bidirectional", masked="own"),
    fits=("masked", "llada"),
    trained_by=("llada",),
    style=Style("#D55E00", "^", (0, (3, 1, 1, 1)), order=4),
)
