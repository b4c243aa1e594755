"""The completion loop of ReFusion: slots whose drafts were rejected are finished independently of each other.

Eq. 7-8 of arXiv 2512.13586, in rounds of one prediction and one verification. Nothing is committed in between: each
forward carries the slots whole, as groups that see the cache and themselves only. Where forwards are fused, a
verification carries likely next predictions, and the plan that follows if it is the last one.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from refusion_eval.decoders.choose import accepted_prefix, first_eos
from refusion_eval.decoders.fuse import (
    Key,
    Rider,
    SlotOdds,
    acceptance,
    by_key,
    lengths_to_cover,
    plans_that_pay,
    with_riders,
)
from refusion_eval.decoders.refusion_settings import RefusionSettings
from refusion_eval.trace import Trace
from refusion_eval.types import Forward, ProbArray, Read, Readout, Segment, TokenArray, groups

NextPlan = Callable[["Completed"], Rider | None]


class Drafts(NamedTuple):
    """Slots, ascending, the tokens drafted for them [S, k] and the probability with which each was."""

    slots: list[int]
    tokens_SK: TokenArray
    probs_SK: ProbArray


class Completed(NamedTuple):
    """What a completion leaves: its rows 0 .. len(tokens) - 1 of the last forward are those of `tokens`.

    Attributes:
        slots: the finished slots; those behind the one that met EOS are dropped.
        tokens: their tokens, slot after slot, up to and including the first EOS.
        eos_row: index in `slots` of the one that met EOS (the last one), or None.
        readouts: of what rode along in the last forward.
    """

    slots: list[int]
    tokens: list[int]
    eos_row: int | None
    readouts: Mapping[Key, Readout]


def prediction_rider(settings: RefusionSettings, prompt_length: int, slot: int, length: int, first_row: int) -> Rider:
    """The masks behind the first `length` tokens of a slot whose rows begin at `first_row` of the verification."""
    positions = range(prompt_length + slot + length, prompt_length + slot + settings.slot_size)
    read = Read(rows=(), suppress=settings.suppress)
    return Rider((slot, length), (first_row, first_row + length), positions, read)


def first_predictions(
    forward: Forward, drafts: Drafts, prompt_length: int, settings: RefusionSettings, num_rows: int
) -> tuple[Forward, list[Rider]]:
    """Adds to a global verification the predictions that pay in case not even its first slot is accepted.

    The first slot sees no other draft, so its own rows serve. The others do: theirs need an independent copy.

    Args:
        forward: the global verification of the drafts.
        drafts: the slots.
        prompt_length: number of prompt tokens.
        settings: of the decoder.
        num_rows: rows of the forward with what rides along already.

    Returns:
        The forward with the copies, and the riders behind it.
    """
    if settings.verify_independently:  # the completion then begins with a verification of its own
        return forward, []
    k = settings.slot_size
    slots = zip(drafts.tokens_SK.tolist(), acceptance(drafts.probs_SK, settings.tau_token), strict=True)
    odds = [SlotOdds.of(tokens_K, accept_K, 0, settings.eos_ids) for tokens_K, accept_K in slots]
    # Were the first slot finished, there would be no completion.
    odds = [replace(odds[0], finished=0.0), *(replace(slot, copied_rows=k) for slot in odds[1:])]
    riders: list[Rider] = []
    for row, lengths in enumerate(lengths_to_cover(odds, k, settings.forward_cost, num_rows)):
        slot, first_row = drafts.slots[row], 0
        if row > 0 and lengths:
            first_row = len(forward.tokens)
            forward = replace(
                forward,
                tokens=[*forward.tokens, *drafts.tokens_SK[row].tolist()],
                positions=[*forward.positions, *range(prompt_length + slot, prompt_length + slot + k)],
                attention=(*forward.attention, Segment(k)),
            )
        riders += [prediction_rider(settings, prompt_length, slot, length, first_row) for length in lengths]
    return forward, riders


class Completion:
    """The slots under completion: their tokens, and how many of each are valid so far.

    Args:
        drafts: the slots.
        accepted_SK: which drafts the global verification accepted.
        prompt_length: number of prompt tokens.
        settings: of the decoder.
        trace: receives the events.
        predictions: by (slot, length) what the global verification already predicted.
        next_plan: the plan that follows if the completion ends like this; None if none does.
    """

    def __init__(
        self,
        drafts: Drafts,
        accepted_SK: npt.NDArray[np.bool_],
        prompt_length: int,
        settings: RefusionSettings,
        trace: Trace,
        predictions: Mapping[Key, Readout],
        next_plan: NextPlan,
    ) -> None:
        self.slots = list(drafts.slots)
        self.tokens_SK = drafts.tokens_SK.copy()
        self.probs_SK = drafts.probs_SK.copy()
        self.valid_S = [accepted_prefix(row) for row in accepted_SK]
        self.fixed_S = [0] * len(drafts.slots)
        self.prompt_length = prompt_length
        self.settings = settings
        self.trace = trace
        self.readouts = dict(predictions)
        self.next_plan = next_plan

    def run(self) -> Generator[Forward, tuple[Readout, ...], Completed]:
        """Runs rounds until every slot is valid; each round accepts at least one token a slot.

        A slot that meets EOS counts as valid to its end, and the slots behind it are dropped; an earlier slot may still
        meet EOS later and take over.
        """
        if self.settings.verify_independently:
            self.valid_S = [0] * len(self.slots)
            yield from self._verify()
        while True:
            eos_row = self._end_at_eos()
            self._fix_valid()
            if min(self.valid_S) == self.settings.slot_size:
                break
            yield from self._predict()
            yield from self._verify()
        return self._completed(eos_row)

    def _completed(self, eos_row: int | None) -> Completed:
        """What the slots up to the one with EOS leave."""
        num_slots = len(self.slots) if eos_row is None else eos_row + 1
        tokens = self.tokens_SK[:num_slots].ravel().tolist()
        eos = first_eos(tokens, self.settings.eos_ids)
        return Completed(self.slots[:num_slots], tokens if eos is None else tokens[: eos + 1], eos_row, self.readouts)

    def _eos_row(self, valid_S: list[int]) -> int | None:
        """The first slot with a valid EOS."""
        for row, valid in enumerate(valid_S):
            if first_eos(self.tokens_SK[row, :valid], self.settings.eos_ids) is not None:
                return row
        return None

    def _end_at_eos(self) -> int | None:
        """Drops the slots behind the first one with a valid EOS and returns its row."""
        row = self._eos_row(self.valid_S)
        if row is not None:
            self.slots = self.slots[: row + 1]
            self.tokens_SK, self.probs_SK = self.tokens_SK[: row + 1], self.probs_SK[: row + 1]
            self.valid_S = [*self.valid_S[:row], self.settings.slot_size]
        return row

    def _unfinished(self) -> list[int]:
        return [row for row, valid in enumerate(self.valid_S) if valid < self.settings.slot_size]

    def _forward(self, kind: str, slots: list[int], tokens: list[int], reads: tuple[Read, ...]) -> Forward:
        positions = [self.prompt_length + position for position in self.settings.response_positions(slots)]
        return Forward(tokens, positions, groups([self.settings.slot_size] * len(slots)), reads, kind=kind)

    def _predict(self) -> Generator[Forward, tuple[Readout, ...], None]:
        """Draws the tokens behind the valid prefix of every unfinished slot again (always the likeliest, Eq. 8).

        Only the slots whose prediction did not ride along in the verification before take a forward.
        """
        k, mask_id = self.settings.slot_size, self.settings.mask_id
        unfinished = self._unfinished()
        for row in unfinished:
            if (ready := self.readouts.get((self.slots[row], self.valid_S[row]))) is not None:
                self._draft(row, ready.tokens, ready.probs)
        missing = [row for row in unfinished if (self.slots[row], self.valid_S[row]) not in self.readouts]
        if missing:
            tokens: list[int] = []
            rows: list[int] = []
            for row in missing:
                valid = self.valid_S[row]
                rows.extend(range(len(tokens) + valid, len(tokens) + k))
                tokens.extend([*self.tokens_SK[row, :valid].tolist(), *[mask_id] * (k - valid)])
            read = Read(rows=rows, suppress=self.settings.suppress)
            (readout,) = yield self._forward("predict", [self.slots[row] for row in missing], tokens, (read,))
            ends = np.cumsum([k - self.valid_S[row] for row in missing])[:-1]
            for row, tokens_N, probs_N in zip(
                missing, np.split(readout.tokens, ends), np.split(readout.probs, ends), strict=True
            ):
                self._draft(row, tokens_N, probs_N)
        spans = [(row, column) for row in unfinished for column in range(self.valid_S[row], k)]
        drafted = self.tokens_SK[tuple(np.transpose(spans))]
        self.trace.draft([self.slots[row] + column for row, column in spans], drafted.tolist())

    def _draft(self, row: int, tokens_N: TokenArray, probs_N: ProbArray) -> None:
        self.tokens_SK[row, self.valid_S[row] :] = tokens_N
        self.probs_SK[row, self.valid_S[row] :] = probs_N

    def _verify(self) -> Generator[Forward, tuple[Readout, ...], None]:
        """Verifies every slot in its own group and lengthens the valid prefixes (Eq. 7).

        Valid tokens are not checked again, the token behind them is accepted whatever its probability, and those after
        it while they exceed tau_token. Finished slots ride along: the keys and values of all slots are kept from the
        last verification.
        """
        k = self.settings.slot_size
        spans = [(row, column) for row, valid in enumerate(self.valid_S) for column in range(valid + 1, k)]
        tokens = self.tokens_SK.ravel().tolist()
        reads: tuple[Read, ...] = ()
        if spans:
            indices = [row * k + column for row, column in spans]
            reads = (Read(rows=[index - 1 for index in indices], given=[tokens[index] for index in indices]),)
        forward = self._forward("verify", self.slots, tokens, reads)
        riders = self._riders() if self.settings.fused else []
        readouts = yield with_riders(forward, riders, self.settings.mask_id)
        self.readouts = by_key(riders, readouts)
        accepted_SK = np.ones(self.tokens_SK.shape, dtype=bool)
        if spans:
            probs = readouts[0].given
            assert probs is not None
            accepted_SK[tuple(np.transpose(spans))] = probs > self.settings.tau_token
        self.valid_S = [accepted_prefix(row) for row in accepted_SK]

    def _riders(self) -> list[Rider]:
        """What pays to ride along: the plan if all slots finish now, and likely next predictions if they do not."""
        settings, k = self.settings, self.settings.slot_size
        cost = settings.forward_cost
        unfinished = self._unfinished()
        accept_SK = acceptance(self.probs_SK, settings.tau_token)
        odds = [
            SlotOdds.of(self.tokens_SK[row].tolist(), accept_SK[row], self.valid_S[row], settings.eos_ids)
            for row in unfinished
        ]
        riders: list[Rider] = []
        num_rows = len(self.slots) * k
        eos_row = self._eos_row([k] * len(self.slots))
        plan = self.next_plan(self._completed(eos_row))
        if plan is not None:
            chance = float(np.prod([slot.finished for slot in odds]))
            riders = plans_that_pay([(chance, plan)], cost, num_rows)
            num_rows += sum(len(rider.positions) for rider in riders)
        if odds:
            for row, lengths in zip(unfinished, lengths_to_cover(odds, k, cost, num_rows), strict=True):
                riders += [
                    prediction_rider(settings, self.prompt_length, self.slots[row], length, row * k)
                    for length in lengths
                ]
        return riders

    def _fix_valid(self) -> None:
        """Reports the newly valid tokens as final, in each slot no further than its EOS."""
        positions: list[int] = []
        tokens: list[int] = []
        for row, slot in enumerate(self.slots):
            tokens_K = self.tokens_SK[row, : self.valid_S[row]].tolist()
            eos = first_eos(tokens_K, self.settings.eos_ids)
            start, end = self.fixed_S[row], len(tokens_K) if eos is None else eos + 1
            positions.extend(range(slot + start, slot + end))
            tokens.extend(tokens_K[start:end])
            self.fixed_S[row] = max(start, end)
        if positions:
            self.trace.fix(positions, tokens)
