"""Run untrusted programs against trusted tests, in isolation; docs/explanations/sandbox.md says what is promised.

The test runs in a judge process, and the program in a guest process that answers calls with data only. Both are locked
in. A check uses the best isolation that `probe()` finds on this machine and names it in its verdict; without any, it
refuses.
"""

import math
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
    candidate: str,
    test: str,
    timeout_s: float = 10,
    memory_mb: int = 1024,
    *,
    helpers: str = "",
    runner: str = "",
    call_s: float = math.inf,
    sandbox: str = "auto",
) -> CheckResult:
    """Check one program; arguments as in `Program` and `check_programs`, and the same error."""
    program = Program(
        candidate=candidate,
        test=test,
        timeout_s=timeout_s,
        memory_mb=memory_mb,
        helpers=helpers,
        runner=runner,
        call_s=call_s,
    )
    return pool.check_on(_profile(sandbox), program)


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
    return pool.check_all(programs, _profile(sandbox), workers, on_done)


def _profile(sandbox: str) -> str:
    if sandbox not in ("auto", "none"):
        raise SandboxError(f"sandbox={sandbox!r} is unknown: use 'auto', or 'none' to run programs without isolation")
    if sandbox == "none" and sys.platform == "linux":
        return "none"
    report = probe()
    if report.tier == "D":
        reasons, advice = "; ".join(map(": ".join, report.missing.items())), "; or ".join(report.advice)
        raise SandboxError(f"programs cannot be isolated here ({reasons}). To change that: {advice}")
    return report.profile
