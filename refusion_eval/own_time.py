"""The time that processes took for their work, whatever else the machine had to do meanwhile; read from /proc."""

import contextlib
import os
import time
from typing import NamedTuple

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Work(NamedTuple):
    """What some processes did so far, and do now."""

    cpu_s: float = 0.0  # processor seconds, with ended and waited-for children
    is_ready: bool = False  # whether a thread runs or waits for a processor; else all sleep, or are gone
    num_tasks: int = 0  # processes and threads


class Proc:
    """The /proc of the machine, kept open so that it can be read from inside another root."""

    # Where there is no /proc, every process seems to be gone, so that all time counts as time asleep.
    def __init__(self) -> None:
        self._fd = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) if os.path.isdir("/proc") else -1

    def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        return os.open(path, flags | os.O_CLOEXEC, dir_fd=self._fd)

    def read(self, path: str) -> str:
        with os.fdopen(self.open(path), "rb", 0) as file:
            return file.read(65536).decode("ascii", "replace")

    def stat(self, path: str) -> list[str]:
        """The fields of a process or a thread from its state on."""
        return self.read(f"{path}/stat").rpartition(")")[2].split()

    def entries(self, path: str) -> list[str]:
        with contextlib.suppress(OSError):  # it is gone
            fd = self.open(path)
            try:
                return os.listdir(fd)
            finally:
                os.close(fd)
        return []

    def children(self, pid: int) -> list[int]:
        """Child processes of all threads of a process; none if it is gone."""
        children: list[int] = []
        for thread in self.entries(f"{pid}/task"):
            with contextlib.suppress(OSError):
                children += [int(word) for word in self.read(f"{pid}/task/{thread}/children").split()]
        return children

    def tree(self, pid: int) -> list[int]:
        """A process and all below it."""
        members = [pid]
        for member in members:
            members += [child for child in self.children(member) if child not in members]
        return members

    def work(self, pids: list[int]) -> Work:
        """Sums over processes; those that are gone count nothing."""
        cpu_ticks = num_tasks = 0
        is_ready = False
        for pid in pids:
            with contextlib.suppress(OSError, IndexError):
                fields = self.stat(str(pid))
                cpu_ticks += sum(int(word) for word in fields[11:15])
                num_tasks += int(fields[17])
                is_ready |= fields[0] == "R" or (int(fields[17]) > 1 and self._has_ready_thread(pid))
        return Work(cpu_ticks / _TICKS_PER_SECOND, is_ready, num_tasks)

    def _has_ready_thread(self, pid: int) -> bool:
        for thread in self.entries(f"{pid}/task"):
            with contextlib.suppress(OSError, IndexError):
                if self.stat(f"{pid}/task/{thread}")[0] == "R":
                    return True
        return False


class OwnTime:
    """Adds up the time that work took: its processor time, and all time in which each of its threads slept.

    A thread that is ready to run has its processor at once on an idle machine. So the sum is the wall clock there, and
    a busy machine does not change it: what is left out is the time in which others had the processor.
    """

    def __init__(self, cpu_s: float = 0.0) -> None:
        self._updated_s, self._cpu_s = time.monotonic(), cpu_s
        self.asleep_s = self._ready_s = self._ready_cpu_s = 0.0

    def update(self, cpu_s: float, is_ready: bool) -> None:
        """Count what passed since the last update, of which the present moment is taken as a sample.

        Args:
            cpu_s: processor seconds of the work so far.
            is_ready: whether a part of it runs or waits for a processor now.
        """
        now_s = time.monotonic()
        passed_s, self._updated_s = now_s - self._updated_s, now_s
        if is_ready:
            self._ready_s += passed_s
            self._ready_cpu_s += cpu_s - self._cpu_s
        else:
            self.asleep_s += passed_s
        self._cpu_s = cpu_s

    @property
    def wall_s(self) -> float:
        return self.asleep_s + self._ready_s

    @property
    def seconds(self) -> float:
        return self.asleep_s + min(max(self._ready_cpu_s, 0), self._ready_s)


def longest_wall_s(limit_s: float) -> float:
    """Seconds of wall clock after which work with this limit of own time is given up without a word about the work."""
    return max(120.0, 12 * limit_s)
