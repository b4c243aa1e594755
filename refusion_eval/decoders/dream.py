"""Dream's decoding (arXiv 2508.15487): a canvas of masks that follows a noise schedule, the surest positions first.

Every forward sees the whole canvas both ways; no keys and values are cached, and there are no blocks. Dream
grew out of a causal model and kept the way its logits are read: the row before a position predicts it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from refusion_eval.decoders import dllm_cache, validate
from refusion_eval.decoders.canvas import Canvas, MaskedSettings
from refusion_eval.decoders.choose import most_confident
from refusion_eval.decoders.decoder import Decoder, Reads, Style
from refusion_eval.errors import ConfigError
from refusion_eval.trace import Trace
from refusion_eval.types import (
    NOTHING,
    Commit,
    Confidence,
    Decoding,
    Forward,
    ProbArray,
    Read,
    Readout,
    bidirectional,
)

Alg = Literal["origin", "maskgit_plus", "topk_margin", "entropy", "confidence_threshold"]
RANKING_ALGS: tuple[Alg, ...] = ("maskgit_plus", "topk_margin", "entropy")


@dataclass(frozen=True, kw_only=True, slots=True)
class DreamSettings(MaskedSettings):
    """Settings of Dream's decoder, named as in its release.

    The release samples at temperature 0.1 with top_p 0.9, where most positions are left with one token and equally
    sure, so that it goes almost from left to right; its temperature 0 does not, and is far worse. `temperature=0,
    confidence_temperature=0.1, confidence_top_p=0.9` decodes without chance and close to what is official.

    Attributes:
        confidence_dtype: "model" as released; then the token too is the most probable one at that precision.
        steps: forwards, each with its share of the masks; None is one for each position.
        top_p, top_k: which tokens stay in the distribution, as in `refusion_eval.types.Read`; the confidences are those
            of what stays.
        alg: what positions are ranked by: the probability of the token ("maskgit_plus"), its distance to the second
            best ("topk_margin") or low entropy ("entropy"). "origin" picks them at random.
        alg_temp: above 0 draws positions without replacement from softmax(confidence / alg_temp).
        eps: noise level at which the schedule ends, in [0, 1].
        confidence_temperature, confidence_top_p: the confidences' own at temperature 0; None is 1 and `top_p`, as
            released. Above temperature 0 confidences are the sampler's, and these play no part.
        prompt_interval_steps, gen_interval_steps: the prompt's and the response's features are computed every so many
            steps (dLLM-Cache, see `refusion_eval.decoders.dllm_cache`); 1 and 1 compute all at every step.
        transfer_ratio: share of the response that is computed at the steps between its own; 0.25 in dLLM-Cache's
            settings. With gen_interval_steps=1 it plays no part.
            The row that predicts the first position of the response is the prompt's last.

    Raises:
        ConfigError: a value is out of its range, or settings do not fit each other.
    """

    decoder: ClassVar[str] = "dream"
    algs: ClassVar[tuple[Alg, ...]] = ("origin", *RANKING_ALGS)

    steps: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    alg: Alg = "entropy"
    alg_temp: float = 0.0
    eps: float = 1e-3
    confidence_temperature: float | None = None
    confidence_top_p: float | None = None
    prompt_interval_steps: int = 1
    gen_interval_steps: int = 1
    transfer_ratio: float = 0.0

    def __post_init__(self) -> None:
        MaskedSettings.__post_init__(self)
        name = self.decoder
        if self.steps is not None:
            validate.require_integer(name, "steps", self.steps, at_least=1)
        validate.require_integer(name, "top_k", self.top_k, at_least=0)
        validate.require_choice(name, "alg", self.alg, self.algs)
        validate.require_number(name, "alg_temp", self.alg_temp, 0.0)
        validate.require_number(name, "eps", self.eps, 0.0, 1.0)
        _require_above_0(name, "top_p", self.top_p, 1.0)
        dllm_cache.check(name, self.prompt_interval_steps, self.gen_interval_steps, self.transfer_ratio)
        if self.confidence_temperature is not None:
            _require_above_0(name, "confidence_temperature", self.confidence_temperature)
        if self.confidence_top_p is not None:
            _require_above_0(name, "confidence_top_p", self.confidence_top_p, 1.0)
        if self.alg_temp > 0 and self.alg not in RANKING_ALGS:
            raise ConfigError(
                f"{name}: alg_temp is {self.alg_temp}, and alg={self.alg} draws nothing by confidence; set alg_temp "
                "to 0"
            )

    @property
    def num_steps(self) -> int:
        """Steps of the schedule."""
        return self.gen_length if self.steps is None else self.steps

    @property
    def confidence(self) -> Confidence:
        """The distribution that confidences are taken from, before top-p and top-k."""
        return Confidence(
            temperature=self.temperature or self.confidence_temperature or 1.0,
            dtype=self.confidence_dtype,
            choose=self.confidence_dtype == "model" and self.temperature == 0 and not self._own_confidence,
        )

    @property
    def _own_confidence(self) -> bool:
        return self.confidence_temperature is not None or self.confidence_top_p is not None

    def read(self, rows: Sequence[int], step: int, positions: Sequence[int]) -> Read:
        """As `MaskedSettings.read`, with what `alg` ranks by."""
        return replace(
            MaskedSettings.read(self, rows, step, positions),
            # At temperature 0 it shapes the confidences alone.
            top_p=self.top_p if self.temperature > 0 or self.confidence_top_p is None else self.confidence_top_p,
            top_k=self.top_k,
            entropy=self.alg == "entropy",
            margin=self.alg == "topk_margin",
        )

    def scores(self, readout: Readout, step: int, positions: Sequence[int]) -> ProbArray:
        """What the candidates of a step are ranked by, [positions]."""
        scores = readout.probs
        if self.alg == "entropy":
            assert readout.entropy is not None
            scores = 0.0 - readout.entropy
        elif self.alg == "topk_margin":
            assert readout.margin is not None
            scores = readout.margin
        if self.alg_temp == 0:
            return scores
        # The best of scores with Gumbel noise are draws without replacement from their softmax.
        uniform = self.random_scores(step, positions).clip(2**-64, 1 - 2**-53)
        return scores.astype(np.float64) / self.alg_temp - np.log(-np.log(uniform))


def _require_above_0(decoder: str, name: str, value: float, high: float = float("inf")) -> None:
    validate.require_number(decoder, name, value, 0.0, high)
    if value == 0:
        raise ConfigError(f"{decoder}: {name} is 0; it must be above 0")


def shares(steps: int, eps: float) -> npt.NDArray[np.float32]:
    """Share of the masks that each step fills: 1 - t[i + 1] / t[i], with t falling evenly from 1 to eps; the last is 1.

    A quota is the whole part of masks times share, which often lies at a whole number. So this is the release's
    arithmetic: float32, and the levels to the last bit those of torch, which counts from the nearer end and rounds
    once after multiplying and adding.
    """
    first, last = np.float32(1), np.float32(eps)
    stride = np.float64((last - first) / np.float32(steps))
    index = np.arange(steps + 1)
    forwards, backwards = first + stride * index, last - stride * (steps - index)
    levels = np.where(index < (steps + 1) // 2, forwards, backwards).astype(np.float32)
    share = first - levels[1:] / levels[:-1]
    share[-1] = 1
    return share


def quota(num_masked: int, share: np.float32) -> int:
    """How many masks a step fills: its share of them, rounded down."""
    return int(np.float32(num_masked) * share)


def decode(prompt: Sequence[int], settings: DreamSettings, trace: Trace) -> Decoding:
    """Decodes one prompt; takes `steps` forwards, fewer only with `early_stop`.

    A step whose quota is 0 takes its forward as released, though nothing is read of it.
    """
    canvas = Canvas(prompt, settings, trace)
    for step, share in enumerate(shares(settings.num_steps, settings.eps)):
        masked = canvas.masked()
        if settings.alg == "origin":
            scores = settings.random_scores(step, masked)
            picked = [position for position, score in zip(masked, scores, strict=True) if score >= 1 - share]
            readouts = yield canvas_forward(canvas, settings, picked, step)
            if picked:
                trace.select("token", masked, scores.tolist(), picked)
                canvas.fix(picked, readouts[0].tokens)
        else:
            num_chosen = quota(len(masked), share)
            candidates = masked if num_chosen else []
            readouts = yield canvas_forward(canvas, settings, candidates, step)
            if candidates:
                scores = settings.scores(readouts[0], step, candidates)
                canvas.fix_chosen(candidates, readouts[0], scores, most_confident(scores, num_chosen))
        if reason := canvas.settled():
            return canvas.finish(reason)
    return canvas.finish()


def canvas_forward(
    canvas: Canvas,
    settings: DreamSettings,
    candidates: Sequence[int],
    step: int,
    commit: Commit = NOTHING,
    kind: str = "denoise",
) -> Forward:
    """The whole canvas, of which the predictions of some response indices are read."""
    length = len(canvas.tokens)
    reads = shifted_reads(settings, canvas.start, candidates, step)
    reuse = dllm_cache.reuse_at(settings, step, canvas.start)
    return Forward(canvas.tokens[:], range(length), bidirectional(length), reads, commit, kind, reuse=reuse)


def shifted_reads(settings: DreamSettings, offset: int, candidates: Sequence[int], step: int) -> tuple[Read, ...]:
    """Reads the row before each candidate; response index 0 lies in row `offset`. Empty without candidates."""
    rows = [offset + position - 1 for position in candidates]
    return (settings.read(rows, step, candidates),) if rows else ()


DECODER = Decoder(
    decode,
    DreamSettings,
    label="Dream",
    reads=Reads("bidirectional", masked="next"),
    fits=("dream",),
    style=Style("#009E73", "v", (0, (1, 1)), order=7),
)
