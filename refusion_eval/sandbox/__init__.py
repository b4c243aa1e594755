"""Run untrusted programs against trusted tests, in isolation.

The test runs in a judge process; the program runs in a guest process that answers calls with data only (`wire`), so
nothing a program does can declare itself correct. Both are locked in. The judge asks no object of a program how it
relates to the test's data, and does not tell the program that data (`mirror`). A check uses the best isolation that
`probe()` finds to hold on this machine and names it in its verdict; without any, it refuses. For a program, the order
of sets of strings and the numbers of `random` are the same in every check, so it gets the same verdict each time; what
a test draws, no program can know.

Verdicts are those of program and test as one file run by Python, as by `code_eval`, except for what would let a program
claim to be right, and builtins, modules, helpers and the test's own names are the judge's. There are no installed
packages. A test that needs the program's own process is an error, `inseparable`. docs/explanations/sandbox.md lists the
differences.

A program may use threads and forked children (32 together), pipes and pairs of sockets, signals to itself, deep
recursion, its memory limit, and in tier A a /tmp of 64 MiB. Its standard input is at its end, and what it prints is
dropped. Page tables, buffers of pipes and sockets, and what the judge grows by while it holds the program's values
count as its memory. It may make the system calls that `seccomp` lists. It has no network, no other program to run, no
named semaphore (so no `multiprocessing.Pool` or `Queue`), no shared anonymous mapping and no locks on files (so
`sqlite3` needs a database in memory, or `vfs=unix-dotfile`).

Known limits: the kernel's records of memory mappings do not count as memory; in tiers B and C a program can ask for
sizes and times of files whose names it guesses, and what it forked lives on if its worker is killed by others
meanwhile; in tier C the programs checked at one time share the user's count of processes. Memory is added up twenty
times a second, so more than the limit can be held for that long. tests/sandbox attacks all tiers.
"""

import sys
from collections.abc import Callable, Iterable

from refusion_eval.errors import SandboxError
from refusion_eval.sandbox import pool
from refusion_eval.sandbox.pool import DaemonThreads, default_workers
from refusion_eval.sandbox.probe import SandboxReport, probe
from refusion_eval.sandbox.result import CheckResult, Program

__all__ = [
    "CheckResult",
    "DaemonThreads",
    "Program",
    "SandboxReport",
    "check_program",
    "check_programs",
    "default_workers",
    "probe",
]


def check_program(
    candidate: str, test: str, timeout_s: float = 10, memory_mb: int = 1024, *, helpers: str = "", sandbox: str = "auto"
) -> CheckResult:
    """Check one program; arguments as in `Program` and `check_programs`, and the same error."""
    program = Program(candidate=candidate, test=test, timeout_s=timeout_s, memory_mb=memory_mb, helpers=helpers)
    return pool.check_on(*_profile(sandbox), program)


def check_programs(
    programs: Iterable[Program],
    *,
    workers: int | None = None,
    sandbox: str = "auto",
    on_done: Callable[[int, CheckResult], None] | None = None,
) -> list[CheckResult]:
    """Check many programs at once; returns verdicts in the order of the programs.

    Args:
        programs: what to check.
        workers: number of programs at a time; by default two per processor this process may use.
        sandbox: "auto", or "none" to run without isolation (only for programs you trust; verdicts then say so).
        on_done: called with index and verdict as each check ends, by one thread at a time.

    Raises:
        SandboxError: nothing on this machine isolates a program; the message says what to do.
    """
    return pool.check_all(programs, *_profile(sandbox), workers, on_done)


def _profile(sandbox: str) -> tuple[str, str]:
    """Name and tier of the profile to use."""
    if sandbox not in ("auto", "none"):
        raise SandboxError(f"sandbox={sandbox!r} is unknown: use 'auto', or 'none' to run programs without isolation")
    if sandbox == "none" and sys.platform == "linux":
        return "none", "none"
    report = probe()
    if report.tier == "D":
        reasons = "; ".join(f"{name}: {why}" for name, why in report.missing.items())
        advice = "; or ".join(report.advice)
        raise SandboxError(f"programs cannot be isolated here ({reasons}). To change that: {advice}")
    return report.profile, report.tier
