"""Two runs on the same items, item by item: what changed from A to B, and what a sample of this size can show."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from refusion_eval.errors import DataError, StoreError
from refusion_eval.metrics.bootstrap import Interval, bootstrap, difference_statistic
from refusion_eval.metrics.speed import speedup
from refusion_eval.results.facts import RunFacts, SampleFacts, TaskFacts, read_facts
from refusion_eval.results.task_metrics import seed_of
from refusion_eval.store.manifest import as_json, differences

_Z_SIGNIFICANCE = 1.959964  # two-sided 5%
_Z_POWER = 0.841621  # 80%

# Parts of a manifest that differ between any two runs, or that are compared task by task.
_NOT_COMPARED = ("command", "tasks", "roofline")


class ItemChange(NamedTuple):
    """One item in both runs.

    Attributes:
        item_id: the benchmark's own name for the item.
        before: share of the item's samples that are right in A.
        after: the same share in B.
        same_prompt: whether the rendered prompts are equal.
    """

    item_id: str
    before: float
    after: float
    same_prompt: bool


@dataclass(frozen=True, kw_only=True)
class TaskComparison:
    """One task in both runs.

    Attributes:
        task: name of the task.
        mini: whether the task is a synthetic look-alike.
        items: all items that were compared, by item id.
        left_out: number of items that only one of the runs has.
        difference: accuracy of B minus accuracy of A in points, paired by item.
        detectable: smallest true difference in points that such a sample shows; NaN with one item.
        settings: decoder settings that differ, one line each.
        speed: TPS of B over TPS of A on the same items; None if there is no such ratio.
        no_speed: why there is no ratio.
    """

    task: str
    mini: bool
    items: Sequence[ItemChange]
    left_out: int
    difference: Interval
    detectable: float
    settings: Sequence[str]
    speed: Interval | None
    no_speed: str

    @property
    def accuracies(self) -> tuple[float, float]:
        """Accuracy of A and of B on the compared items, in percent."""
        before, after = zip(*((item.before, item.after) for item in self.items), strict=True)
        return 100 * float(np.mean(before)), 100 * float(np.mean(after))

    @property
    def gained(self) -> list[str]:
        """Ids of the items that are right more often in B."""
        return [item.item_id for item in self.items if item.after > item.before]

    @property
    def lost(self) -> list[str]:
        """Ids of the items that are right less often in B."""
        return [item.item_id for item in self.items if item.after < item.before]

    @property
    def other_prompts(self) -> list[str]:
        """Ids of the items whose prompts differ."""
        return [item.item_id for item in self.items if not item.same_prompt]


class Comparison(NamedTuple):
    """Two runs.

    Attributes:
        before: id of A.
        after: id of B.
        settings: what differs between the runs as a whole, one line each.
        tasks: the tasks that both runs have.
        only_in_one: names of the tasks that only one of the runs has.
    """

    before: str
    after: str
    settings: Sequence[str]
    tasks: Sequence[TaskComparison]
    only_in_one: Sequence[str]


def compare_runs(
    before: str | os.PathLike[str], after: str | os.PathLike[str], *, common_items: bool = False
) -> Comparison:
    """Compares two run directories.

    Args:
        before: run directory A.
        after: run directory B.
        common_items: compare what both have where their items differ, instead of refusing.

    Raises:
        StoreError: a directory is unreadable, the runs have no task in common, or a task has another version, several
            settings, or other items.
    """
    run_a, run_b = read_facts(before), read_facts(after)
    tasks_a, tasks_b = _tasks(run_a), _tasks(run_b)
    names = sorted(tasks_a.keys() & tasks_b.keys())
    if not names:
        contents = " and ".join(
            f"{facts.run.run_id} ({', '.join(sorted(tasks)) or 'nothing'})"
            for facts, tasks in ((run_a, tasks_a), (run_b, tasks_b))
        )
        raise StoreError(f"{contents} have no task in common; run both on the same tasks")
    return Comparison(
        before=run_a.run.run_id,
        after=run_b.run.run_id,
        settings=differences(_described(run_a), _described(run_b), ("A", "B")),
        tasks=[_compare_task(tasks_a[name], tasks_b[name], common_items) for name in names],
        only_in_one=sorted(tasks_a.keys() ^ tasks_b.keys()),
    )


def detectable_difference(differences_of_items: ArrayLike) -> float:
    """The smallest true mean difference that a paired sample like this one shows, in the unit of the differences.

    (z_0.975 + z_0.8) * s / sqrt(n): found significant at 5% (two-sided) with a probability of 80%; s is the standard
    deviation of the items' differences. If hardly any item differs, s would promise that nothing stays hidden, so it is
    taken as at least that of a single item of n that flips.

    Returns:
        NaN for fewer than two items.
    """
    values = np.asarray(differences_of_items, dtype=np.float64)
    num_items = len(values)
    if num_items < 2:
        return math.nan
    single_flip = math.sqrt((1 - 1 / num_items) / num_items)
    spread = max(float(values.std(ddof=1)), single_flip)
    return (_Z_SIGNIFICANCE + _Z_POWER) * spread / math.sqrt(num_items)


def _tasks(facts: RunFacts) -> dict[str, TaskFacts]:
    tasks = {task.task: task for task in facts.tasks}
    if len(tasks) < len(facts.tasks):
        names = [task.task for task in facts.tasks]
        twice = next(name for name in names if names.count(name) > 1)
        raise StoreError(f"{facts.run.run_id} holds {twice} in several versions or settings; compare runs of one")
    return tasks


def _compare_task(before: TaskFacts, after: TaskFacts, common_items: bool) -> TaskComparison:
    if before.task_version != after.task_version:
        raise StoreError(
            f"{before.task} is version {before.task_version!r} in A and {after.task_version!r} in B, which is another "
            "task; run one of them again"
        )
    items_a, items_b = _scored(before), _scored(after)
    common = sorted(items_a.keys() & items_b.keys())
    left_out = len(items_a.keys() ^ items_b.keys())
    if not common or (left_out and not common_items):
        counts = f"{len(items_a)} scored items and B {len(items_b)}, {len(common)} of them in common"
        advice = "compare these with --common-items" if common else "run both on the same items"
        raise StoreError(f"{before.task}: A has {counts}; {advice}")
    items = [_change(items_a[item], items_b[item]) for item in common]
    shares, seed = [[item.after for item in items], [item.before for item in items]], seed_of(before.task)
    speed, no_speed = None, ""
    try:
        speed = speedup(after.timings, before.timings, seed=seed).ratio.interval()
    except DataError as error:
        no_speed = str(error)
    return TaskComparison(
        task=before.task,
        mini=before.mini,
        items=sorted(items, key=lambda item: item.item_id),
        left_out=left_out,
        difference=bootstrap(shares, difference_statistic, seed=seed).scaled(100).interval(),
        detectable=100 * detectable_difference([item.after - item.before for item in items]),
        settings=differences(before.settings, after.settings, ("A", "B")),
        speed=speed,
        no_speed=no_speed,
    )


def _scored(facts: TaskFacts) -> dict[Any, list[SampleFacts]]:
    """The judged samples of each item, by the item's hash."""
    judged = [sample for sample in facts.samples if sample.verdict is not None]
    return {samples[0].timing.item: samples for samples in facts.by_item(judged)}


def _change(before: Sequence[SampleFacts], after: Sequence[SampleFacts]) -> ItemChange:
    same_prompt = {sample.prompt_hash for sample in before} == {sample.prompt_hash for sample in after}
    return ItemChange(before[0].item_id, _share(before), _share(after), same_prompt)


def _share(samples: Sequence[SampleFacts]) -> float:
    return float(np.mean([sample.verdict.value for sample in samples if sample.verdict is not None]))


def _described(facts: RunFacts) -> Mapping[str, Any]:
    """What is compared of a run as a whole. Its settings tables are those of all tasks and stand with each task."""
    manifest = {name: value for name, value in facts.run.manifest.to_json().items() if name not in _NOT_COMPARED}
    settings = {name: value for name, value in manifest["settings"].items() if name != "tables"}
    hardware = {name: value for name, value in manifest["hardware"].items() if name != "gpu_detail"}
    return as_json({**manifest, "settings": settings, "hardware": hardware})
