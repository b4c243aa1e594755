"""A comparison of two runs as table, text and CSV."""

import math
from collections.abc import Iterator

from refusion_eval.results.compare import Comparison, TaskComparison
from refusion_eval.results.figure import MINI_NOTE
from refusion_eval.results.render import Table, csv_text, interval_text

MOST_SHOWN = 8  # item ids in a line of text; the CSV has all


def comparison_table(comparison: Comparison) -> Table:
    """One line for each task."""
    rows = [
        (
            task.task,
            str(len(task.items)),
            *(f"{accuracy:.1f}" for accuracy in task.accuracies),
            interval_text(task.difference),
            "" if math.isnan(task.detectable) else f"{task.detectable:.2f}",
            *(str(len(items)) for items in (task.gained, task.lost, task.other_prompts)),
            interval_text(task.speed),
        )
        for task in comparison.tasks
    ]
    notes = [
        "B - A: points, paired by item, 95% bootstrap interval. Detectable: true difference in points that a sample "
        "like this finds significant (5%) four times out of five.",
        "Gained, lost: items that only B, only A has right (of several samples: more often).",
    ]
    if any(task.mini for task in comparison.tasks):
        notes.append(f"mini: {MINI_NOTE}.")
    return Table(
        title=f"A = {comparison.before}, B = {comparison.after}",
        columns=("Task", "n", "A %", "B %", "B - A", "Detectable", "Gained", "Lost", "Other prompts", "Speed B / A"),
        rows=rows,
        notes=notes,
    )


def details(comparison: Comparison) -> list[str]:
    """What differs, line by line: settings, prompts, flipped items, and what could not be compared."""
    lines = [f"differs: {line}" for line in comparison.settings] or ["differs: nothing but the tasks' settings below"]
    if comparison.only_in_one:
        lines.append(f"in one run only: {', '.join(comparison.only_in_one)}")
    return lines + [f"{task.task}: {line}" for task in comparison.tasks for line in _details_of_task(task)]


def _details_of_task(task: TaskComparison) -> Iterator[str]:
    yield from task.settings
    for name, items in (("gained", task.gained), ("lost", task.lost), ("other prompts", task.other_prompts)):
        if items:
            more = f" and {len(items) - MOST_SHOWN} more" if len(items) > MOST_SHOWN else ""
            yield f"{name} ({len(items)}): {', '.join(items[:MOST_SHOWN])}{more}"
    if task.left_out:
        yield f"{task.left_out} items are in one run only and in no figure"
    if task.no_speed:
        yield f"no speed ratio: {task.no_speed}"


def comparison_markdown(comparison: Comparison) -> str:
    """The table and all that differs."""
    lines = "".join(f"- {line}\n" for line in details(comparison))
    return f"{comparison_table(comparison).markdown()}\n### What differs\n\n{lines}"


def comparison_csv(comparison: Comparison) -> str:
    """One row for each task."""
    head = [
        *("before", "after", "task", "mini", "n", "left_out", "accuracy_before", "accuracy_after"),
        *("difference", "difference_ci_low", "difference_ci_high", "detectable", "gained", "lost", "other_prompts"),
        *("speed_ratio", "speed_ratio_ci_low", "speed_ratio_ci_high", "no_speed"),
    ]
    rows = []
    for task in comparison.tasks:
        speed = (None, None, None) if task.speed is None else (task.speed.value, task.speed.low, task.speed.high)
        counts = (len(task.gained), len(task.lost), len(task.other_prompts))
        difference = (task.difference.value, task.difference.low, task.difference.high, task.detectable)
        identity = (comparison.before, comparison.after, task.task, task.mini, len(task.items), task.left_out)
        rows.append((*identity, *task.accuracies, *difference, *counts, *speed, task.no_speed))
    return csv_text(head, rows)


def items_csv(comparison: Comparison) -> str:
    """One row for each item: how often it is right in A and in B, and whether the prompts are equal."""
    rows = []
    for task in comparison.tasks:
        for item in task.items:
            change = "" if item.after == item.before else "gained" if item.after > item.before else "lost"
            rows.append((task.task, item.item_id, item.before, item.after, change, item.same_prompt))
    return csv_text(("task", "item_id", "before", "after", "change", "same_prompt"), rows)
