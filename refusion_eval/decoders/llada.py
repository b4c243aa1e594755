"""LLaDA's decoding (arXiv 2502.09992): a canvas of masks, a quota of the most confident tokens a step.

Every forward sees the whole canvas both ways; no keys and values are cached. The canvas is filled block after block
(semi-autoregressive remasking), each in the same number of steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from refusion_eval.decoders import dllm_cache, validate
from refusion_eval.decoders.canvas import BlockSettings, Canvas, Remasking
from refusion_eval.decoders.choose import even_quotas, most_confident
from refusion_eval.decoders.decoder import Decoder, Reads, Style
from refusion_eval.errors import ConfigError
from refusion_eval.trace import Trace
from refusion_eval.types import (
    Attention,
    Confidence,
    Decoding,
    Forward,
    Guidance,
    ProbArray,
    Read,
    Segment,
    bidirectional,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LladaSettings(BlockSettings):
    """Settings of LLaDA's decoder, named as in its release.

    Attributes:
        remasking: keep the most confident candidates of a step, or random ones.
        cfg_scale: scale of classifier-free guidance, 0 for none; the other half sees the prompt masked.
        logits_eos_inf: never choose the first of `eos_ids`.
        confidence_eos_eot_inf: stop tokens that are chosen have confidence 0, so that they are committed last.
        prompt_interval_steps, gen_interval_steps: the prompt's and the response's features are computed every so many
            steps (dLLM-Cache, see `refusion_eval.decoders.dllm_cache`); 1 and 1 compute all at every step.
        transfer_ratio: share of the response that is computed at the steps between its own; 0.25 in dLLM-Cache's
            settings. With gen_interval_steps=1 it plays no part.
        release_compatible: above temperature 0 the release forgets the first of `eos_ids` in `confidence_eos_eot_inf`.

    Raises:
        ConfigError: a value is out of its range, or sizes do not fit each other.
    """

    decoder: ClassVar[str] = "llada"

    remasking: Remasking = "low_confidence"
    cfg_scale: float = 0.0
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    prompt_interval_steps: int = 1
    gen_interval_steps: int = 1
    transfer_ratio: float = 0.0
    release_compatible: bool = False

    def __post_init__(self) -> None:
        BlockSettings.__post_init__(self)
        validate.require_choice("llada", "remasking", self.remasking, ("low_confidence", "random"))
        validate.require_number("llada", "cfg_scale", self.cfg_scale, 0.0)
        validate.require_flags(
            "llada",
            logits_eos_inf=self.logits_eos_inf,
            confidence_eos_eot_inf=self.confidence_eos_eot_inf,
            release_compatible=self.release_compatible,
        )
        if (self.logits_eos_inf or self.confidence_eos_eot_inf) and not self.eos_ids:
            raise ConfigError("llada: logits_eos_inf and confidence_eos_eot_inf need eos_ids, and there are none")
        dllm_cache.check("llada", self.prompt_interval_steps, self.gen_interval_steps, self.transfer_ratio)
        if self.cfg_scale > 0 and dllm_cache.reuse_at(self, 0, 0) is not None:
            raise ConfigError(
                f"llada: cfg_scale is {self.cfg_scale} with prompt_interval_steps {self.prompt_interval_steps} and "
                f"gen_interval_steps {self.gen_interval_steps}; features are reused without guidance, so set cfg_scale "
                "to 0 or both intervals to 1"
            )

    @property
    def confidence(self) -> Confidence:
        """The softmax that confidences are taken from, without what may not be confident."""
        exclude = self.eos_ids if self.confidence_eos_eot_inf else ()
        if self.release_compatible and self.temperature > 0:
            exclude = exclude[1:]
        return Confidence(dtype=self.confidence_dtype, exclude=exclude)


def decode(prompt: Sequence[int], settings: LladaSettings, trace: Trace) -> Decoding:
    """Decodes one prompt; takes `steps` forwards, fewer only with `early_stop`."""
    canvas = Canvas(prompt, settings, trace)
    step = 0
    for block in range(settings.num_blocks):
        region = settings.block(block)
        for quota in even_quotas(len(region), settings.steps_per_block):
            masked = canvas.masked(region)
            readouts = yield _forward(canvas, settings, masked, step)
            if masked:
                scores = _scores(readouts[0].probs, settings, masked, step)
                canvas.fix_chosen(masked, readouts[0], scores, most_confident(scores, quota))
            step += 1
            if reason := canvas.settled():
                return canvas.finish(reason)
    return canvas.finish()


def _forward(canvas: Canvas, settings: LladaSettings, masked: Sequence[int], step: int) -> Forward:
    """The whole canvas, and with guidance beside it the canvas without the prompt, neither seeing the other."""
    length = len(canvas.tokens)
    tokens, positions = canvas.tokens[:], list(range(length))
    attention: Attention = bidirectional(length)
    rows = [canvas.start + position for position in masked]
    read = _read(settings, rows, step, masked)
    reuse = dllm_cache.reuse_at(settings, step, canvas.start)
    if settings.cfg_scale > 0:
        tokens = [*tokens, *[settings.mask_id] * canvas.start, *tokens[canvas.start :]]
        positions, attention = positions * 2, (Segment(length, causal=False),) * 2
        read = replace(read, guidance=Guidance([length + row for row in rows], settings.cfg_scale))
    return Forward(tokens, positions, attention, (read,) if masked else (), kind="denoise", reuse=reuse)


def _read(settings: LladaSettings, rows: Sequence[int], step: int, masked: Sequence[int]) -> Read:
    read = settings.read(rows, step, masked)
    return replace(read, exclude=settings.eos_ids[:1]) if settings.logits_eos_inf else read


def _scores(probs: ProbArray, settings: LladaSettings, masked: Sequence[int], step: int) -> ProbArray:
    """What candidates are ranked by."""
    return probs if settings.remasking == "low_confidence" else settings.random_scores(step, masked)


DECODER = Decoder(
    decode,
    LladaSettings,
    label="LLaDA",
    reads=Reads("bidirectional", masked="own"),
    fits=("masked", "llada"),
    trained_by=("llada",),
    style=Style("#D55E00", "^", (0, (3, 1, 1, 1)), order=4),
)
