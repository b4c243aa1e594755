"""Two runs on the same items, item by item: what changed from A to B, and what a sample of this size can show."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, kw_only=True)
class ItemChange:
    """One item in both runs.

    Attributes:
        item_id: the benchmark's own name for it.
        before, after: share of its samples that are right, in A and B.
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
        task: its name.
        mini: whether it is a synthetic look-alike.
        items: all that were compared, by item id.
        left_out: items that only one of the runs has.
        difference: accuracy of B minus accuracy of A in points, paired.
        detectable: smallest true difference in points that such a sample shows; NaN with one item.
        settings: decoder settings that differ, one line each.
        speed: TPS of B over TPS of A on the same items; None if there is no such ratio.
        no_speed: why not.
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
        """Of A and B on the compared items, in percent."""
        before, after = ([getattr(item, name) for item in self.items] for name in ("before", "after"))
        return 100 * float(np.mean(before)), 100 * float(np.mean(after))

    @property
    def gained(self) -> list[str]:
        """Items that are right more often in B."""
        return [item.item_id for item in self.items if item.after > item.before]

    @property
    def lost(self) -> list[str]:
        """Items that are right less often in B."""
        return [item.item_id for item in self.items if item.after < item.before]

    @property
    def other_prompts(self) -> list[str]:
        """Items that were asked in other words."""
        return [item.item_id for item in self.items if not item.same_prompt]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs.

    Attributes:
        before, after: their ids, A and B.
        settings: what differs between the runs as a whole, one line each.
        tasks: what both have.
        only_in_one: tasks that only one of them has.
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
        before: A.
        after: B.
        common_items: compare what both have where their items differ, instead of refusing.

    Raises:
        StoreError: a directory is unreadable, the runs have no task in common, or a task has another version, several
            settings, or other items.
    """
    runs = (read_facts(before), read_facts(after))
    of_run = [_tasks(facts) for facts in runs]
    names = sorted(of_run[0].keys() & of_run[1].keys())
    if not names:
        held = " and ".join(
            f"{facts.run.run_id} ({', '.join(sorted(t)) or 'nothing'})" for facts, t in zip(runs, of_run, strict=True)
        )
        raise StoreError(f"{held} have no task in common; run both on the same tasks")
    return Comparison(
        before=runs[0].run.run_id,
        after=runs[1].run.run_id,
        settings=_run_differences(*runs),
        tasks=[_compare_task(of_run[0][name], of_run[1][name], common_items) for name in names],
        only_in_one=sorted(of_run[0].keys() ^ of_run[1].keys()),
    )


def detectable_difference(differences_of_items: ArrayLike) -> float:
    """The smallest true mean difference that a paired sample like this one shows, in the unit of the differences.

    (z_0.975 + z_0.8) * s / sqrt(n): found significant at 5% (two-sided) with a probability of 80%; s is the standard
    deviation of the items' differences. Where no item or hardly any differs, s would promise that nothing could stay
    hidden; so it is taken as at least that of a single item of n that flips.

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
    found: dict[str, TaskFacts] = {}
    for task in facts.tasks:
        if task.task in found:
            raise StoreError(
                f"{facts.run.run_id} holds {task.task} in several versions or settings; compare runs of one"
            )
        found[task.task] = task
    return found


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
    shares = [[item.after for item in items], [item.before for item in items]]
    difference = bootstrap(shares, difference_statistic, seed=seed_of(before.task)).scaled(100).interval()
    speed, no_speed = _speed_ratio(before, after)
    return TaskComparison(
        task=before.task,
        mini=before.mini,
        items=sorted(items, key=lambda item: item.item_id),
        left_out=left_out,
        difference=difference,
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
    return ItemChange(
        item_id=before[0].item_id,
        before=_share(before),
        after=_share(after),
        same_prompt={sample.prompt_hash for sample in before} == {sample.prompt_hash for sample in after},
    )


def _share(samples: Sequence[SampleFacts]) -> float:
    return float(np.mean([sample.verdict.value for sample in samples if sample.verdict is not None]))


def _speed_ratio(before: TaskFacts, after: TaskFacts) -> tuple[Interval | None, str]:
    try:
        return speedup(after.timings, before.timings, seed=seed_of(before.task)).ratio.interval(), ""
    except DataError as error:
        return None, str(error)


def _run_differences(before: RunFacts, after: RunFacts) -> list[str]:
    return differences(_described(before), _described(after), ("A", "B"))


def _described(facts: RunFacts) -> Mapping[str, Any]:
    manifest = {name: value for name, value in facts.run.manifest.to_json().items() if name not in _NOT_COMPARED}
    # Settings tables are of all tasks; what is in force stands with each task.
    settings = {name: value for name, value in manifest["settings"].items() if name != "tables"}
    hardware = {name: value for name, value in manifest["hardware"].items() if name != "gpu_detail"}
    return as_json({**manifest, "settings": settings, "hardware": hardware})
