"""Ray workers without Ray: calls are made in this process, and a clock that jumps says when they are answered."""

import math
from types import SimpleNamespace

from refusion_eval.scaleout.ray_cluster import Node
from refusion_eval.scaleout.ray_pool import Member, Pool, Room
from refusion_eval.scaleout.ray_worker import RayWorker

NODE = Node("n", "host", 0, 8)


class SimulatedError(Exception):
    """What Ray raises for a worker that is gone."""


class Answer:
    """A reference to an answer: known at a time, or never."""

    def __init__(self, at=math.inf, value=None, error=None):
        self.at, self.value, self.error = at, value, error


class Actor:
    """Takes turns one after the other; any other call is answered at once, or as `script` says."""

    def __init__(self, ray, worker):
        self._ray, self._worker = ray, worker
        self._waiting = []
        self._free_at = 0.0
        self.script = {}

    def begin_turns(self):
        """Begins each turn that the worker is free for by now."""
        while self._waiting and self._free_at <= self._ray.now:
            answer, arguments = self._waiting.pop(0)
            answer.value = self._worker.turn(*arguments)
            took = 0.0 if answer.value is None else self._ray.seconds_of(answer.value[1])
            self._free_at = max(self._free_at, self._ray.now) + took
            answer.at = self._free_at

    def __getattr__(self, name):
        def call(*arguments, **named):
            if name == "turn":
                answer = Answer()
                self._waiting.append((answer, arguments))
                self._ray.turns.append((self, answer))
                return answer
            if name in self.script:
                return self.script[name]
            return Answer(self._ray.now, getattr(self._worker, name)(*arguments, **named))

        return SimpleNamespace(remote=call, options=lambda **options: SimpleNamespace(remote=call))


class SimulatedRay:
    """What `Pool` uses of the ray package.

    Args:
        seconds_of: how long a request takes, of its record.
    """

    exceptions = SimpleNamespace(RayError=SimulatedError)

    def __init__(self, seconds_of):
        self.seconds_of = seconds_of
        self.now = 0.0
        self.turns = []
        self.on_wait = lambda: None
        self.actors = []

    def remote(self, **options):
        return lambda kind: kind

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
        """What a worker had under way fails, now."""
        for of, answer in self.turns:
            if of is actor and answer.at > self.now:
                answer.at, answer.error = self.now, SimulatedError("killed")
        actor._waiting.clear()

    def wait(self, answers, num_returns, timeout):
        """As ray.wait; the clock jumps to the first answer, or as far as the wait may last."""
        for actor in self.actors:
            actor.begin_turns()
        if timeout:
            self.on_wait()
            self.now = max(self.now, min(min(answer.at for answer in answers), self.now + timeout))
        ready = [answer for answer in answers if answer.at <= self.now][:num_returns]
        return ready, [answer for answer in answers if answer not in ready]


class SimulatedPool(Pool):
    """A pool of workers that decode what `decode` makes of their claims."""

    def __init__(self, ray, decode):
        super().__init__(SimpleNamespace(ray=ray), Room(use_gpu=False, cpus=1, most=None))
        self._decode = decode

    def grow(self):
        """Nothing: a test adds workers."""

    def add(self, batch_size=1, doing="idle"):
        worker = RayWorker(f"worker {next(self._numbers)}")
        worker._worker = SimpleNamespace(run=self._decode, system=SimpleNamespace(entry=SimpleNamespace(Settings=None)))
        actor = Actor(self._ray, worker)
        self._ray.actors.append(actor)
        member = Member(worker._name, NODE, 1, actor, doing=doing, batch_size=batch_size)
        self.members.append(member)
        return member
