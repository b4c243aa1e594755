"""A run of two processes in one: a driver, and a worker in a thread."""

from concurrent.futures import ThreadPoolExecutor

from refusion_eval.runs.job import Job
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.system import System
from refusion_eval.scaleout.channel import Channel, ProcessInfo
from refusion_eval.scaleout.torchrun import TorchrunRunner, serve
from refusion_eval.store.records import SampleKey

ARGUMENTS = {"pretrained": "embedded", "gen_length": 16, "free_rows": 16, "row_cost": 0.02, "warmup": 0}


def jobs_of(system, count, prompt=(5, 6, 7, 8)):
    resolved = system.resolve("mini_gsm8k", {})
    keys = [SampleKey("mini_gsm8k", "1", f"d{number}", "p", 0, resolved.digest) for number in range(count)]
    return [
        Job(key=key, benchmark="gsm8k", item_id=key.doc_hash, prompt_ids=[*prompt, 20 + number], resolved=resolved)
        for number, key in enumerate(keys)
    ]


class TwoProcesses:
    """A driver and a worker that share a store; the worker is a thread."""

    def __init__(self, store):
        self.store = store
        self.registered = []
        self.driver = Channel(store, ProcessInfo(rank=0, num_processes=2, num_local=2))
        worker = Channel(store, ProcessInfo(rank=1, num_processes=2, local_rank=1, num_local=2))
        self.pool = ThreadPoolExecutor(1)
        self.worker = self.pool.submit(serve, worker, "cpu")

    def runner(self, **changes):
        self.system = System(parse_model_args({**ARGUMENTS, **changes}), num_processes=2)
        return TorchrunRunner(self.driver, self.system, self._register)

    def _register(self, hardware, pid):
        self.registered.append((hardware, pid))
        return f"worker {len(self.registered)}"

    def status(self):
        self.driver.finish(max_seconds=60)
        return self.worker.result(timeout=60)
