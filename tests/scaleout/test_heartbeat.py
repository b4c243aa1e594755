"""Who is still there: workers bump a counter, and the driver watches it."""

import time

import pytest
from torch.distributed import HashStore

from refusion_eval.scaleout import channel
from refusion_eval.scaleout.channel import Channel, ProcessInfo


@pytest.fixture
def store():
    return HashStore()


def test_a_worker_is_silent_when_its_heartbeat_ends_and_not_before(store, monkeypatch):
    monkeypatch.setattr(channel, "HEARTBEAT_SECONDS", 0.01)
    driver, worker = (Channel(store, ProcessInfo(rank, num_processes=3)) for rank in range(2))

    def silent_within(seconds):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if silent := driver.silent_workers(0.3):
                return silent
            time.sleep(0.01)
        return set()

    assert silent_within(0.5) == set()  # one that was never heard may still be on its way
    with worker.heartbeat():
        assert silent_within(0.8) == set()
    assert silent_within(10) == {1}
    with worker.heartbeat():
        assert silent_within(0.1) == set()


def test_the_driver_leaves_without_workers_that_are_gone(store, monkeypatch):
    monkeypatch.setattr(channel, "LEAVE_SILENCE_SECONDS", 0.05)
    driver, gone, left = (Channel(store, ProcessInfo(rank, num_processes=3)) for rank in range(3))
    with gone.heartbeat():
        pass
    left.leave()
    began = time.monotonic()
    driver.finish(max_seconds=30)
    assert time.monotonic() - began < 10
