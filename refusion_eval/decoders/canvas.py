"""What decoders of masked models share: settings, and a response of masks that is filled in."""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import field
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Gt, Le

from refusion_eval.config import NonNegativeFloat, NonNegativeInt, PositiveInt, added_setting, settings_class
from refusion_eval.decoders import check_mask_id, response_of
from refusion_eval.errors import ConfigError
from refusion_eval.types import (
    HOLE,
    Confidence,
    ConfidenceDtype,
    Forward,
    ProbArray,
    Read,
    Readout,
    Response,
    StopReason,
    StopRule,
    Trace,
    draw_key,
)

Remasking = Literal["low_confidence", "random"]
PositiveFraction = Annotated[float, Gt(0), Le(1)]
# A part of a decoding that fills masks; returns why decoding ends with it, or None.
Filling = Generator[Forward, tuple[Readout, ...], StopReason | None]


def rounded_quotas(num_masked: int, steps: int) -> list[int]:
    """Number of masks that each step fills on a linear schedule, rounded step by step (dllm); no number is 0."""
    # With i steps to go, a step fills one i-th of the remaining masks, rounded half to even. float32, as in the
    # release, decides how halves are rounded.
    unit = np.float32(1)
    quotas, num_left = [], num_masked
    for step in range(steps, 0, -1):
        masked_now, masked_next = (unit - (unit - np.float32(share / steps)) for share in (step, step - 1))
        quotas.append(round(num_left * (1 - float(masked_next / masked_now))))
        num_left -= quotas[-1]
    return [quota for quota in quotas if quota]  # a step that fills nothing would repeat the forward before it


def even_quotas(num_masked: int, steps: int) -> list[int]:
    """Number of masks that each step fills: evenly, and one more in the first steps for the remainder (LLaDA)."""
    quota, remainder = divmod(num_masked, steps)
    return [quota + (step < remainder) for step in range(steps)]


@settings_class("masked")
class MaskedSettings:
    """Settings that every decoder of a masked model has.

    Attributes:
        gen_length: number of response positions, >= 1. All are decoded unless the decoder has a reason to stop.
        temperature: 0 takes the most probable token; above 0 samples softmax(logits / temperature).
        seed: seed of the random draws.
        mask_id: the mask token. It is never chosen, though some releases let it through.
        eos_ids: tokens that end the response; everything after the first of them is cut. The first id is the one with
            which the model was taught to fill the end of a response.
        confidence_dtype: precision in which confidences are computed, which changes the tokens; "model" is that of the
            weights, to which thresholds are rounded too.
        early_stop: end as soon as a stop token or a stop string and everything before it are final, and so is the text
            up to there. The releases decode all positions.
        thought_budget: tokens after which a thought that goes on is ended, and the answer decoded in a part of its own
            (see `refusion_eval.decoders.thoughts`). None ends no thought, nor does a budget of `gen_length`.
        stop_rule: with `early_stop`, ends decoding when it returns True for the tokens without a gap from the start.
    """

    decoder: ClassVar[str] = "masked"  # its name, for messages
    shift: ClassVar[int] = 0  # rows between a position and the row that predicts it; a property of the model

    gen_length: PositiveInt = 256
    temperature: NonNegativeFloat = 0.0
    seed: NonNegativeInt = 0
    mask_id: NonNegativeInt
    eos_ids: tuple[NonNegativeInt, ...] = ()
    confidence_dtype: ConfidenceDtype = "float32"
    early_stop: bool = False
    thought_budget: NonNegativeInt | None = added_setting(None)
    stop_rule: StopRule | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_mask_id(self.decoder, self.mask_id, self.eos_ids)

    @property
    def num_positions(self) -> int:
        return self.gen_length

    @property
    def draws_order(self) -> bool:
        """Whether the seed decides in which order positions are filled, also at temperature 0."""
        return False

    @property
    def confidence(self) -> Confidence:
        return Confidence(dtype=self.confidence_dtype)

    def read(self, rows: Sequence[int], step: int, positions: Sequence[int]) -> Read:
        """Reads a candidate and its confidence for each position."""
        # A key for each position, so that draws do not depend on which other positions are read.
        draws = tuple(draw_key(self.seed, step, position) for position in positions) if self.temperature > 0 else ()
        # Suppressed, not excluded: the mask is never chosen, but keeps its share of the softmax, as in the releases.
        return Read(rows, None, (self.mask_id,), self.temperature, draws, confidence=self.confidence)

    def scores(self, readout: Readout, step: int, positions: Sequence[int]) -> ProbArray:
        """Scores by which the candidates of a step are compared: the statistic that was asked for, or probabilities."""
        if readout.margin is not None:
            return readout.margin
        if readout.entropy is not None:
            return 0.0 - readout.entropy  # not negated: records have 0.0, never -0.0
        return readout.probs

    def random_scores(self, step: int, positions: Sequence[int]) -> ProbArray:
        """Uniform scores in [0, 1) of response indices."""
        # The last counter makes them independent of the draws of the tokens.
        return np.array([draw_key(self.seed, step, position, 1) / 2**64 for position in positions])


@settings_class("blocks")
class BlockSettings(MaskedSettings):
    """Settings of decoders that fill the response block after block, each block in the same number of steps.

    Attributes:
        block_length: positions that are filled before the next ones begin; divides gen_length.
        steps: steps for the whole response, divided evenly among the blocks; None is one for each position.
    """

    block_length: PositiveInt = 32
    steps: PositiveInt | None = None

    def __post_init__(self) -> None:
        MaskedSettings.__post_init__(self)  # super() fails in a class that was made anew for its slots
        check_blocks(self.decoder, self.gen_length, self.block_length, self.steps)

    @property
    def blocks(self) -> list[range]:
        return blocks_of(self.gen_length, self.block_length)

    @property
    def steps_per_block(self) -> int:
        return (self.gen_length if self.steps is None else self.steps) // len(self.blocks)


def blocks_of(gen_length: int, block_length: int) -> list[range]:
    return [range(first, first + block_length) for first in range(0, gen_length, block_length)]


def check_blocks(decoder: str, gen_length: int, block_length: int, steps: int | None) -> None:
    """Raises ConfigError unless the response consists of whole blocks and each gets the same number of steps."""
    num_blocks, surplus = divmod(gen_length, block_length)
    if surplus:
        sizes = f"gen_length is {gen_length} and block_length {block_length}"
        raise ConfigError(f"{decoder}: {sizes}; set gen_length to a multiple of block_length")
    if steps is not None and steps % num_blocks:
        raise ConfigError(f"{decoder}: steps is {steps} for {num_blocks} blocks; set it to a multiple of {num_blocks}")


class Canvas:
    """Prompt and response; the response consists of masks until they are filled in.

    Holes of a prompt are the masks. The response then reaches from the first hole to the last one, given tokens between
    them included, and the text goes on behind it.
    """

    def __init__(
        self, prompt: Sequence[int], settings: MaskedSettings, trace: Trace, gen_length: int | None = None
    ) -> None:
        # Prompt and response, and what stands behind a gap, with masks where nothing is final.
        self.tokens = [settings.mask_id if token == HOLE else token for token in prompt]
        self.given = [index for index, token in enumerate(prompt) if token != HOLE]  # indices in `tokens`
        holes = [index for index, token in enumerate(prompt) if token == HOLE]
        self.has_gap = bool(holes)
        self.start = holes[0] if holes else len(prompt)  # index in `tokens` of the first response position
        self._known = frozenset(index - self.start for index in self.given)  # negative before the response
        self.settings = settings
        self._trace = trace
        self._is_masked = [token == HOLE for token in prompt[self.start : holes[-1] + 1]] if holes else []
        self.gen_length = len(self._is_masked)  # response positions so far
        if not holes:
            self.extend(settings.gen_length if gen_length is None else gen_length)

    def extend(self, num_positions: int) -> None:
        self.gen_length += num_positions
        self.tokens += [self.settings.mask_id] * num_positions
        self._is_masked += [True] * num_positions

    def masked(self, region: Iterable[int] | None = None) -> list[int]:
        """Response indices that are still masked, of `region` or of all."""
        region = range(self.gen_length) if region is None else region
        return [position for position in region if self._is_masked[position]]

    def reads(self, positions: Sequence[int], step: int, first: int = 0) -> tuple[Read, ...]:
        """The read of some response indices, if there are any, in a forward whose rows are the text from `first` on."""
        # A model that was made from a causal one predicts a masked position in the row before it, also its own masks.
        # Before the first position of a text there is none, so it is predicted in its own row.
        rows = [max(0, self.start + position - self.settings.shift) - first for position in positions]
        return (self.settings.read(rows, step, positions),) if rows else ()

    def fix(self, positions: Sequence[int], tokens: Iterable[int]) -> None:
        """Makes response positions final, and records them if there are any."""
        final = [int(token) for token in tokens]
        for position, token in zip(positions, final, strict=True):
            self.tokens[self.start + position] = token
            self._is_masked[position] = False
        if final:
            self._trace.fix(positions, final)

    def mask_again(self, positions: Sequence[int]) -> None:
        """Makes response positions masks again, and records them if there are any."""
        self.fix(positions, [self.settings.mask_id] * len(positions))
        for position in positions:
            self._is_masked[position] = True

    def fill(self, positions: Iterable[int], token: int) -> None:
        """Writes a token to response positions that are no part of the text, which traces do not mention."""
        for position in positions:
            self.tokens[self.start + position] = token
            self._is_masked[position] = False

    def fix_chosen(
        self, candidates: Sequence[int], readout: Readout, scores: ProbArray, accepted: Sequence[int]
    ) -> None:
        """Makes the accepted candidates (indices) final and records the choice."""
        positions = [candidates[index] for index in accepted]
        self._trace.select("token", candidates, scores.tolist(), positions)
        self.fix(positions, readout.tokens[list(accepted)])

    def settled(self) -> StopReason | None:
        """With `early_stop`, why the text can no longer change; else None."""
        # A final token never changes, so without a mask before it a stop token or string ends the text for good.
        if not self.settings.early_stop:
            return None
        gapless = self._gapless()
        if self._first_eos(gapless) is not None:
            return "eos"
        rule = self.settings.stop_rule
        return "stop_string" if rule is not None and rule(gapless) else None

    def finish(self, reason: StopReason | None = None, most: int | None = None) -> Response:
        """The response: the tokens without a gap from the start, `most` of them, up to and including the first EOS."""
        tokens = self._gapless()[:most]
        return response_of(tokens, self._first_eos(tokens), reason or "length", self._trace)

    def _first_eos(self, tokens: Sequence[int]) -> int | None:
        """Index of the first stop token that was decoded; one that was given between gaps ends nothing."""
        eos_ids, known = self.settings.eos_ids, self._known
        return next((index for index, token in enumerate(tokens) if token in eos_ids and index not in known), None)

    def _gapless(self) -> list[int]:
        end = self._is_masked.index(True) if True in self._is_masked else self.gen_length
        return self.tokens[self.start : self.start + end]
