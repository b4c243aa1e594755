"""The worker process: a warm Python that forks a judge and a locked-in guest for every check and watches both."""

# It never sees a program or a test, and a guest begins as its copy, so a guest knows none but its own. It runs in the
# bare interpreter (`python -S`, empty environment), and ends when `pool.WorkerProcess` closes the connection.

import contextlib
import gc
import json
import math
import mmap
import os
import pwd
import random
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from refusion_eval.sandbox import guest, jail, judge, layout, linux, seccomp, wire
from refusion_eval.sandbox.jail import PROFILES, Profile
from refusion_eval.sandbox.layout import ForkHooks
from refusion_eval.sandbox.watch import JudgeProcess, Proc, Watched

_CPU_SLACK_S = 2  # the kernel's limit on processor seconds comes after the watchdog's
_JUDGE_MIB = 2048
_NUM_JUDGE_PROCESSES = 256  # those of programs that are checked at the same time may count with them
_MIB = 1 << 20
_STDERR_FD, _ONLY_FD = 2, 3
_PAUSE_S = 0.002
_NUM_OWN_PROCESSES = 4  # the worker, the first process beside a guest, the judge and its child
_MOST_REAPED = 64  # in one round; some processes fork faster than they can be reaped


class Worker:
    """Sets the isolation up once, then runs one check at a time for the pool at the other end of `control`."""

    # `proc` is the machine's /proc, opened before the root was replaced, and `folders` are what programs may read.
    def __init__(
        self, control: socket.socket, profile: Profile, proc: Proc, folders: list[str], fork_hooks: ForkHooks
    ) -> None:
        random.seed(0)  # for all guests, which are copies: the same program gives the same verdict
        self._control, self._profile, self._proc, self._fork_hooks = control, profile, proc, fork_hooks
        self._own_number = proc.own_number()
        self._guest_uid, self._judge_uid = jail.unprivileged_ids(self._own_number)
        if profile.namespaces:  # they share a folder, and see no processes of each other
            self._judge_uid = self._guest_uid
        self._filter = seccomp.allow_program(profile.restrict_files) if profile.filter_calls else b""
        self._ruleset_fd = jail.make_ruleset(profile, folders)
        self._own_memory_bytes = proc.memory_bytes([self._own_number])
        self._base_bytes = proc.address_space_bytes(self._own_number)
        self._path = layout.search_path()
        # Those that count with the processes of a program.
        own, of_user = profile.namespaces, not (profile.namespaces or profile.change_uid)
        self._num_other_processes = _NUM_OWN_PROCESSES if own else proc.num_tasks_of(os.getuid()) if of_user else 0
        self._pid_namespace_fd = proc.open("self/ns/pid") if profile.namespaces else -1
        self._folder = "/tmp" if profile.namespaces else "/"  # in which programs and tests run
        self._tmp = jail.PrivateTmp(folders) if profile.namespaces else None
        self._sweeper = Sweeper(profile, proc, self._guest_uid)
        self._shared = mmap.mmap(-1, mmap.PAGESIZE)
        self._num_calls = memoryview(self._shared).cast("Q")  # in [0], the calls that the judge has begun
        self._judge: JudgeProcess | None = None
        self._first = (-1, -1)  # of the guest's pid namespace

    def serve(self) -> None:
        gc.collect()
        gc.freeze()  # forked copies then share these pages
        wire.send(self._control, ["up"])
        while True:
            data, fds, _, _ = socket.recv_fds(self._control, 4096, 1)
            if not data:
                return
            timeout_s, call_s, memory_mb, has_streams = json.loads(data)
            wire.send(self._control, self._check(timeout_s, call_s, memory_mb, has_streams, fds[0]))

    def _check(
        self, timeout_s: float, call_s: float, memory_mb: int, has_streams: bool, result_fd: int
    ) -> dict[str, Any]:
        if self._judge is None or self._judge.ended:
            ours, theirs = socket.socketpair()
            self._judge = JudgeProcess(self._proc, *self._start(_fork, partial(self._be_judge, theirs)), ours)
            theirs.close()
        guest_end, judge_end = socket.socketpair()
        cpu_s, num_processes = math.ceil(timeout_s) + _CPU_SLACK_S, self._num_other_processes + jail.NUM_PROCESSES
        limits = jail.limits_of(self._base_bytes + memory_mb * _MIB, cpu_s, num_processes)
        if self._profile.namespaces:
            linux.call("unshare", linux.CLONE_NEWPID)  # takes the next child
            self._first = self._start(linux.start_first_process)
        be_guest = partial(self._be_guest, guest_end, limits, has_streams, [result_fd, judge_end.fileno()])
        guest_pid, guest_number = self._start(_fork, be_guest)
        if self._profile.namespaces:
            linux.call("setns", self._pid_namespace_fd, linux.CLONE_NEWPID)  # or a new judge would be born inside
        with guest_end, judge_end, socket.socket(fileno=result_fd):
            self._judge.begin(result_fd, judge_end)
        memory_bytes = memory_mb * _MIB + self._own_memory_bytes
        processes = (self._judge, guest_pid, guest_number, self._first[1])
        watched = Watched(self._proc, *processes, timeout_s, call_s, memory_bytes, self._num_calls)
        try:
            watched.wait(self._control)
        finally:
            watched.reap()
            if self._profile.namespaces:  # the end of the first process ends all others of the guest's pid namespace
                os.kill(self._first[0], signal.SIGKILL)
                os.waitpid(self._first[0], 0)
            self._sweeper.sweep(self._judge)
            if self._tmp is not None:
                self._tmp.renew()
        return {"stopped": watched.stopped, "status": watched.guest_status, "waited_s": watched.waited_s}

    def _start(self, start: Callable[..., int], *args: Callable[[], None]) -> tuple[int, int]:
        """Start a process; returns its number here and in the machine's /proc."""
        others = self._proc.children(self._own_number)
        pid = start(*args)
        return pid, next(child for child in self._proc.children(self._own_number) if child not in others)

    def _be_guest(self, sock: socket.socket, limits: dict[int, int], has_streams: bool, others: list[int]) -> None:
        try:
            self._num_calls.release()  # only the judge may tell the watchdog that a call has begun
            self._shared.close()
            self._proc.die_first()
            for fd in others:
                os.close(fd)
            os.chdir(self._folder)
            os.setsid()  # or a signal to its process group would reach this worker
            streams = os.open(os.devnull, os.O_RDWR)
            for fd in range(_ONLY_FD):  # anew: a program's flags on its own streams reach no other program's
                os.dup2(os.memfd_create("stream") if has_streams and fd != _STDERR_FD else streams, fd)
            self._lock_down(sock, self._guest_uid, limits)
        except OSError as error:
            wire.send(sock, [f"locking down failed: {error}"])
            return
        sys.argv[:] = sys.orig_argv[:] = [""]
        for hooks in self._fork_hooks:
            os.register_at_fork(**hooks)
        guest.Guest(socket.socket(fileno=_ONLY_FD)).serve()

    def _lock_down(self, sock: socket.socket, uid: int, limits: dict[int, int]) -> None:
        jail.lock_down(self._profile, uid, self._ruleset_fd, limits, self._filter)
        os.dup2(sock.detach(), _ONLY_FD)
        os.closerange(_ONLY_FD + 1, 1 << 20)
        os.environ.clear()
        sys.path[:] = self._path

    def _be_judge(self, sock: socket.socket) -> None:
        # Rows of a benchmark come from elsewhere, so their tests have no more rights than programs.
        cpu_s = resource.RLIM_INFINITY  # a judge is kept; the watchdog sees to the time of each check
        num_processes = self._num_other_processes + _NUM_JUDGE_PROCESSES
        limits = jail.limits_of(self._base_bytes + _JUDGE_MIB * _MIB, cpu_s, num_processes)
        self._lock_down(sock, self._judge_uid, limits)
        judge.serve(socket.socket(fileno=_ONLY_FD), self._fork_hooks, self._folder, self._num_calls)


class Sweeper:
    """Ends every process that a check left running, however fast it forks."""

    # A process that forks and ends at once, again and again, is gone before a list with its number has been read. One
    # signal to all processes that the sender may signal does end it, because the kernel sends that in one step. So
    # before a worker starts anything, the processes that it may signal are reduced to those that it starts.
    def __init__(self, profile: Profile, proc: Proc, guest_uid: int) -> None:
        self._proc = proc
        self._own_number = proc.own_number()
        # The first process of a pid namespace reaches nothing else.
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
                    os.waitpid(_fork(partial(_kill_all_of, self._uid)), 0)
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
    if not profile.restrict_files or linux.landlock_abi() < linux.LANDLOCK_ABI_SIGNALS:
        return False
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.call("landlock_restrict_self", linux.create_landlock_ruleset(scopes=linux.LANDLOCK_SIGNALS), 0)
    try:
        os.kill(os.getppid(), 0)
    except PermissionError:
        return True
    return False


def _kill_all_of(uid: int) -> None:
    jail.become(uid)
    os.kill(-1, signal.SIGKILL)


def _kill(pid: int, signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal_number)


def _fork(body: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        body()
    finally:
        os._exit(0)


def main(control_fd: int, profile_name: str, fork_hooks: ForkHooks) -> NoReturn:
    control = socket.socket(fileno=control_fd)
    profile = PROFILES[profile_name]
    # Background jobs of scripts and `nohup` start with these ignored, and programs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    try:
        proc = Proc()
        folders = layout.readable_folders()
        if profile.namespaces:
            jail.enter_namespaces(profile)
            inner = os.fork()
            if inner:
                control.close()
                os.waitpid(inner, 0)
                os._exit(0)
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
            jail.build_root(folders)
            linux.drop_bounding_capabilities()
        else:
            linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)  # adopts orphans of its programs
        worker = Worker(control, profile, proc, folders, fork_hooks)
    except Exception as error:  # noqa: BLE001 - whatever is missing here becomes the reason why this profile fails
        wire.send(control, ["failed", f"{type(error).__name__}: {error}"])
        os._exit(0)
    with contextlib.suppress(OSError):  # the pool is gone
        worker.serve()
    os._exit(0)
