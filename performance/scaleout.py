"""Speed-up of several processes over one process: `python performance/scaleout.py`.

The same requests are decoded in three ways: by one process; by as many independent processes as the run has, with
shares that are fixed in advance, which shows what the machine can give; and by one run in processes that torchrun
started or on a Ray cluster of this machine. The ways alternate in every round, so that other load on the machine
affects all of them.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

import typer
from command import Model, Out, prepare, run_script, write_json
from independent import IndependentProcesses, Round, Tokens, balanced_shares

from refusion_eval.bench.bench import PROMPTED, mini_prompts
from refusion_eval.errors import ConfigError, ScaleOutError
from refusion_eval.evaluation.loop import num_local_processes
from refusion_eval.runs.job import Job, JobRunner
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.system import System
from refusion_eval.scaleout.channel import open_channel
from refusion_eval.scaleout.messages import Register, decode
from refusion_eval.scaleout.ray_runner import RayRunner, driver_args
from refusion_eval.scaleout.torchrun import TorchrunRunner, run_worker_or_return
from refusion_eval.store.manifest import Hardware
from refusion_eval.store.records import Sample, SampleKey

SECONDS_TO_START = 600
AS_PROCESS = "--as-process"  # marks a process of the run; `measure_scaleout` passes it, users do not


@dataclass(frozen=True, kw_only=True)
class ScaleOutSettings:
    """Requests and processes of a measurement.

    Attributes:
        model: checkpoint folder, hub id, or embedded.
        decoder: name of the decoder.
        num_processes: processes of the run, at least 2.
        num_prompts: requests of a round, taken from the mini tasks in turn.
        num_rounds: number of rounds in which each way is timed.
        gen_length: largest number of tokens of a response.
        threads: CPU threads of each process.
        batch_size: requests that each process decodes together.
        engine: "local" for processes that torchrun starts, "ray" for workers on a Ray cluster.
    """

    model: str = "embedded"
    decoder: str = "refusion"
    num_processes: int = 2
    num_prompts: int = 48
    num_rounds: int = 3
    gen_length: int = 128
    threads: int = 1
    batch_size: int = 1
    engine: Literal["local", "ray"] = "local"

    def __post_init__(self) -> None:
        if self.num_processes < 2:
            raise ConfigError(f"--processes {self.num_processes}: a comparison needs at least 2")


@dataclass(frozen=True, kw_only=True)
class ScaleOutReport:
    """Times of one measurement. Each sequence of seconds has one entry per round.

    Attributes:
        settings: requests and processes of the measurement.
        alone_seconds: time of one process.
        independent_seconds: time of independent processes until the last one ends.
        independent_first_seconds: time of independent processes until the first one ends; the difference shows how
            uneven their shares were.
        independent_processor_shares: smallest fraction of the round for which an independent process had a processor.
            Below 1, other programs or other guests of the host used the processors.
        together_seconds: time of the run in all of its processes.
        num_tokens: tokens kept in one round.
        shares: number of requests that each process decoded in all rounds of the run.
        conditions: facts about the machine, and its load before and after the measurement.
    """

    settings: ScaleOutSettings
    alone_seconds: Sequence[float]
    independent_seconds: Sequence[float]
    independent_first_seconds: Sequence[float]
    independent_processor_shares: Sequence[float]
    together_seconds: Sequence[float]
    num_tokens: int
    shares: Sequence[int]
    conditions: Mapping[str, Any]

    @property
    def ratio(self) -> float:
        """Median over rounds of the time of one process divided by the time of the run."""
        return statistics.median(_quotients(self.alone_seconds, self.together_seconds))

    @property
    def independent_ratio(self) -> float:
        """Median over rounds of the time of one process divided by the time of independent processes."""
        return statistics.median(_quotients(self.alone_seconds, self.independent_seconds))

    @property
    def share_of_independent(self) -> float:
        """Median over rounds of the speed of the run divided by the speed of independent processes."""
        return statistics.median(_quotients(self.independent_seconds, self.together_seconds))

    def to_json(self) -> dict[str, Any]:
        """All fields and the ratios as plain JSON types."""
        return {**asdict(self), **{name: getattr(self, name) for name in RATIOS}}

    def text(self) -> str:
        """The report as a few lines for the terminal."""
        s, count = self.settings, self.settings.num_processes
        lines = [f"{s.model}, {s.decoder}: {s.num_prompts} requests a round, {s.threads} thread(s) a process"]
        rows = {"1 process": self.alone_seconds, f"{count} independent": self.independent_seconds}
        for name, seconds in {**rows, f"{count} in one run": self.together_seconds}.items():
            middle = statistics.median(seconds)
            each = " ".join(f"{value:.2f}" for value in seconds)
            lines.append(f"{name:<14} {middle:8.2f} s {self.num_tokens / middle:9.1f} tokens/s   rounds: {each}")
        first_end = statistics.median(_quotients(self.independent_first_seconds, self.independent_seconds))
        lines.append(
            f"{count} independent processes reach {self.independent_ratio:.2f} of {count} here"
            f" {_range(_quotients(self.alone_seconds, self.independent_seconds))}; the first of them was done after"
            f" {first_end:.0%} of the time, and each had a processor for"
            f" {min(self.independent_processor_shares) / self.settings.threads:.0%} of it or more"
        )
        lines.append(
            f"speed-up {self.ratio:.2f} of {count} {_range(_quotients(self.alone_seconds, self.together_seconds))},"
            f" {self.share_of_independent:.0%} of what independent processes reach"
            f" {_range(_quotients(self.independent_seconds, self.together_seconds))}, same tokens in every round"
        )
        lines.append(f"requests by process, all rounds: {' '.join(map(str, self.shares))}")
        before, after = self.conditions["load_before"], self.conditions["load_after"]
        lines.append(f"{self.conditions['cores']} cores, load {before:.1f} before and {after:.1f} after")
        return "\n".join(lines)


RATIOS = ("ratio", "independent_ratio", "share_of_independent")


def _quotients(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [numerator / denominator for numerator, denominator in zip(numerators, denominators, strict=True)]


def _range(values: Sequence[float]) -> str:
    return f"({min(values):.2f} to {max(values):.2f})"


def measure_scaleout(settings: ScaleOutSettings) -> ScaleOutReport:
    """Starts the processes of the run and returns their measurement.

    Raises:
        ScaleOutError: the processes failed; their messages are on stderr.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.num_processes)]
    start = launcher if settings.engine == "local" else []
    command = [sys.executable, *start, __file__, AS_PROCESS, json.dumps(asdict(settings))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(settings.threads)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ScaleOutError(f"the processes ended with status {done.returncode}; their messages stand above")
    fields = json.loads(done.stdout.splitlines()[-1])
    for name in RATIOS:
        del fields[name]
    return ScaleOutReport(**{**fields, "settings": ScaleOutSettings(**fields["settings"])})


def _run(settings: ScaleOutSettings) -> ScaleOutReport:
    """Measures in the first process of the run; the other processes only decode."""
    own = {"decoder": settings.decoder, "gen_length": settings.gen_length, "batch_size": settings.batch_size}
    args = parse_model_args({"pretrained": settings.model, "warmup": 0, **own})
    facts: dict[str, Any] = {}

    def get_or_compute(name: str, compute: Callable[[], Any]) -> Any:
        if name not in facts:
            facts[name] = compute()
        return facts[name]

    system = System(args, get_or_compute=get_or_compute, num_processes=num_local_processes())
    names = list[str]()

    def register(hardware: Hardware, pid: int) -> str:
        names.append(str(pid))
        return names[-1]

    if settings.engine == "ray":
        runner: RayRunner | TorchrunRunner = _ray_runner(settings, system, register)
    else:
        run_worker_or_return(args)
        channel = open_channel()
        if channel is None:
            raise ScaleOutError("this process has no launcher; start `python performance/scaleout.py`")
        names.append("")  # the first process decodes too and stores an empty process id
        runner = TorchrunRunner(channel, system, register)
    jobs = _jobs(system, settings.num_prompts)
    _wait_for_all(runner, jobs, settings.num_processes)
    load_before = os.getloadavg()[0]
    with IndependentProcesses(system, jobs, settings.num_processes) as independent:
        rounds = [_round(system, jobs, independent, runner) for _ in range(settings.num_rounds)]
    process_ids = [sample.process_id for timed in rounds for sample in timed.together]
    return ScaleOutReport(
        settings=settings,
        alone_seconds=[timed.alone_seconds for timed in rounds],
        independent_seconds=[timed.independent.seconds for timed in rounds],
        independent_first_seconds=[timed.independent.first_seconds for timed in rounds],
        independent_processor_shares=[timed.independent.processor_share for timed in rounds],
        together_seconds=[timed.together_seconds for timed in rounds],
        num_tokens=sum(sample.num_tokens or 0 for sample in rounds[0].together),
        shares=[process_ids.count(name) for name in names],
        conditions={
            **asdict(system.backend.hardware()),
            "load_before": load_before,
            "load_after": os.getloadavg()[0],
        },
    )


class _Round(NamedTuple):
    alone_seconds: float
    independent: Round
    together: list[Sample]
    together_seconds: float


def _round(system: System, jobs: Sequence[Job], independent: IndependentProcesses, runner: JobRunner) -> _Round:
    """Times all three ways once; raises ScaleOutError if their tokens differ."""
    started = time.perf_counter()
    alone = list(decode(system, iter(jobs)))
    alone_seconds = time.perf_counter() - started
    seconds = {sample.key.doc_hash: sample.seconds for sample in alone}
    shares = balanced_shares([seconds[job.key.doc_hash] for job in jobs], independent.num_processes)
    separate = independent.decode(shares)
    started = time.perf_counter()
    together = list(runner.run(jobs))
    together_seconds = time.perf_counter() - started
    if not _tokens(alone) == separate.tokens == _tokens(together):
        raise ScaleOutError("rounds differ in their tokens: the processes do not decode alike")
    return _Round(alone_seconds, separate, together, together_seconds)


def _ray_runner(settings: ScaleOutSettings, system: System, register: Register) -> RayRunner:
    """Workers on a Ray cluster; they use the timings that this process measures when it decodes alone."""
    args = replace(system.args, engine="ray", workers=settings.num_processes, worker_cpus=settings.threads)
    driver_system = System(driver_args(args), get_or_compute=system.get_or_compute)
    return RayRunner(args, driver_system, register, keep_workers=True)


def _wait_for_all(runner: JobRunner, jobs: Sequence[Job], num_processes: int) -> None:
    """Decodes until every process has taken part, so that all have loaded the model and are warm."""
    deadline, seen = time.monotonic() + SECONDS_TO_START, set[str]()
    while len(seen) < num_processes:
        if time.monotonic() > deadline:
            raise ScaleOutError(f"only {len(seen)} of {num_processes} processes decode after {SECONDS_TO_START} s")
        seen |= {sample.process_id for sample in runner.run(jobs)}


def _jobs(system: System, count: int) -> list[Job]:
    jobs = []
    for number, prompt in enumerate(mini_prompts(system.model, count)):
        benchmark = PROMPTED[number % len(PROMPTED)]
        resolved = system.resolve(f"mini_{benchmark}", {}, announce=False)
        key = SampleKey(f"mini_{benchmark}", "", str(number), "", 0, resolved.digest)
        jobs.append(Job(key=key, benchmark=benchmark, item_id=str(number), prompt_ids=prompt, resolved=resolved))
    return jobs


def _tokens(samples: Iterable[Sample]) -> Tokens:
    for sample in samples:
        if sample.error is not None:
            raise ScaleOutError(f"request {sample.item_id} failed: {sample.error.strip().splitlines()[-1]}")
    return {sample.key.doc_hash: sample.tokens for sample in samples}


def main(
    model: Model = "embedded",
    decoder: Annotated[str, typer.Option(help="Name of the decoder.")] = "refusion",
    processes: Annotated[int, typer.Option(help="Number of processes of the run, on this machine.")] = 2,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a round, taken from the mini tasks in turn.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds in which each way is timed.")] = 3,
    gen_length: Annotated[int, typer.Option(min=1, help="Largest number of tokens of a response.")] = 128,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each process.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that each process decodes together.")] = 1,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Processes that torchrun starts, or workers on a Ray cluster.")
    ] = "local",
    out: Out = None,
) -> None:
    """Measure how much faster several processes of one run decode the same requests than one process."""
    settings = ScaleOutSettings(
        model=model,
        decoder=decoder,
        num_processes=processes,
        num_prompts=prompts,
        num_rounds=rounds,
        gen_length=gen_length,
        threads=threads,
        batch_size=batch_size,
        engine=engine,
    )
    prepare(out)
    report = measure_scaleout(settings)
    print(report.text())
    write_json(out, report.to_json())


if __name__ == "__main__":
    if AS_PROCESS in sys.argv:
        print(json.dumps(_run(ScaleOutSettings(**json.loads(sys.argv[-1]))).to_json()))
    else:
        run_script(main)
