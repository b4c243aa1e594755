"""How long a run waits for its first worker, with stand-ins for Ray and for the clock."""

from types import SimpleNamespace

import pytest

from refusion_eval.errors import ScaleOutError
from refusion_eval.runs.interrupt import StoppableIterator
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.scaleout import ray_runner
from refusion_eval.scaleout.ray_cluster import Node
from refusion_eval.scaleout.ray_pool import Event, Member, Room
from tests.store.conftest import make_manifest

TURN_SECONDS = 100.0
NODE = Node("n", "host", 1, 8)
RAY = SimpleNamespace(exceptions=SimpleNamespace(RayError=ConnectionError))


class SlowPool:
    """One worker, of which `script` says what comes of it in which turn."""

    def __init__(self, script, clock):
        self.members = [Member("worker 1", NODE, 1, None)]
        self.room = Room(True, 1, None)
        self._script = script
        self._clock = clock
        self._turn = 0

    def grow(self):
        pass

    def open(self, member, setup, *, first):
        assert first
        member.doing = "opening"

    def wait(self, seconds):
        self._clock.now += TURN_SECONDS
        self._turn += 1
        kind, value = self._script.get(self._turn, (None, None))
        if kind is not None:
            self.members[0].doing = kind
            yield Event(kind, self.members[0], value)


@pytest.fixture
def waiting(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(ray_runner, "time", clock)
    monkeypatch.setattr(ray_runner, "Cluster", lambda address: SimpleNamespace(nodes=lambda: [NODE], ray=RAY))
    monkeypatch.setattr(ray_runner.RayRunner, "_setup", lambda runner: {})

    def with_script(script):
        args = parse_model_args({"pretrained": "embedded", "engine": "ray"})
        runner = ray_runner.RayRunner(args, None, lambda hardware, pid: "")
        runner._pool = SlowPool(script, clock)
        return runner, clock

    return with_script


def test_a_first_worker_may_open_its_checkpoint_for_longer_than_one_may_take_to_start(waiting):
    facts = {"batch_size": 1, "attention": "sdpa", "manifest": make_manifest().to_json()}
    runner, clock = waiting({2: ("started", None), 40: ("opened", facts)})
    assert runner._described(lambda: False).fingerprint() == make_manifest().fingerprint()
    assert clock.now == 40 * TURN_SECONDS > ray_runner.FIRST_WORKER_SECONDS


def test_a_worker_that_does_not_start_is_waited_for_so_long_and_no_longer(waiting):
    runner, clock = waiting({})
    with pytest.raises(ScaleOutError, match="no worker started in 900 s: each needs a free GPU"):
        runner._described(lambda: False)
    assert clock.now == ray_runner.FIRST_WORKER_SECONDS + TURN_SECONDS


def test_a_signal_does_not_wait_for_a_first_worker(waiting):
    runner, clock = waiting({})
    jobs = StoppableIterator([None], lambda: clock.now >= 3 * TURN_SECONDS)
    runner._pool.dismiss_all = lambda: None
    assert list(runner.run(jobs)) == []
    assert clock.now == 3 * TURN_SECONDS
