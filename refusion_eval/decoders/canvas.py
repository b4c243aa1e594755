"""What the decoders of masked models share: a response of masks that is filled in, and the settings around it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from refusion_eval.decoders import validate
from refusion_eval.decoders.choose import first_eos
from refusion_eval.errors import ConfigError
from refusion_eval.trace import Trace
from refusion_eval.types import (
    Confidence,
    ConfidenceDtype,
    ProbArray,
    Read,
    Readout,
    Response,
    StopReason,
    StopRule,
    draw_key,
)

Remasking = Literal["low_confidence", "random"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedSettings:
    """Settings that every decoder of a masked model has.

    Attributes:
        gen_length: size of the canvas, >= 1. All of it is decoded unless the decoder knows a reason to stop.
        temperature: 0 takes the most probable token; above 0 samples softmax(logits / temperature).
        seed: of the random draws.
        mask_id: the mask token; it is never chosen, though some releases let it through.
        eos_ids: tokens that end the response; what stands behind the first is cut. The first of them is the one with
            which the model was taught to fill up the canvas.
        confidence_dtype: what confidences are computed in: float32, float64, or model (that of the weights). The
            releases differ, and it changes which tokens are committed.
        early_stop: end as soon as a stop token, or a stop string, and everything before it are final: later steps
            cannot change the text up to there. The releases go on to the end of the canvas.
        stop_rule: with `early_stop` told the tokens decoded without a gap from the start, and asked whether to end.

    Raises:
        ConfigError: a value is out of its range.
    """

    decoder: ClassVar[str] = "masked"

    gen_length: int = 256
    temperature: float = 0.0
    seed: int = 0
    mask_id: int
    eos_ids: tuple[int, ...] = ()
    confidence_dtype: ConfidenceDtype = "float32"
    early_stop: bool = False
    stop_rule: StopRule | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        name = self.decoder
        validate.require_integer(name, "gen_length", self.gen_length, at_least=1)
        validate.require_number(name, "temperature", self.temperature, 0.0)
        validate.require_integer(name, "seed", self.seed, at_least=0)
        validate.require_integer(name, "mask_id", self.mask_id, at_least=0)
        validate.require_token_ids(name, "eos_ids", self.eos_ids)
        validate.require_choice(name, "confidence_dtype", self.confidence_dtype, ("float32", "float64", "model"))
        validate.require_flags(name, early_stop=self.early_stop)
        if self.mask_id in self.eos_ids:
            raise ConfigError(f"{name}: mask_id {self.mask_id} is also an end-of-sequence id; set either one right")

    @property
    def num_positions(self) -> int:
        """Positions behind the prompt that decoding may touch."""
        return self.gen_length

    @property
    def confidence(self) -> Confidence:
        """The distribution that confidences are taken from."""
        return Confidence(dtype=self.confidence_dtype)

    def read(self, rows: Sequence[int], step: int, positions: Sequence[int]) -> Read:
        """A read of candidates and confidences.

        Args:
            rows: of the forward, one for each position.
            step: number of the step: equal seed, step and position give equal samples.
            positions: response indices that are predicted.
        """
        sampled = self.temperature > 0
        return Read(
            rows,
            suppress=(self.mask_id,),
            temperature=self.temperature,
            draws=tuple(draw_key(self.seed, step, position) for position in positions) if sampled else (),
            confidence=self.confidence,
        )

    def random_scores(self, step: int, positions: Sequence[int]) -> ProbArray:
        """Uniform scores in [0, 1) of response indices, apart from the draws of the tokens themselves."""
        return np.array([draw_key(self.seed, step, position, 1) / 2**64 for position in positions])


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSettings(MaskedSettings):
    """Settings of decoders that fill a canvas block after block, each in the same number of steps.

    Attributes:
        block_length: positions that are filled before the next ones begin; divides gen_length.
        steps: for the whole canvas, as many for each block; None is one for each position.

    Raises:
        ConfigError: a value is out of its range, or sizes do not fit each other.
    """

    block_length: int = 32
    steps: int | None = None

    def __post_init__(self) -> None:
        MaskedSettings.__post_init__(self)
        check_blocks(self.decoder, self.gen_length, self.block_length, self.steps)

    @property
    def num_blocks(self) -> int:
        """Blocks of the canvas."""
        return self.gen_length // self.block_length

    @property
    def steps_per_block(self) -> int:
        """Steps for each block."""
        return (self.gen_length if self.steps is None else self.steps) // self.num_blocks

    def block(self, number: int) -> range:
        """Response indices of a block."""
        return range(number * self.block_length, (number + 1) * self.block_length)


def check_blocks(decoder: str, gen_length: int, block_length: int, steps: int | None) -> None:
    """Raises ConfigError unless the canvas holds whole blocks and each gets the same number of steps.

    Args:
        decoder: for messages.
        gen_length: size of the canvas, >= 1.
        block_length: positions of a block.
        steps: for the whole canvas; None where they need not be divided.
    """
    validate.require_integer(decoder, "block_length", block_length, at_least=1)
    if gen_length % block_length:
        raise ConfigError(
            f"{decoder}: gen_length is {gen_length} and block_length {block_length}; the canvas holds whole blocks, so "
            "set gen_length to a multiple of block_length"
        )
    if steps is not None:
        validate.require_integer(decoder, "steps", steps, at_least=1)
        num_blocks = gen_length // block_length
        if steps % num_blocks:
            raise ConfigError(
                f"{decoder}: steps is {steps} for {num_blocks} blocks; every block gets the same number, so set steps "
                f"to a multiple of {num_blocks}"
            )


class Canvas:
    """Prompt and response, the response masked until it is filled in.

    Attributes:
        tokens: prompt and response; masks where nothing is final.
        start: index of the first response token.
        gen_length: number of response positions; it grows with `extend`.

    Args:
        prompt: token ids.
        settings: of the decoder.
        trace: told what becomes final.
        gen_length: masks to begin with; None for all of `settings.gen_length`.
    """

    def __init__(
        self, prompt: Sequence[int], settings: MaskedSettings, trace: Trace, gen_length: int | None = None
    ) -> None:
        self.tokens = list(prompt)
        self.start = len(prompt)
        self._settings = settings
        self._trace = trace
        self._is_masked: list[bool] = []
        self.extend(settings.gen_length if gen_length is None else gen_length)

    @property
    def gen_length(self) -> int:
        """Number of response positions."""
        return len(self._is_masked)

    def extend(self, num_positions: int) -> None:
        """Appends masks."""
        self.tokens += [self._settings.mask_id] * num_positions
        self._is_masked += [True] * num_positions

    def masked(self, region: Iterable[int] | None = None) -> list[int]:
        """Response indices that are still masked, of all or of some, in their order."""
        region = range(self.gen_length) if region is None else region
        return [position for position in region if self._is_masked[position]]

    def fix(self, positions: Sequence[int], tokens: Iterable[int]) -> None:
        """Makes response positions final; nothing is recorded where there are none."""
        fixed = [int(token) for token in tokens]
        for position, token in zip(positions, fixed, strict=True):
            self.tokens[self.start + position] = token
            self._is_masked[position] = False
        if fixed:
            self._trace.fix(positions, fixed)

    def fix_chosen(self, candidates: Sequence[int], readout: Readout, scores: ProbArray, chosen: Sequence[int]) -> None:
        """Makes the chosen candidates final and records the choice.

        Args:
            candidates: response indices.
            readout: what was predicted for each.
            scores: what they were ranked by.
            chosen: indices of `candidates`, ascending.
        """
        positions = [candidates[index] for index in chosen]
        self._trace.select("token", candidates, scores.tolist(), positions)
        self.fix(positions, readout.tokens[list(chosen)])

    def settled(self) -> StopReason | None:
        """Why the text can no longer change, with `early_stop`: a stop token or string, and no mask before it."""
        if not self._settings.early_stop:
            return None
        gapless = self._gapless()
        if first_eos(gapless, self._settings.eos_ids) is not None:
            return "eos"
        rule = self._settings.stop_rule
        return "stop_string" if rule is not None and rule(gapless) else None

    def finish(self, reason: StopReason | None = None) -> Response:
        """The response: what is final without a gap, up to and including the first EOS.

        Args:
            reason: "stop_string" if that is why decoding ended; else the tokens tell.
        """
        tokens = self._gapless()
        eos = first_eos(tokens, self._settings.eos_ids)
        if eos is not None:
            tokens, reason = tokens[: eos + 1], "eos"
        reason = reason or "length"
        self._trace.stop(reason, len(tokens))
        return Response(tuple(tokens), reason)

    def _gapless(self) -> list[int]:
        end = self._is_masked.index(True) if True in self._is_masked else self.gen_length
        return self.tokens[self.start : self.start + end]
