"""SIGINT and SIGTERM during a run: what is in flight is finished and recorded, then the process says how to go on.

Handlers belong to a process, not to a library: they are there for the length of a block, in the main thread, and what
was there before comes back. A signal that the process ignores, as SIGINT in a job that a script put in the background,
stays ignored.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from operator import length_hint
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from refusion_eval.errors import StoreError
from refusion_eval.store.run_reader import RunReader

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_Item = TypeVar("_Item")


class Interrupted(SystemExit):
    """A signal asked this process to end.

    Args:
        number: of the signal; the exit status is the one that a shell gives to a process that the signal ended.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class Interruption:
    """A block that SIGINT and SIGTERM end with one line on stderr and `Interrupted`; a context manager.

    Blocks may be nested: the innermost one answers.

    Args:
        describe: what the line says behind the signal's name; called when the block has ended.
        finish_first: whether the first signal only asks (see `until_asked`), so that a second is needed to end the
            block at once.
    """

    def __init__(self, describe: Callable[[], str], *, finish_first: bool) -> None:
        self._describe = describe
        self._finish_first = finish_first
        self._asked_by: int | None = None
        self._before: dict[int, Any] = {}

    def until_asked(self, items: Iterable[_Item]) -> "UntilAsked[_Item]":
        """The items, as far as they are taken before the first signal; says how many are left, if they do."""
        return UntilAsked(items, lambda: self._asked_by is not None)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if handler not in (signal.SIG_IGN, None):  # None: it is not Python's, and could not be put back
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # Ray, if the signal came while it waited, turns `Interrupted` into an error of its own.
        if self._asked_by is None or not (error is None or isinstance(error, SystemExit | KeyboardInterrupt)):
            return
        print(f"stopped by {signal.Signals(self._asked_by).name}: {self._describe()}", file=sys.stderr, flush=True)
        if not isinstance(error, Interrupted):
            raise Interrupted(self._asked_by) from None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first = self._asked_by is None
        self._asked_by = number
        if not (first and self._finish_first):
            raise Interrupted(number)
        line = f"{signal.Signals(number).name}: what is in flight is finished first; a second signal stops at once\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode())  # print may be what the signal came in between of, and refuses that


class UntilAsked(Iterator[_Item]):
    """Items that end when a signal asks for an end; whoever takes them can see that it did, even behind the last one.

    Args:
        items: what is left while nobody asks.
        is_asked: whether a signal came.
    """

    def __init__(self, items: Iterable[_Item], is_asked: Callable[[], bool]) -> None:
        self._items = iter(items)
        self._is_asked = is_asked

    @property
    def asked(self) -> bool:
        """Whether a signal asked for an end."""
        return self._is_asked()

    def __next__(self) -> _Item:
        if self.asked:
            raise StopIteration
        return next(self._items)

    def __length_hint__(self) -> int:
        return length_hint(self._items)


def how_to_go_on(run_dir: str | os.PathLike[str] | None) -> str:
    """How much of a run is recorded, and that it can be continued."""
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
