"""Which samples belong to which optimizer step, and which forward of a step holds them.

A step is exactly `global_batch_size` samples. Everything follows from the seed, the samples and the settings; the
number of processes only says who computes which forwards of a step.
"""

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from refusion_eval.errors import ConfigError

# What a stream of random numbers is for, so that no two share one: numpy ignores zeros at the end of a seed.
_ORDER, _CORRUPTION = 2, 3


class Draw(NamedTuple):
    """A sample as it is seen once.

    Attributes:
        epoch: which pass over the data.
        sample: its number.
    """

    epoch: int
    sample: int


def corruption_rng(seed: int, draw: Draw) -> np.random.Generator:
    """The generator of everything that is drawn for a sample in an epoch, whichever process draws it."""
    return np.random.default_rng([seed, _CORRUPTION, draw.epoch, draw.sample])


@lru_cache(maxsize=2)  # a step may hold the end of one epoch and the beginning of the next
def _order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    return np.random.default_rng([seed, _ORDER, epoch]).permutation(num_samples)


class StepPlan:
    """The steps of a training.

    Epochs follow each other without a seam: each is a new order of all samples, and a step takes the next
    `global_batch_size` of them, across the end of an epoch if need be. So no step is smaller than the others and no
    sample is left out of an epoch; only behind the last whole step of the training fewer samples than a step's remain.

    The samples of a step, in their order, form groups of `micro_batch_size`, over which the release normalises its
    loss. The groups are dealt to `num_forwards` forwards, the longest first, each to the forward that has the fewest
    rows so far (LPT scheduling; the fullest forward has at most 4/3 of the rows that the best deal would give it).

    Attributes:
        num_groups: of a step.
        num_forwards: of a step, over all processes.

    Args:
        lengths: rows that each sample takes, as the objective lays it out.
        global_batch_size: samples of a step.
        micro_batch_size: samples of a group; divides the step.
        num_forwards: of a step, over all processes; at most its groups.
        seed: of the order.

    Raises:
        ConfigError: there are no samples, or the numbers do not fit each other.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        num_forwards: int,
        seed: int,
    ) -> None:
        check_batch(global_batch_size, micro_batch_size, num_forwards)
        self._lengths = np.asarray(lengths, dtype=np.int64)
        if not len(self._lengths):
            raise ConfigError("there are no samples to train on; give at least one")
        self._global_batch_size, self._micro_batch_size = global_batch_size, micro_batch_size
        self.num_forwards, self._seed = num_forwards, seed
        self.num_groups = global_batch_size // micro_batch_size

    def num_steps(self, num_epochs: float) -> int:
        """Whole steps in a number of epochs; the samples behind the last one are not trained on."""
        return int(num_epochs * len(self._lengths) + 1e-6) // self._global_batch_size

    def groups(self, step: int) -> list[tuple[Draw, ...]]:
        """The groups of a step, counted from 0."""
        num_samples, first = len(self._lengths), step * self._global_batch_size
        draws = []
        for place in range(first, first + self._global_batch_size):
            epoch, number = divmod(place, num_samples)
            draws.append(Draw(epoch, int(_order(self._seed, epoch, num_samples)[number])))
        size = self._micro_batch_size
        return [tuple(draws[start : start + size]) for start in range(0, len(draws), size)]

    def forwards(self, step: int) -> list[list[tuple[Draw, ...]]]:
        """The forwards of a step, the fullest first; each a list of one or more groups."""
        groups = self.groups(step)
        rows = [int(sum(self._lengths[draw.sample] for draw in group)) for group in groups]
        loads = [(0, number) for number in range(self.num_forwards)]
        forwards: list[list[tuple[Draw, ...]]] = [[] for _ in loads]
        for group in sorted(range(len(groups)), key=lambda group: (-rows[group], group)):
            load, number = loads[0]
            forwards[number].append(groups[group])
            heapq.heapreplace(loads, (load + rows[group], number))
        return [forwards[number] for _, number in sorted(loads, key=lambda load: (-load[0], load[1]))]

    def forward(self, step: int, turn: int, rank: int, world_size: int) -> list[tuple[Draw, ...]]:
        """What one process computes in its n-th forward of a step.

        Processes take the forwards in turns, fullest first, so that those which wait for each other are alike.

        Args:
            step: from 0.
            turn: from 0 up to `num_forwards / world_size`.
            rank: of the process.
            world_size: number of processes, which `check_world` accepts.
        """
        return self.forwards(step)[turn * world_size + rank]


def check_batch(global_batch_size: int, micro_batch_size: int, num_forwards: int) -> None:
    """Refuses a step that cannot be cut as asked.

    Raises:
        ConfigError: likewise.
    """
    if global_batch_size < 1 or micro_batch_size < 1 or global_batch_size % micro_batch_size:
        raise ConfigError(
            f"global_batch_size is {global_batch_size} and micro_batch_size {micro_batch_size}; a step is cut into "
            "whole micro-batches, so make the first a multiple of the second"
        )
    if not 1 <= num_forwards <= global_batch_size // micro_batch_size:
        raise ConfigError(
            f"num_forwards is {num_forwards}; a step of {global_batch_size} samples has "
            f"{global_batch_size // micro_batch_size} micro-batches of {micro_batch_size}, and every forward needs at "
            "least one of them"
        )


def check_world(num_forwards: int, world_size: int) -> None:
    """Refuses a number of processes that a step cannot be shared by.

    Raises:
        ConfigError: likewise.
    """
    if world_size < 1 or num_forwards % world_size:
        raise ConfigError(
            f"a step of {num_forwards} forwards cannot be shared evenly by {world_size} processes; start a number of "
            "processes that divides it, or set optimisation.num_forwards to a multiple of them"
        )
