"""The state of a ReFusion decoding: which slots are masked, which tokens are final, where the response ends.

A slot is named by the response index of its first position. Arrays are [S slots, K tokens a slot].
"""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from refusion_eval.decoders.choose import accepted_prefix, first_eos
from refusion_eval.decoders.refusion_settings import RefusionSettings
from refusion_eval.trace import Trace
from refusion_eval.types import Forward, ProbArray, Read, Readout, Response, StopReason, TokenArray, groups


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


class Accepted(NamedTuple):
    """What a global verification accepts.

    Attributes:
        num_tokens: drafts that become final: whole slots, or all up to an EOS.
        has_eos: whether the last of them is an EOS.
    """

    num_tokens: int
    has_eos: bool


class Completed(NamedTuple):
    """The result of a completion. Row i of its last forward belongs to `tokens[i]`.

    Attributes:
        slots: the finished slots; the slots after the one that met EOS are dropped.
        tokens: their tokens, slot after slot, up to and including the first EOS.
        eos_row: index in `slots` of the slot that met EOS, which is the last one; None if none did.
    """

    slots: list[int]
    tokens: list[int]
    eos_row: int | None


def block_slots(settings: RefusionSettings) -> list[range]:
    """The slots of each block; the last block may be shorter."""
    k, b, length = settings.slot_size, settings.block_size, settings.num_positions
    if settings.release_compatible:
        length = length // b * b  # the release never decodes what does not fill a block
    return [range(start, min(start + b, length), k) for start in range(0, length, b)]


def accepted_drafts(drafts: Drafts, num_passed: int, settings: RefusionSettings) -> Accepted | None:
    """What becomes final if the first `num_passed` drafts pass the verification; None if a completion has to follow."""
    eos = first_eos(drafts.tokens_SK.ravel()[:num_passed], settings.eos_ids)
    if eos is not None:
        return Accepted(eos + 1, has_eos=True)
    k = settings.slot_size
    return Accepted(num_passed // k * k, has_eos=False) if num_passed >= k else None


def masked_after_acceptance(masked: Sequence[int], slots: Sequence[int], accepted: Accepted, k: int) -> list[int]:
    """The slots that stay masked when a verification of `slots` accepts drafts; those after an EOS are dropped."""
    done = slots[: -(-accepted.num_tokens // k)]
    return [slot for slot in masked if slot not in done and not (accepted.has_eos and slot > done[-1])]


def masked_after_completion(
    masked: Sequence[int], slots: Sequence[int], completed: Completed, settings: RefusionSettings
) -> list[int]:
    """The slots that stay masked after a completion of `slots`; those after an EOS are dropped."""
    rest = [slot for slot in masked if slot not in slots]
    if completed.eos_row is None:
        return rest
    if settings.release_compatible:
        # The release takes the row among the selected slots for an index among the masked ones, and loses text.
        return [slot for slot in rest if slot in masked[: completed.eos_row]]
    return [slot for slot in rest if slot < completed.slots[-1]]


def needs_refresh(completed: Completed, settings: RefusionSettings) -> bool:
    """Whether completed slots are computed once more so that they see each other (section 5.5, Table 4)."""
    return settings.recompute_kv and len(completed.slots) > 1


class Text:
    """The response while it is decoded.

    Attributes:
        tokens: final tokens by response index.
        masked: slots of the current block that are not final yet, ascending.
        met_eos: whether the response ends within what is decoded so far.

    Args:
        num_prompt: tokens of the prompt.
        settings: settings of the decoder.
        trace: receives the events.
    """

    def __init__(self, num_prompt: int, settings: RefusionSettings, trace: Trace) -> None:
        self.tokens: dict[int, int] = {}
        self.masked: list[int] = []
        self.met_eos = False
        self._num_prompt = num_prompt
        self._settings = settings
        self._trace = trace

    def accept(self, drafts: Drafts, accepted: Accepted) -> None:
        """Makes verified drafts final."""
        self.masked = masked_after_acceptance(self.masked, drafts.slots, accepted, self._settings.slot_size)
        tokens = drafts.tokens_SK.ravel().tolist()[: accepted.num_tokens]
        self._trace.fix(self._keep(drafts.slots, tokens), tokens)
        self.met_eos |= accepted.has_eos

    def take_over(self, drafts: Drafts, completed: Completed) -> Rows:
        """Adds completed slots, whose tokens are already reported as final, and returns their rows."""
        self.masked = masked_after_completion(self.masked, drafts.slots, completed, self._settings)
        self.met_eos |= completed.eos_row is not None
        positions = self._keep(completed.slots, completed.tokens)
        return Rows(completed.tokens, [self._num_prompt + position for position in positions])

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

    def _keep(self, slots: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Adds tokens, which fill these slots in order, the last one perhaps in part."""
        positions = self._settings.response_positions(slots)[: len(tokens)]
        self.tokens.update(zip(positions, tokens, strict=True))
        return positions

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

    Args:
        drafts: the selected slots.
        passed_SK: which drafts passed the global verification.
        num_prompt: tokens of the prompt.
        settings: settings of the decoder.
        trace: receives the events.
    """

    def __init__(
        self,
        drafts: Drafts,
        passed_SK: npt.NDArray[np.bool_],
        num_prompt: int,
        settings: RefusionSettings,
        trace: Trace,
    ) -> None:
        self.slots = list(drafts.slots)
        self.tokens_SK = drafts.tokens_SK.copy()
        self.probs_SK = drafts.probs_SK.copy()
        self.valid_S = [0 if settings.verify_independently else accepted_prefix(row) for row in passed_SK]
        self._fixed_S = [0] * len(drafts.slots)
        self._num_prompt = num_prompt
        self._settings = settings
        self._trace = trace

    @property
    def unfinished(self) -> list[int]:
        """Rows of the slots that are not valid to their end."""
        return [row for row, valid in enumerate(self.valid_S) if valid < self._settings.slot_size]

    def cells_after_prefix(self, rows: Sequence[int], skipped: int = 0) -> list[tuple[int, int]]:
        """(row, column) of the tokens of some slots after the valid prefix, without the first `skipped` of them."""
        k = self._settings.slot_size
        return [(row, column) for row in rows for column in range(self.valid_S[row] + skipped, k)]

    def draft(self, row: int, tokens_N: TokenArray, probs_N: ProbArray) -> None:
        """Puts predicted tokens after the valid prefix of a slot."""
        self.tokens_SK[row, self.valid_S[row] :] = tokens_N
        self.probs_SK[row, self.valid_S[row] :] = probs_N

    def predict(self, rows: Sequence[int], readout: Readout) -> None:
        """Puts the tokens of one prediction of several slots in their places."""
        ends = np.cumsum([self._settings.slot_size - self.valid_S[row] for row in rows])[:-1]
        parts = zip(rows, np.split(readout.tokens, ends), np.split(readout.probs, ends), strict=True)
        for row, tokens_N, probs_N in parts:
            self.draft(row, tokens_N, probs_N)

    def forward(self, kind: str, rows: Sequence[int], tokens: Sequence[int], reads: tuple[Read, ...]) -> Forward:
        """A forward of some slots side by side, none of which sees another."""
        slots = [self.slots[row] for row in rows]
        positions = [self._num_prompt + position for position in self._settings.response_positions(slots)]
        return Forward(tokens, positions, groups([self._settings.slot_size] * len(slots)), reads, kind=kind)

    def record_drafts(self) -> None:
        """Reports the tokens of all unfinished slots that are not valid."""
        cells = self.cells_after_prefix(self.unfinished)
        drafted = self.tokens_SK[tuple(np.transpose(cells))]
        self._trace.draft([self.slots[row] + column for row, column in cells], drafted.tolist())

    def end_round(self) -> bool:
        """Drops the slots after the first valid EOS and reports what became final; True if all slots are finished.

        A slot that meets EOS counts as valid to its end. An earlier slot may still meet EOS in a later round.
        """
        row = self.eos_row(self.valid_S)
        if row is not None:
            self.slots = self.slots[: row + 1]
            self.tokens_SK, self.probs_SK = self.tokens_SK[: row + 1], self.probs_SK[: row + 1]
            self.valid_S = [*self.valid_S[:row], self._settings.slot_size]
        final = list(self._newly_final())
        if final:
            self._trace.fix(*zip(*final, strict=True))
        return not self.unfinished

    def eos_row(self, valid_S: Sequence[int]) -> int | None:
        """Row of the first slot with an EOS among its first `valid_S[row]` tokens; None if there is none."""
        for row, valid in enumerate(valid_S):
            if first_eos(self.tokens_SK[row, :valid], self._settings.eos_ids) is not None:
                return row
        return None

    def completed(self) -> Completed:
        """The result if every token is valid as it stands."""
        eos_row = self.eos_row([self._settings.slot_size] * len(self.slots))
        num_slots = len(self.slots) if eos_row is None else eos_row + 1
        tokens = self.tokens_SK[:num_slots].ravel().tolist()
        eos = first_eos(tokens, self._settings.eos_ids)
        return Completed(self.slots[:num_slots], tokens if eos is None else tokens[: eos + 1], eos_row)

    def _newly_final(self) -> Iterator[tuple[int, int]]:
        """(response index, token) of the newly valid tokens, in each slot no further than its EOS."""
        for row, slot in enumerate(self.slots):
            tokens_K = self.tokens_SK[row, : self.valid_S[row]].tolist()
            eos = first_eos(tokens_K, self._settings.eos_ids)
            start, end = self._fixed_S[row], len(tokens_K) if eos is None else eos + 1
            yield from zip(range(slot + start, slot + end), tokens_K[start:end], strict=True)
            self._fixed_S[row] = max(start, end)
