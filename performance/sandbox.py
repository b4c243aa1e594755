"""Programs that the sandbox checks per second: `python performance/sandbox.py`.

The reference programs of a benchmark are checked in three ways: in the sandbox; by the same workers without isolation,
which shows the cost of isolation; and each in a new interpreter without isolation, as a harness without warm workers
does. The ways alternate in every round, so that other load on the machine affects all of them.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from command import Out, prepare, run_script, show_progress, write_json

from refusion_eval.benchmarks import BENCHMARKS, Row, Task, get_task
from refusion_eval.errors import ConfigError, SandboxError
from refusion_eval.runs.hardware import collect_hardware
from refusion_eval.sandbox import Program, check_programs, pool, probe

_SANDBOX, _BARE, _STARTED = "sandbox", "without isolation", "an interpreter each"


@dataclass(frozen=True, kw_only=True)
class SandboxReport:
    """Rates of one measurement.

    Attributes:
        benchmark: name of the benchmark whose reference programs were checked.
        mini: whether the programs are those of the synthetic look-alike.
        num_programs: programs checked in a round.
        tier: isolation that the sandbox had, "A" to "D".
        workers: programs checked at a time.
        rates: checks per second of each round, for each way of checking.
        conditions: facts about the machine, and its load before and after the measurement.
    """

    benchmark: str
    mini: bool
    num_programs: int
    tier: str
    workers: int
    rates: Mapping[str, Sequence[float]]
    conditions: Mapping[str, Any]

    def text(self) -> str:
        """The report as a few lines for the terminal."""
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
        rows: rows of the benchmark, with the columns of its public data set.

    Raises:
        ConfigError: the answers of the benchmark are not programs.
    """
    definition = BENCHMARKS.get(benchmark)
    if definition is None or definition.test is None:
        with_programs = ", ".join(name for name, other in BENCHMARKS.items() if other.test is not None)
        raise ConfigError(f"{benchmark!r} has no programs to check; these have: {with_programs}")
    programs = []
    for row in rows:
        test = definition.test(row)
        programs.append(Program(candidate=definition.gold(row), **vars(test)))
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
    """Checks a benchmark's reference programs in every way, round after round, after a warm-up.

    Args:
        benchmark: "humaneval" or "mbpp".
        rows: rows of the benchmark.
        mini: whether the rows are those of the synthetic look-alike.
        num_rounds: number of rounds, at least 1.
        workers: programs checked at a time; None for the default of an evaluation.
        progress: called with a line of text before each measurement.

    Raises:
        SandboxError: a reference program did not pass, or this machine cannot isolate programs.
        ConfigError: the answers of the benchmark are not programs.
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
            **asdict(collect_hardware(threads=1, num_processes=count)),
            "load_before": load_before,
            "load_after": os.getloadavg()[0],
        },
    )


def _start_each(programs: Sequence[Program], workers: int) -> list[bool]:
    with ThreadPoolExecutor(workers) as executor:
        return list(executor.map(_run_in_own_interpreter, programs))


def _run_in_own_interpreter(program: Program) -> bool:
    """Runs a trusted program, followed by its test."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"{program.candidate}\n{program.test}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return done.returncode == 0


def main(
    benchmark: Annotated[
        Literal["humaneval", "mbpp"], typer.Option(help="Benchmark whose reference programs are checked.")
    ] = "humaneval",
    mini: Annotated[bool, typer.Option("--mini", help="Check the programs of the synthetic look-alike.")] = False,
    data: Annotated[
        Path | None, typer.Option(help="Folder with benchmark rows: <benchmark>/<split>.jsonl[.gz].")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds in which each way is timed.")] = 3,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Programs checked at a time; by default as many as in an evaluation.")
    ] = None,
    out: Out = None,
) -> None:
    """Measure how many programs per second the sandbox checks."""
    rows = Task(get_task(benchmark).benchmark, mini).rows(data)
    prepare(out)
    report = measure_sandbox(benchmark, rows, mini=mini, num_rounds=rounds, workers=workers, progress=show_progress)
    print(report.text())
    write_json(out, asdict(report))


if __name__ == "__main__":
    run_script(main)
