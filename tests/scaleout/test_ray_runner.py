"""How long a run waits for its first worker, with stand-ins for Ray and for the clock."""

from types import SimpleNamespace

import pytest

from refusion_eval.errors import ScaleOutError
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.terminal import StoppableIterator
from refusion_eval.scaleout import ray_runner
from refusion_eval.scaleout.ray_cluster import Node
from refusion_eval.scaleout.ray_pool import WorkerHandle
from tests.store.conftest import make_manifest

WAIT_SECONDS = 100.0
NODE = Node("n", "host", 1, 8)
RAY = SimpleNamespace(exceptions=SimpleNamespace(RayError=ConnectionError))


class SlowPool:
    """One worker, whose state `script` gives by the number of the wait; "opened" ends its setup."""

    def __init__(self, script, clock):
        self.workers = [WorkerHandle("worker 1", NODE, 1, None)]
        self.manifest = None
        self._script = script
        self._clock = clock
        self._num_waits = 0

    @property
    def is_first_opening(self):
        return self.workers[0].state == "opening"

    def describe(self):
        return "each needs a free GPU"

    def grow(self):
        pass

    def wait(self, seconds):
        self._clock.now += WAIT_SECONDS
        self._num_waits += 1
        state = self._script.get(self._num_waits, self.workers[0].state)
        self.workers[0].state = state
        if state == "opened":
            self.manifest = make_manifest()
        return []


@pytest.fixture
def waiting(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(ray_runner, "time", clock)
    monkeypatch.setattr(ray_runner, "Cluster", lambda address: SimpleNamespace(nodes=lambda: [NODE], ray=RAY))
    monkeypatch.setattr(ray_runner, "WorkerPool", lambda cluster, args: None)

    def with_script(script):
        args = parse_model_args({"pretrained": "embedded", "engine": "ray"})
        runner = ray_runner.RayRunner(args, None, lambda hardware, pid: "")
        runner._pool = SlowPool(script, clock)
        return runner, clock

    return with_script


def test_a_first_worker_may_open_its_checkpoint_for_longer_than_one_may_take_to_start(waiting):
    runner, clock = waiting({2: "opening", 40: "opened"})
    assert runner._wait_for_manifest(lambda: False).fingerprint() == make_manifest().fingerprint()
    assert clock.now == 40 * WAIT_SECONDS > ray_runner.FIRST_WORKER_SECONDS


def test_a_worker_that_does_not_start_is_waited_for_so_long_and_no_longer(waiting):
    runner, clock = waiting({})
    with pytest.raises(ScaleOutError, match="no worker started in 900 s: each needs a free GPU"):
        runner._wait_for_manifest(lambda: False)
    assert clock.now == ray_runner.FIRST_WORKER_SECONDS + WAIT_SECONDS


def test_a_signal_does_not_wait_for_a_first_worker(waiting):
    runner, clock = waiting({})
    jobs = StoppableIterator([None], lambda: clock.now >= 3 * WAIT_SECONDS)
    runner._pool.stop_all = lambda: None
    assert list(runner.run(jobs)) == []
    assert clock.now == 3 * WAIT_SECONDS
