"""Ray workers without Ray: calls are made in this process, and a clock that jumps says when they are answered."""

import itertools
import math
from collections import deque
from types import SimpleNamespace

from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.scaleout import ray_runner
from refusion_eval.scaleout.ray_runner import Node
from refusion_eval.scaleout.ray_worker import RayWorker
from tests.store.conftest import make_manifest

MOST_SECONDS = 3600.0


class RayError(Exception):
    """Any error of Ray."""

    def __init__(self, message, actor_id=None):
        super().__init__(message)
        self.actor_id = actor_id


class ActorUnavailableError(RayError):
    """The error of a call whose worker died and is restarted."""


class ActorDiedError(RayError):
    """The error of a call whose worker is not restarted."""


class Answer:
    """A reference to an answer: known at a time, or never."""

    def __init__(self, at=math.inf, value=None, error=None):
        self.at, self.value, self.error = at, value, error


class Actor:
    """Decodes at once and answers when the record would be ready; other calls are answered as `script` says."""

    def __init__(self, ray, number):
        self._ray = ray
        self._actor_id = SimpleNamespace(hex=lambda: f"id {number}")
        self.answers = []
        self.script = ray.scripts.pop(number, {})
        self.start()

    def start(self):
        """Begins a new process, which knows nothing of earlier requests."""
        self._worker = object.__new__(RayWorker)
        self._worker._inbox, self._worker._samples = deque(), iter(())
        self._worker._setup = SimpleNamespace(run_facts={})
        self._worker._system = SimpleNamespace(run=self._ray.decode, args=SimpleNamespace(settings_type=None))
        self._worker._hardware = None

    def die(self):
        """Fails the unanswered calls; a new process takes the next ones."""
        for answer in self.answers:
            if answer.at > self._ray.now:
                answer.at = self._ray.now
                answer.error = ActorUnavailableError("killed", self._actor_id.hex())
        self.start()

    def _load(self, fingerprint):
        facts = {"node_id": "n", "batch_size": self._ray.batch_size, "attention": "sdpa"}
        return facts | {"manifest": make_manifest().to_json()}

    def __getattr__(self, name):
        def call(*arguments):
            if name in self.script:
                answer = self.script[name]
                if answer.error is not None:
                    answer.error.actor_id = self._actor_id.hex()
            else:
                method = self._load if name == "load" else getattr(self._worker, name)
                try:
                    value = method(*arguments)
                    answer = Answer(self._ray.now + (value["seconds"] if name == "decode" else 0.0), value)
                except (
                    StopIteration
                ):  # a process that began anew between two calls knows no request; Ray wraps its error
                    error = RayError("the worker has no request", self._actor_id.hex())
                    answer = Answer(self._ray.now, error=error)
            self.answers.append(answer)
            return answer

        method = SimpleNamespace(remote=call)
        method.options = lambda max_task_retries: method
        return method


class SimulatedRay:
    """What `RayRunner` and `ActorPool` use of the ray package.

    Args:
        decode: makes records of the claims of a worker.

    Attributes:
        scripts: answers of the worker of a number to its calls, by the name of the method.
    """

    exceptions = SimpleNamespace(
        RayError=RayError, ActorDiedError=ActorDiedError, ActorUnavailableError=ActorUnavailableError
    )

    def __init__(self, decode, batch_size=1):
        self.decode, self.batch_size = decode, batch_size
        self.now = 0.0
        self.on_wait = lambda: None
        self.scripts = {}
        self._numbers = itertools.count(1)

    def remote(self, kind):
        made = SimpleNamespace(remote=lambda *arguments: Actor(self, next(self._numbers)))
        made.options = lambda **options: made
        return made

    def kill(self, actor):
        pass

    def get(self, answer, timeout=math.inf):
        until = min(answer.at, self.now + timeout)
        self.now = max(self.now, until)
        if answer.at > self.now:
            raise RayError("timed out")
        if answer.error is not None:
            raise answer.error
        return answer.value

    def sleep(self, seconds):
        self.wait([], 1, seconds)

    def monotonic(self):
        return self.now

    def wait(self, answers, num_returns, timeout):
        """As ray.wait; the clock jumps to the first answer, or as far as the wait may last."""
        self.on_wait()
        assert self.now < MOST_SECONDS, "the run does not end"
        self.now = max(self.now, min([*(answer.at for answer in answers), self.now + timeout]))
        ready = [answer for answer in answers if answer.at <= self.now][:num_returns]
        return ready, [answer for answer in answers if answer not in ready]


class Simulation:
    """A run on a machine with room for some workers, which tests may change."""

    def __init__(self, patch, num_workers, decode=lambda claims: claims, *, batch_size=1, width_cost=True):
        from ray.util import actor_pool

        self.ray = SimulatedRay(decode, batch_size)
        self.room = num_workers
        self.num_waits = 0
        patch.setattr(actor_pool, "ray", self.ray)
        patch.setattr(ray_runner, "time", self.ray)
        cluster = SimpleNamespace(ray=self.ray, nodes=lambda: [Node("n", "host", 0, self.room)])
        patch.setattr(ray_runner, "Cluster", lambda address: cluster)
        args = parse_model_args({"pretrained": "embedded", "engine": "ray", "device": "cpu"})
        system = SimpleNamespace(get_or_compute=lambda name, compute: compute())
        self.runner = ray_runner.RayRunner(args, system, lambda hardware, pid: "")
        self.runner._records = SimpleNamespace(
            read=lambda worker, message: SimpleNamespace(**message, by=worker[0], error=None)
        )
        if width_cost:
            self.runner._run_facts["width_cost"] = {}

    @property
    def workers(self):
        return self.runner._workers
