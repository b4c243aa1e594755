"""The batches of a training run: which samples a step takes, which forward computes them, and the packs of a process.

A step has exactly `global_batch_size` samples. The plan depends on the seed, the samples and the settings only; the
number of processes decides only which process computes which forward of a step.
"""

import heapq
from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple, TypedDict

import numpy as np
from torch.utils.data import DataLoader, Dataset

from refusion_eval.errors import ConfigError
from refusion_eval.training.config import ObjectiveConfig
from refusion_eval.training.data.collate import PackedBatch, collate_groups
from refusion_eval.training.data.token_cache import TokenCache
from refusion_eval.training.objectives.example import Example
from refusion_eval.training.objectives.table import OBJECTIVES, SpecialIds, num_rows

# Last parts of seeds, one for each purpose, so that no two streams of random numbers are equal. They are not 0, because
# numpy ignores zeros at the end of a seed.
_ORDER, _CORRUPTION = 2, 3


class Draw(NamedTuple):
    """One use of a sample: 0-based numbers of the epoch and of the sample."""

    epoch: int
    sample: int


class ProcessRank(NamedTuple):
    """0-based rank of a process and number of processes of the run."""

    rank: int
    world_size: int


class ForwardInputs(TypedDict):
    """Inputs of one forward.

    Attributes:
        batch: whole micro-batches. Its loss is scaled so that the mean over all forwards of a step is the mean over
            all micro-batches of the step.
        num_tokens: number of tokens of the samples, without filling and second copies.
    """

    batch: PackedBatch
    num_tokens: int
    num_pairs: int


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

    Args:
        num_forwards: number of forwards of a step, over all processes; at most the number of groups.

    Raises:
        ConfigError: there are no samples.
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
        self._lengths = np.asarray(lengths, dtype=np.int64)
        if not len(self._lengths):
            raise ConfigError("there are no samples to train on; give at least one")
        self._global_batch_size, self._micro_batch_size, self._seed = global_batch_size, micro_batch_size, seed
        self.num_forwards = num_forwards
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


class StepBatches(Dataset[ForwardInputs]):
    """All forwards of one process, in the order of the steps; data-loader workers corrupt and pack their samples.

    The processes take the forwards of a step in turns, fullest first, so that forwards that run at the same time have
    similar sizes.
    """

    def __init__(
        self,
        samples: TokenCache,
        config: ObjectiveConfig,
        ids: SpecialIds,
        plan: StepPlan,
        *,
        num_steps: int,
        seed: int,
        process: ProcessRank,
    ) -> None:
        self._samples, self._config, self._ids, self._plan = samples, config, ids, plan
        self._num_steps, self._seed, self._process = num_steps, seed, process
        self._forwards_per_process = plan.num_forwards // process.world_size

    def __len__(self) -> int:
        return self._num_steps * self._forwards_per_process

    def __getitem__(self, index: int) -> ForwardInputs:
        step, turn = divmod(index, self._forwards_per_process)
        draws = self._plan.forwards(step)[turn * self._process.world_size + self._process.rank]
        examples = [[self._example(draw) for draw in group] for group in draws]
        return ForwardInputs(
            batch=collate_groups(
                examples,
                normalisation=self._config.normalisation,
                num_groups=self._plan.num_groups / self._plan.num_forwards,
            ),
            num_tokens=sum(int(self._samples.lengths[draw.sample]) for group in draws for draw in group),
            num_pairs=sum(example.num_visible_pairs() for group in examples for example in group),
        )

    def _example(self, draw: Draw) -> Example:
        make = OBJECTIVES[self._config.objective]
        return make(self._samples[draw.sample], corruption_rng(self._seed, draw), self._config, self._ids)

    def loader(self, num_workers: int) -> "DataLoader[ForwardInputs]":
        """A loader of all forwards in order; with 0 workers this process prepares them."""
        return DataLoader(self, batch_size=1, shuffle=False, collate_fn=itemgetter(0), num_workers=num_workers)


def example_lengths(samples: TokenCache, config: ObjectiveConfig) -> np.ndarray:
    """[N], number of rows of each sample in a pack."""
    return num_rows(config, samples.prompt_lengths, samples.lengths - samples.prompt_lengths)
