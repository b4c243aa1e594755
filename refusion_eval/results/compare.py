"""Two runs on the same items, item by item: what changed from A to B, and what a sample of this size can show."""

import math
import os
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from refusion_eval.errors import DataError, StoreError
from refusion_eval.metrics import Z_95, Interval, by_item, mean_of_intervals, paired_difference, scaled, speedup
from refusion_eval.results.cautions import MINI_NOTE, sentences, that_hold
from refusion_eval.results.facts import (
    Extent,
    RunFacts,
    SampleFacts,
    TaskFacts,
    natural_order,
    read_facts,
    setting_text,
)
from refusion_eval.results.measured import seed_of
from refusion_eval.results.measurement import MEAN_TASK, NO_PROTOCOL, told_apart
from refusion_eval.results.render import Table, interval_cells, interval_text, markdown_prose
from refusion_eval.store.manifest import differences
from refusion_eval.store.records import BY_FILTER, PASSED, as_json

_Z_POWER = 0.841621  # 80%

# Parts of a manifest that differ between any two runs, or that are compared task by task.
_NOT_COMPARED = ("command", "tasks", "roofline", "protocol")


class ItemChange(NamedTuple):
    """An item, by the benchmark's own name, with the shares of its samples that are right in A and in B."""

    item_id: str
    before: float
    after: float
    same_prompt: bool

    @property
    def change(self) -> str:
        """Whether the item is right more often in B (`gained`) or less often (`lost`); empty if neither."""
        return "" if self.after == self.before else "gained" if self.after > self.before else "lost"


@dataclass(frozen=True, kw_only=True)
class TaskComparison:
    """One task in both runs, or the unweighted mean over several (`parts`), whose p and flips are of all items."""

    task: str
    mini: bool
    items: Sequence[ItemChange]
    left_out: int
    difference: Interval
    extents: tuple[Extent, Extent] | None = None  # of A and of B; None for a mean
    detectable: float = math.nan
    settings: Sequence[str] = ()
    speed: Interval | None = None  # TPS of B over TPS of A on the same items; None if there is no such ratio
    no_speed: str = ""
    parts: "Sequence[TaskComparison]" = ()
    mark: str = ""  # what tells a mean from others of the comparison, such as `prompts=ours`
    by_sample: Sequence[Sequence[float]] = ((), ())  # of A and of B: accuracy of each sample number in percent

    @property
    def label(self) -> str:
        return f"{self.task} ({self.mark})" if self.mark else self.task

    @property
    def accuracies(self) -> tuple[float, float]:
        """Accuracy of A and of B on the compared items, in percent."""
        pairs = [part.accuracies for part in self.parts] or [(100 * i.before, 100 * i.after) for i in self.items]
        before, after = zip(*pairs, strict=True)
        return float(np.mean(before)), float(np.mean(after))

    @property
    def spreads(self) -> tuple[float, float]:
        """Standard deviation over the samples of each accuracy; NaN where a task has one sample of an item."""
        columns = zip(*(part.by_sample for part in self.parts or [self]), strict=True)
        scores = ([fmean(of_sample) for of_sample in zip(*of_run, strict=False)] for of_run in columns)
        before, after = (stdev(of_run) if len(of_run) > 1 else math.nan for of_run in scores)
        return before, after

    @property
    def flips(self) -> dict[str, list[str]]:
        """Ids of the items that are right more often in B, less often in B, and of those whose prompts differ."""
        flips = {name: [item.item_id for item in self.items if item.change == name] for name in ("gained", "lost")}
        return flips | {"other prompts": [item.item_id for item in self.items if not item.same_prompt]}

    @property
    def p_value(self) -> float:
        """Two-sided p of McNemar's exact test for items that are right more often and less often."""
        return mcnemar(len(self.flips["gained"]), len(self.flips["lost"]))


class Comparison(NamedTuple):
    """Two runs, A (`before`) and B (`after`), by their ids; `lines` ends with the means where tasks have any."""

    before: str
    after: str
    systems: tuple[str, str]  # labels of A and of B
    settings: Sequence[str]
    tasks: Sequence[TaskComparison]
    lines: Sequence[TaskComparison]
    not_compared: Sequence[str]  # tasks that a run was not asked, or of which it has no sample yet
    notes: Sequence[str]  # what the records know of missing samples, limits and speeds

    @property
    def adjusted(self) -> list[float]:
        """The p values of `lines`: those of tasks adjusted for their number (Holm); that of the mean, which is one."""
        return [*holm([task.p_value for task in self.tasks]), *(line.p_value for line in self.lines if line.parts)]


def compare_runs(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    *,
    common_items: bool = False,
    filter_name: str | None = None,
) -> Comparison:
    """Compares two run directories, by verdicts or by an answer filter; StoreError if they cannot be compared."""
    metric = PASSED if filter_name is None else BY_FILTER + filter_name
    run_a, run_b = read_facts(before), read_facts(after)
    tasks_a, tasks_b = _tasks(run_a), _tasks(run_b)
    names = sorted(tasks_a.keys() & tasks_b.keys())
    if not names:
        of_a, of_b = (", ".join(sorted(tasks)) or "no sample yet" for tasks in (tasks_a, tasks_b))
        both = f"{run_a.run.run_id} ({of_a}) and {run_b.run.run_id} ({of_b})"
        raise StoreError(f"{both} have no task in common; run both on the same tasks")
    wanted = {task.task for facts in (run_a, run_b) for task in facts.tasks}
    if filter_name is not None:  # it may apply to some of the tasks only
        judged_a, judged_b = (
            {name for name, task in tasks.items() if _scored(task, metric)} for tasks in (tasks_a, tasks_b)
        )
        names, wanted = sorted(judged_a & judged_b), judged_a | judged_b
        if not names:
            both = f"{run_a.run.run_id} and {run_b.run.run_id}"
            advice = f"rescore both runs with --filter {filter_name}"
            raise StoreError(f"{both} have no scores by the filter {filter_name} in common; {advice}")
    tasks = [_compare_task(tasks_a[name], tasks_b[name], common_items, metric) for name in names]
    return Comparison(
        before=run_a.run.run_id,
        after=run_b.run.run_id,
        systems=(run_a.run.manifest.system, run_b.run.manifest.system),
        settings=differences(_described(run_a), _described(run_b), ("A", "B")),
        tasks=tasks,
        lines=[*tasks, *_means(tasks, tasks_a, tasks_b)],
        not_compared=sorted(wanted.difference(names)),
        notes=sentences(
            task.conditions(facts.run, is_speed=task.task in names and any(entry.speed for entry in tasks))
            for facts in (run_a, run_b)
            for task in facts.tasks
        ),
    )


def detectable_difference(differences_of_items: ArrayLike) -> float:
    """The smallest true mean difference that a paired sample like this one shows, in the unit of the differences."""
    # (z_0.975 + z_0.8) * s / sqrt(n), with s the standard deviation of the items' differences, is found significant at
    # 5% (two-sided) with a probability of 80%.
    values = np.asarray(differences_of_items, dtype=np.float64)
    num_items = len(values)
    if num_items < 2:
        return math.nan
    # If hardly any item differs, s would promise that nothing stays hidden: it is at least that of a single flip.
    single_flip = math.sqrt((1 - 1 / num_items) / num_items)
    spread = max(float(values.std(ddof=1)), single_flip)
    return (Z_95 + _Z_POWER) * spread / math.sqrt(num_items)


def mcnemar(gained: int, lost: int) -> float:
    """The two-sided p value of McNemar's exact test: as likely to gain as to lose, `gained` and `lost` are chance."""
    total, fewer = gained + lost, min(gained, lost)
    tail = sum(math.comb(total, count) for count in range(fewer + 1))
    return min(1.0, 2 * tail / 2**total)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values, in their order: each one below 5% is shown with a risk of 5% that any of them is by chance."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def _tasks(facts: RunFacts) -> dict[str, TaskFacts]:
    tasks: dict[str, TaskFacts] = {}
    for task in facts.tasks:
        if not task.asked:  # no sample is there yet
            continue
        if tasks.setdefault(task.task, task) is not task:
            raise StoreError(
                f"{facts.run.run_id} holds {task.task} in several versions, settings or protocols, and a comparison is "
                "of one; decode that one again with a new --run-dir"
            )
    return tasks


def _compare_task(before: TaskFacts, after: TaskFacts, common_items: bool, metric: str) -> TaskComparison:
    if before.task_version != after.task_version:
        both = f"{before.task} is version {before.task_version!r} in A and {after.task_version!r} in B"
        raise StoreError(
            f"{both}, which is another task; decode the older one again with a new --run-dir (`refusion-eval rescore` "
            "says how many verdicts of its texts change)"
        )
    items_a, items_b = _scored(before, metric), _scored(after, metric)
    common = sorted(items_a.keys() & items_b.keys())
    left_out = len(items_a.keys() ^ items_b.keys())
    if not common or (left_out and not common_items):
        counts = f"{len(items_a)} scored items and B {len(items_b)}, {len(common)} of them in common"
        advice = "compare these with --common-items" if common else "run both on the same items"
        raise StoreError(f"{before.task}: A has {counts}; {advice}")
    items = [_change(items_a[item], items_b[item], metric) for item in common]
    seed = seed_of(before.task)
    speed, no_speed = None, ""
    try:
        speed = speedup(after.samples, before.samples, seed=seed)[0].interval()
    except DataError as error:
        no_speed = str(error)
    shares = zip(*((item.before, item.after) for item in items), strict=True)
    difference = scaled(paired_difference(*shares, seed=seed), 100)
    return TaskComparison(
        task=before.task,
        mini=before.mini,
        items=sorted(items, key=lambda item: natural_order(item.item_id)),
        left_out=left_out,
        difference=difference,
        extents=(before.extent, after.extent),
        detectable=_detectable(items, difference),
        settings=differences(_without_none(before.settings), _without_none(after.settings), ("A", "B")),
        speed=speed,
        no_speed=no_speed,
        by_sample=[_by_sample([of_run[item] for item in common], metric) for of_run in (items_a, items_b)],
    )


def _by_sample(items: Sequence[Sequence[SampleFacts]], metric: str) -> list[float]:
    """The accuracy of each sample number that every item has, in percent."""
    return [100 * fmean(sample.scores[metric].value for sample in samples) for samples in zip(*items, strict=False)]


def _detectable(items: Sequence[ItemChange], difference: Interval) -> float:
    """The detectable difference in points, at least that whose interval would leave out 0 four times out of five."""
    # With few items, or hardly any change, the standard deviation of the sample promises too much.
    by_interval = (1 + _Z_POWER / Z_95) * (difference.high - difference.low) / 2
    return max(100 * detectable_difference([item.after - item.before for item in items]), by_interval)


def _means(
    tasks: Sequence[TaskComparison], tasks_a: Mapping[str, TaskFacts], tasks_b: Mapping[str, TaskFacts]
) -> list[TaskComparison]:
    """The mean of each kind of task, with what tells several from each other; controls are in none."""
    of_kinds: dict[Hashable, list[TaskComparison]] = {}
    for task in tasks:
        if not tasks_a[task.task].is_control:
            of_kinds.setdefault((tasks_a[task.task].row.kind, tasks_b[task.task].row.kind), []).append(task)
    groups = [of_kind for of_kind in of_kinds.values() if len(of_kind) > 1]
    both = ([of_run[task.task] for of_run in (tasks_a, tasks_b) for task in group] for group in groups)
    marks = told_apart([(MEAN_TASK, _shared(facts)) for facts in both])
    return [_mean_of_tasks(group, ", ".join(mark)) for group, mark in zip(groups, marks, strict=True)]


def _shared(tasks: Sequence[TaskFacts]) -> dict[str, str]:
    """What makes the kind of tasks, by name; where A and B differ in it, first that of A."""
    values = {
        "mini": [setting_text(task.mini) for task in tasks],
        "prompts": [task.row.prompts for task in tasks],
        "protocol": [task.protocol or NO_PROTOCOL for task in tasks],
    }
    return {name: "|".join(dict.fromkeys(texts)) for name, texts in values.items()}


def _mean_of_tasks(tasks: Sequence[TaskComparison], mark: str) -> TaskComparison:
    return TaskComparison(
        task=MEAN_TASK,
        mini=tasks[0].mini,
        items=[item for task in tasks for item in task.items],
        left_out=sum(task.left_out for task in tasks),
        difference=mean_of_intervals([task.difference for task in tasks]),
        detectable=math.hypot(*(task.detectable for task in tasks)) / len(tasks),
        parts=tasks,
        mark=mark,
    )


def _scored(task: TaskFacts, metric: str) -> dict[Any, list[SampleFacts]]:
    """The judged samples of each item, by the item's hash."""
    return {item[0].item: item for item in by_item([sample for sample in task.samples if metric in sample.scores])}


def _change(before: Sequence[SampleFacts], after: Sequence[SampleFacts], metric: str) -> ItemChange:
    shares = [float(np.mean([sample.scores[metric].value for sample in samples])) for samples in (before, after)]
    same_prompt = {sample.prompt_hash for sample in before} == {sample.prompt_hash for sample in after}
    return ItemChange(before[0].item_id, shares[0], shares[1], same_prompt)


def _described(facts: RunFacts) -> Mapping[str, Any]:
    """The facts of a run as a whole that are compared."""
    manifest = _without(facts.run.manifest.to_json(), _NOT_COMPARED)
    # What also stands as a fact of the run, or with each task, is not named again as an argument.
    elsewhere = {*manifest, "device", *(name for task in facts.tasks for name in task.settings)}
    parts = {
        # Decoder settings of the command line (model_args), and the tables of settings, stand with each task.
        "settings": _without(manifest["settings"], ("tables", "model_args")),
        "hardware": _without(manifest["hardware"], ("gpu_detail",)),
        "protocol": facts.run.manifest.protocol.get("label"),
        "arguments": _without(manifest["arguments"], elsewhere),
    }
    return as_json(_without_none(manifest | parts))


def _without(values: Mapping[str, Any], names: Container[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _without_none(sections: Mapping[str, Any]) -> dict[str, Any]:
    """The values of nested mappings without None, which says no more than a missing value."""
    values = {name: value for name, value in sections.items() if value is not None}
    return {name: _without_none(value) if isinstance(value, Mapping) else value for name, value in values.items()}


MOST_SHOWN = 8  # item ids in a line of text; the CSV has all


def comparison_table(comparison: Comparison) -> Table:
    """One line for each task and one for each mean. Other prompts have a column if there are any."""
    counted = ["gained", "lost"]
    if any(task.flips["other prompts"] for task in comparison.lines):
        counted.append("other prompts")
    several = len(comparison.tasks) > 1
    rows = [
        (
            task.label,
            str(len(task.items)),
            *(
                f"{accuracy:.1f}" if math.isnan(spread) else f"{accuracy:.1f} ± {spread:.1f}"
                for accuracy, spread in zip(task.accuracies, task.spreads, strict=True)
            ),
            interval_text(task.difference),
            "" if math.isnan(task.detectable) else f"{task.detectable:.2f}",
            f"{task.p_value:.2g}",
            *([f"{adjusted:.2g}"] if several else []),
            *(str(len(task.flips[name])) for name in counted),
            interval_text(task.speed, missing="-"),
        )
        for task, adjusted in zip(comparison.lines, comparison.adjusted, strict=True)
    ]
    statements = {
        "B - A: points, paired by item, 95% interval. Detectable: true difference in points that a sample like this "
        "finds significant (5%) about four times out of five, at least 1.43 times half the interval's width, however "
        "few items changed. p: McNemar's exact test, which needs six changed items "
        "to get below 5%.": True,
        "p (Holm): adjusted for the number of tasks, so that the risk of any false finding among them is 5%. The mean "
        "is one hypothesis of its own, and its p is not adjusted.": several,
        "Gained, lost: items that only B, only A has right (of several samples: more often).": True,
        "±: standard deviation of the accuracies that each have one sample of every item.": not all(
            math.isnan(spread) for task in comparison.tasks for spread in task.spreads
        ),
    }
    notes = that_hold(statements)
    notes += [f"No speed ratio: {reason}." for reason in sorted({task.no_speed for task in comparison.tasks} - {""})]
    notes += comparison.notes
    p_columns = ("p", "p (Holm)") if several else ("p",)
    measured = ("Task", "n", "A %", "B %", "B - A", "Detectable", *p_columns)
    columns = (*measured, *map(str.capitalize, counted), "Speed B / A")
    title = f"A = {comparison.before}, B = {comparison.after}"
    named = comparison.systems if len(set(comparison.systems)) > 1 else (comparison.before, comparison.after)
    caption = f"Accuracy of two runs on the same items, A = {named[0]}, B = {named[1]}"
    limited = {f"{t.task} {e.limited}": None for t in comparison.tasks for e in t.extents or () if e.limited}
    caption += f" (limited: {', '.join(limited)})" if limited else ""
    return Table(title=title, columns=columns, rows=rows, notes=notes, caption_title=caption)


def details(comparison: Comparison) -> list[str]:
    """The differences, line by line: settings, prompts, flipped items, and what could not be compared."""
    below = " but the tasks' settings below" if any(task.settings for task in comparison.tasks) else ""
    lines = [f"differs: {line}" for line in comparison.settings] or [f"differs: nothing{below}"]
    if comparison.not_compared:
        lines.append(f"not in both runs: {', '.join(comparison.not_compared)}")
    for line in dict.fromkeys(line for task in comparison.tasks for line in task.settings):
        tasks = [task.task for task in comparison.tasks if line in task.settings]
        lines.append(f"{'all tasks' if len(tasks) == len(comparison.tasks) else ', '.join(tasks)}: {line}")
    return lines + [f"{task.task}: {line}" for task in comparison.tasks for line in _details_of_task(task)]


def _details_of_task(task: TaskComparison) -> Iterator[str]:
    for name, items in task.flips.items():
        if items:
            more = f" and {len(items) - MOST_SHOWN} more" if len(items) > MOST_SHOWN else ""
            yield f"{name} ({len(items)}): {', '.join(items[:MOST_SHOWN])}{more}"
    if task.left_out:
        yield f"{task.left_out} items are in one run only and in no figure"
    if task.no_speed:
        yield f"no speed ratio: {task.no_speed}"


def comparison_markdown(comparison: Comparison) -> str:
    lines = "".join(f"- {markdown_prose(line)}\n" for line in details(comparison))
    return f"{comparison_table(comparison).markdown()}\n### What differs\n\n{lines}"


# Columns of the CSV of two runs, with what they mean; `before` is run A and `after` run B.
COMPARISON_COLUMNS = {
    "before": "run A",
    "after": "run B",
    "task": f"the task; `{MEAN_TASK}` for the mean over tasks",
    "told_apart_by": "what tells a mean from the other means, such as `prompts=release`; empty where there is one",
    "mini": f"whether the task is a {MINI_NOTE}",
    "n": "items that are compared",
    "left_out": "items that are in one run only, and in no figure",
    "accuracy_before": "accuracy of A on the compared items, in percent",
    "accuracy_after": "accuracy of B on the same items",
    "sd_before": "standard deviation of the accuracy of A over samples; empty for one sample of an item",
    "sd_after": "standard deviation of the accuracy of B over samples",
    "difference": "accuracy of B minus that of A, in points",
    "difference_ci_low": "lower bound of its 95% interval, paired by item",
    "difference_ci_high": "upper bound of that interval",
    "detectable": "true difference in points that such a sample finds significant (5%) four times out of five",
    "gained": "number of items that B has right more often",
    "lost": "number of items that B has right less often",
    "other_prompts": "number of items whose prompts differ",
    "speed_ratio": "TPS of B over that of A on the same items; empty for none",
    "speed_ratio_ci_low": "lower bound of its 95% interval",
    "speed_ratio_ci_high": "upper bound of that interval",
    "unfinished_before": "`26 of 40` samples that were asked for are in A; empty for all",
    "limited_before": "`40 of 100` samples of the task were asked for in A; empty for all",
    "unfinished_after": "the same as `unfinished_before`, of B",
    "limited_after": "the same as `limited_before`, of B",
    "no_speed": "why there is no ratio of speeds",
    "p_value": "two-sided p value of McNemar's exact test for the items gained and lost",
    "p_holm": "the p value adjusted for the number of tasks (Holm); that of the mean, one hypothesis, is not adjusted",
}


def comparison_cells(comparison: Comparison) -> tuple[list[str], list[list[Any]]]:
    """Column names, and the values of every task in their order, and of their means."""
    rows = []
    for task, adjusted in zip(comparison.lines, comparison.adjusted, strict=True):
        before, after = task.accuracies
        row: dict[str, Any] = {"before": comparison.before, "after": comparison.after}
        row |= {"task": task.task, "told_apart_by": task.mark, "mini": task.mini}
        row |= {"n": len(task.items), "left_out": task.left_out, "accuracy_before": before, "accuracy_after": after}
        row |= dict(zip(("sd_before", "sd_after"), task.spreads, strict=True))
        row |= interval_cells("difference", task.difference) | {"detectable": task.detectable}
        row |= {name.replace(" ", "_"): len(items) for name, items in task.flips.items()}
        row |= interval_cells("speed_ratio", task.speed)
        for run, extent in zip(("before", "after"), task.extents or (None, None), strict=True):
            row |= {f"{name}_{run}": getattr(extent, name, "") for name in ("unfinished", "limited")}
        rows.append(row | {"no_speed": task.no_speed, "p_value": task.p_value, "p_holm": adjusted})
    return list(COMPARISON_COLUMNS), [[row[name] for name in COMPARISON_COLUMNS] for row in rows]


def item_cells(comparison: Comparison) -> tuple[tuple[str, ...], list[tuple]]:
    """Column names, and how often each item is right in A and in B, and whether the prompts are equal."""
    rows = [
        (task.task, item.item_id, item.before, item.after, item.change, item.same_prompt)
        for task in comparison.tasks
        for item in task.items
    ]
    return ("task", "item_id", "before", "after", "change", "same_prompt"), rows
