"""Speculative branches: a verification carries the plan or prediction that follows it under likely outcomes.

Attention is causal, so masks after the drafts cannot change what is read of the drafts, and each branch sees only the
rows that are accepted under its outcome. If that outcome comes true, the readout of the branch is exactly that of the
forward that it saves. Only cost decides how many branches are attached: the chances of outcomes are estimated from the
probabilities of the drafts, costs from how the device's time for a forward grows with its rows.

A slot under completion has k rows; a length is how many of its tokens are valid.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from refusion_eval.decoders.choose import first_eos
from refusion_eval.types import Forward, Read, Readout, Segment

MAX_LENGTHS = 8  # outcomes that are considered for one slot: bounds the work on the host, whatever rows cost

Outcome = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """Time of a forward by its number of rows, in units of the time of a forward of one row.

    Attributes:
        free_rows: up to this many rows a forward takes no longer than one of a single row.
        row_cost: what every further row adds.
    """

    free_rows: int
    row_cost: float

    def of(self, num_rows: int) -> float:
        """Cost of a forward of `num_rows` rows."""
        return 1.0 + self.row_cost * max(0, num_rows - self.free_rows)

    def gain(self, chance: float, saved_rows: int, num_rows: int, extra_rows: int) -> float:
        """Expected saving of extra rows.

        Args:
            chance: probability that the extra rows save a forward.
            saved_rows: rows of that forward.
            num_rows: rows of the forward that carries the extra rows, without them.
            extra_rows: their number.
        """
        return chance * self.of(saved_rows) - (self.of(num_rows + extra_rows) - self.of(num_rows))


class Branch(NamedTuple):
    """Masks after a verification, read as if the verification had one certain outcome.

    Attributes:
        outcome: names the outcome.
        sees: rows of the verification that are accepted under it: first, last + 1.
        positions: position ids of the masks.
        read: what is read of them; `attach_branches` sets its rows.
    """

    outcome: Outcome
    sees: tuple[int, int]
    positions: Sequence[int]
    read: Read


def attach_branches(forward: Forward, branches: Sequence[Branch], mask_id: int) -> Forward:
    """Appends branches to the rows of a forward; their readouts follow its own."""
    if not branches:
        return forward
    tokens, positions = list(forward.tokens), list(forward.positions)
    attention, reads = list(forward.attention), list(forward.reads)
    for branch in branches:
        first, size = len(tokens), len(branch.positions)
        tokens += [mask_id] * size
        positions += branch.positions
        attention.append(Segment(size, sees=(branch.sees,)))
        reads.append(replace(branch.read, rows=range(first, first + size)))
    return replace(forward, tokens=tokens, positions=positions, attention=tuple(attention), reads=tuple(reads))


def branch_readouts(branches: Sequence[Branch], readouts: Sequence[Readout]) -> dict[Outcome, Readout]:
    """Maps outcomes to the readouts of their branches, which are the last ones of a forward."""
    outcomes = (branch.outcome for branch in branches)
    return dict(zip(outcomes, readouts[len(readouts) - len(branches) :], strict=True))


def profitable_branches(candidates: Sequence[tuple[float, Branch]], cost: ForwardCost, num_rows: int) -> list[Branch]:
    """The branches that are worth their rows, the likeliest first.

    Args:
        candidates: branches, each with the chance of its outcome.
        cost: cost of forwards.
        num_rows: rows of the verification.
    """
    branches: list[Branch] = []
    for chance, branch in sorted(candidates, key=lambda candidate: candidate[0], reverse=True):
        size = len(branch.positions)
        if cost.gain(chance, size, num_rows, size) > 0:
            branches.append(branch)
            num_rows += size
    return branches


def acceptance(probs: npt.NDArray[np.floating], tau_token: float) -> npt.NDArray[np.floating]:
    """Estimates the chance that a verification accepts drafts: their own probabilities, or 1 without a threshold.

    Args:
        probs: probabilities of the drafts, any shape.
        tau_token: the threshold.
    """
    return np.ones_like(probs) if tau_token <= 0 else probs.copy()


def length_chances(accept_N: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Chance that exactly the first l of N tokens are accepted, for l = 0 .. N.

    Args:
        accept_N: chance that each token is accepted if those before it are.
    """
    reach = np.concatenate(([1.0], np.cumprod(accept_N, dtype=np.float64)))
    reach[:-1] *= 1 - np.asarray(accept_N, dtype=np.float64)
    return reach


@dataclass(frozen=True, slots=True)
class SlotForecast:
    """How a verification may leave one slot.

    Attributes:
        finished: chance that the slot needs no further prediction.
        lengths: (chance, length) of the other outcomes, the likeliest first.
        copied_rows: rows that branches of this slot need besides their masks.
    """

    finished: float
    lengths: Sequence[tuple[float, int]]
    copied_rows: int = 0

    @classmethod
    def estimate(
        cls, tokens_K: Sequence[int], accept_K: npt.NDArray[np.floating], valid: int, eos_ids: Container[int]
    ) -> "SlotForecast":
        """Estimates the chances.

        Args:
            tokens_K: tokens of the slot.
            accept_K: chance that each of them is accepted.
            valid: how many are valid already; the token after them is accepted in any case.
            eos_ids: tokens that finish a slot once they are valid.
        """
        size = len(tokens_K)
        chances = length_chances(accept_K[valid + 1 :])  # of valid + 1, ..., size valid tokens
        eos = first_eos(tokens_K[valid:], eos_ids)
        num_open = size - valid - 1 if eos is None else min(eos, size - valid - 1)
        lengths = sorted(((float(chances[i]), valid + 1 + i) for i in range(num_open)), reverse=True)
        return cls(float(chances[num_open:].sum()), lengths[:MAX_LENGTHS])


def profitable_lengths(
    forecasts: Sequence[SlotForecast], slot_size: int, cost: ForwardCost, num_rows: int
) -> list[list[int]]:
    """For each slot the lengths for which its next prediction is attached.

    A forward is saved only if every unfinished slot is covered, so all slots get equally many, as many as pay.

    Args:
        forecasts: one for each unfinished slot.
        slot_size: k.
        cost: cost of forwards.
        num_rows: rows of the verification.
    """
    most = max(len(slot.lengths) for slot in forecasts)
    nothing_to_save = float(np.prod([slot.finished for slot in forecasts]))
    best: list[list[int]] = [[] for _ in forecasts]
    best_gain = 0.0
    for count in range(1, most + 1):
        covered, rows = 1.0, 0
        for slot in forecasts:
            taken = slot.lengths[:count]
            covered *= slot.finished + sum(chance for chance, _ in taken)
            rows += sum(slot_size - length for _, length in taken) + (slot.copied_rows if taken else 0)
        gain = cost.gain(covered - nothing_to_save, len(forecasts) * slot_size, num_rows, rows)
        if gain > best_gain:
            best, best_gain = [[length for _, length in slot.lengths[:count]] for slot in forecasts], gain
    return best
