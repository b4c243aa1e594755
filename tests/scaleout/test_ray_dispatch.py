"""A pass over jobs whose workers say nothing, with stand-ins for Ray."""

import itertools
import signal
import time
from types import SimpleNamespace

import pytest

from refusion_eval.evaluate.interrupt import Interrupted, Interruption
from refusion_eval.scaleout import ray_dispatch
from refusion_eval.scaleout.desk import Desk
from refusion_eval.scaleout.ray_cluster import Node
from refusion_eval.scaleout.ray_dispatch import Dispatch
from refusion_eval.scaleout.ray_pool import Event, LostWhileAskedError, Member

SETTINGS = SimpleNamespace(fused=True, row_cost=None)
TURN_SECONDS = 0.01
MOST_TURNS = 500


class Near:
    """Calls of an actor, made here."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return SimpleNamespace(remote=getattr(self._inner, name))


class QuietPool:
    """Workers that take a request each, and from which nothing comes."""

    def __init__(self, num_workers):
        node = Node("n", "host", 0, 1)
        self.members = [Member(f"worker {one}", node, 1, None, "idle") for one in range(1, num_workers + 1)]
        self.turns = 0
        self.on_turn = lambda turn: None

    def grow(self):
        pass

    def ask(self, answer):
        return answer

    def run(self, member, desk, at_once):
        member.doing = "decoding"
        assert desk.claim.remote(member.name, 0, False).state == "job"

    def width_cost(self, member):
        self.members.remove(member)
        raise LostWhileAskedError(Event("lost", member, "out of memory"))

    def wait(self, seconds):
        self.turns += 1
        assert self.turns < MOST_TURNS, "the run does not end"
        time.sleep(TURN_SECONDS)
        self.on_turn(self.turns)
        return iter(())


class QuietOffice:
    def __init__(self, settled):
        self.settled = settled
        self.welcomed = []

    def welcome(self, event):
        self.welcomed.append(event.member.name)

    def demand(self):
        return "each needs a free GPU"

    def settle_width_cost(self, measure):
        self.settled["width_cost"] = measure()


@pytest.fixture(autouse=True)
def plain_jobs(monkeypatch):
    monkeypatch.setattr(ray_dispatch, "job_to_json", lambda job: {"alone": False})


def dispatch_of(pool, jobs, office=None):
    return Dispatch(pool, Near(Desk()), itertools.count(), jobs, office or QuietOffice({"width_cost": {}}))


def interrupted_run(pool):
    """A run that a signal ends in its third turn."""
    pool.on_turn = lambda turn: signal.raise_signal(signal.SIGTERM) if turn == 3 else None
    with Interruption(lambda: "so far", finish_first=True) as stopping:
        jobs = itertools.repeat(SimpleNamespace(resolved=SimpleNamespace(settings=SETTINGS)))
        dispatch = dispatch_of(pool, stopping.until_asked(jobs))
        assert list(dispatch.records()) == []
        assert not dispatch.is_complete


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_signal_ends_a_run_whose_workers_hang(num_workers, monkeypatch, caplog):
    monkeypatch.setattr(ray_dispatch, "STOP_SECONDS", 10 * TURN_SECONDS)
    pool = QuietPool(num_workers)
    with pytest.raises(Interrupted):
        interrupted_run(pool)
    assert pool.turns > 3
    (line,) = caplog.messages
    awaited = "worker 1 has 1 requests, worker 2 has 1 requests" if num_workers else "no worker is ready; each needs"
    assert line.startswith("not waited for")
    assert awaited in line


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_silent_run_says_again_and_again_whom_it_waits_for(num_workers, monkeypatch, caplog):
    monkeypatch.setattr(ray_dispatch, "SILENCE_SECONDS", 5 * TURN_SECONDS)
    monkeypatch.setattr(ray_dispatch, "STOP_SECONDS", 0.0)
    pool = QuietPool(num_workers)

    def stop_after_two_lines(turn):
        if len(caplog.messages) == 2:
            raise InterruptedError

    pool.on_turn = stop_after_two_lines
    jobs = iter([SimpleNamespace(resolved=SimpleNamespace(settings=SETTINGS))])
    with pytest.raises(InterruptedError):
        list(dispatch_of(pool, jobs).records())
    awaited = "worker 1 has 1 requests; 0 more wait" if num_workers else "no worker is ready; each needs a free GPU"
    assert all("nothing has come for" in line and awaited in line for line in caplog.messages)


def test_a_worker_that_dies_over_a_measurement_is_welcomed_as_lost():
    pool, office = QuietPool(1), QuietOffice({})

    def stop(turn):
        raise InterruptedError

    pool.on_turn = stop
    jobs = iter([SimpleNamespace(resolved=SimpleNamespace(settings=SETTINGS))])
    with pytest.raises(InterruptedError):
        list(dispatch_of(pool, jobs, office).records())
    assert office.welcomed == ["worker 1"]
    assert office.settled == {}
