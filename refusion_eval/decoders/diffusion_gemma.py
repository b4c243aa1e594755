"""DiffusionGemma: canvases of random tokens that are denoised one after the other, by an encoder and a decoder.

The encoder stores keys and values of all that is final. A step of the decoder sees them and the whole canvas, and
draws a token at every position; those of low entropy are fed to the next step, the others are replaced by random
tokens. Nothing is kept: a token that was accepted can be replaced again. The response is what the last step holds most
probable. The rules are those of `generate` of `DiffusionGemmaForBlockDiffusion` in transformers 5.24.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import field
from typing import NamedTuple, Protocol

import numpy as np

from refusion_eval.config import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, settings_class
from refusion_eval.decoders import Decoder, Reads, Style, first_eos, response_of
from refusion_eval.decoders.canvas import Filling
from refusion_eval.errors import ConfigError
from refusion_eval.types import (
    ENCODE,
    NOTHING,
    Commit,
    Confidence,
    Decoding,
    Forward,
    ProbArray,
    Read,
    Readout,
    StopReason,
    StopRule,
    TokenArray,
    Trace,
    bidirectional,
    causal,
    draw_key,
)


@settings_class("diffusion_gemma")
class DiffusionGemmaSettings:
    """Settings of DiffusionGemma, named as in its release.

    Attributes:
        gen_length: most tokens of the response. Whole canvases are decoded, and the response is cut to this length; the
            release keeps them whole (`release_compatible`).
        canvas_length: positions of a canvas, as the model was trained with; the checkpoint says it.
        vocab_size: random tokens are drawn from the ids below this, special ones too; the checkpoint says it.
        max_denoising_steps: most steps of a canvas.
        entropy_bound: a step accepts positions by ascending entropy, as long as the entropies of those before add up to
            this at most, in nats; so it accepts one at least.
        t_min, t_max: with n steps to go of N, the logits are divided by t_min + (t_max - t_min) n / N. There is no
            greedy decoding; t_min=1e-6 with t_max=2e-6 is it in effect.
        stability_threshold, confidence_threshold: a canvas ends early if its most probable tokens are those of so many
            steps before, and the mean of its entropies is less than the second, in nats.
        seed: seed of the random draws.
        eos_ids: tokens that end the response, wherever in a canvas the first of them is.
        early_stop: end after a canvas that completes a stop string, where the release decodes on.
        release_compatible: keep the tokens behind `gen_length` that the last canvas has.
        stop_rule: with `early_stop`, ends decoding when it returns True for the tokens so far.
    """

    gen_length: PositiveInt = 256
    canvas_length: PositiveInt = 256
    vocab_size: PositiveInt = 262144
    max_denoising_steps: PositiveInt = 48
    entropy_bound: PositiveFloat = 0.1
    t_min: NonNegativeFloat = 0.4
    t_max: NonNegativeFloat = 0.8
    stability_threshold: NonNegativeInt = 1
    confidence_threshold: PositiveFloat = 0.005
    seed: NonNegativeInt = 0
    eos_ids: tuple[NonNegativeInt, ...] = ()
    early_stop: bool = False
    release_compatible: bool = False
    stop_rule: StopRule | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.t_max <= self.t_min:
            raise ConfigError(f"diffusion_gemma: t_max={self.t_max} must be above t_min={self.t_min}; raise it")

    @property
    def num_positions(self) -> int:
        return -(-self.gen_length // self.canvas_length) * self.canvas_length

    @property
    def is_random(self) -> bool:
        return True

    def temperature(self, num_left: int) -> float:
        """The temperature of a step, with so many to go, itself included."""
        return self.t_min + (self.t_max - self.t_min) * (num_left / self.max_denoising_steps)


class Place(NamedTuple):
    """Where a draw is made: the number of the canvas, and how many of its steps are done."""

    canvas: int
    step: int


class Draws(Protocol):
    """The random draws of a decoding."""

    def uniform(self, place: Place) -> Sequence[int]:
        """A random token for each position of a canvas: the first canvas, or what replaces tokens after a step."""

    def sampled(self, place: Place, readout: Readout) -> TokenArray:
        """The token that a step draws at each position."""


class SeededDraws:
    """The draws of a seed; each depends on its place alone."""

    def __init__(self, settings: DiffusionGemmaSettings) -> None:
        self._settings = settings

    def uniform(self, place: Place) -> Sequence[int]:
        settings = self._settings
        key = draw_key(settings.seed, *place)
        # The last counter makes them independent of the draws from the model's distribution.
        keys = (draw_key(key, position, 1) for position in range(settings.canvas_length))
        return [one * settings.vocab_size >> 64 for one in keys]

    def sampled(self, place: Place, readout: Readout) -> TokenArray:
        return readout.tokens


def decode(prompt: Sequence[int], settings: DiffusionGemmaSettings, trace: Trace) -> Decoding:
    """Decodes one prompt, canvas after canvas."""
    return decode_with(prompt, settings, trace, SeededDraws(settings))


def decode_with(prompt: Sequence[int], settings: DiffusionGemmaSettings, trace: Trace, draws: Draws) -> Decoding:
    """As `decode`, with draws of another origin, such as those of a recorded decoding."""
    tokens: list[int] = []
    fed, start, reason = list(prompt), 0, None
    while reason is None:
        # The last canvas is never encoded: nothing would see it.
        positions = range(start, start := start + len(fed))
        yield Forward(fed, positions, causal(len(fed)), (), kind=ENCODE)
        reason = yield from _denoise(tokens, start, Commit(range(len(fed))), settings, trace, draws)
        fed = tokens[-settings.canvas_length :]
    kept = tokens if settings.release_compatible else tokens[: settings.gen_length]
    return response_of(kept, first_eos(kept, settings.eos_ids), reason, trace)


def _denoise(
    tokens: list[int], start: int, commit: Commit, settings: DiffusionGemmaSettings, trace: Trace, draws: Draws
) -> Filling:
    """Appends a canvas, whose first position is `start`; returns why decoding ends with it, or None."""
    size, most = settings.canvas_length, settings.max_denoising_steps
    number, place = len(tokens) // size, range(len(tokens), len(tokens) + size)
    canvas, before = list(draws.uniform(Place(number, 0))), deque[TokenArray](maxlen=settings.stability_threshold)
    temperature = None
    for num_left in range(most, 0, -1):
        done = Place(number, most - num_left + 1)
        conditioning, temperature = temperature, settings.temperature(num_left)
        key = draw_key(settings.seed, *done)
        keys = tuple(draw_key(key, position) for position in range(size))
        drawn = Read(
            range(size), None, (), temperature, keys, entropy=True, confidence=Confidence(temperature=temperature)
        )
        readout, best = yield Forward(
            canvas,
            range(start, start + size),
            bidirectional(size),
            (drawn, Read(range(size))),
            commit,
            "denoise",
            self_conditioning=conditioning,
        )
        commit = NOTHING
        assert readout.entropy is not None
        accepted = within_bound(readout.entropy, settings.entropy_bound)
        trace.select("token", place, (0.0 - readout.entropy).tolist(), [place[index] for index in accepted])
        is_stable = len(before) == before.maxlen and all(np.array_equal(one, best.tokens) for one in before)
        if num_left == 1 or (is_stable and readout.entropy.mean() < settings.confidence_threshold):
            break
        before.append(best.tokens)
        sampled, canvas = draws.sampled(done, readout), list(draws.uniform(done))
        for index in accepted:
            canvas[index] = int(sampled[index])
        trace.draft([place[index] for index in accepted], [canvas[index] for index in accepted])
    tokens += best.tokens.tolist()
    trace.fix(place, best.tokens.tolist())
    return _reason(tokens, settings)


def within_bound(entropies: ProbArray, bound: float) -> list[int]:
    """Indices by ascending entropy, as long as the entropies of those before add up to the bound at most; sorted."""
    order = np.argsort(entropies, kind="stable")
    ordered = entropies[order]
    return sorted(order[np.cumsum(ordered) - ordered <= bound].tolist())


def _reason(tokens: Sequence[int], settings: DiffusionGemmaSettings) -> StopReason | None:
    if first_eos(tokens[-settings.canvas_length :], settings.eos_ids) is not None:
        return "length"  # unless the stop token is within `gen_length`
    if settings.early_stop and settings.stop_rule is not None and settings.stop_rule(tokens):
        return "stop_string"
    return "length" if len(tokens) >= settings.gen_length else None


DECODER = Decoder(
    decode,
    DiffusionGemmaSettings,
    label="DiffusionGemma",
    reads=Reads("block_causal"),
    fits=("diffusion_gemma",),
    style=Style("#661100", "P", (0, (4, 1, 1, 1)), order=29),
)
