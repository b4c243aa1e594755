"""Ray workers without Ray: calls are made in this process, and a clock that jumps says when they are answered."""

import math
from types import SimpleNamespace

from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.scaleout.ray_cluster import Node
from refusion_eval.scaleout.ray_pool import WorkerHandle, WorkerPool
from refusion_eval.scaleout.ray_worker import RayWorker

NODE = Node("n", "host", 0, 8)


class SimulatedError(Exception):
    """What Ray raises for a worker that is gone."""


class Answer:
    """A reference to an answer: known at a time, or never."""

    def __init__(self, at=math.inf, value=None, error=None):
        self.at, self.value, self.error = at, value, error


class Actor:
    """Decodes at once and answers when the record would be ready; other calls are answered as `script` says."""

    def __init__(self, ray, worker):
        self._ray, self._worker = ray, worker
        self.answers = []
        self.script = {}

    def __getattr__(self, name):
        def call(*arguments, **named):
            if name in self.script:
                return self.script[name]
            value = getattr(self._worker, name)(*arguments, **named)
            took = self._ray.seconds_of(value) if name == "decode" else 0.0
            self.answers.append(Answer(self._ray.now + took, value))
            return self.answers[-1]

        return SimpleNamespace(remote=call)


class SimulatedRay:
    """What `WorkerPool` uses of the ray package.

    Args:
        seconds_of: seconds that a request takes, from its record.
    """

    exceptions = SimpleNamespace(RayError=SimulatedError)

    def __init__(self, seconds_of):
        self.seconds_of = seconds_of
        self.now = 0.0
        self.on_wait = lambda: None
        self.actors = []

    def remote(self, kind):
        return kind

    def kill(self, actor, no_restart):
        self.actors.remove(actor)

    def get(self, answer):
        if answer.error is not None:
            raise answer.error
        return answer.value

    def sleep(self, seconds):
        self.now += seconds

    def monotonic(self):
        return self.now

    def kill_worker(self, actor):
        """Fails the unanswered calls of a worker now."""
        for answer in actor.answers:
            if answer.at > self.now:
                answer.at, answer.error = self.now, SimulatedError("killed")

    def wait(self, answers, num_returns, timeout):
        """As ray.wait; the clock jumps to the first answer, or as far as the wait may last."""
        if timeout:
            self.on_wait()
            self.now = max(self.now, min(min(answer.at for answer in answers), self.now + timeout))
        ready = [answer for answer in answers if answer.at <= self.now][:num_returns]
        return ready, [answer for answer in answers if answer not in ready]


class SimulatedPool(WorkerPool):
    """A pool of workers that decode what `decode` makes of their claims."""

    def __init__(self, ray, decode):
        args = parse_model_args({"pretrained": "embedded", "engine": "ray", "device": "cpu"})
        super().__init__(SimpleNamespace(ray=ray, nodes=lambda: [NODE]), args)
        self._decode = decode

    def grow(self):
        """Nothing: a test adds workers."""

    def add(self, batch_size=1, state="idle"):
        worker = RayWorker(f"worker {next(self._numbers)}")
        worker._setup = SimpleNamespace(run_facts={})
        worker._system = SimpleNamespace(run=self._decode, entry=SimpleNamespace(Settings=None))
        worker._records = SimpleNamespace(write=lambda job: {"key": job.key, "name": job.name, "seconds": job.seconds})
        actor = Actor(self._ray, worker)
        self._ray.actors.append(actor)
        handle = WorkerHandle(worker._name, NODE, 1, actor, state=state, batch_size=batch_size)
        self.workers.append(handle)
        return handle
