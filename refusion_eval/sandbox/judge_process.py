"""Handle to a judge process, which is reused between checks because forking takes longer than most tests."""

import contextlib
import os
import select
import signal
import socket

from refusion_eval.sandbox.judge import GOES_ON
from refusion_eval.sandbox.watch import Proc, Usage

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)  # sent when memory is short, or at a shutdown


class JudgeProcess:
    """A running judge.

    Attributes:
        number: its process number in the machine's /proc.
        killed: whether a process other than its worker has killed it.
        collected: whether it has ended and been waited for; another process may have its number then.
    """

    def __init__(self, proc: Proc, pid: int, number: int, sock: socket.socket) -> None:
        """Take over a judge that was started.

        Args:
            proc: the machine's /proc.
            pid: the judge's process number in the worker's pid namespace.
            number: the judge's process number in `proc`.
            sock: connection to the judge.
        """
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
