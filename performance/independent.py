"""Processes that decode shares fixed in advance: the upper bound of what several processes reach on this machine.

The processes exchange nothing while they decode, so a run with as many processes cannot be faster except by chance.
Cores that share a cache, a memory bus or an execution unit slow each other down in both cases.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, NamedTuple, Self

from refusion_eval import api
from refusion_eval.errors import ScaleOutError
from refusion_eval.runs.job import Job
from refusion_eval.runs.system import System
from refusion_eval.scaleout.messages import WIDTH_COST, Setup, decode, job_from_json, job_to_json, own_device

# Tokens of each response, by the id of the request.
Tokens = dict[str, list[int] | None]


class Round(NamedTuple):
    """Times and tokens of one round.

    Attributes:
        seconds: time from the common start until the last process ends.
        first_seconds: time from the common start until the first process ends.
        processor_share: smallest fraction of its time for which a process had a processor.
        tokens: tokens of every response.
    """

    seconds: float
    first_seconds: float
    processor_share: float
    tokens: Tokens


def balanced_shares(seconds: Sequence[float], num_shares: int) -> list[list[int]]:
    """Divides requests into shares of about equal duration: the longest request goes first to the shortest share.

    Args:
        seconds: duration of each request.
        num_shares: number of shares.

    Returns:
        Ascending indices of the requests of each share.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    sums = [0.0] * num_shares
    for number in sorted(range(len(seconds)), key=lambda index: -seconds[index]):
        least = sums.index(min(sums))
        shares[least].append(number)
        sums[least] += seconds[number]
    return [sorted(share) for share in shares]


class IndependentProcesses:
    """Processes that have loaded the same model and jobs; a context manager that ends them.

    Args:
        system: the checkpoint and decoder that every process opens.
        jobs: the jobs of a round.
        num_processes: number of processes.
    """

    def __init__(self, system: System, jobs: Sequence[Job], num_processes: int) -> None:
        self.num_processes = num_processes
        setup = Setup.of(system)
        if any(api.needs_width_cost(job.resolved.settings) for job in jobs):
            setup.run_facts[WIDTH_COST] = system.engine.width_cost._asdict()
        self._processes = [
            subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(num_processes)
        ]
        shared = {"setup": asdict(setup), "jobs": [job_to_json(job) for job in jobs]}
        for number, process in enumerate(self._processes):
            self._send(process, {**shared, "num_processes": num_processes, "number": number})
        for process in self._processes:
            self._receive(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
            process.communicate()

    def decode(self, shares: Sequence[Sequence[int]]) -> Round:
        """Lets all processes decode their shares at the same time.

        Args:
            shares: indices of the jobs of each process.

        Raises:
            ScaleOutError: a process failed.
        """
        started = time.perf_counter()
        for process, share in zip(self._processes, shares, strict=True):
            self._send(process, share)
        # All processes of a machine read the same clock, so answers may be received in any order.
        answers = [self._receive(process) for process in self._processes]
        ends = [answer["ended"] - started for answer in answers]
        tokens = {name: tokens for answer in answers for name, tokens in answer["tokens"].items()}
        share = min(answer["processor_seconds"] / end for answer, end in zip(answers, ends, strict=True))
        return Round(max(ends), min(ends), share, tokens)

    def _send(self, process: "subprocess.Popen[str]", message: Any) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()

    def _receive(self, process: "subprocess.Popen[str]") -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise ScaleOutError(f"an independent process ended with status {process.wait()}; its messages stand above")
        return json.loads(line)


def _serve() -> None:
    """Decodes the shares that arrive on stdin, one line of JSON each, and answers on stdout."""
    message = json.loads(sys.stdin.readline())
    setup = Setup(**message["setup"])
    device = own_device(setup.arguments["device"], message["number"])
    system = setup.open_system(device, message["num_processes"])
    jobs = [job_from_json(fields, system.args.settings_type) for fields in message["jobs"]]
    list(decode(system, iter(jobs)))  # loads the weights and warms up, so that no timed round includes this
    _answer({"ready": True})
    for line in sys.stdin:
        before = time.process_time()
        samples = list(decode(system, iter([jobs[number] for number in json.loads(line)])))
        ended, processor_seconds = time.perf_counter(), time.process_time() - before
        tokens = {sample.key.doc_hash: sample.tokens for sample in samples}
        _answer({"ended": ended, "processor_seconds": processor_seconds, "tokens": tokens})


def _answer(message: Mapping[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    _serve()
