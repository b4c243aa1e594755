"""Ends every process that a check left running, however fast it forks.

A process that forks and ends at once, again and again, is gone before a list with its number has been read, so it
cannot be killed by its number. One signal to all processes that the sender may signal does end it, because the kernel
sends that signal in one step. Before a worker starts anything, the processes that it may signal are therefore reduced
to those that it starts.
"""

import contextlib
import os
import pwd
import signal
import time

from refusion_eval.sandbox import jail, landlock, linux
from refusion_eval.sandbox.judge_process import JudgeProcess
from refusion_eval.sandbox.profiles import Profile
from refusion_eval.sandbox.watch import Proc

_PAUSE_S = 0.002
_MOST_REAPED = 64  # in one round; some processes fork faster than they can be reaped


class Sweeper:
    """Ends the processes that are left of a check. Each worker has one, for its own children."""

    def __init__(self, profile: Profile, proc: Proc, guest_uid: int) -> None:
        """Reduce the processes that the worker may signal to those that it starts.

        Args:
            profile: isolation of the worker.
            proc: the machine's /proc.
            guest_uid: uid of its programs, where the profile changes it.
        """
        self._proc = proc
        self._own_number = proc.own_pid()
        # The first process of a pid namespace reaches that namespace and nothing else.
        self._reaches_own_only = os.getpid() == 1 if profile.namespaces else _confined(profile)
        by_uid = profile.change_uid and not self._reaches_own_only and _is_nobodys(guest_uid, proc)
        self._uid = guest_uid if by_uid else None

    def sweep(self, judge: JudgeProcess) -> None:
        """Return when no process but the judge is left. The judge ends too where the signal reaches it."""
        while left := self._left(judge):
            if self._reaches_own_only:
                _kill(-1, signal.SIGKILL)
                judge.kill()
            else:
                if self._uid is not None:
                    _kill_all_of(self._uid)
                below = [pid for child in left for pid in self._proc.tree(child)]
                for signal_number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none forks
                    for pid in below:
                        _kill(pid, signal_number)
            time.sleep(_PAUSE_S)

    def _left(self, judge: JudgeProcess) -> list[int]:
        """Children without the judge. Of processes that fork and end, at least an ended one is there at any time."""
        with contextlib.suppress(ChildProcessError):
            for _ in range(_MOST_REAPED):
                if not os.waitpid(-1, os.WNOHANG)[0]:
                    break
        spared = [] if judge.collected else [judge.number]
        return [child for child in self._proc.children(self._own_number) if child not in spared]


def _is_nobodys(uid: int, proc: Proc) -> bool:
    """Whether a uid belongs to no user and has no processes, so that all its later ones may be killed."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return proc.num_tasks_of(uid) == 0
    return False


def _confined(profile: Profile) -> bool:
    """Give up signals to all processes but those that this one will start; False where the kernel cannot do that."""
    if not profile.restrict_files or linux.landlock_abi() < landlock.ABI_SIGNALS:
        return False
    linux.no_new_privileges()
    linux.landlock_restrict(landlock.own_signals_only())
    try:
        os.kill(os.getppid(), 0)
    except PermissionError:
        return True
    return False


def _kill_all_of(uid: int) -> None:
    """Kill all processes of a program's uid."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        jail.become(uid)
        os.kill(-1, signal.SIGKILL)
    finally:
        os._exit(0)


def _kill(pid: int, signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal_number)
