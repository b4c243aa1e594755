"""State of a ReFusion decoding: which slots are masked, which tokens are final, where the response ends.

A slot is named by the response index of its first position. Arrays are [S slots, K tokens a slot].
"""

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from refusion_eval.decoders import accepted_prefix, first_eos
from refusion_eval.decoders.refusion_settings import RefusionSettings
from refusion_eval.types import Forward, ProbArray, Read, Readout, Response, StopReason, TokenArray, Trace, groups

BoolArray = npt.NDArray[np.bool_]


class Rows(NamedTuple):
    """Tokens that a forward adds to the cache, and their position ids."""

    tokens: Sequence[int]
    positions: Sequence[int]


NO_ROWS = Rows((), ())


class Drafts(NamedTuple):
    """Selected slots, ascending, and the tokens drafted for them."""

    slots: list[int]
    tokens_SK: TokenArray
    probs_SK: ProbArray  # of each token when it was drafted


class Final(NamedTuple):
    """Tokens that become final in one iteration; they are the first rows of its last verification."""

    slots: list[int]  # ascending; the slots after the one that meets EOS are dropped
    tokens: list[int]  # slot after slot, up to and including the first EOS
    positions: list[int]  # response index of each token
    has_eos: bool  # whether the last token is an EOS
    completed: bool  # whether the slots were completed independently of each other instead of verified together

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
    """Returns the tokens that become final if these, the first of some slots, are valid: all up to an EOS."""
    eos = first_eos(tokens, settings.eos_ids)
    if eos is not None:
        tokens = tokens[: eos + 1]
    slots = slots[: -(-len(tokens) // settings.slot_size)]
    positions = settings.response_positions(slots)[: len(tokens)]
    return Final(slots, tokens, positions, eos is not None, completed)


def accepted_drafts(drafts: Drafts, num_passed: int, settings: RefusionSettings) -> Final | None:
    """The drafts that become final if the first `num_passed` pass verification; None if a completion must follow."""
    # Whole slots (Eq. 6): a slot is the unit that training masks, so none is left half final. An EOS ends the response,
    # so that what follows it in its slot need not pass.
    tokens = drafts.tokens_SK.ravel()[:num_passed].tolist()
    if first_eos(tokens, settings.eos_ids) is None:
        tokens = tokens[: num_passed // settings.slot_size * settings.slot_size]
    return final_tokens(drafts.slots, tokens, settings) if tokens else None


def masked_after(masked: Sequence[int], final: Final, settings: RefusionSettings) -> list[int]:
    """The slots that stay masked once tokens are final; those after an EOS are dropped."""
    rest = [slot for slot in masked if slot not in final.slots]
    if not final.has_eos:
        return rest
    # Slots may become final in any order: those before the EOS are still part of the response.
    if final.completed and settings.release_compatible:
        # The release takes the row among the selected slots for an index among the masked ones, and loses text.
        return [slot for slot in rest if slot in masked[: len(final.slots) - 1]]
    return [slot for slot in rest if slot < final.slots[-1]]


class Text:
    """The response while it is decoded."""

    def __init__(self, settings: RefusionSettings, trace: Trace) -> None:
        self.tokens: dict[int, int] = {}  # final ones, by response index
        self.masked: list[int] = []  # slots of the current block that are not final yet, ascending
        self.met_eos = False  # whether the response ends within what is decoded so far
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
        if self._settings.release_compatible:  # the release closes the gaps that dropped slots leave
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
        end = next(position for position in count() if position not in self.tokens)
        return [self.tokens[position] for position in range(end)]


class Completion:
    """Slots, ascending, that are completed independently of each other (Eq. 7-8): `tokens_SK`, valid or drafted."""

    def __init__(
        self, drafts: Drafts, passed_SK: BoolArray, num_prompt: int, settings: RefusionSettings, trace: Trace
    ) -> None:
        self.slots = drafts.slots
        self.tokens_SK, self.probs_SK = drafts.tokens_SK.copy(), drafts.probs_SK.copy()
        # How many tokens of each slot are valid, from its first one. A prefix that passed the global verification saw
        # more than its own slot; the release keeps it, and Eq. 7 as written verifies anew (`verify_independently`).
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
        # All share the cache of what is final, so no copy of it is needed for each slot.
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
        """Drops the slots after the first valid EOS and reports what became final; True if all slots are finished."""
        # A slot that meets EOS counts as valid to its end. An earlier slot may still meet EOS in a later round.
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
        """The tokens that become final if all are valid as they stand."""
        return final_tokens(self.slots, self.tokens_SK.ravel().tolist(), self._settings, completed=True)
