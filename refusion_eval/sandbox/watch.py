"""The watchdog: reads the usage of processes from the kernel, and decides when a check has to be stopped.

The time of a check is the wall clock less the time that its processes were ready to run and had no processor. So a busy
machine changes no verdict, and a program that sleeps is stopped as soon as one that computes. A program that takes the
processor from itself by its own children gains nothing: it cannot have them collected unseen
(`calls.REFUSED_ARGUMENTS`: SIGCHLD), so their processor time counts.
"""

import contextlib
import math
import os
import select
import signal
import socket
import time
from typing import NamedTuple, Protocol

from refusion_eval.sandbox.result import hard_wall_s

JUDGE_KILLED = "judge_killed"
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_TICK_MS = 50
_GRACE_S = 0.5  # for a judge to end by itself once its guest was stopped
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Usage(NamedTuple):
    """Sums over a process and all its descendants.

    Attributes:
        cpu_s: processor seconds, ended and waited-for children included.
        memory_bytes: resident memory now.
        starved_s: seconds the first process was ready to run and had no processor.
        num_tasks: processes and threads.
    """

    cpu_s: float
    memory_bytes: int
    starved_s: float
    num_tasks: int


class Proc:
    """The /proc of the machine, kept open so that it can be read from inside another root."""

    def __init__(self) -> None:
        """Open /proc."""
        self._fd = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def _read(self, path: str) -> str:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            return os.read(fd, 65536).decode("ascii", "replace")
        finally:
            os.close(fd)

    def own_pid(self) -> int:
        """This process's number as this /proc counts (another than os.getpid() in a pid namespace)."""
        return int(os.readlink("self", dir_fd=self._fd))

    def children(self, pid: int) -> list[int]:
        """Child processes of all threads of a process; none if it is gone."""
        children: list[int] = []
        try:
            fd = os.open(f"{pid}/task", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            return children
        try:
            threads = os.listdir(fd)
        except OSError:
            threads = []
        finally:
            os.close(fd)
        for thread in threads:
            try:
                children += [int(word) for word in self._read(f"{pid}/task/{thread}/children").split()]
            except OSError:
                continue
        return children

    def tree(self, pid: int) -> list[int]:
        """A process and all its descendants."""
        members = [pid]
        for member in members:
            members += [child for child in self.children(member) if child not in members]
        return members

    def usage(self, pids: list[int]) -> Usage:
        """Sums over processes; those that are gone count nothing."""
        cpu_ticks = memory_pages = num_tasks = 0
        starved_s = 0.0
        for index, pid in enumerate(pids):
            try:
                after_name = self._read(f"{pid}/stat").rpartition(")")[2].split()
                cpu_ticks += sum(int(word) for word in after_name[11:15])
                memory_pages += int(after_name[21])
                num_tasks += int(after_name[17])
                if index == 0:
                    starved_s = int(self._read(f"{pid}/schedstat").split()[1]) / 1e9
            except (OSError, IndexError):
                continue
        return Usage(cpu_ticks / _TICKS_PER_SECOND, memory_pages * _PAGE_BYTES, starved_s, num_tasks)

    def open_pid_namespace(self) -> int:
        """File descriptor of this process's pid namespace."""
        return os.open("self/ns/pid", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)

    def address_space_bytes(self, pid: int) -> int:
        """Address space of a process."""
        return int(self._read(f"{pid}/statm").split()[0]) * _PAGE_BYTES

    def die_first(self) -> None:
        """Offer this process to the kernel when memory runs out."""
        fd = os.open("self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            os.write(fd, b"1000")
        finally:
            os.close(fd)

    def num_tasks_of(self, uid: int) -> int:
        """Processes and threads of a uid."""
        total = 0
        for name in os.listdir("/proc"):
            if not name.isdecimal():
                continue
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    total += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
        return total


class Limits(NamedTuple):
    """Limits of one check.

    Attributes:
        timeout_s: own time and processor seconds.
        memory_bytes: resident memory of all processes of the guest together.
        started_s: `time.monotonic()` when it began.
    """

    timeout_s: float
    memory_bytes: int
    started_s: float


class Judge(Protocol):
    """The part of `judge_process.JudgeProcess` that the watchdog uses."""

    number: int
    killed: bool

    def fileno(self) -> int:
        """A descriptor that can be read as soon as the judge is done or has ended."""

    def note_end(self) -> None:
        """Take note of why it can be read."""

    def usage(self) -> Usage:
        """What this check took of it so far."""

    def kill(self) -> None:
        """End it."""


class Watched:
    """A guest and its judge while they run.

    Attributes:
        stopped: reason why the guest was stopped; None if it was not.
        guest_status: wait status of a guest that ended by itself; None if it was killed here.
        waited_s: seconds not counted, because others had the processor.
    """

    def __init__(self, proc: Proc, limits: Limits, guest_pid: int, guest_number: int, judge: Judge) -> None:
        """Begin to watch.

        Args:
            proc: the machine's /proc.
            limits: when to stop.
            guest_pid: the guest's process number as this process counts.
            guest_number: the same as /proc counts.
            judge: its judge.
        """
        self.stopped: str | None = None
        self.guest_status: int | None = None
        self._proc = proc
        self._limits = limits
        self._guest_pid = guest_pid
        self._guest_number = guest_number
        self._judge = judge
        self._own_number = proc.own_pid()
        self.waited_s = 0.0
        self._judge_busy = True
        self._had_company = False
        self._pool_gone = False
        self._deadline_s = math.inf

    def wait(self, control: socket.socket) -> None:
        """Return when the judge is done or `control` was closed; stop the guest when it is over a limit."""
        guest_fd = os.pidfd_open(self._guest_pid)
        notes = {guest_fd: self._note_guest, self._judge.fileno(): self._note_judge}
        poller = select.poll()
        for fd in (*notes, control.fileno()):
            poller.register(fd, select.POLLIN)
        try:
            while self._judge_busy and not self._pool_gone:
                events = poller.poll(_TICK_MS)
                for fd, _ in events:
                    poller.unregister(fd)
                    notes.get(fd, self._note_pool)()
                if not events:
                    self._enforce()
        finally:
            os.close(guest_fd)

    def _note_guest(self) -> None:
        _, self.guest_status = os.waitpid(self._guest_pid, 0)

    def _note_judge(self) -> None:
        self._judge.note_end()
        self._judge_busy = False
        if self._judge.killed:
            self.stopped = JUDGE_KILLED

    def _note_pool(self) -> None:
        self._pool_gone = True

    def _enforce(self) -> None:
        now_s = time.monotonic()
        if self.stopped:
            if now_s > self._deadline_s:
                self._judge.kill()
                self._judge_busy = False
            return
        # All below this process but the judge: orphans of the guest may be children of this process.
        left_out = {self._own_number, self._guest_number, *self._proc.tree(self._judge.number)}
        others = [pid for pid in self._proc.tree(self._own_number) if pid not in left_out]
        self.stopped = self._over(
            self._proc.usage([self._guest_number, *others]),
            self._judge.usage(),
            now_s - self._limits.started_s,
        )
        if self.stopped:
            self._deadline_s = now_s + _GRACE_S
            if self.guest_status is None:
                os.kill(self._guest_pid, signal.SIGKILL)

    def _over(self, guest: Usage, judge: Usage, wall_s: float) -> str | None:
        """Reason to stop, or None."""
        timeout_s = self._limits.timeout_s
        self._had_company |= guest.num_tasks > 1
        self.waited_s = min(wall_s, guest.starved_s + judge.starved_s)
        own_s = wall_s - self.waited_s
        if guest.memory_bytes > self._limits.memory_bytes:
            return "memory"
        if guest.cpu_s > timeout_s:
            return "timeout_cpu"
        if own_s > timeout_s:
            return "timeout_cpu" if guest.cpu_s + judge.cpu_s > own_s / 2 else "timeout_wall"
        if wall_s > hard_wall_s(timeout_s):
            # A machine too busy to tell is no fault of the program, unless it may itself be what keeps it busy.
            return "timeout_cpu" if self._had_company else "sandbox_error"
        return None

    def reap(self) -> None:
        """Kill and collect what is left of the guest, and a judge that is not done."""
        if self._judge_busy:
            self._judge.kill()
        if self.guest_status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._guest_pid, signal.SIGKILL)
            _, status = os.waitpid(self._guest_pid, 0)
            killed_here = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            self.guest_status = None if killed_here else status
