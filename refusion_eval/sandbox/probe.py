"""Finds the isolation that works on this machine by attacking it."""

import contextlib
import functools
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field

from refusion_eval.errors import SandboxError
from refusion_eval.sandbox import linux, pool
from refusion_eval.sandbox.jail import PROFILES
from refusion_eval.sandbox.result import Program

# In order of preference. Root needs no user namespace; without root there is no uid to change to.
_FOR_ROOT = ("namespaces", "user-namespaces", "root-landlock")
_FOR_USERS = ("user-namespaces", "landlock")
_TIMEOUT_S = 5.0

_SELF_TEST_PROGRAM = """
import os, socket
def honest(items):
    items.append(len(items))
    return sorted(items)
def reach():
    reached = []
    def attempt(name, action, *arguments):
        try:
            action(*arguments)
            reached.append(name)
        except OSError:
            pass
    for path in PATHS:
        attempt("read " + path, os.listdir if os.path.isdir(path) else open, path)
    attempt("network", socket.socket)
    for pid in PIDS:
        attempt("signal", os.kill, pid, 0)
    if os.geteuid() == 0 and os.getuid() == 0:
        reached.append("root")
    return reached
def fork():
    pid = os.fork()
    if not pid:
        os._exit(0)
    return os.waitpid(pid, 0)[1]
def late():
    import plistlib
    return plistlib.__name__
"""
_SELF_TEST = """
assert honest([3, 1]) == [1, 2, 3]
assert late() == "plistlib"
assert fork() == 0
reached = reach()
assert reached == [], reached
"""


@dataclass(frozen=True, kw_only=True)
class SandboxReport:
    """The isolation of this machine: tier and profile ("D" and "" for none), and why stronger ones are missing."""

    tier: str
    profile: str
    layers: tuple[str, ...]
    missing: dict[str, str] = field(default_factory=dict)
    advice: tuple[str, ...] = ()


@functools.cache
def probe() -> SandboxReport:
    """Find the best isolation of this machine; tried once per process."""
    # Each profile is set up for real and given a program that tries to read outside, to open a socket and to signal
    # this process, and that must also be able to do honest work.
    missing: dict[str, str] = {}
    if sys.platform == "linux":
        for name in _FOR_ROOT if os.geteuid() == 0 else _FOR_USERS:
            fault = self_test(name)
            if not fault:
                tier, layers = PROFILES[name].tier, PROFILES[name].layers
                return SandboxReport(tier=tier, profile=name, layers=layers, missing=missing, advice=_advice(tier))
            missing[name] = fault
    else:
        missing["all"] = f"isolation needs Linux; this is {sys.platform}"
    return SandboxReport(tier="D", profile="", layers=(), missing=missing, advice=_advice("D"))


def self_test(profile_name: str) -> str:
    """Set a profile up and attack it; returns what went wrong, or "" if it holds."""
    with contextlib.ExitStack() as stack:
        paths = [os.path.expanduser("~"), __file__, "/etc/passwd", "/proc/self/environ", os.getcwd()]
        with contextlib.suppress(OSError):  # a machine without a writable folder for temporary files
            paths.append(stack.enter_context(tempfile.NamedTemporaryFile()).name)
        if PROFILES[profile_name].namespaces:
            # A root and a /tmp of its own are given to the program, whoever started this process in one of them. What
            # lies in those of the machine is looked for by the other paths.
            paths = [path for path in paths if os.path.realpath(path) not in ("/", "/tmp")]
        return _attack(profile_name, paths)


def _attack(profile_name: str, paths: list[str]) -> str:
    program = f"PATHS = {paths!r}\nPIDS = {[os.getpid(), os.getppid()]!r}\n{_SELF_TEST_PROGRAM}"
    try:
        with contextlib.closing(pool.WorkerProcess(profile_name)) as worker:
            verdict = worker.check(Program(candidate=program, test=_SELF_TEST, timeout_s=_TIMEOUT_S))
    except SandboxError as error:
        return str(error)
    return "" if verdict.passed else f"self-test: {verdict.reason}: {verdict.detail}"


def _advice(tier: str) -> tuple[str, ...]:
    if tier == "A":
        return ()
    if sys.platform != "linux":
        return ("score on a Linux machine: generation works here, and its outputs can be scored elsewhere",)
    advice = [
        "allow unprivileged user namespaces: sysctl -w user.max_user_namespaces=10000",
        "on Ubuntu 23.10 or newer: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        "in docker: docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined",
    ]
    if linux.landlock_abi() == 0:
        advice.append("or boot a kernel >= 6.12 with Landlock (CONFIG_SECURITY_LANDLOCK, lsm=landlock,...)")
    if shutil.which("unshare"):
        advice.append("try it by hand: unshare --user --map-root-user --net --pid --fork true")
    return tuple(advice)
