"""Fewer forwards, same tokens: a verification carries the next plan or prediction under hypotheses about its outcome.

Attention is causal, so masks behind the drafts cannot change what is read of the drafts; each group of them sees only
the rows that its hypothesis takes for accepted. If the hypothesis comes true, its readout is exactly that of the
forward that it saves. How many hypotheses ride along is a matter of cost alone: chances are estimated from the drafts'
own probabilities, costs from the width curve of the device.

Names: a slot under completion has `k` rows; a length is how many of its tokens are valid.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from refusion_eval.decoders.choose import first_eos
from refusion_eval.types import Forward, Read, Readout, Segment

MOST_LENGTHS = 8  # hypotheses for one slot: bounds the host's work, whatever rows cost

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """What a forward of some rows takes, in units of the fixed cost of a forward.

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
        """What extra rows are worth that save, with some chance, a forward of their own."""
        return chance * self.of(saved_rows) - (self.of(num_rows + extra_rows) - self.of(num_rows))


class Rider(NamedTuple):
    """A group of masks behind a verification.

    Attributes:
        key: the hypothesis.
        sees: rows of the verification that are accepted under it: first, last + 1.
        positions: position ids of the masks.
        read: what is wanted of them; its rows are set when the rider gets its place.
    """

    key: Key
    sees: tuple[int, int]
    positions: Sequence[int]
    read: Read


def with_riders(forward: Forward, riders: Sequence[Rider], mask_id: int) -> Forward:
    """Puts riders behind the rows of a forward; their readouts follow its own."""
    if not riders:
        return forward
    tokens, positions = list(forward.tokens), list(forward.positions)
    attention, reads = list(forward.attention), list(forward.reads)
    for rider in riders:
        first, size = len(tokens), len(rider.positions)
        tokens += [mask_id] * size
        positions += rider.positions
        attention.append(Segment(size, sees=(rider.sees,)))
        reads.append(replace(rider.read, rows=range(first, first + size)))
    return replace(forward, tokens=tokens, positions=positions, attention=tuple(attention), reads=tuple(reads))


def by_key(riders: Sequence[Rider], readouts: Sequence[Readout]) -> dict[Key, Readout]:
    """The riders' readouts, the last ones of a forward, by hypothesis."""
    return dict(zip((rider.key for rider in riders), readouts[len(readouts) - len(riders) :], strict=True))


def plans_that_pay(plans: Sequence[tuple[float, Rider]], cost: ForwardCost, num_rows: int) -> list[Rider]:
    """Of the plans that may follow, each with its chance, those worth their rows, the likeliest first.

    Args:
        plans: (chance, rider).
        cost: of forwards.
        num_rows: rows of the verification.
    """
    riders: list[Rider] = []
    for chance, rider in sorted(plans, key=lambda plan: plan[0], reverse=True):
        size = len(rider.positions)
        if cost.gain(chance, size, num_rows, size) > 0:
            riders.append(rider)
            num_rows += size
    return riders


def acceptance(probs: npt.NDArray[np.floating], tau_token: float) -> npt.NDArray[np.floating]:
    """Chance that a verification accepts a token: the probability it was drafted with; certain without a threshold.

    Args:
        probs: of the drafts, any shape.
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
class SlotOdds:
    """How a verification may leave one slot.

    Attributes:
        finished: chance that it needs no further prediction.
        lengths: (chance, length) of the other outcomes, the likeliest first.
        copied_rows: rows that a rider of this slot needs besides its masks.
    """

    finished: float
    lengths: Sequence[tuple[float, int]]
    copied_rows: int = 0

    @classmethod
    def of(
        cls, tokens_K: Sequence[int], accept_K: npt.NDArray[np.floating], valid: int, eos_ids: Container[int]
    ) -> "SlotOdds":
        """Estimates them.

        Args:
            tokens_K: the slot's tokens.
            accept_K: chance that each is accepted.
            valid: the first tokens are valid, and the one behind them is accepted in any case.
            eos_ids: a valid EOS finishes a slot.
        """
        size = len(tokens_K)
        chances = length_chances(accept_K[valid + 1 :])  # of valid + 1, ..., size valid tokens
        eos = first_eos(tokens_K[valid:], eos_ids)
        num_open = size - valid - 1 if eos is None else min(eos, size - valid - 1)
        lengths = sorted(((float(chances[i]), valid + 1 + i) for i in range(num_open)), reverse=True)
        return cls(float(chances[num_open:].sum()), lengths[:MOST_LENGTHS])


def lengths_to_cover(odds: Sequence[SlotOdds], slot_size: int, cost: ForwardCost, num_rows: int) -> list[list[int]]:
    """For each slot the lengths after which its next prediction rides along.

    A forward is saved only if every unfinished slot is covered, so all slots get equally many, as many as pay.

    Args:
        odds: of each unfinished slot.
        slot_size: k.
        cost: of forwards.
        num_rows: rows of the verification.
    """
    most = max(len(slot.lengths) for slot in odds)
    nothing_to_save = float(np.prod([slot.finished for slot in odds]))
    best: list[list[int]] = [[] for _ in odds]
    best_gain = 0.0
    for count in range(1, most + 1):
        covered, rows = 1.0, 0
        for slot in odds:
            taken = slot.lengths[:count]
            covered *= slot.finished + sum(chance for chance, _ in taken)
            rows += sum(slot_size - length for _, length in taken) + (slot.copied_rows if taken else 0)
        gain = cost.gain(covered - nothing_to_save, len(odds) * slot_size, num_rows, rows)
        if gain > best_gain:
            best, best_gain = [[length for _, length in slot.lengths[:count]] for slot in odds], gain
    return best
