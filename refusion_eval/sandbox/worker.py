"""The worker process: a warm Python that forks a judge and a locked-in guest for every check and watches both.

It never sees a program or a test, and a guest begins as its copy, so a guest knows none but its own. It runs in the
bare interpreter (`python -S`, empty environment), is started by `pool.WorkerProcess`, and ends when that closes the
connection.
"""

import contextlib
import gc
import json
import math
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from refusion_eval.sandbox import guest, jail, judge, layout, linux, wire
from refusion_eval.sandbox.judge_process import JudgeProcess
from refusion_eval.sandbox.profiles import PROFILES, Profile
from refusion_eval.sandbox.sweep import Sweeper
from refusion_eval.sandbox.watch import Limits, Proc, Watched

_CPU_SLACK_S = 2  # the kernel's limit on processor seconds comes after the watchdog's
_JUDGE_MIB = 2048
_MIB = 1 << 20
_ONLY_FD = 3


class Worker:
    """Sets the isolation up once, then runs one check at a time."""

    def __init__(
        self,
        control: socket.socket,
        profile: Profile,
        proc: Proc,
        folders: list[str],
        fork_hooks: list[dict[str, Callable[[], object]]],
    ) -> None:
        """Prepare what all checks share.

        Args:
            control: connection to the pool.
            profile: isolation to apply.
            proc: the machine's /proc, opened before the root was replaced.
            folders: what programs may read.
            fork_hooks: from `layout.preload`.
        """
        random.seed(0)  # for all guests, which are copies: the same program gives the same verdict
        self._control = control
        self._profile = profile
        self._proc = proc
        self._own_pid = proc.own_pid()
        self._guest_uid, self._judge_uid = jail.unprivileged_ids(self._own_pid)
        self._filter = jail.filter_program(profile)
        self._ruleset_fd = jail.make_ruleset(profile, folders)
        self._base = proc.usage([self._own_pid])
        self._base_bytes = proc.address_space_bytes(self._own_pid)
        self._path = layout.search_path()
        self._fork_hooks = fork_hooks
        shares_uid = not profile.namespaces and not profile.change_uid
        self._num_other_processes = proc.num_tasks_of(os.getuid()) if shares_uid else 0
        self._pid_namespace_fd = proc.open_pid_namespace() if profile.namespaces else -1
        self._tmp = jail.PrivateTmp(folders) if profile.namespaces else None
        self._sweeper = Sweeper(profile, proc, self._guest_uid)
        self._judge: JudgeProcess | None = None

    def serve(self) -> None:
        """Check programs until the pool closes the connection."""
        gc.collect()
        gc.freeze()  # forked copies then share these pages
        wire.send(self._control, ["up"])
        while True:
            data, fds, _, _ = socket.recv_fds(self._control, 4096, 1)
            if not data:
                return
            timeout_s, memory_mb = json.loads(data)
            wire.send(self._control, self._check(timeout_s, memory_mb, fds[0]))

    def _check(self, timeout_s: float, memory_mb: int, result_fd: int) -> dict[str, Any]:
        """Run one check; says how the guest ended and who stopped it."""
        started_s = time.monotonic()
        judge_process = self._ready_judge()
        guest_end, judge_end = socket.socketpair()
        others = self._proc.children(self._own_pid)
        guest_pid = self._fork_guest(guest_end, timeout_s, memory_mb, [result_fd, judge_end.fileno()])
        guest_number = next(child for child in self._proc.children(self._own_pid) if child not in others)
        judge_process.begin(result_fd, judge_end)
        guest_end.close()
        judge_end.close()
        os.close(result_fd)
        limits = Limits(timeout_s, memory_mb * _MIB + self._base.memory_bytes, started_s)
        watched = Watched(self._proc, limits, guest_pid, guest_number, judge_process)
        try:
            watched.wait(self._control)
        finally:
            watched.reap()
            self._sweeper.sweep(judge_process)
            if self._tmp is not None:
                self._tmp.renew()
        return {"stopped": watched.stopped, "status": watched.guest_status, "waited_s": watched.waited_s}

    def _ready_judge(self) -> JudgeProcess:
        """The judge of the last check, or a new one."""
        if self._judge is None or self._judge.ended:
            ours, theirs = socket.socketpair()
            others = self._proc.children(self._own_pid)
            pid = _fork(lambda: self._be_judge(theirs))
            theirs.close()
            number = next(child for child in self._proc.children(self._own_pid) if child not in others)
            self._judge = JudgeProcess(self._proc, pid, number, ours)
        return self._judge

    def _fork_guest(self, sock: socket.socket, timeout_s: float, memory_mb: int, others: list[int]) -> int:
        limits = jail.guest_limits(
            self._profile,
            self._base_bytes + memory_mb * _MIB,
            math.ceil(timeout_s) + _CPU_SLACK_S,
            self._num_other_processes,
        )
        if not self._profile.namespaces:
            return _fork(lambda: self._be_guest(sock, limits, others))
        linux.unshare(linux.CLONE_NEWPID)
        pid = _fork(lambda: self._be_guest(sock, limits, others))
        linux.setns(self._pid_namespace_fd, linux.CLONE_NEWPID)  # or the judge would be born inside
        return pid

    def _be_guest(self, sock: socket.socket, limits: dict[int, int], others: list[int]) -> None:
        try:
            self._proc.die_first()
            for fd in others:
                os.close(fd)
            os.chdir("/tmp" if self._profile.namespaces else "/")
            os.setsid()  # or a signal to its process group would reach this worker
            jail.lock_down(self._profile, self._guest_uid, self._ruleset_fd, limits, self._filter)
            os.dup2(sock.detach(), _ONLY_FD)
            os.closerange(_ONLY_FD + 1, 1 << 20)
        except OSError as error:
            wire.send(sock, [f"locking down failed: {error}"])
            return
        os.environ.clear()
        sys.path[:] = self._path
        sys.argv[:] = [""]
        for hooks in self._fork_hooks:
            os.register_at_fork(**hooks)
        guest.Guest(socket.socket(fileno=_ONLY_FD)).serve()

    def _be_judge(self, sock: socket.socket) -> None:
        os.dup2(sock.detach(), _ONLY_FD)
        os.closerange(_ONLY_FD + 1, 1 << 20)
        sys.path[:] = self._path
        jail.restrict_judge(self._profile, self._judge_uid, self._base_bytes + _JUDGE_MIB * _MIB)
        judge.serve(socket.socket(fileno=_ONLY_FD), self._fork_hooks)


def _fork(body: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        body()
    finally:
        os._exit(0)


def main(control_fd: int, profile_name: str, fork_hooks: list[dict[str, Callable[[], object]]]) -> NoReturn:
    """Entry point of the worker process.

    Args:
        control_fd: connection to the pool.
        profile_name: one of `PROFILES`.
        fork_hooks: from `layout.preload`.
    """
    control = socket.socket(fileno=control_fd)
    profile = PROFILES[profile_name]
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
            linux.die_with_parent(signal.SIGKILL)
            jail.build_root(folders)
            linux.drop_bounding_capabilities()
        else:
            linux.adopt_orphans()
        worker = Worker(control, profile, proc, folders, fork_hooks)
    except Exception as error:  # noqa: BLE001 - whatever is missing here becomes the reason why this profile fails
        wire.send(control, ["failed", f"{type(error).__name__}: {error}"])
        os._exit(0)
    with contextlib.suppress(OSError):  # the pool is gone
        worker.serve()
    os._exit(0)
