"""The end of everything that a check left running, however fast it forks.

A process that forks and ends at once, again and again, is gone before a list that names it was read, so it cannot be
killed by its number. What ends it is one signal to all processes within reach, which the kernel sends in one step; so
a worker's reach is made to be what it started, before it starts anything.
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
_MOST_REAPED = 64  # before the next look; some fork faster than they can be reaped


class Sweeper:
    """Ends what is left of a check; one per worker, whose children it looks at."""

    def __init__(self, profile: Profile, proc: Proc, guest_uid: int) -> None:
        """Narrow the worker's reach.

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
        """Return when the judge, at most, is left; it has to end too where the signal reaches it."""
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
        """Children but the judge; each of those that fork and end leaves at least itself, ended, at any time."""
        with contextlib.suppress(ChildProcessError):
            for _ in range(_MOST_REAPED):
                if not os.waitpid(-1, os.WNOHANG)[0]:
                    break
        spared = [] if judge.collected else [judge.number]
        return [child for child in self._proc.children(self._own_number) if child not in spared]


def _is_nobodys(uid: int, proc: Proc) -> bool:
    """Whether all processes of a uid can be killed without asking whose they are."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return proc.num_tasks_of(uid) == 0
    return False


def _confined(profile: Profile) -> bool:
    """Give up signals to all but what this process will start, where the kernel can do that; says whether it did."""
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
