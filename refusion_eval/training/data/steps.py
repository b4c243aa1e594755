"""Assigns samples to optimiser steps, and the samples of a step to its forwards.

A step has exactly `global_batch_size` samples. The plan depends on the seed, the samples and the settings only; the
number of processes decides only which process computes which forward of a step.
"""

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from refusion_eval.errors import ConfigError

# Last parts of seeds, one for each purpose, so that no two streams of random numbers are equal. They are not 0, because
# numpy ignores zeros at the end of a seed.
_ORDER, _CORRUPTION = 2, 3


class Draw(NamedTuple):
    """One use of a sample: 0-based numbers of the epoch and of the sample."""

    epoch: int
    sample: int


def corruption_rng(seed: int, draw: Draw) -> np.random.Generator:
    """Generator of all random choices for a sample in an epoch; equal in every process."""
    return np.random.default_rng([seed, _CORRUPTION, draw.epoch, draw.sample])


@lru_cache(maxsize=2)  # a step may hold the end of one epoch and the beginning of the next
def _order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    return np.random.default_rng([seed, _ORDER, epoch]).permutation(num_samples)


class StepPlan:
    """Plan of all steps of a training run.

    Each epoch is a new order of all samples. A step takes the next `global_batch_size` samples and may cross the end of
    an epoch, so that all steps are equally large and no epoch leaves a sample out. Only after the last whole step of
    the run fewer samples than a step remain unused.

    The samples of a step, in their order, form groups of `micro_batch_size`, over which the release normalises its
    loss. The groups are assigned to `num_forwards` forwards, the longest group first, each to the forward with the
    fewest rows so far (LPT scheduling: the fullest forward has at most 4/3 of the rows of the optimum).

    Attributes:
        num_groups: number of groups of a step.
        num_forwards: number of forwards of a step, over all processes.

    Args:
        lengths: number of rows that the objective makes of each sample.
        global_batch_size: number of samples of a step.
        micro_batch_size: number of samples of a group; divides `global_batch_size`.
        num_forwards: number of forwards of a step, over all processes; at most the number of groups.
        seed: seed of the order of samples.

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
        """Number of whole steps in a number of epochs; the samples after the last step are not used."""
        return int(num_epochs * len(self._lengths) + 1e-6) // self._global_batch_size

    def groups(self, step: int) -> list[tuple[Draw, ...]]:
        """The groups of a step (0-based)."""
        num_samples, first = len(self._lengths), step * self._global_batch_size
        draws = []
        for index in range(first, first + self._global_batch_size):
            epoch, number = divmod(index, num_samples)
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
        """The groups of forward number `turn` (0-based) of one process in a step.

        Ranks take the forwards in turns, fullest first, so that forwards that run at the same time have similar sizes.
        """
        return self.forwards(step)[turn * world_size + rank]


def check_batch(global_batch_size: int, micro_batch_size: int, num_forwards: int) -> None:
    """Checks that a step consists of whole micro-batches, at least one for each forward.

    Raises:
        ConfigError: it does not.
    """
    if global_batch_size < 1 or micro_batch_size < 1 or global_batch_size % micro_batch_size:
        raise ConfigError(
            f"global_batch_size is {global_batch_size} and micro_batch_size {micro_batch_size}; a step consists of "
            "whole micro-batches, so make the first a multiple of the second"
        )
    if not 1 <= num_forwards <= global_batch_size // micro_batch_size:
        raise ConfigError(
            f"num_forwards is {num_forwards}; a step of {global_batch_size} samples has "
            f"{global_batch_size // micro_batch_size} micro-batches of {micro_batch_size}, and every forward needs at "
            "least one of them"
        )


def check_world(num_forwards: int, world_size: int) -> None:
    """Checks that the number of processes divides the number of forwards of a step.

    Raises:
        ConfigError: it does not.
    """
    if world_size < 1 or num_forwards % world_size:
        raise ConfigError(
            f"a step of {num_forwards} forwards cannot be shared evenly by {world_size} processes; start a number of "
            "processes that divides it, or set optimisation.num_forwards to a multiple of them"
        )
