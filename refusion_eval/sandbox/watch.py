"""The watchdog: reads from /proc what processes use, and decides when a check has to be stopped."""

# The time of a check is its own time (`own_time`), so a busy machine changes no verdict, and a program that sleeps is
# stopped as soon as one that computes. A program that takes the processor from itself by its own children gains
# nothing: it cannot have them collected unseen (`seccomp.RESTRICTED`: SIGCHLD), so their processor time counts.

import contextlib
import math
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from refusion_eval import own_time
from refusion_eval.own_time import OwnTime, Work, longest_wall_s

JUDGE_KILLED = "judge_killed"
GOES_ON = b"+"  # a judge's answer to a check that is done
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)  # sent when memory is short, or at a shutdown
_TICK_MS = 50
_GRACE_S = 0.5  # for a judge to end by itself once its guest was stopped
# Peak resident memory; the allocator does not always return that of a large value. A judge that has had more is not
# kept for the next check, so one that is killed with more was killed for its size.
KEPT_JUDGE_BYTES = 256 << 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PIPE_PAGES = 16
_EXITING = 0x4  # PF_EXITING of the kernel
_LAST_MESSAGE_BYTES = 64 << 10  # a socket takes one more message when its buffer is almost full


class Proc(own_time.Proc):
    """With what the processes of a check hold, and what is done with them."""

    def __init__(self) -> None:
        super().__init__()
        left, right = socket.socketpair()
        with left, right:
            socket_bytes = left.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) + _LAST_MESSAGE_BYTES
        self._file_bytes = max(socket_bytes, _PIPE_PAGES * _PAGE_BYTES)

    def own_number(self) -> int:  # another than os.getpid() in a pid namespace
        return int(os.readlink("self", dir_fd=self._fd))

    def memory_bytes(self, pids: list[int]) -> int:
        """Resident memory and page tables of processes now, and what their open pipes and sockets may hold."""
        memory_bytes = 0
        files: set[tuple[int, int]] = set()
        for pid in pids:
            with contextlib.suppress(OSError, IndexError):
                # All threads have the same memory and files, and those that have ended none: the first one may be such.
                threads = self.entries(f"{pid}/task") if self.stat(str(pid))[0] == "Z" else [str(pid)]
                memory_bytes += max((self._memory_bytes(f"{pid}/task/{thread}") for thread in threads), default=0)
                files.update(*(self._files(f"{pid}/task/{thread}/fd") for thread in threads))
        return memory_bytes + len(files) * self._file_bytes

    def _memory_bytes(self, thread: str) -> int:
        # Pages, those swapped out, and page tables, which count pages only read, too.
        lines = self.read(f"{thread}/status").splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("VmRSS:", "VmSwap:", "VmPTE:")))

    def _files(self, folder: str) -> set[tuple[int, int]]:
        """Device and inode of the open files of a process, so that a file that several have open counts once."""
        files = set()
        for name in self.entries(folder):
            with contextlib.suppress(OSError):
                status = os.stat(f"{folder}/{name}", dir_fd=self._fd)
                files.add((status.st_dev, status.st_ino))
        return files

    def is_ending(self, pid: int) -> bool:
        """Whether a child of this process, not waited for yet, has begun to end."""
        return bool(int(self.stat(str(pid))[6]) & _EXITING)

    def address_space_bytes(self, pid: int) -> int:
        return int(self.read(f"{pid}/statm").split()[0]) * _PAGE_BYTES

    def die_first(self) -> None:
        """Offer this process to the kernel when memory runs out."""
        with os.fdopen(self.open("self/oom_score_adj", os.O_WRONLY), "wb", 0) as file:
            file.write(b"1000")

    def num_tasks_of(self, uid: int) -> int:
        total = 0
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == uid:
                    total += len(os.listdir(f"/proc/{name}/task"))
        return total


class JudgeProcess:
    """A running judge. It is reused between checks, because forking takes longer than most tests."""

    # `pid` is its process number in the worker's pid namespace, `number` that in the machine's /proc.
    def __init__(self, proc: Proc, pid: int, number: int, sock: socket.socket) -> None:
        self.number = number
        self.killed = False
        self.collected = False  # it has ended and been waited for; another process may have its number then
        self.peak_bytes = 0
        self._proc = proc
        self._pid = pid
        self._sock = sock
        self._before = self.usage()

    @property
    def ended(self) -> bool:
        if not self.collected and select.select([self._sock], [], [], 0)[0]:
            self.note_end()
        return self.collected

    def fileno(self) -> int:
        return self._sock.fileno()

    def begin(self, result_fd: int, candidate: socket.socket) -> None:
        """Hand over one check. A judge that is gone is no error here; `note_end` reports it."""
        self._before = self.usage()
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

    def usage(self) -> tuple[Work, int]:
        """What the judge and the process that it may have forked for this check did so far, and their memory."""
        members = self._proc.tree(self.number)
        # The memory is that of the larger one, because they share most of it.
        return self._proc.work(members), max(self._proc.memory_bytes([number]) for number in members)

    def usage_of_check(self) -> tuple[Work, int]:
        """As `usage`, without what was there before this check."""
        (work, memory_bytes), (work_before, bytes_before) = self.usage(), self._before
        return work._replace(cpu_s=work.cpu_s - work_before.cpu_s), max(0, memory_bytes - bytes_before)

    def kill(self) -> None:
        if not self.collected:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._collect()

    def _collect(self) -> int:
        status = 0
        with contextlib.suppress(ChildProcessError):  # collected with the orphans
            _, status, used = os.wait4(self._pid, 0)
            self.peak_bytes = used.ru_maxrss << 10
        self._sock.close()
        self.collected = True
        return status


@dataclass
class Watched:
    proc: Proc
    judge: JudgeProcess
    guest_pid: int  # as the worker counts
    guest_number: int  # as /proc counts
    first_number: int  # of the first process of the guest's pid namespace, which does nothing itself; -1 for none
    timeout_s: float  # own time and processor seconds
    call_s: float  # own time of one call
    memory_bytes: int  # of all processes of the guest together, and what the judge grows by
    num_calls: Sequence[int]  # in [0], the calls that the judge has begun
    stopped: str | None = None  # why the guest was killed here
    guest_status: int | None = None  # wait status of a guest that ended by itself
    _call: tuple[int, float] = (0, 0.0)  # the last one seen, and what the guest had used before it
    _own_time: OwnTime = field(default_factory=OwnTime)
    _judge_busy: bool = True
    _deadline_s: float = math.inf

    @property
    def waited_s(self) -> float:
        """Seconds that did not count, because others had the processor."""
        return self._own_time.wall_s - self._own_time.seconds

    def wait(self, control: socket.socket) -> None:
        """Return when the judge is done or `control` was closed; stop the guest when it is over a limit."""
        guest_fd = os.pidfd_open(self.guest_pid)
        poller = select.poll()
        for fd in (guest_fd, self.judge.fileno(), control.fileno()):
            poller.register(fd, select.POLLIN)
        try:
            while self._judge_busy:
                events = poller.poll(_TICK_MS)
                for fd, _ in events:
                    poller.unregister(fd)
                    if fd == guest_fd:
                        _, self.guest_status = os.waitpid(self.guest_pid, 0)
                    elif fd == control.fileno():
                        return
                    else:
                        self._judge_busy = False
                        self.judge.note_end()
                        if self.judge.killed:
                            self.stopped = "memory" if self.judge.peak_bytes > KEPT_JUDGE_BYTES else JUDGE_KILLED
                if not events:
                    self._enforce()
        finally:
            os.close(guest_fd)

    def _enforce(self) -> None:
        now_s = time.monotonic()
        if self.stopped:
            if now_s > self._deadline_s:
                self.judge.kill()
                self._judge_busy = False
            return
        own_number = self.proc.own_number()
        # All below this process but the judge: orphans of the guest may be children of this process.
        ours = (own_number, self.guest_number, self.first_number, *self.proc.tree(self.judge.number))
        others = [pid for pid in self.proc.tree(own_number) if pid not in ours]
        guest = [self.guest_number, *others]
        self.stopped = self._over(self.proc.work(guest), self.proc.memory_bytes(guest), *self.judge.usage_of_check())
        if self.stopped:
            self._deadline_s = now_s + _GRACE_S
            if self.guest_status is None:
                os.kill(self.guest_pid, signal.SIGKILL)

    def _over(self, guest: Work, guest_bytes: int, judge: Work, judge_bytes: int) -> str | None:
        cpu_s = guest.cpu_s + judge.cpu_s
        self._own_time.update(cpu_s, guest.is_ready or judge.is_ready)
        if guest_bytes + judge_bytes > self.memory_bytes:
            return "memory"
        used_s, own_s = guest.cpu_s + self._own_time.asleep_s, self._own_time.seconds
        if self.num_calls[0] != self._call[0]:
            self._call = self.num_calls[0], used_s
        if max(guest.cpu_s, own_s) > self.timeout_s or used_s - self._call[1] > self.call_s:
            return "timeout_cpu" if cpu_s > own_s / 2 else "timeout_wall"
        return "no_time" if self._own_time.wall_s > longest_wall_s(self.timeout_s) else None

    def reap(self) -> None:
        """Kill and collect what is left of the guest, and a judge that is not done."""
        if self._judge_busy:
            self.judge.kill()
        if self.guest_status is None:
            by_itself = self.proc.is_ending(self.guest_number)
            os.kill(self.guest_pid, signal.SIGKILL)
            _, status = os.waitpid(self.guest_pid, 0)
            self.guest_status = status if by_itself or status != signal.SIGKILL else None
