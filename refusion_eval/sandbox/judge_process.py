"""The judge's process as its worker sees it; kept from check to check, for a fork takes longer than most tests."""

import contextlib
import os
import select
import signal
import socket

from refusion_eval.sandbox.judge import GOES_ON
from refusion_eval.sandbox.watch import Proc, Usage

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)  # short of memory, or shutting down


class JudgeProcess:
    """A running judge.

    Attributes:
        number: its process number as /proc counts.
        killed: whether others than its worker have killed it.
        collected: whether it has ended and been waited for; its number may be another's then.
    """

    def __init__(self, proc: Proc, pid: int, number: int, sock: socket.socket) -> None:
        """Take over a judge that was started.

        Args:
            proc: the machine's /proc.
            pid: its process number as the worker counts.
            number: the same as /proc counts.
            sock: connection to it.
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
        """Whether it has ended, and another is needed for the next check."""
        if not self.collected and select.select([self._sock], [], [], 0)[0]:
            self.note_end()
        return self.collected

    def fileno(self) -> int:
        """A descriptor that can be read as soon as the judge is done or has ended."""
        return self._sock.fileno()

    def begin(self, result_fd: int, candidate: socket.socket) -> None:
        """Hand over one check; says nothing of a judge that is gone, for `note_end` will."""
        self._base = self._total()
        with contextlib.suppress(OSError):
            socket.send_fds(self._sock, [b"+"], [result_fd, candidate.fileno()])

    def note_end(self) -> None:
        """Take note of why it can be read: the check is done, or the judge has ended."""
        try:
            goes_on = self._sock.recv(1) == GOES_ON
        except OSError:
            goes_on = False
        if not goes_on:
            status = self._collect()
            self.killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in _FROM_OUTSIDE

    def usage(self) -> Usage:
        """What this check took of it so far, with the process that it may have made for it."""
        now = self._total()
        return now._replace(cpu_s=now.cpu_s - self._base.cpu_s, starved_s=now.starved_s - self._base.starved_s)

    def _total(self) -> Usage:
        parts = [self._proc.usage([number]) for number in self._proc.tree(self.number)]
        return Usage(*(sum(column) for column in zip(*parts, strict=True)))

    def kill(self) -> None:
        """End it; what it started ends with it."""
        if not self.collected:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._collect()

    def _collect(self) -> int:
        """Its wait status."""
        status = 0
        with contextlib.suppress(ChildProcessError):  # collected with the orphans
            _, status = os.waitpid(self._pid, 0)
        self._sock.close()
        self.collected = True
        return status
