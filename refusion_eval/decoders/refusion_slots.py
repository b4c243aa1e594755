"""Settings and state of a ReFusion decoding: which slots are masked, which tokens are final, where the response ends.

A slot is named by the response index of its first position. Arrays are [S slots, K tokens a slot].
"""

from collections.abc import Sequence
from dataclasses import field
from itertools import count
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from refusion_eval.config import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, added_setting, settings_class
from refusion_eval.decoders import accepted_prefix, check_mask_id, first_eos
from refusion_eval.errors import ConfigError
from refusion_eval.types import (
    Forward,
    ProbArray,
    Read,
    Readout,
    Response,
    StopReason,
    StopRule,
    TokenArray,
    Trace,
    groups,
)

BoolArray = npt.NDArray[np.bool_]
Order = Literal["confidence", "left_to_right", "random"]


@settings_class("refusion")
class RefusionSettings:
    """Settings of the ReFusion decoder, named as in Table 6 of the paper.

    Attributes:
        gen_length: most tokens of the response, >= 1. Positions are decoded in whole slots; the surplus is cut.
        slot_size: k, consecutive positions that are drafted and verified together, >= 1.
        block_size: b, consecutive positions decoded before the next block begins; a multiple of k (App. C.4: b >= k).
        tau_slot: a masked slot is selected when its certainty exceeds this; the best one always is.
        tau_token: a drafted token is accepted when its probability given the tokens before it exceeds this.
        temperature: temperature of the drafts (Eq. 4); thresholds always see untempered probabilities.
        seed: seed of the random draws.
        mask_id: the mask token.
        eos_ids: tokens that end the response; if there are none, it always has `gen_length` tokens.
        left_to_right: `order="left_to_right"` by its former name.
        recompute_kv: one more forward at the end of every iteration computes the tokens that became final in it once
            more, as one sequence after everything before them, and keeps these keys and values (section 5.5, Table 4).
            Only slots that were completed independently of each other get other keys and values by it. The paper's
            times say that the forward is made in any case: ARC-C takes 1.16 times as long, though its answers of two
            tokens end in the only slot of their only iteration. Fused, the forwards that change nothing are left out
            and the others carry the next plan: the same tokens at next to no cost, so measure the cost with
            `fuse=False`.
        verify_independently: begin a completion by verifying every slot on its own, as Eq. 7 is written, instead of
            keeping the prefixes that the global verification found.
        release_compatible: reproduce the defects of the public release (docs/explanations/paper-and-release.md).
        fuse: let verifications carry likely next plans and predictions, which gives the same tokens in fewer forwards.
            False is the paper's algorithm; None is True, except with `release_compatible`, which reproduces the forward
            counts of the release.
        free_rows, row_cost: how the time of a forward grows with its rows (see `ForwardCost`), which decides how many
            speculative branches a forward carries; None takes the values shipped for this kind of device, or those
            that `tune` measured (0 and 0.02 without either).
        order: how slots are selected: by "confidence" as above, or one at a time, "left_to_right" or at "random"
            (from the seed; compared in arXiv 2602.12586). Slots are drafted and verified whole in every order.
        serial: decode one token a forward from left to right, without drafts, thresholds and blocks: the paper's
            left-to-right point, which has the speed of an autoregressive model (Figure 1).
        stop_rule: gets the tokens decoded without a gap from the start; decoding ends when it returns True.

    Raises:
        ConfigError: a value is out of its range, sizes do not fit each other, or settings exclude each other.
    """

    gen_length: PositiveInt = 512
    slot_size: PositiveInt = 32
    block_size: PositiveInt = 128
    tau_slot: Fraction = 0.9
    tau_token: Fraction = 0.4
    temperature: NonNegativeFloat = 0.0
    seed: NonNegativeInt = 0
    mask_id: NonNegativeInt
    eos_ids: tuple[NonNegativeInt, ...] = ()
    left_to_right: bool = False
    recompute_kv: bool = False
    verify_independently: bool = False
    release_compatible: bool = False
    fuse: bool | None = None
    free_rows: NonNegativeInt | None = None
    row_cost: NonNegativeFloat | None = None
    order: Order = added_setting("confidence")
    serial: bool = added_setting(False)
    stop_rule: StopRule | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.block_size < self.slot_size or self.block_size % self.slot_size:
            multiple = max(1, round(self.block_size / self.slot_size)) * self.slot_size
            raise ConfigError(
                f"refusion: block_size is {self.block_size} and slot_size {self.slot_size}; a block holds whole slots "
                f"(App. C.4), so set block_size to a multiple of slot_size, for example {multiple}"
            )
        check_mask_id("refusion", self.mask_id, self.eos_ids)
        if self.left_to_right and self.order == "random":
            raise ConfigError("refusion: left_to_right=true and order=random exclude each other; give order alone")
        if self.serial:
            without_meaning = ("recompute_kv", "verify_independently", "left_to_right", "fuse")
            given = [f"{name}=true" for name in without_meaning if getattr(self, name)]
            given += [f"order={self.order}"] if self.order != "confidence" else []
            if given:
                raise ConfigError(f"refusion: serial=true decodes token by token, so leave out {', '.join(given)}")

    @property
    def num_positions(self) -> int:
        """Positions after the prompt that decoding may touch: `gen_length` in whole slots."""
        return -(-self.gen_length // self.slot_size) * self.slot_size

    @property
    def fused(self) -> bool:
        """Whether forwards are fused."""
        return not (self.release_compatible or self.serial) if self.fuse is None else self.fuse

    @property
    def slot_order(self) -> Order:
        """The order of slots, by whichever name it was given."""
        return "left_to_right" if self.left_to_right else self.order

    @property
    def without_effect(self) -> set[str]:
        """Settings that change nothing beside the others, so that a sweep of them shows noise."""
        thresholds = {"tau_slot": self.block_size == self.slot_size or self.slot_order != "confidence"}
        thresholds["tau_token"] = self.slot_size == 1
        return {name for name, is_dead in thresholds.items() if is_dead or self.serial}

    @property
    def is_random(self) -> bool:
        """Whether anything is drawn from the seed."""
        return self.temperature > 0 or self.order == "random"

    @property
    def suppress(self) -> tuple[int, ...]:
        """Ids that may not be drafted: the mask token, except where the release lets it through."""
        return () if self.release_compatible else (self.mask_id,)

    def response_positions(self, slots: Sequence[int]) -> list[int]:
        """Response indices of all tokens of some slots, slot after slot."""
        return [slot + column for slot in slots for column in range(self.slot_size)]


class Rows(NamedTuple):
    """Tokens that a forward adds to the cache, and their position ids."""

    tokens: Sequence[int]
    positions: Sequence[int]


NO_ROWS = Rows((), ())


class Drafts(NamedTuple):
    """Selected slots, ascending, the tokens drafted for them, and the probability of each token when it was drafted."""

    slots: list[int]
    tokens_SK: TokenArray
    probs_SK: ProbArray


class Final(NamedTuple):
    """Tokens that become final in one iteration; they are the first rows of its last verification.

    Attributes:
        slots: their slots, ascending; the slots after the one that meets EOS are dropped.
        tokens: the tokens, slot after slot, up to and including the first EOS.
        positions: response index of each token.
        has_eos: whether the last token is an EOS.
        completed: whether the slots were completed independently of each other instead of verified together.
    """

    slots: list[int]
    tokens: list[int]
    positions: list[int]
    has_eos: bool
    completed: bool

    def rows(self, num_prompt: int) -> Rows:
        """The tokens with their position ids."""
        return Rows(self.tokens, [num_prompt + position for position in self.positions])


def block_slots(settings: RefusionSettings) -> list[range]:
    """The slots of each block; the last block may be shorter."""
    k, b, length = settings.slot_size, settings.block_size, settings.num_positions
    if settings.release_compatible:
        length = length // b * b  # the release never decodes what does not fill a block
    return [range(start, min(start + b, length), k) for start in range(0, length, b)]


def final_tokens(slots: list[int], tokens: list[int], settings: RefusionSettings, completed: bool = False) -> Final:
    """What becomes final if these tokens, the first ones of some slots, are valid."""
    eos = first_eos(tokens, settings.eos_ids)
    if eos is not None:
        tokens = tokens[: eos + 1]
    slots = slots[: -(-len(tokens) // settings.slot_size)]
    positions = settings.response_positions(slots)[: len(tokens)]
    return Final(slots, tokens, positions, eos is not None, completed)


def accepted_drafts(drafts: Drafts, num_passed: int, settings: RefusionSettings) -> Final | None:
    """What becomes final if the first `num_passed` drafts pass the verification; None if a completion has to follow.

    These are whole slots, or all drafts up to an EOS.
    """
    tokens = drafts.tokens_SK.ravel()[:num_passed].tolist()
    if first_eos(tokens, settings.eos_ids) is None:
        tokens = tokens[: num_passed // settings.slot_size * settings.slot_size]
    return final_tokens(drafts.slots, tokens, settings) if tokens else None


def masked_after(masked: Sequence[int], final: Final, settings: RefusionSettings) -> list[int]:
    """The slots that stay masked once tokens are final; those after an EOS are dropped."""
    rest = [slot for slot in masked if slot not in final.slots]
    if not final.has_eos:
        return rest
    if final.completed and settings.release_compatible:
        # The release takes the row among the selected slots for an index among the masked ones, and loses text.
        return [slot for slot in rest if slot in masked[: len(final.slots) - 1]]
    return [slot for slot in rest if slot < final.slots[-1]]


class Text:
    """The response while it is decoded.

    Attributes:
        tokens: final tokens by response index.
        masked: slots of the current block that are not final yet, ascending.
        met_eos: whether the response ends within what is decoded so far.
    """

    def __init__(self, settings: RefusionSettings, trace: Trace) -> None:
        self.tokens: dict[int, int] = {}
        self.masked: list[int] = []
        self.met_eos = False
        self._settings = settings
        self._trace = trace

    def add(self, final: Final) -> None:
        """Adds final tokens."""
        self.tokens.update(zip(final.positions, final.tokens, strict=True))
        self.masked = masked_after(self.masked, final, self._settings)
        self.met_eos |= final.has_eos

    def stops(self) -> bool:
        """Whether the stop rule ends decoding."""
        rule = self._settings.stop_rule
        return rule is not None and rule(self._gapless())

    def finish(self, reason: StopReason) -> Response:
        """The response, cut after its first EOS."""
        if self._settings.release_compatible:
            tokens = [self.tokens[position] for position in sorted(self.tokens)]
        else:
            tokens = self._gapless()[: self._settings.gen_length]
            eos = first_eos(tokens, self._settings.eos_ids)
            if eos is not None:
                tokens = tokens[: eos + 1]
            elif reason == "eos":
                reason = "length"  # the EOS stood in the surplus of the last slot
        self._trace.stop(reason, len(tokens))
        return Response(tuple(tokens), reason)

    def _gapless(self) -> list[int]:
        """The response from its start to the first position that is not final."""
        end = next(position for position in count() if position not in self.tokens)
        return [self.tokens[position] for position in range(end)]


class Completion:
    """Slots that are completed independently of each other (Eq. 7-8).

    Attributes:
        slots: the slots, ascending.
        tokens_SK: their tokens, valid or drafted.
        probs_SK: probability of each token when it was drafted.
        valid_S: how many tokens of each slot are valid, from its first one.
    """

    def __init__(
        self, drafts: Drafts, passed_SK: BoolArray, num_prompt: int, settings: RefusionSettings, trace: Trace
    ) -> None:
        self.slots = drafts.slots
        self.tokens_SK, self.probs_SK = drafts.tokens_SK.copy(), drafts.probs_SK.copy()
        self.valid_S = [0 if settings.verify_independently else accepted_prefix(row) for row in passed_SK]
        self._num_reported_S = [0] * len(drafts.slots)
        self._num_prompt = num_prompt
        self._settings = settings
        self._trace = trace

    @property
    def unfinished(self) -> list[int]:
        """Rows of the slots that are not valid to their end."""
        return [row for row, valid in enumerate(self.valid_S) if valid < self._settings.slot_size]

    def after_prefix(self, skipped: int = 0) -> BoolArray:
        """Which tokens stand after the valid prefix of their slot and the `skipped` tokens that follow it, [S, K]."""
        return np.arange(self._settings.slot_size) >= np.array(self.valid_S)[:, None] + skipped

    def predict(self, rows: Sequence[int], readout: Readout) -> None:
        """Puts predicted tokens after the valid prefixes of some slots, ascending."""
        cells_SK = self.after_prefix() & np.isin(np.arange(len(self.slots)), rows)[:, None]
        self.tokens_SK[cells_SK], self.probs_SK[cells_SK] = readout.tokens, readout.probs

    def forward(self, kind: str, rows: Sequence[int], tokens_SK: TokenArray, reads: tuple[Read, ...]) -> Forward:
        """A forward of some slots side by side, none of which sees another."""
        slots = [self.slots[row] for row in rows]
        positions = [self._num_prompt + position for position in self._settings.response_positions(slots)]
        attention = groups([self._settings.slot_size] * len(slots))
        return Forward(tokens_SK.ravel().tolist(), positions, attention, reads, kind=kind)

    def record_drafts(self) -> None:
        """Reports all tokens that are not valid."""
        cells_SK = self.after_prefix()
        positions_SK = np.add.outer(self.slots, range(self._settings.slot_size))
        self._trace.draft(positions_SK[cells_SK].tolist(), self.tokens_SK[cells_SK].tolist())

    def end_round(self) -> bool:
        """Drops the slots after the first valid EOS and reports what became final; True if all slots are finished.

        A slot that meets EOS counts as valid to its end. An earlier slot may still meet EOS in a later round.
        """
        positions, tokens = [], []
        for row, (slot, valid) in enumerate(zip(self.slots, self.valid_S, strict=True)):
            final = final_tokens([slot], self.tokens_SK[row, :valid].tolist(), self._settings)
            positions += final.positions[self._num_reported_S[row] :]
            tokens += final.tokens[self._num_reported_S[row] :]
            self._num_reported_S[row] = len(final.tokens)
            if final.has_eos:
                self.slots = self.slots[: row + 1]
                self.tokens_SK, self.probs_SK = self.tokens_SK[: row + 1], self.probs_SK[: row + 1]
                self.valid_S = [*self.valid_S[:row], self._settings.slot_size]
                break
        if tokens:
            self._trace.fix(positions, tokens)
        return not self.unfinished

    def final(self) -> Final:
        """What becomes final if every token is valid as it stands."""
        return final_tokens(self.slots, self.tokens_SK.ravel().tolist(), self._settings, completed=True)
