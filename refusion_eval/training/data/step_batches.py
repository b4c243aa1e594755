"""The batches of a training run, made by data-loader workers: corrupted, packed, and weighed as `steps` plans them."""

from typing import NamedTuple, TypedDict

import numpy as np
from torch.utils.data import DataLoader, Dataset

from refusion_eval.training.config import ObjectiveConfig
from refusion_eval.training.data.collate import PackedBatch, collate_groups
from refusion_eval.training.data.steps import StepPlan, corruption_rng
from refusion_eval.training.data.token_cache import TokenCache
from refusion_eval.training.flops import visible_pairs
from refusion_eval.training.objectives.table import OBJECTIVES, SpecialIds, num_rows


class Place(NamedTuple):
    """Which of the run's processes this is.

    Attributes:
        rank: from 0.
        world_size: number of processes.
    """

    rank: int
    world_size: int


class ForwardInputs(TypedDict):
    """What one forward is made of.

    Attributes:
        batch: its loss is the mean over the step's micro-batches, times the number of forwards of a step, as far as it
            holds them: the mean over all forwards of a step is the mean over all its micro-batches.
        num_tokens: of the samples, as they are in the data.
        num_pairs: pairs of rows of which one sees the other.
    """

    batch: PackedBatch
    num_tokens: int
    num_pairs: int


def example_lengths(samples: TokenCache, config: ObjectiveConfig) -> np.ndarray:
    """[N], rows that each sample takes in a pack."""
    return num_rows(config, samples.prompt_lengths, samples.lengths - samples.prompt_lengths)


class StepBatches(Dataset[ForwardInputs]):
    """One process' forwards, step after step.

    Args:
        samples: to train on.
        config: of the objective.
        ids: token ids that it puts into texts.
        plan: of the steps, made with `example_lengths`.
        num_steps: of the run.
        seed: of the corruption.
        place: of this process.
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
        place: Place,
    ) -> None:
        self._samples, self._config, self._ids, self._plan = samples, config, ids, plan
        self._num_steps, self._seed, self._place = num_steps, seed, place
        self._forwards_per_process = plan.num_forwards // place.world_size

    def __len__(self) -> int:
        return self._num_steps * self._forwards_per_process

    def __getitem__(self, index: int) -> ForwardInputs:
        step, turn = divmod(index, self._forwards_per_process)
        make = OBJECTIVES[self._config.objective]
        groups, num_tokens = [], 0
        for draws in self._plan.forward(step, turn, *self._place):
            group = []
            for draw in draws:
                sample, rng = self._samples[draw.sample], corruption_rng(self._seed, draw)
                group.append(make(sample, rng, self._config, self._ids))
                num_tokens += sample.length
            groups.append(group)
        return ForwardInputs(
            batch=collate_groups(
                groups,
                normalisation=self._config.normalisation,
                num_groups=self._plan.num_groups / self._plan.num_forwards,
            ),
            num_tokens=num_tokens,
            num_pairs=sum(visible_pairs(example) for group in groups for example in group),
        )

    def loader(self, num_workers: int) -> "DataLoader[ForwardInputs]":
        """The forwards in their order, prepared by a number of processes; 0 is this one."""
        return DataLoader(self, batch_size=1, shuffle=False, collate_fn=_only, num_workers=num_workers)


def _only(items: list[ForwardInputs]) -> ForwardInputs:
    (item,) = items
    return item
