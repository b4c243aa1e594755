"""`refusion-eval rescore`: which runs and filter, progress, the tables, and the files that hold them."""

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from refusion_eval.benchmarks import is_mini
from refusion_eval.errors import ConfigError
from refusion_eval.metrics.bootstrap import Interval, bootstrap, mean_statistic
from refusion_eval.results.figure import UNISOLATED
from refusion_eval.results.render import csv_text, interval_text
from refusion_eval.results.summary import MINI_CAPTION
from refusion_eval.results.task_metrics import seed_of
from refusion_eval.runs.progress import SECONDS_BETWEEN_LINES
from refusion_eval.scoring.filters import OURS, AnswerFilter
from refusion_eval.scoring.rescore import Rescored, RunRescored, TaskRescored, rescore_run, rows_by_hash, select_tasks
from refusion_eval.store.atomic_write import prepare_output, write_output
from refusion_eval.store.records import NO_ISOLATION

FOLDER = "rescored"

_MOST_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryLine:
    """One task of one run under a filter, beside its recorded score.

    Attributes:
        run_id: name of the run directory.
        system: name of the system.
        filter_name: the filter.
        task: name of the task.
        settings: hash of the settings it was generated with.
        n: items.
        samples: texts.
        recorded: accuracy in percent by the recorded verdicts; None if there are none.
        rescored: accuracy in percent under the filter; None if nothing could be judged.
        to_correct: texts recorded as wrong that the filter makes right.
        to_wrong: texts recorded as right that the filter makes wrong.
        note: what a reader must know.
    """

    run_id: str
    system: str
    filter_name: str
    task: str
    settings: str
    n: int
    samples: int
    recorded: Interval | None
    rescored: Interval | None
    to_correct: int
    to_wrong: int
    note: str


def rescore_command(
    run_dirs: Sequence[Path],
    answer_filter: AnswerFilter,
    *,
    tasks: Sequence[str] = (),
    data: Path | None = None,
    out: Path | None = None,
    workers: int | None = None,
    sandbox: str = "auto",
    console: Console,
) -> int:
    """Scores recorded texts with a filter, prints the summary and writes it beside the records, with one line a text.

    Args:
        run_dirs: run directories.
        answer_filter: how answers are found in the texts.
        tasks: tasks or benchmarks; none for all.
        data: directory with the rows, see `Task.rows`.
        out: folder for the results, with one folder a run in it; `FOLDER` in each run directory if None.
        workers: processes for code and mathematics.
        sandbox: "auto", or "none" to run model-written code without isolation.
        console: where lines and the table are printed.

    Returns:
        The number of texts for which the filter `OURS` does not give what is recorded; 0 for any other filter.

    Raises:
        ConfigError: unknown task, or two runs of one name for one folder.
        StoreError: not a run directory, or the results cannot be written.
        DataError: rows are missing, or a run has nothing that the filter can score.
        SandboxError: code cannot be run in isolation here.
    """
    echo = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    selected = {run_dir: names for run_dir, names in select_tasks(run_dirs, tasks).items() if names or not tasks}
    paths = {run_dir: _paths(run_dir, answer_filter, out) for run_dir in selected}
    if len({path for path, _ in paths.values()}) < len(paths):
        raise ConfigError(f"--out {out}: two of the runs have folders of one name; rescore them one by one")
    for path in (path for pair in paths.values() for path in pair):
        prepare_output(path)
    rows = cache(partial(rows_by_hash, data_dir=data))
    lines: list[SummaryLine] = []
    num_differing = 0
    for run_dir, of_user in selected.items():
        progress = Progress(f"{answer_filter.name} {run_dir.name}")
        result = rescore_run(run_dir, answer_filter, of_user, rows, workers=workers, sandbox=sandbox, on_done=progress)
        of_run = summarise(result, answer_filter.name)
        samples_path, summary_path = paths[run_dir]
        write_output(samples_path, _csv(_sample_cells(result)))
        write_output(summary_path, _csv(map(_summary_cells, of_run)))
        lines += of_run
        for why in dict.fromkeys(result.left_out.values()):
            names = ", ".join(task for task, reason in result.left_out.items() if reason == why)
            echo(f"{result.run.run_id}: left out, as {why}: {names}")
        if answer_filter.name == OURS:
            num_differing += _report_differences(result, echo)
    console.print(summary_table(lines))
    for line in lines:
        if line.note:
            echo(f"{line.run_id} {line.task}: {line.note}")
    for run_dir in selected:
        echo(f"one line a text: {paths[run_dir][0]}")
    return num_differing


class Progress:
    """Counts judged answers of one run on stderr, a line now and then: code and mathematics may take minutes."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._counts: Counter[str] = Counter()
        self._last_line = time.monotonic()

    def __call__(self, task: str, total: int) -> None:
        """Counts one of at most `total` answers of a task."""
        self._counts[task] += 1
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            print(f"{self._label} {task}: {self._counts[task]} of up to {total} judged", file=sys.stderr, flush=True)


def summarise(result: RunRescored, filter_name: str) -> list[SummaryLine]:
    """One line a task and settings; intervals are those of the tables: by item, with the task's own seed."""
    run = result.run
    lines = []
    for task in result.tasks:
        flips = Counter((it.recorded_correct, it.correct) for it in task.samples)
        unisolated = any(it.judged.tier == NO_ISOLATION for it in task.samples)
        lines.append(
            SummaryLine(
                run_id=run.run_id,
                system=run.manifest.system,
                filter_name=filter_name,
                task=task.task,
                settings=task.settings_hash,
                n=len({it.key.doc_hash for it in task.samples}),
                samples=len(task.samples),
                recorded=_accuracy(task, lambda it: it.recorded_correct),
                rescored=_accuracy(task, lambda it: it.correct),
                to_correct=flips[False, True],
                to_wrong=flips[True, False],
                note="; ".join([*task.notes, *([UNISOLATED] if unisolated else [])]),
            )
        )
    return lines


def summary_table(lines: Sequence[SummaryLine]) -> Table:
    """The summary for a terminal."""
    caption = "In brackets: 95% bootstrap interval by item."
    if any(is_mini(line.task) for line in lines):
        caption += f" {MINI_CAPTION}"
    table = Table(title=f"filter {lines[0].filter_name}", caption=caption, caption_justify="left")
    for heading in ("Task", "System"):
        table.add_column(heading)
    for heading in ("n", "Recorded %", "Rescored %", "wrong to right", "right to wrong"):
        table.add_column(heading, justify="right")
    several = {key for key, number in Counter((line.run_id, line.task) for line in lines).items() if number > 1}
    runs = {line.system: {other.run_id for other in lines if other.system == line.system} for line in lines}
    for line in lines:
        task = f"{line.task} ({line.settings})" if (line.run_id, line.task) in several else line.task
        system = f"{line.system} ({line.run_id})" if len(runs[line.system]) > 1 else line.system
        accuracies = (interval_text(accuracy, 1, missing="-") for accuracy in (line.recorded, line.rescored))
        figures = (*accuracies, str(line.to_correct), str(line.to_wrong))
        table.add_row(escape(task), escape(system), str(line.n), *figures)
    return table


def _paths(run_dir: Path, chosen: AnswerFilter, out: Path | None) -> tuple[Path, Path]:
    """Where the lines of the texts and the summary of a run go."""
    folder = run_dir / FOLDER if out is None else out / run_dir.resolve().name
    name = re.sub(r"[^\w.-]", "_", chosen.name)
    return folder / f"{name}.csv", folder / f"{name}.summary.csv"


def _accuracy(task: TaskRescored, verdict: Callable[[Rescored], bool | None]) -> Interval | None:
    items: dict[str, list[bool]] = {}
    for sample in task.samples:
        passed = verdict(sample)
        if passed is not None:
            items.setdefault(sample.key.doc_hash, []).append(passed)
    if not items:
        return None
    means = [np.mean(items[item]) for item in sorted(items)]
    return bootstrap([means], mean_statistic, seed=seed_of(task.task)).scaled(100).interval()


def _report_differences(result: RunRescored, echo: Callable[[str], None]) -> int:
    differing = [sample for task in result.tasks for sample in task.samples if sample.differs]
    for sample in differing[:_MOST_SHOWN]:
        assert sample.recorded is not None
        echo(
            f"{result.run.run_id}: {sample.key.task} item {sample.doc_id} sample {sample.key.sample}: now "
            f"{sample.judged.verdict} ({sample.judged.reason}), recorded {sample.recorded.verdict} "
            f"({sample.recorded.reason}) by {sample.recorded.scorer}"
        )
    return len(differing)


def _sample_cells(result: RunRescored) -> Iterator[dict[str, Any]]:
    for task in result.tasks:
        for it in task.samples:
            yield {
                "task": task.task,
                "settings": task.settings_hash,
                "doc_id": it.doc_id,
                "sample": it.key.sample,
                "extracted": it.judged.extracted,
                "verdict": it.judged.verdict,
                "correct": it.correct,
                "recorded_extracted": it.recorded.extracted if it.recorded else None,
                "recorded_verdict": it.recorded.verdict if it.recorded else None,
                "recorded_correct": it.recorded_correct,
                "tier": it.judged.tier,
                "reason": it.judged.reason,
            }


def _summary_cells(line: SummaryLine) -> dict[str, Any]:
    cells: dict[str, Any] = {
        "run_id": line.run_id,
        "system": line.system,
        "filter": line.filter_name,
        "task": line.task,
        "mini": is_mini(line.task),
        "settings": line.settings,
        "n": line.n,
        "samples": line.samples,
    }
    for name, interval in (("recorded", line.recorded), ("rescored", line.rescored)):
        cells[name] = interval.value if interval else None
        cells[f"{name}_low"] = interval.low if interval else None
        cells[f"{name}_high"] = interval.high if interval else None
    return {**cells, "to_correct": line.to_correct, "to_wrong": line.to_wrong, "note": line.note}


def _csv(rows: Iterable[dict[str, Any]]) -> str:
    """Rows as CSV; the first one names the columns. Verdicts are 1 and 0, to be summed."""
    found = list(rows)
    numbers = ([int(value) if isinstance(value, bool) else value for value in row.values()] for row in found)
    return csv_text(list(found[0]), numbers) if found else ""
