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

from refusion_eval.training.config import ObjectiveConfig, OptimisationConfig
from refusion_eval.training.data.collate import PackedBatch, collate
from refusion_eval.training.data.token_cache import TokenCache
from refusion_eval.training.objectives.example import Example
from refusion_eval.training.objectives.table import OBJECTIVES, SpecialIds

# Last parts of seeds, one for each purpose, so that no two streams of random numbers are equal. They are not 0, because
# numpy ignores zeros at the end of a seed.
_ORDER, _CORRUPTION = 2, 3


class Draw(NamedTuple):
    epoch: int  # 0-based
    sample: int  # 0-based


class ProcessRank(NamedTuple):
    rank: int
    world_size: int


class ForwardInputs(TypedDict):
    batch: PackedBatch  # whole micro-batches; the mean of its loss over all forwards of a step is that of the step
    num_tokens: int  # of the samples, without filling and second copies
    num_pairs: int  # of rows of which one sees the other


def corruption_rng(seed: int, draw: Draw) -> np.random.Generator:
    """Generator of all random choices for a sample in an epoch; equal in every process."""
    return np.random.default_rng([seed, _CORRUPTION, draw.epoch, draw.sample])


@lru_cache(maxsize=2)  # a step may hold the end of one epoch and the beginning of the next
def _order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    return np.random.default_rng([seed, _ORDER, epoch]).permutation(num_samples)


class StepPlan:
    """The samples of all steps, in groups of `micro_batch_size`, and the groups of each of a step's `num_forwards`."""

    def __init__(self, lengths: Sequence[int] | np.ndarray, config: OptimisationConfig) -> None:
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._global_batch_size, self._micro_batch_size = config.global_batch_size, config.micro_batch_size
        self.seed, self.num_forwards = config.seed, config.forwards_of_step
        self.num_groups = self._global_batch_size // self._micro_batch_size
        self.epochs_per_step = self._global_batch_size / len(self._lengths)

    def num_steps(self, num_epochs: float) -> int:
        return int(num_epochs * len(self._lengths) + 1e-6) // self._global_batch_size

    def groups(self, step: int) -> list[tuple[Draw, ...]]:
        """The groups of a step (0-based), over each of which the release normalises its loss."""
        num_samples, first = len(self._lengths), step * self._global_batch_size
        draws = []
        # A step may cross the end of an epoch, so that all steps are equally large and no epoch leaves a sample out.
        for index in range(first, first + self._global_batch_size):
            epoch, number = divmod(index, num_samples)
            draws.append(Draw(epoch, int(_order(self.seed, epoch, num_samples)[number])))
        size = self._micro_batch_size
        return [tuple(draws[start : start + size]) for start in range(0, len(draws), size)]

    def forwards(self, step: int) -> list[list[tuple[Draw, ...]]]:
        """The forwards of a step, the fullest first; each a list of one or more groups."""
        groups = self.groups(step)
        rows = [int(sum(self._lengths[draw.sample] for draw in group)) for group in groups]
        loads = [(0, number) for number in range(self.num_forwards)]
        forwards: list[list[tuple[Draw, ...]]] = [[] for _ in loads]
        # LPT scheduling: the longest group first, each to the forward with the fewest rows so far. The fullest forward
        # then has at most 4/3 of the rows of the optimum.
        for group in sorted(range(len(groups)), key=lambda group: (-rows[group], group)):
            load, number = loads[0]
            forwards[number].append(groups[group])
            heapq.heapreplace(loads, (load + rows[group], number))
        return [forwards[number] for _, number in sorted(loads, key=lambda load: (-load[0], load[1]))]


class StepBatches(Dataset[ForwardInputs]):
    """All forwards of one process, in the order of the steps; data-loader workers corrupt and pack their samples."""

    def __init__(
        self,
        samples: TokenCache,
        config: ObjectiveConfig,
        ids: SpecialIds,
        plan: StepPlan,
        num_steps: int,
        process: ProcessRank,
    ) -> None:
        self._samples, self._config, self._ids, self._plan = samples, config, ids, plan
        self._num_steps, self._process = num_steps, process
        self._forwards_per_process = plan.num_forwards // process.world_size
        self.epochs_per_step = plan.epochs_per_step

    def __len__(self) -> int:
        return self._num_steps * self._forwards_per_process

    def __getitem__(self, index: int) -> ForwardInputs:
        step, turn = divmod(index, self._forwards_per_process)
        # The processes take the forwards in turns, so that forwards that run at the same time have similar sizes.
        draws = self._plan.forwards(step)[turn * self._process.world_size + self._process.rank]
        examples = [[self._example(draw) for draw in group] for group in draws]
        num_groups = self._plan.num_groups / self._plan.num_forwards
        return ForwardInputs(
            batch=collate(examples, normalisation=self._config.normalisation, num_groups=num_groups),
            num_tokens=sum(int(self._samples.lengths[draw.sample]) for group in draws for draw in group),
            num_pairs=sum(example.num_visible_pairs() for group in examples for example in group),
        )

    def _example(self, draw: Draw) -> Example:
        rng = corruption_rng(self._plan.seed, draw)
        return OBJECTIVES[self._config.objective](self._samples[draw.sample], rng, self._config, self._ids)

    def loader(self, num_workers: int) -> "DataLoader[ForwardInputs]":
        return DataLoader(self, batch_size=1, shuffle=False, collate_fn=itemgetter(0), num_workers=num_workers)
