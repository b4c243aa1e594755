"""The progress of a run: a live display on a terminal, elsewhere a plain line every 20 seconds."""

import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from refusion_eval.store.records import Sample

SECONDS_BETWEEN_LINES = 20.0


@dataclass(slots=True)
class TaskTally:
    """Counts of one task; speed counts only samples that this run decoded."""

    total: int
    done: int = 0
    stored: int = 0
    failed: int = 0
    num_tokens: int = 0
    num_forwards: int = 0
    seconds: float = 0.0

    def summary(self) -> str:
        """Speed and parallelism in words; empty before the first sample."""
        parts = []
        if self.seconds > 0:
            parts.append(f"{self.num_tokens / self.seconds:.1f} tokens/s")
        if self.num_forwards:
            parts.append(f"TPF {self.num_tokens / self.num_forwards:.2f}")
        if self.stored:
            parts.append(f"{self.stored} from the run directory")
        if self.failed:
            parts.append(f"{self.failed} FAILED")
        return ", ".join(parts)


@dataclass(slots=True)
class ProgressDisplay:
    """Counts finished samples by task and shows them; use as a context manager.

    Attributes:
        label: the text before the task's name, for example the system.
        totals: number of requests of every task.
        stream: where to write; a terminal gets a live display, anything else lines.
    """

    label: str
    totals: dict[str, int]
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    tallies: dict[str, TaskTally] = field(init=False)
    _bars: Progress | None = field(init=False, default=None)
    _bar_ids: dict[str, TaskID] = field(init=False, default_factory=dict)
    _last_line: float = field(init=False, default=0.0)
    _last_sample: float = field(init=False, default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.tallies = {task: TaskTally(total) for task, total in self.totals.items()}

    def __enter__(self) -> Self:
        if self.stream.isatty():
            columns = ("{task.description}", BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
            text = TextColumn("{task.fields[summary]}")
            self._bars = Progress(*columns, text, console=Console(file=self.stream))
            for task, total in self.totals.items():
                name = f"{self.label} {task}"
                self._bar_ids[task] = self._bars.add_task(name, total=total, summary="", start=False)
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def stored(self, task: str) -> None:
        """Counts a sample that was recorded before."""
        tally = self.tallies[task]
        tally.done += 1
        tally.stored += 1
        self._show(task)

    def decoded(self, sample: Sample) -> None:
        """Counts a finished sample, good or failed."""
        tally = self.tallies[sample.key.task]
        now = time.monotonic()
        # The decoding times of a batch overlap, so for a batch the time since the last sample counts.
        seconds = sample.seconds if sample.batch_size == 1 else now - self._last_sample
        self._last_sample = now
        tally.done += 1
        tally.failed += sample.error is not None
        tally.num_tokens += sample.num_tokens
        tally.num_forwards += sample.num_forwards
        tally.seconds += seconds
        self._show(sample.key.task)

    def scored(self, task: str) -> None:
        """Counts a text whose log-likelihood is known."""
        self.tallies[task].done += 1
        self._show(task)

    def _show(self, task: str) -> None:
        tally = self.tallies[task]
        if self._bars is not None:
            bar = self._bar_ids[task]
            self._bars.start_task(bar)
            self._bars.update(bar, completed=tally.done, summary=tally.summary())
            return
        now = time.monotonic()
        if tally.done == tally.total or now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            line = f"{self.label} {task}: {tally.done}/{tally.total}  {tally.summary()}"
            print(line.rstrip(), file=self.stream, flush=True)
