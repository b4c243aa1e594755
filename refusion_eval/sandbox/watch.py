"""The watchdog: reads the usage of processes from the kernel, and decides when a check has to be stopped.

The time of a check is the wall clock less the time that its processes were ready to run and had no processor. So a busy
machine changes no verdict, and a program that sleeps is stopped as soon as one that computes. A program that takes the
processor from itself by its own children gains nothing: it cannot have them collected unseen
(`seccomp.REFUSED_ARGUMENTS`: SIGCHLD), so their processor time counts.
"""

import contextlib
import math
import os
import select
import signal
import socket
import time
from typing import NamedTuple

from refusion_eval.sandbox.result import hard_wall_s

JUDGE_KILLED = "judge_killed"
GOES_ON = b"+"  # a judge's answer to a check that is done
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)  # sent when memory is short, or at a shutdown
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_TICK_MS = 50
_GRACE_S = 0.5  # for a judge to end by itself once its guest was stopped
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Usage(NamedTuple):
    """Sums over a process and all its descendants."""

    cpu_s: float  # processor seconds, ended and waited-for children included
    memory_bytes: int  # resident memory now
    starved_s: float  # seconds the first process was ready to run and had no processor
    num_tasks: int  # processes and threads


class Proc:
    """The /proc of the machine, kept open so that it can be read from inside another root."""

    def __init__(self) -> None:
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
            with contextlib.suppress(OSError):
                children += [int(word) for word in self._read(f"{pid}/task/{thread}/children").split()]
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
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == uid:
                    total += len(os.listdir(f"/proc/{name}/task"))
        return total


class Limits(NamedTuple):
    """Limits of one check, and when it began."""

    timeout_s: float  # own time and processor seconds
    memory_bytes: int  # resident memory of all processes of the guest together
    started_s: float  # `time.monotonic()`


class JudgeProcess:
    """A running judge. It is reused between checks, because forking takes longer than most tests.

    Attributes:
        number: its process number in the machine's /proc.
        killed: whether a process other than its worker has killed it.
        collected: whether it has ended and been waited for; another process may have its number then.

    `pid` is its process number in the worker's pid namespace, and `sock` the connection to it.
    """

    def __init__(self, proc: Proc, pid: int, number: int, sock: socket.socket) -> None:
        self.number = number
        self.killed = False
        self.collected = False
        self._proc = proc
        self._pid = pid
        self._sock = sock
        self._base = self._total()

    @property
    def ended(self) -> bool:
        """Whether the judge has ended, so that the next check needs a new one."""
        if not self.collected and select.select([self._sock], [], [], 0)[0]:
            self.note_end()
        return self.collected

    def fileno(self) -> int:
        """A descriptor that becomes readable when the judge has done its check or has ended."""
        return self._sock.fileno()

    def begin(self, result_fd: int, candidate: socket.socket) -> None:
        """Hand over one check. A judge that is gone is no error here; `note_end` reports it."""
        self._base = self._total()
        with contextlib.suppress(OSError):
            socket.send_fds(self._sock, [b"+"], [result_fd, candidate.fileno()])

    def note_end(self) -> None:
        """Read why the descriptor is readable: the check is done, or the judge has ended."""
        try:
            goes_on = self._sock.recv(1) == GOES_ON
        except OSError:
            goes_on = False
        if not goes_on:
            status = self._collect()
            self.killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in _FROM_OUTSIDE

    def usage(self) -> Usage:
        """Usage of this check so far, including the process that the judge may have forked for it."""
        now = self._total()
        return now._replace(cpu_s=now.cpu_s - self._base.cpu_s, starved_s=now.starved_s - self._base.starved_s)

    def _total(self) -> Usage:
        parts = [self._proc.usage([number]) for number in self._proc.tree(self.number)]
        return Usage(*(sum(column) for column in zip(*parts, strict=True)))

    def kill(self) -> None:
        """Kill the judge; the processes that it started end with it."""
        if not self.collected:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._collect()

    def _collect(self) -> int:
        """Wait for the judge and return its wait status."""
        status = 0
        with contextlib.suppress(ChildProcessError):  # collected with the orphans
            _, status = os.waitpid(self._pid, 0)
        self._sock.close()
        self.collected = True
        return status


class Watched:
    """A guest and its judge while they run.

    Attributes:
        stopped: reason why the guest was stopped; None if it was not.
        guest_status: wait status of a guest that ended by itself; None if it was killed here.
        waited_s: seconds not counted, because others had the processor.

    The guest's process number is `guest_pid` as this process counts, and `guest_number` as /proc counts.
    """

    def __init__(self, proc: Proc, limits: Limits, guest_pid: int, guest_number: int, judge: JudgeProcess) -> None:
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
