"""What so many busy processes reach on this machine by themselves: each decodes a share that was fixed before.

Nothing is handed out and nothing is sent while they decode, so a run in as many processes cannot be faster, except by
chance: cores that share a cache, a memory bus or an execution unit slow each other down, whoever drives them.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from refusion_eval.errors import ScaleOutError
from refusion_eval.runs.job import Job
from refusion_eval.runs.system import System
from refusion_eval.scaleout.wire import job_from_json, job_to_json
from refusion_eval.scaleout.worker import Setup, Worker, own_device

# Request -> the tokens of its response.
Tokens = dict[str, list[int] | None]


class Round(NamedTuple):
    """What one round gave.

    Attributes:
        seconds: from the common start to the last end.
        first_seconds: from the common start to the first end.
        processor_share: part of that time for which the process that had least of it had a processor.
        tokens: of every request.
    """

    seconds: float
    first_seconds: float
    processor_share: float
    tokens: Tokens


def balanced_shares(seconds: Sequence[float], num_shares: int) -> list[list[int]]:
    """Divides requests so that all shares take about as long: the longest first, each to the share that has least.

    Args:
        seconds: of each request.
        num_shares: how many shares.

    Returns:
        Numbers of the requests of each share, in their order.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    sums = [0.0] * num_shares
    for number in sorted(range(len(seconds)), key=lambda one: -seconds[one]):
        least = sums.index(min(sums))
        shares[least].append(number)
        sums[least] += seconds[number]
    return [sorted(share) for share in shares]


class IndependentProcesses:
    """Processes that know nothing of each other, ready to decode the same jobs; a context manager that ends them.

    Args:
        system: what they are to open as well.
        jobs: what they decode.
        num_processes: how many.
    """

    def __init__(self, system: System, jobs: Sequence[Job], num_processes: int) -> None:
        self.num_processes = num_processes
        setup = Setup.of(system, jobs)
        self._processes = [
            subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(num_processes)
        ]
        told = {"setup": setup.to_json(), "jobs": [job_to_json(job) for job in jobs]}
        for number, process in enumerate(self._processes):
            self._tell(process, {**told, "num_processes": num_processes, "number": number})
        for process in self._processes:
            self._hear(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
            process.communicate()

    def decode(self, shares: Sequence[Sequence[int]]) -> Round:
        """Lets each process decode its share, all from one moment on.

        Args:
            shares: numbers of the jobs of each process.

        Raises:
            ScaleOutError: a process failed.
        """
        started = time.perf_counter()
        for process, share in zip(self._processes, shares, strict=True):
            self._tell(process, share)
        # The clock of all processes of a machine is one, so what is asked first may well end last.
        answers = [self._hear(process) for process in self._processes]
        ends = [answer["ended"] - started for answer in answers]
        tokens = {name: tokens for answer in answers for name, tokens in answer["tokens"].items()}
        share = min(answer["processor_seconds"] / end for answer, end in zip(answers, ends, strict=True))
        return Round(max(ends), min(ends), share, tokens)

    def _tell(self, process: "subprocess.Popen[str]", what: Any) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(what) + "\n")
        process.stdin.flush()

    def _hear(self, process: "subprocess.Popen[str]") -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise ScaleOutError(f"an independent process ended with status {process.wait()}; see what it said above")
        return json.loads(line)


def _serve() -> None:
    told = json.loads(sys.stdin.readline())
    setup = Setup(**told["setup"])
    device = own_device(setup.args().device, told["number"])
    worker = Worker(setup.args(device), setup.settled, num_processes=told["num_processes"])
    jobs = [job_from_json(fields, worker.system.entry.Settings) for fields in told["jobs"]]
    list(worker.run(iter(jobs)))  # loads the weights, and pays for all first-time work
    _answer({"ready": True})
    for line in sys.stdin:
        before = time.process_time()
        samples = list(worker.run(iter([jobs[number] for number in json.loads(line)])))
        ended, processor_seconds = time.perf_counter(), time.process_time() - before
        tokens = {sample.key.doc_hash: sample.tokens for sample in samples}
        _answer({"ended": ended, "processor_seconds": processor_seconds, "tokens": tokens})


def _answer(what: Mapping[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    _serve()
