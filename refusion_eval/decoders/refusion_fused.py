"""Fused ReFusion: the tokens of `refusion` in fewer forwards.

A verification carries speculative branches, which are the plan that follows it under each likely outcome, and the
predictions that follow if slots have to be completed. Attention is causal, so masks after the drafts cannot change what
is read of the drafts, and each branch sees only the rows that are accepted under its outcome. If that outcome comes
true, the readout of the branch is exactly that of the forward that it saves. Only cost decides how many branches are
attached.
"""

import math
from collections import defaultdict
from collections.abc import Container, Generator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from refusion_eval.decoders import first_eos
from refusion_eval.decoders.refusion_settings import RefusionSettings
from refusion_eval.decoders.refusion_slots import (
    Drafts,
    Final,
    accepted_drafts,
    flat,
    masked_after,
    num_kept,
    plan_read,
)
from refusion_eval.types import Forward, ProbArray, Read, Readout, Segment

MAX_LENGTHS = 8  # outcomes that are considered for one slot: bounds the work on the host, whatever rows cost

OutcomeKey = tuple[object, ...]
T = TypeVar("T")
Steps = Generator[Forward, tuple[Readout, ...], T]  # a part of a decoding


class Branch(NamedTuple):
    """Masks after a verification, read as if the verification had one certain outcome."""

    outcome: OutcomeKey
    sees: tuple[int, int]  # rows of the verification that are accepted under it: first, last + 1
    positions: Sequence[int]  # position ids of the masks
    draws: tuple[int, ...] = ()  # a draw key for each if their tokens are sampled


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """Time of a forward by its number of rows, in units of the time of a forward of one row."""

    free_rows: int  # up to this many rows a forward takes no longer than one of a single row
    row_cost: float  # what every further row adds

    def gain(self, chance: float, saved_rows: int, num_rows: int, extra_rows: int) -> float:
        """Expected saving of extra rows: perhaps a forward of `saved_rows`, less the wider forward for certain."""
        # This runs for every branch of every forward, and a GPU waits for it, so it calls no other function of Python.
        free, unit = self.free_rows, self.row_cost
        saved, narrow, wide = max(saved_rows, free), max(num_rows, free), max(num_rows + extra_rows, free)
        return chance * (1.0 + unit * (saved - free)) - ((1.0 + unit * (wide - free)) - (1.0 + unit * (narrow - free)))


def profitable_branches(candidates: Sequence[tuple[float, Branch]], cost: ForwardCost, num_rows: int) -> list[Branch]:
    """The branches that are worth their rows, the likeliest first."""
    branches: list[Branch] = []
    for chance, branch in sorted(candidates, key=lambda candidate: candidate[0], reverse=True):
        size = len(branch.positions)
        if cost.gain(chance, size, num_rows, size) > 0:
            branches.append(branch)
            num_rows += size
    return branches


def acceptance(probs_SK: ProbArray, tau_token: float) -> ProbArray:
    # Chances are estimated by the drafts' own probabilities: a draft that is likely with masks before it is likely with
    # tokens before it. Only speed depends on the estimate, never a token.
    return np.ones_like(probs_SK) if tau_token <= 0 else probs_SK.copy()


def length_chances(accept_N: ProbArray) -> npt.NDArray[np.float64]:
    """Chance that exactly the first l of N tokens are accepted, for l = 0 .. N."""
    reach = np.empty(len(accept_N) + 1)
    reach[0] = 1
    accept_N.cumprod(dtype=np.float64, out=reach[1:])
    reach[:-1] *= 1 - accept_N.astype(np.float64)
    return reach


class SlotForecast(NamedTuple):
    """How a verification may leave one slot."""

    finished: float  # chance that the slot needs no further prediction
    lengths: Sequence[tuple[float, int]]  # (chance, length) of the other outcomes, the likeliest first
    copied_rows: int = 0  # rows that branches of this slot need besides their masks

    @classmethod
    def estimate(
        cls, tokens_K: Sequence[int], accept_K: ProbArray, valid: int, eos_ids: Container[int]
    ) -> "SlotForecast":
        """Estimates the chances of a slot of which the first `valid` tokens are valid."""
        size = len(tokens_K)
        # Of valid + 1, ..., size valid tokens: the token after the valid ones is accepted in any case.
        chances = length_chances(accept_K[valid + 1 :])
        # A slot that reaches its EOS is finished, whatever follows.
        eos = first_eos(tokens_K[valid:], eos_ids)
        num_open = size - valid - 1 if eos is None else min(eos, size - valid - 1)
        lengths = sorted([(float(chances[i]), valid + 1 + i) for i in range(num_open)], reverse=True)
        return cls(float(chances[num_open:].sum()), lengths[:MAX_LENGTHS])


def profitable_lengths(
    forecasts: Sequence[SlotForecast], slot_size: int, cost: ForwardCost, num_rows: int
) -> list[list[int]]:
    """For each slot the lengths for which its next prediction is attached."""
    # A forward is saved only if every unfinished slot is covered, so all slots get equally many, as many as pay.
    nothing_to_save = math.prod([slot.finished for slot in forecasts])
    best_number, best_gain = 0, 0.0
    chances, rows = [0.0] * len(forecasts), 0
    for number in range(max([len(slot.lengths) for slot in forecasts], default=0)):
        covered = 1.0
        for index, slot in enumerate(forecasts):
            if number < len(slot.lengths):
                chance, length = slot.lengths[number]
                chances[index] += chance
                rows += slot_size - length + (slot.copied_rows if number == 0 else 0)
            covered *= slot.finished + chances[index]
        gain = cost.gain(covered - nothing_to_save, len(forecasts) * slot_size, num_rows, rows)
        if gain > best_gain:
            best_number, best_gain = number + 1, gain
    return [[length for _, length in slot.lengths[:best_number]] for slot in forecasts]


class Iteration(NamedTuple):
    """The state of the text when an iteration of plan and infilling begins."""

    number: int  # of its plan, from 0
    masked: Sequence[int]  # slots of the block, the selected ones included
    next_slots: Sequence[int]  # of the next block; empty after the last one
    met_eos: bool  # whether the response ends in what was decoded before


class Fusion:
    """Makes the verifications of one decoding, with the branches that pay, and keeps what branches of the last read."""

    def __init__(self, start: int, settings: RefusionSettings) -> None:
        self._start, self._settings, self._end = start, settings, start + settings.num_positions
        # Where nothing is given, a guess for a device that nobody has measured.
        self._cost = ForwardCost(settings.free_rows or 0, 0.02 if settings.row_cost is None else settings.row_cost)
        # Whether a branch is sampled -> what was read, and for each outcome its part of that.
        self._readouts: dict[bool, Readout] = {}
        self._places: dict[OutcomeKey, tuple[bool, int, int]] = {}

    def read(self, *outcome: object) -> Readout | None:
        """What the branch of an outcome of the last verification has read, if there was one."""
        if outcome not in self._places:
            return None
        is_sampled, first, end = self._places[outcome]
        readout = self._readouts[is_sampled]
        return Readout(readout.tokens[first:end], readout.probs[first:end])

    def verify(self, forward: Forward, drafts: Drafts, iteration: Iteration) -> Steps[tuple[Readout, ...]]:
        """Makes the global verification of drafts."""
        self._iteration = iteration
        branches = profitable_branches(self._next_plans(drafts), self._cost, len(forward.tokens))
        # A completion begins with a verification of its own, or goes on after a token that nobody has drafted.
        if not (self._settings.verify_independently or self._settings.keeps_verifier):
            num_rows = len(forward.tokens) + sum(len(branch.positions) for branch in branches)
            forward, predictions = self._first_predictions(forward, drafts, num_rows)
            branches += predictions
        return (yield from self._with_branches(forward, branches))

    def verify_groups(
        self, forward: Forward, drafts: Drafts, valid_S: Sequence[int], final: Final
    ) -> Steps[tuple[Readout, ...]]:
        """Makes a verification of groups, with the plan if all slots finish now (`final`), else predictions."""
        k = self._settings.slot_size
        sizes = self._settings.sizes_of(drafts.slots)
        unfinished = [row for row, (valid, size) in enumerate(zip(valid_S, sizes, strict=True)) if valid < size]
        forecasts = self._forecasts(drafts, unfinished, valid_S)
        branches: list[Branch] = []
        plan = self._plan_after(final)
        if plan is not None:
            chance = math.prod([slot.finished for slot in forecasts])
            branches = profitable_branches([(chance, plan)], self._cost, len(forward.tokens))
        if not self._settings.keeps_verifier:
            num_rows = len(forward.tokens) + sum(len(branch.positions) for branch in branches)
            lengths_S = profitable_lengths(forecasts, k, self._cost, num_rows)
            for row, lengths in zip(unfinished, lengths_S, strict=True):
                branches += [self._prediction(drafts.slots[row], length, row * k) for length in lengths]
        return (yield from self._with_branches(forward, branches))

    def _with_branches(self, forward: Forward, branches: Sequence[Branch]) -> Steps[tuple[Readout, ...]]:
        """Makes a forward with branches after its rows, and returns its own readouts."""
        self._places, num_own = {}, len(forward.reads)
        if not branches:
            return self.priced((yield forward))
        tokens, positions, attention = list(forward.tokens), list(forward.positions), list(forward.attention)
        # One read for all branches that are sampled and one for all others: every read takes time on the host, and most
        # branches are never looked at.
        rows: dict[bool, list[int]] = defaultdict(list)
        draws: list[int] = []
        for branch in branches:
            start, size, is_sampled = len(tokens), len(branch.positions), bool(branch.draws)
            tokens += [self._settings.mask_id] * size
            positions += branch.positions
            attention.append(Segment(size, sees=(branch.sees,)))
            self._places[branch.outcome] = (is_sampled, len(rows[is_sampled]), len(rows[is_sampled]) + size)
            rows[is_sampled] += range(start, start + size)
            draws += branch.draws
        reads = list(forward.reads)
        for is_sampled, own_rows in rows.items():
            temperature, keys = (self._settings.temperature, tuple(draws)) if is_sampled else (0.0, ())
            reads.append(Read(own_rows, suppress=self._settings.suppress, temperature=temperature, draws=keys))
        readouts = yield Forward(tokens, positions, tuple(attention), tuple(reads), forward.commit, forward.kind)
        self._readouts = dict(zip(rows, readouts[num_own:], strict=True))
        return self.priced(readouts)[:num_own]

    def priced(self, readouts: tuple[Readout, ...]) -> tuple[Readout, ...]:
        """Takes over what a row costs in this batch, if the readouts say it."""
        if readouts and (cost := readouts[0].row_cost) is not None:
            self._cost = ForwardCost(0, cost)
        return readouts

    def _forecasts(self, drafts: Drafts, rows: Sequence[int], valid_S: Sequence[int]) -> list[SlotForecast]:
        accept_SK = acceptance(drafts.probs_SK, self._settings.tau_token)
        forecasts, sizes = [], self._settings.sizes_of(drafts.slots)
        for row in rows:
            size = sizes[row]
            tokens, accept = drafts.tokens_SK[row, :size].tolist(), accept_SK[row, :size]
            forecasts.append(SlotForecast.estimate(tokens, accept, valid_S[row], self._settings.eos_ids))
        return forecasts

    def _next_plans(self, drafts: Drafts) -> list[tuple[float, Branch]]:
        """The plans that may follow the global verification, each with its chance."""
        accept_SK = acceptance(drafts.probs_SK, self._settings.tau_token)
        accept_SK[:, 0] = 1  # tau_token does not apply to the first token of a slot
        accept_N = flat(accept_SK, drafts.slots, self._settings)
        eos = first_eos(flat(drafts.tokens_SK, drafts.slots, self._settings).tolist(), self._settings.eos_ids)
        chances: dict[int, float] = defaultdict(float)
        # Outcomes that leave the same tokens are one branch.
        for num_passed, chance in enumerate(length_chances(accept_N).tolist()):
            chances[num_kept(num_passed, eos, len(accept_N), self._settings.slot_size)] += chance
        plans = []
        for kept, chance in chances.items():
            final = accepted_drafts(drafts, kept, self._settings)
            if final is not None and (plan := self._plan_after(final)) is not None:
                plans.append((chance, plan))
        return plans

    def _plan_after(self, final: Final) -> Branch | None:
        """The plan that follows if these tokens become final; None if none follows or keys and values change before."""
        # The key names all that the plan depends on: how many rows stay, and which slots are masked.
        masked = masked_after(self._iteration.masked, final, self._settings)
        if not masked and not (self._iteration.met_eos or final.has_eos):
            masked = list(self._iteration.next_slots)
        if not masked or final.changes_keys(self._settings):
            return None
        positions = self._settings.text_positions(masked, self._start)
        read = plan_read((), positions, self._settings, self._iteration.number + 1)
        num_rows = len(final.tokens)
        return Branch(("plan", num_rows, *masked), (0, num_rows), positions, read.draws)

    def _prediction(self, slot: int, length: int, first_row: int) -> Branch:
        """The masks after the first `length` tokens of a slot whose rows begin at `first_row` of the verification."""
        start = self._start + slot
        positions = range(start + length, min(start + self._settings.slot_size, self._end))
        return Branch(("prediction", slot, length), (first_row, first_row + length), positions)

    def _first_predictions(self, forward: Forward, drafts: Drafts, num_rows: int) -> tuple[Forward, list[Branch]]:
        """Adds to a global verification the predictions that pay in case not even its first slot is accepted."""
        # The first slot sees no other draft, so its rows in the verification serve. The other slots need rows of their
        # own, which see no other draft either.
        k = self._settings.slot_size
        num_slots = len(drafts.slots)
        forecasts = self._forecasts(drafts, range(num_slots), [0] * num_slots)
        # If the first slot is finished, no completion follows.
        forecasts = [forecasts[0]._replace(finished=0.0), *(slot._replace(copied_rows=k) for slot in forecasts[1:])]
        branches: list[Branch] = []
        for row, lengths in enumerate(profitable_lengths(forecasts, k, self._cost, num_rows)):
            slot, first_row = drafts.slots[row], 0
            if row > 0 and lengths:
                first_row = len(forward.tokens)
                positions = self._settings.text_positions([slot], self._start)
                size = len(positions)
                forward = replace(
                    forward,
                    tokens=[*forward.tokens, *drafts.tokens_SK[row, :size].tolist()],
                    positions=[*forward.positions, *positions],
                    attention=(*forward.attention, Segment(size)),
                )
            branches += [self._prediction(slot, length, first_row) for length in lengths]
        return forward, branches
