"""How many programs a second the sandbox checks: `refusion-eval bench-sandbox`.

The reference programs of a benchmark are checked in turns in three ways, so that whatever else the machine does falls
on all of them: in the sandbox; likewise without isolation, which tells what isolation costs; and each in an interpreter
of its own that is started for it, which is what a harness without warm workers does, with no isolation either.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from refusion_eval.benchmarks.prompts import Row
from refusion_eval.benchmarks.table import BENCHMARKS
from refusion_eval.errors import ConfigError, SandboxError
from refusion_eval.sandbox import Program, check_programs, pool, probe
from refusion_eval.store.environment import collect_hardware

_SANDBOX, _BARE, _STARTED = "sandbox", "without isolation", "an interpreter each"


@dataclass(frozen=True, kw_only=True)
class SandboxReport:
    """What was measured.

    Attributes:
        benchmark: whose reference programs were checked.
        mini: whether it is the synthetic look-alike.
        num_programs: programs of a round.
        tier: isolation of the sandbox.
        workers: programs at a time.
        rates: checks per second of each round, by way.
        conditions: the machine, and how busy it was before and after.
    """

    benchmark: str
    mini: bool
    num_programs: int
    tier: str
    workers: int
    rates: Mapping[str, Sequence[float]]
    conditions: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON types."""
        return asdict(self)

    def text(self) -> str:
        """The report in words."""
        what = f"{self.num_programs} reference programs of {self.benchmark}{' (mini, synthetic)' if self.mini else ''}"
        lines = [f"{what}, {self.workers} at a time, isolation of tier {self.tier}"]
        for way, rates in self.rates.items():
            ratio = statistics.median(own / other for own, other in zip(self.rates[_SANDBOX], rates, strict=True))
            each = " ".join(f"{rate:.1f}" for rate in rates)
            lines.append(f"{way:<20} {statistics.median(rates):7.1f} checks/s   sandbox {ratio:5.2f}x   rounds: {each}")
        before, after = self.conditions["load_before"], self.conditions["load_after"]
        lines.append(f"{self.conditions['cores']} cores, load {before:.1f} before and {after:.1f} after")
        return "\n".join(lines)


def reference_programs(benchmark: str, rows: Sequence[Row]) -> list[Program]:
    """The reference program of each row against the row's test.

    Args:
        benchmark: "humaneval" or "mbpp".
        rows: in hub columns.

    Raises:
        ConfigError: the benchmark is not about programs.
    """
    known = BENCHMARKS.get(benchmark)
    if known is None or known.test is None:
        of_code = ", ".join(name for name, one in BENCHMARKS.items() if one.test is not None)
        raise ConfigError(f"{benchmark!r} has no programs to check; these have: {of_code}")
    programs = []
    for row in rows:
        test = known.test(row)
        programs.append(
            Program(candidate=known.gold(row), test=test.test, helpers=test.helpers, timeout_s=test.timeout_s)
        )
    return programs


def measure_sandbox(
    benchmark: str,
    rows: Sequence[Row],
    *,
    mini: bool,
    num_rounds: int,
    workers: int | None,
    progress: Callable[[str], None],
) -> SandboxReport:
    """Check a benchmark's reference programs in every way, round after round, after a warm-up.

    Args:
        benchmark: "humaneval" or "mbpp".
        rows: its rows.
        mini: whether they are those of the synthetic look-alike.
        num_rounds: at least 1.
        workers: programs at a time; None for what an evaluation takes.
        progress: told what is being done.

    Raises:
        SandboxError: a reference did not pass, or nothing isolates programs here.
        ConfigError: the benchmark is not about programs.
    """
    programs = reference_programs(benchmark, rows)
    count = workers or pool.default_workers()
    ways: dict[str, Callable[[Sequence[Program]], Sequence[bool]]] = {
        _SANDBOX: lambda some: [verdict.passed for verdict in check_programs(some, workers=count)],
        _BARE: lambda some: [verdict.passed for verdict in check_programs(some, workers=count, sandbox="none")],
        _STARTED: lambda some: _start_each(some, count),
    }
    for check in ways.values():
        check(programs[: 2 * count])
    load_before = os.getloadavg()[0]
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(num_rounds):
        for way, check in ways.items():
            progress(f"round {number + 1} of {num_rounds}: {way}")
            started_s = time.perf_counter()
            passed = check(programs)
            rates[way].append(len(programs) / (time.perf_counter() - started_s))
            if not all(passed):
                raise SandboxError(f"{way}: reference programs {[i for i, ok in enumerate(passed) if not ok]} failed")
    return SandboxReport(
        benchmark=benchmark,
        mini=mini,
        num_programs=len(programs),
        tier=probe().tier,
        workers=count,
        rates=rates,
        conditions={
            **asdict(collect_hardware(threads=1, gpu_index=None, num_processes=count)),
            "load_before": load_before,
            "load_after": os.getloadavg()[0],
        },
    )


def _start_each(programs: Sequence[Program], workers: int) -> list[bool]:
    with ThreadPoolExecutor(workers) as executor:
        return list(executor.map(_run_in_own_interpreter, programs))


def _run_in_own_interpreter(program: Program) -> bool:
    """Run a program that is trusted, and its test behind it."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"{program.candidate}\n{program.test}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return done.returncode == 0
