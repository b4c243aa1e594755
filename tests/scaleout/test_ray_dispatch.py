"""A pass over jobs, with simulated workers and a simulated clock."""

import itertools
import math
import signal
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.runs.terminal import Interrupted, Interruption
from refusion_eval.scaleout import ray_pool, ray_runner, ray_worker
from refusion_eval.scaleout.ray_pool import MAX_FAILED_STARTS, MAX_SECONDS
from refusion_eval.scaleout.ray_runner import MAX_LOSSES, Dispatcher
from tests.scaleout.simulated_ray import NODE, Answer, SimulatedError, SimulatedPool, SimulatedRay

MOST_WAITS = 2000


def job(name, seconds=1.0, alone=False):
    settings = SimpleNamespace(fused=True, row_cost=None)
    return SimpleNamespace(
        name=name, seconds=seconds, alone=alone, key=name, resolved=SimpleNamespace(settings=settings)
    )


class Records:
    """Reads the records of the workers, which are invented."""

    def read(self, worker, message):
        return SimpleNamespace(**message, by=worker)


def decode_one_by_one(claims):
    return claims


class Simulation:
    """A run whose workers decode one request after the other, each in its own simulated seconds."""

    def __init__(self, num_workers, has_width_cost=True):
        self.ray = SimulatedRay(lambda record: record["seconds"])
        self.pool = SimulatedPool(self.ray, decode_one_by_one)
        if has_width_cost:
            self.pool.run_facts["width_cost"] = {}
        self.num_waits = 0
        for _ in range(num_workers):
            self.pool.add()

    def dispatch(self, jobs):
        self.dispatcher = Dispatcher(self.pool, jobs, Records(), lambda name, compute: compute())
        return self.dispatcher


def failed(job, error, batch_size):
    return SimpleNamespace(name=job.name, by="", error=error)


@pytest.fixture(autouse=True)
def plain_jobs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_pool, "job_to_json", lambda job: {"alone": job.alone, "job": job})
        patch.setattr(
            ray_runner,
            "record_error",
            lambda job, error, batch_size: SimpleNamespace(name=job.name, by="", error=error),
        )
        patch.setattr(ray_worker, "job_from_json", lambda fields, settings: fields["job"])
        patch.setattr(ray_worker, "decode", lambda system, jobs: system.run(jobs))
        yield patch


def clocked(simulation):
    """Replaces the clock of the modules by the simulated clock."""
    patch = pytest.MonkeyPatch()
    for module in (ray_runner, ray_pool):
        patch.setattr(module, "time", simulation.ray)
    return patch


def run(simulation, jobs):
    """The records of a run, in simulated time."""
    patch = clocked(simulation)
    try:
        return list(simulation.dispatch(iter(jobs)).records())
    finally:
        patch.undo()


@given(
    seconds=st.lists(st.floats(0.01, 20), max_size=30),
    num_workers=st.integers(1, 4),
    deaths=st.lists(st.integers(1, 40), max_size=4),
    joins=st.lists(st.integers(1, 40), max_size=2),
)
def test_every_request_has_one_record_and_none_waits_while_a_worker_is_idle(seconds, num_workers, deaths, joins):
    simulation = Simulation(num_workers)

    def on_wait():
        simulation.num_waits += 1
        assert simulation.num_waits < MOST_WAITS, "the run does not end"
        workers = simulation.pool.workers
        idle = [worker for worker in workers if worker.state == "idle"]
        assert not idle or not simulation.dispatcher._waiting, "a request waits while a worker is idle"
        if simulation.num_waits in deaths and workers:
            simulation.ray.kill_worker(workers[0].actor)
            simulation.pool.add()
        if simulation.num_waits in joins:
            simulation.pool.add()

    simulation.ray.on_wait = on_wait
    jobs = [job(str(number), length) for number, length in enumerate(seconds)]
    records = run(simulation, jobs)
    assert Counter(record.name for record in records) == Counter(job.name for job in jobs)


def test_no_second_is_lost_between_two_requests():
    simulation = Simulation(2)
    assert len(run(simulation, [job(str(number)) for number in range(12)])) == 12
    assert simulation.ray.now == 6.0


def test_no_request_waits_for_a_worker_that_decodes_a_long_one():
    simulation = Simulation(2)
    records = run(simulation, [job("long", 100.0), *(job(str(number)) for number in range(5))])
    by = {record.name: record.by for record in records}
    assert set(by.values()) == {"worker 1", "worker 2"}
    assert {by[str(number)] for number in range(5)} == {"worker 2"}
    assert simulation.ray.now == 100.0


def test_a_worker_that_joins_late_takes_the_requests_that_wait():
    simulation = Simulation(1)

    def join():
        if simulation.ray.now >= 1.0 and len(simulation.pool.workers) == 1:
            simulation.pool.add()

    simulation.ray.on_wait = join
    records = run(simulation, [job("0"), job("1", 50.0), job("2")])
    assert {record.name: record.by for record in records}["2"] == "worker 2"


def test_timed_requests_are_handed_out_one_by_one():
    simulation = Simulation(2)
    for worker in simulation.pool.workers:
        worker.batch_size = 8
    records = run(simulation, [job(str(number), alone=True) for number in range(6)])
    assert Counter(record.by for record in records) == {"worker 1": 3, "worker 2": 3}


@given(num_jobs=st.integers(0, 40), ends=st.lists(st.integers(1, 4), min_size=1), alone=st.integers(0, 3))
def test_a_batch_is_full_as_long_as_there_are_requests(num_jobs, ends, alone):
    simulation = Simulation(0)
    at_once = itertools.cycle(ends)
    num_left, alive = num_jobs, []

    def decode(claims):
        """Batches of four, of which as many end together as `ends` says; timed requests come alone."""
        nonlocal num_left
        for first in claims:
            live = [first]
            while live:
                while len(live) < 4 and not first.alone and (following := next(claims, None)) is not None:
                    live.append(following)
                alive.append((len(live), 1 if first.alone else min(4, num_left)))
                for _ in range(min(next(at_once), len(live))):
                    num_left -= 1
                    yield live.pop(0)

    simulation.pool = SimulatedPool(simulation.ray, decode)
    simulation.pool.run_facts["width_cost"] = {}
    simulation.pool.add(batch_size=4)
    jobs = [job(str(number), alone=number < alone) for number in range(num_jobs)]
    records = run(simulation, jobs)
    assert Counter(record.name for record in records) == Counter(job.name for job in jobs)
    assert all(count == full for count, full in alive)


@given(
    lengths=st.lists(st.floats(0.1, 5), min_size=1, max_size=12),
    alone=st.integers(0, 3),
    poison=st.sets(st.integers(0, 11), max_size=2),
    deaths=st.lists(st.integers(1, 30), max_size=3),
)
def test_a_request_that_kills_workers_ends_alone_and_no_other_request_is_lost(lengths, alone, poison, deaths):
    simulation = Simulation(2)
    for worker in simulation.pool.workers:
        worker.batch_size = 3
    jobs = [job(str(number), length, alone=number < alone) for number, length in enumerate(lengths)]
    poisonous = {job.name for number, job in enumerate(jobs) if number in poison}

    def on_wait():
        simulation.num_waits += 1
        assert simulation.num_waits < MOST_WAITS, "the run does not end"
        for worker in list(simulation.pool.workers):
            held = worker.requests.values()
            assert len(held) == 1 or not any(request.is_solo for request in held)
            if poisonous & worker.requests.keys() or (simulation.num_waits in deaths and len(deaths) < MAX_LOSSES):
                simulation.ray.kill_worker(worker.actor)
                simulation.pool.add(batch_size=3)

    simulation.ray.on_wait = on_wait
    records = run(simulation, jobs)
    assert Counter(record.name for record in records) == Counter(job.name for job in jobs)
    given_up = {record.name: record.error for record in records if record.by == ""}
    assert poisonous <= given_up.keys()
    assert all(error.startswith("3 workers ended while they decoded it") for error in given_up.values())


def stopped(simulation, jobs, *, when):
    """The records of a run that a signal ends."""
    patch = clocked(simulation)

    def on_wait():
        if when():
            simulation.ray.on_wait = lambda: None
            signal.raise_signal(signal.SIGTERM)

    simulation.ray.on_wait = on_wait
    records = []
    try:
        with Interruption(lambda: "so far", finish_first=True) as stopping:
            dispatch = simulation.dispatch(stopping.stoppable(jobs))
            records += dispatch.records()
            records.append(dispatch.is_complete)
    except Interrupted:
        return records
    finally:
        patch.undo()


def test_a_signal_lets_requests_in_flight_end_and_drops_the_rest():
    simulation = Simulation(2)
    jobs = (job(str(number), 10.0) for number in itertools.count())
    records = stopped(simulation, jobs, when=lambda: True)
    assert [record.name for record in records[:-1]] == ["0", "1"]
    assert records[-1], "nothing is outstanding"
    assert simulation.ray.now == 10.0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_signal_ends_a_run_whose_workers_hang(num_workers, caplog):
    simulation = Simulation(num_workers)
    jobs = (job(str(number), math.inf) for number in itertools.count())
    start = simulation.pool.add(state="starting") if not num_workers else None
    if start:
        start.call = Answer()
    records = stopped(simulation, jobs, when=lambda: True)
    if num_workers:
        assert records == [False]
        (line,) = [line for line in caplog.messages if line.startswith("records are missing")]
        assert "worker 1 has 1 requests, worker 2 has 1 requests" in line
    else:
        assert records == [True], "nothing was begun, so nothing is waited for"
    assert simulation.ray.now <= ray_runner.STOP_SECONDS + 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_silent_run_reports_repeatedly_for_whom_it_waits(num_workers, caplog):
    simulation = Simulation(num_workers)

    def stop_after_two_lines():
        if len(caplog.messages) == 2:
            raise InterruptedError

    simulation.ray.on_wait = stop_after_two_lines
    starting = simulation.pool.add(state="starting")
    starting.call = Answer()
    with pytest.raises(InterruptedError):
        run(simulation, [job("a", math.inf)])
    awaited = "worker 1 has 1 requests, worker 2 is starting; 0 more wait"
    if not num_workers:
        awaited = "worker 1 is starting, no worker is ready; each needs 1 free cores"
    assert all("nothing has come for" in line and awaited in line for line in caplog.messages)


def measuring(simulation, answer):
    """A run that has to measure, and waits for the answer."""
    (worker,) = simulation.pool.workers
    worker.actor.script["width_cost"] = answer
    return worker


def test_the_width_cost_is_measured_before_a_job_needs_it():
    simulation = Simulation(1, has_width_cost=False)
    measuring(simulation, Answer(5.0, {"row_cost": 1}))
    assert [record.name for record in run(simulation, [job("a")])] == ["a"]
    assert simulation.pool.run_facts == {"width_cost": {"row_cost": 1}}
    assert simulation.ray.now == 6.0


def test_a_signal_does_not_wait_for_a_measurement():
    simulation = Simulation(1, has_width_cost=False)
    measuring(simulation, Answer(MAX_SECONDS["measuring"]))
    records = stopped(simulation, iter([job("a")]), when=lambda: simulation.pool.workers[0].state == "measuring")
    assert records == [True]
    assert simulation.ray.now <= 1.0


@pytest.mark.parametrize("answer", [Answer(5.0, error=SimulatedError("out of memory")), Answer()])
def test_a_worker_that_dies_or_hangs_over_a_measurement_is_lost_and_another_measures(answer, caplog):
    simulation = Simulation(1, has_width_cost=False)
    measuring(simulation, answer)

    def replace():
        if not simulation.pool.workers:
            simulation.pool.add().actor.script["width_cost"] = Answer(0.0, {"row_cost": 2})

    simulation.pool.grow = replace
    assert [record.by for record in run(simulation, [job("a")])] == ["worker 2"]
    (line,) = [line for line in caplog.messages if "is lost" in line]
    assert line.startswith("worker 1 is lost")


def opening(simulation, answer):
    worker = simulation.pool.add(state="started")
    worker.actor.script["open"] = answer


def test_a_worker_that_hangs_while_it_opens_its_checkpoint_is_given_up():
    simulation = Simulation(0)
    patch = clocked(simulation)
    opening(simulation, Answer())
    events = []
    while not events:
        events = list(simulation.pool.wait(100.0))
    patch.undo()
    assert [event.kind for event in events] == ["lost"]
    assert "it was opening for" in events[0].value
    assert simulation.pool.workers == []
    assert simulation.ray.now == pytest.approx(MAX_SECONDS["opening"], abs=200.0)


def fail_to_open(simulation):
    opening(simulation, Answer(0.0, error=SimulatedError("out of memory")))
    (event,) = simulation.pool.wait(1.0)
    assert event.kind == "lost"


def test_failures_that_a_success_came_between_do_not_add_up():
    simulation = Simulation(0)
    patch = clocked(simulation)
    for _ in range(MAX_FAILED_STARTS):
        for _ in range(MAX_FAILED_STARTS - 1):
            fail_to_open(simulation)
        worker = simulation.pool.add()
        assert [record.name for record in simulation.dispatch(iter([job("a")])).records()] == ["a"]
        simulation.pool.stop(worker)
    assert simulation.pool._capacity(NODE)
    for _ in range(MAX_FAILED_STARTS):
        assert simulation.pool._capacity(NODE)
        fail_to_open(simulation)
    assert not simulation.pool._capacity(NODE)
    patch.undo()
