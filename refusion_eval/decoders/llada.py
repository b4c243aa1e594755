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
from refusion_eval.decoders.canvas import BlockSettings, Canvas, MaskedSettings, even_quotas, rounded_quotas
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
        schedule: "dllm" fills as the library dllm. The blocks in which it fills a gap are those of the whole text,
            counted from its first token; all of them have shares of `steps`, rounded up; and each step fills an equal
            share of what is left, rounded, and at least one. The last block may be shorter.
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
    schedule: Literal["release", "dllm"] = added_setting("release")

    def __post_init__(self) -> None:
        (BlockSettings if self.schedule == "release" else MaskedSettings).__post_init__(self)
        one_token = ("temperature", "remasking", "steps", "cfg_scale", "threshold", "schedule", *FEATURE_INTERVALS)
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

    def regions(self, canvas: Canvas) -> list[range]:
        """The response indices that are filled before the next ones."""
        if self.draft_steps:
            return [range(self.gen_length)]
        blocks = self.blocks
        if self.schedule == "dllm":
            starts, size = self._windows(canvas), self.block_length
            blocks = [range(max(0, start), min(start + size, canvas.gen_length)) for start in starts]
        return [block for block in blocks if canvas.masked(block)]

    def _windows(self, canvas: Canvas) -> range:
        """The first response indices of the blocks of "dllm", negative in front of a gap."""
        first, end = 0, canvas.gen_length
        if canvas.has_gap:
            first, end = -canvas.start, len(canvas.tokens) - canvas.start
        return range(first, end, self.block_length)

    def rule(self, canvas: Canvas, region: range) -> Rule | Drafts:
        if self.draft_steps:
            return Drafts(self.draft_steps, self.block_length)
        if self.threshold is not None:
            return Rule(at_least(-self.threshold))
        num_masked = len(canvas.masked(region))
        if self.schedule == "dllm":
            steps = -(-(self.steps or self.gen_length) // len(self._windows(canvas)))
            return Rule(quotas=rounded_quotas(num_masked, steps))
        # With more steps than positions the last quotas are 0, and the release makes these forwards too.
        steps = num_masked if self.steps is None else self.steps_per_block
        return Rule(quotas=even_quotas(num_masked, steps), fewest=steps)


def decode(prompt: Sequence[int], settings: LladaSettings, trace: Trace) -> Decoding:
    """Decodes one prompt; takes `steps` forwards, fewer only with `early_stop`, `threshold` or drafts."""
    canvas = Canvas(prompt, settings, trace)

    def forward(positions: Sequence[int], step: int) -> Forward:
        return _guided(text_forward(canvas, settings, positions, step), canvas, settings)

    steps = count()
    for region in settings.regions(canvas):
        if reason := (yield from fill(canvas, [region], steps, forward, settings.rule(canvas, region))):
            return canvas.finish(reason)
    return canvas.finish()


def _guided(forward: Forward, canvas: Canvas, settings: LladaSettings) -> Forward:
    """With guidance, the text is followed by the text with all that was given masked; neither half sees the other."""
    if settings.cfg_scale == 0:
        return forward
    # One forward of twice the length instead of two forwards: both halves read the weights once.
    length, unconditional = len(forward.tokens), list(forward.tokens)
    for index in canvas.given:
        unconditional[index] = settings.mask_id
    return replace(
        forward,
        tokens=[*forward.tokens, *unconditional],
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
    infills="gaps",
    fits=("masked", "llada"),
    trained_by=("llada",),
    style=Style("#D55E00", "^", (0, (3, 1, 1, 1)), order=4),
)
