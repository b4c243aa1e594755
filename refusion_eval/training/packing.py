"""Which samples share a packed sequence, and which packs each process trains on in which step.

Both depend on the seed and the epoch alone, never on the number of processes: 1 process and 8 see the same batches.
"""

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from refusion_eval.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PackPlan(Sequence[np.ndarray]):
    """The packs of one epoch, in the order of training: a sequence of arrays of sample numbers.

    Attributes:
        members: [N], sample numbers, pack after pack; each sample once.
        bounds: [packs + 1], where each pack begins in `members`, and the last one's end.
        num_tokens: of all samples.
        capacity: tokens that a pack may hold.
    """

    members: np.ndarray
    bounds: np.ndarray
    num_tokens: int
    capacity: int

    @property
    def fill(self) -> float:
        """Share of the packs' capacity that holds tokens."""
        return self.num_tokens / (len(self) * self.capacity)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        return self.members[self.bounds[number] : self.bounds[number + 1]]


def plan_packs(
    lengths: Sequence[int] | np.ndarray,
    capacity: int,
    seed: int,
    epoch: int,
    *,
    multiple_of: int = 1,
    window: int = 4096,
) -> PackPlan:
    """Groups the samples of one epoch into packs with little waste, in a random order that seed and epoch decide.

    Samples are shuffled and cut into windows; within one, each sample goes, as the shuffle has them, to the fullest
    pack that still has room for it (best fit). Sorted by length they would fit a little better (0.998 in place of 0.997
    of the room, on lengths such as fine-tuning data have), but short samples would meet short ones only. The packs are
    shuffled again, over all windows.

    Args:
        lengths: tokens that each sample takes in a pack, as the objective lays it out (EOS filling, noisy copy).
        capacity: tokens of a pack at most.
        seed: of the run.
        epoch: each epoch has its own packs.
        multiple_of: packs of a global batch: the number of packs becomes a multiple of it, so that no batch is
            incomplete, by halving the packs with the most samples; nothing is dropped or repeated. It takes the room
            of up to `multiple_of - 1` packs an epoch, which is little where an epoch has many batches.
        window: samples that are packed together; larger wastes less and takes longer.

    Raises:
        ConfigError: there are no samples, one is longer than the capacity, or they are too few for the multiple.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if min(multiple_of, window) < 1:
        raise ConfigError(f"multiple_of is {multiple_of} and window {window}; both must be at least 1")
    if not len(lengths):
        raise ConfigError("there are no samples to pack; give at least one")
    if lengths.max() > capacity:
        raise ConfigError(
            f"sample {lengths.argmax()} takes {lengths.max()} tokens and a pack holds {capacity}; raise the capacity "
            "or leave out longer samples"
        )
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    packs: list[list[int]] = []
    for start in range(0, len(order), window):
        packs += _best_fit(order[start : start + window].tolist(), lengths, capacity)
    _split_to_multiple(packs, multiple_of)
    shuffled = [packs[number] for number in rng.permutation(len(packs))]
    return PackPlan(
        members=np.array([number for pack in shuffled for number in pack], dtype=np.int64),
        bounds=np.cumsum([0] + [len(pack) for pack in shuffled]),
        num_tokens=int(lengths.sum()),
        capacity=capacity,
    )


def _best_fit(numbers: list[int], lengths: np.ndarray, capacity: int) -> list[list[int]]:
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, pack), the fullest first; packs without room are left out
    for number, length in zip(numbers, lengths[numbers].tolist(), strict=True):
        place = bisect.bisect_left(rooms, (length, -1))
        if place < len(rooms):
            room, pack = rooms.pop(place)
            packs[pack].append(number)
        else:
            room, pack = capacity, len(packs)
            packs.append([number])
        if room > length:
            bisect.insort(rooms, (room - length, pack))
    return packs


def _split_to_multiple(packs: list[list[int]], multiple: int) -> None:
    """Halves the packs with the most samples, in place, until their number is a multiple."""
    missing = -len(packs) % multiple
    by_size = [(-len(pack), number) for number, pack in enumerate(packs)]
    heapq.heapify(by_size)
    for _ in range(missing):
        _, number = by_size[0]
        pack = packs[number]
        if len(pack) == 1:
            raise ConfigError(
                f"{len(packs)} samples are too few for batches of {multiple} packs; use smaller batches or more data"
            )
        packs[number], other = pack[0::2], pack[1::2]
        heapq.heapreplace(by_size, (-len(packs[number]), number))
        heapq.heappush(by_size, (-len(other), len(packs)))
        packs.append(other)


def batches_of(plan: PackPlan, global_batch_packs: int, rank: int = 0, world_size: int = 1) -> list[list[np.ndarray]]:
    """The packs of each step that one process trains on; a run goes on at step n with `[n:]`.

    A global batch is the next `global_batch_packs` packs of the plan. Every process takes as many of them, and the
    processes' parts, in the order of their ranks, are the global batch.

    Args:
        plan: of one epoch, made with `multiple_of=global_batch_packs`.
        global_batch_packs: packs of a step over all processes.
        rank: of this process.
        world_size: number of processes; divides `global_batch_packs`.

    Returns:
        For each step, packs of sample numbers.

    Raises:
        ConfigError: the numbers do not fit each other, or the plan.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(f"rank is {rank} and world_size {world_size}; ranks count from 0 up to world_size - 1")
    if global_batch_packs < 1 or global_batch_packs % world_size:
        raise ConfigError(
            f"a global batch of {global_batch_packs} packs cannot be dealt to {world_size} processes evenly; "
            "make it a multiple of their number"
        )
    if len(plan) % global_batch_packs:
        raise ConfigError(
            f"{len(plan)} packs are no whole batches of {global_batch_packs}; plan them with "
            f"multiple_of={global_batch_packs}"
        )
    share = global_batch_packs // world_size
    return [plan[start : start + share] for start in range(rank * share, len(plan), global_batch_packs)]
