"""The batches of a training run, which data-loader workers corrupt and pack according to the plan of `steps`."""

from typing import NamedTuple, TypedDict

import numpy as np
from torch.utils.data import DataLoader, Dataset

from refusion_eval.training.config import ObjectiveConfig
from refusion_eval.training.data.collate import PackedBatch, collate_groups
from refusion_eval.training.data.steps import StepPlan, corruption_rng
from refusion_eval.training.data.token_cache import TokenCache
from refusion_eval.training.objectives.table import OBJECTIVES, SpecialIds, num_rows


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
        num_pairs: number of pairs of rows that see each other.
    """

    batch: PackedBatch
    num_tokens: int
    num_pairs: int


def example_lengths(samples: TokenCache, config: ObjectiveConfig) -> np.ndarray:
    """[N], number of rows of each sample in a pack."""
    return num_rows(config, samples.prompt_lengths, samples.lengths - samples.prompt_lengths)


class StepBatches(Dataset[ForwardInputs]):
    """All forwards of one process, in the order of the steps."""

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
        make = OBJECTIVES[self._config.objective]
        groups, num_tokens = [], 0
        for draws in self._plan.forward(step, turn, *self._process):
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
            num_pairs=sum(example.num_visible_pairs() for group in groups for example in group),
        )

    def loader(self, num_workers: int) -> "DataLoader[ForwardInputs]":
        """A loader of all forwards in order; with 0 workers this process prepares them."""
        return DataLoader(self, batch_size=1, shuffle=False, collate_fn=_only_item, num_workers=num_workers)


def _only_item(items: list[ForwardInputs]) -> ForwardInputs:
    (item,) = items
    return item
