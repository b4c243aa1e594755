"""The terminal of a run: its progress, live or as a line every 20 seconds, and the signals that stop it."""

import contextlib
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import length_hint
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self, TextIO, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from refusion_eval.errors import StoreError
from refusion_eval.store.records import Sample
from refusion_eval.store.run_store import RunReader
from refusion_eval.untrusted import visible

SECONDS_BETWEEN_LINES = 20.0
# Samples after the first, of which the time left is estimated: workers of a cluster begin one after the other.
_FEWEST_TIMED = 4
SIGNALS = (signal.SIGINT, signal.SIGTERM)

_Item = TypeVar("_Item")


class Interrupted(SystemExit):
    """A signal asked this process to end; the exit status is 128 + its number, as shells report it."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class Interruption:
    """A block that SIGINT and SIGTERM end with one line on stderr and `Interrupted`; the innermost handles a signal."""

    # Handlers belong to a process, not to a library, so the former ones are back when the block has ended.
    def __init__(self, describe: Callable[[], str], *, finish_first: bool) -> None:
        self._describe = describe  # gives the text behind the signal's name in that line, when the block has ended
        # The first signal only ends the iterators of `stoppable`, the second the block.
        self._finish_first = finish_first
        self._received: int | None = None
        self._handlers_before: dict[int, Any] = {}

    def stoppable(
        self, items: Iterable[_Item], or_if: Callable[[], bool] = lambda: False
    ) -> "StoppableIterator[_Item]":
        return StoppableIterator(items, lambda: self._received is not None or or_if())

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                # A signal that the process ignores, as background jobs ignore SIGINT, stays ignored. None is a handler
                # that Python did not install and could not restore.
                if handler not in (signal.SIG_IGN, None):
                    self._handlers_before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        # Ray turns an `Interrupted` that was raised while Ray waited into an error of its own class.
        if self._received is None or not (error is None or isinstance(error, SystemExit | KeyboardInterrupt)):
            return
        print(f"stopped by {signal.Signals(self._received).name}: {self._describe()}", file=sys.stderr, flush=True)
        if not isinstance(error, Interrupted):
            raise Interrupted(self._received) from None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_first = self._received is None
        self._received = number
        if not (is_first and self._finish_first):
            raise Interrupted(number)
        line = f"{signal.Signals(number).name}: what is in flight is finished first; a second signal stops at once\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode())  # print is not reentrant, and the signal may have interrupted a print


class StoppableIterator(Iterator[_Item]):
    """An iterator that ends when a stop is requested; its consumer can ask whether that happened."""

    def __init__(self, items: Iterable[_Item], stop_requested: Callable[[], bool]) -> None:
        self._items = iter(items)
        self.stop_requested = stop_requested

    def __next__(self) -> _Item:
        if self.stop_requested():
            raise StopIteration
        return next(self._items)

    def __length_hint__(self) -> int:
        return length_hint(self._items)


def resume_hint(run_dir: str | os.PathLike[str] | None) -> str:
    if run_dir is None:
        return "nothing is recorded, as no run directory was given; with one the same command would continue"
    try:
        with RunReader.open(Path(run_dir)) as reader:
            num_recorded, num_expected = reader.num_recorded(), sum(reader.run.expected.values())
    except StoreError:
        num_recorded = num_expected = 0
    if not num_recorded:
        return f"nothing is recorded in {run_dir} yet; run the same command again"
    return f"{num_recorded} of {num_expected} samples are recorded in {run_dir}; run the same command again to continue"


class RunningScore(NamedTuple):
    num_right: int
    num_judged: int


@dataclass(slots=True)
class _Tally:
    """Counts of one task; speed counts only samples that this run decoded."""

    name: str
    total: int
    done: int = 0
    stored: int = 0
    failed: int = 0
    num_tokens: int = 0
    num_forwards: int = 0
    num_counted: int = 0  # tokens of samples whose forwards are known
    seconds: float = 0.0

    def summary(self, score: RunningScore | None) -> str:
        num_right, num_judged = score or (0, 0)
        parts = (
            self.seconds > 0 and self.num_tokens and f"{self.num_tokens / self.seconds:.1f} tokens/s",
            self.num_forwards and f"TPF {self.num_counted / self.num_forwards:.2f}",
            num_judged and f"accuracy {100 * num_right / num_judged:.1f} % of {num_judged}",
            self.stored and f"{self.stored} from the run directory",
            self.failed and f"{self.failed} FAILED",
        )
        return ", ".join(part for part in parts if part)


class ProgressDisplay:
    """Counts finished samples by task and shows them, on stderr by default; a context manager."""

    def __init__(
        self,
        label: str,
        totals: Mapping[str, int],
        stream: TextIO | None = None,
        *,
        score_of: Callable[[str], RunningScore] | None = None,
    ) -> None:
        # --quiet raises the level of the log. Without the command line none is set, and progress is shown.
        is_quiet = logging.getLogger("refusion_eval").level > logging.INFO
        self._stream = stream or (io.StringIO() if is_quiet else sys.stderr)
        self._tallies = {task: _Tally(visible(f"{label} {task}"), total) for task, total in totals.items()}
        self._score_of = score_of
        self._bars: Progress | None = None
        self._bar_ids: dict[str, TaskID] = {}
        self._last_line = 0.0
        self._last_sample = self._first = time.monotonic()
        self._worked = 0  # texts that were decoded or scored here
        self._num_first = 0  # of them, those that were finished at `_first`

    def __enter__(self) -> Self:
        if self._stream.isatty():
            widest = len(str(max((tally.total for tally in self._tallies.values()), default=0)))
            count = MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * widest + 1))
            left = TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7))
            summary = TextColumn("{task.fields[summary]}")
            console = Console(file=self._stream)
            self._bars = Progress("{task.description}", count, left, "left", summary, console=console)
            for task, tally in self._tallies.items():
                name = escape(tally.name)
                self._bar_ids[task] = self._bars.add_task(name, total=tally.total, summary="", start=False)
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def stored(self, task: str) -> None:
        self._tallies[task].stored += 1
        self._count(task, 1)

    def decoded(self, sample: Sample) -> None:
        tally = self._tallies[sample.key.task]
        now = time.monotonic()
        # The decoding times of a batch overlap, so for a batch the time since the last sample counts.
        tally.seconds += sample.seconds if sample.batch_size == 1 else now - self._last_sample
        self._last_sample = now
        tally.failed += sample.error is not None
        tally.num_tokens += sample.num_decoded or 0
        tally.num_forwards += sample.num_forwards
        tally.num_counted += (sample.num_decoded or 0) if sample.num_forwards else 0
        self.scored(sample.key.task)

    def scored(self, task: str, number: int = 1) -> None:
        if not self._worked:  # the estimate counts from here: loading, compiling and warming up happen only once
            self._first, self._num_first = time.monotonic(), number
        self._worked += number
        self._count(task, number)

    def _count(self, task: str, number: int) -> None:
        tally = self._tallies[task]
        tally.done += number
        if self._bars is not None:
            bar = self._bar_ids[task]
            self._bars.start_task(bar)
            self._bars.update(bar, completed=tally.done, summary=self._summary(task))
        elif tally.done == tally.total or time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            line = f"{tally.name}: {tally.done}/{tally.total}  {self._summary(task)}{self._time_left()}"
            print(line.rstrip(), file=self._stream, flush=True)

    def _summary(self, task: str) -> str:
        return self._tallies[task].summary(None if self._score_of is None else self._score_of(task))

    def _time_left(self) -> str:
        num_left = sum(tally.total - tally.done for tally in self._tallies.values())
        num_timed = self._worked - self._num_first
        if num_timed < _FEWEST_TIMED or not num_left:
            return ""
        seconds = num_left * (time.monotonic() - self._first) / num_timed
        # Also on the last line of a task, where the time is that of the tasks after it.
        of_all = " in all" if len(self._tallies) > 1 else ""
        minutes = f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"
        return f", about {seconds / 3600:.1f} h left{of_all}" if seconds >= 3600 else f", about {minutes} left{of_all}"
