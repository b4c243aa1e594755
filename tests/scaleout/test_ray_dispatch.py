"""A pass over jobs, with simulated workers and a simulated clock."""

import itertools
import math
import signal
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.errors import ScaleOutError
from refusion_eval.runs.terminal import Interrupted, Interruption, StoppableIterator
from refusion_eval.scaleout import messages, ray_runner, ray_worker
from refusion_eval.scaleout.messages import STOP_SECONDS
from refusion_eval.scaleout.ray_runner import MAX_FAILED_STARTS, MAX_LOSSES, MEASURING_SECONDS
from tests.scaleout.ray_clusters import ray_here
from tests.scaleout.simulated_ray import ActorDiedError, Answer, RayError, Simulation
from tests.store.conftest import make_manifest

MOST_WAITS = 5000


def job(name, seconds=1.0, alone=False):
    settings = SimpleNamespace(fused=True, row_cost=None)
    return SimpleNamespace(
        name=name, seconds=seconds, alone=alone, key=name, resolved=SimpleNamespace(settings=settings)
    )


@pytest.fixture(autouse=True)
def patch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "job_to_json", lambda job: {"alone": job.alone, "job": job})
        patch.setattr(
            ray_runner,
            "record_error",
            lambda job, error, batch_size: SimpleNamespace(name=job.name, key=job.key, by="", error=error),
        )
        patch.setattr(ray_worker, "job_from_json", lambda fields, settings: fields["job"])
        patch.setattr(ray_worker, "decode", lambda system, jobs: system.run(jobs))
        patch.setattr(
            ray_worker,
            "record_to_json",
            lambda job, hardware: {"key": job.key, "name": job.name, "seconds": job.seconds, "pid": 1},
        )
        yield patch


def simulated(*arguments, **named):
    """A simulation that replaces the one before it in the same test."""
    return Simulation(pytest.MonkeyPatch(), *arguments, **named)


@pytest.fixture(autouse=True)
def restored(patch):
    """Takes back what simulations replaced."""
    with ray_here():
        from ray.util import actor_pool

    patch.setattr(actor_pool, "ray", actor_pool.ray)
    patch.setattr(ray_runner, "time", ray_runner.time)
    patch.setattr(ray_runner, "Cluster", ray_runner.Cluster)


def run(simulation, jobs):
    """The records of a run, in simulated time."""
    return list(simulation.runner.run(iter(jobs)))


def names(items):
    return Counter(item.name for item in items)


@given(
    seconds=st.lists(st.floats(0.01, 20), max_size=30),
    num_workers=st.integers(1, 4),
    deaths=st.lists(st.integers(1, 40), max_size=4),
    joins=st.lists(st.integers(1, 40), max_size=2),
)
def test_every_request_has_one_record_and_none_waits_while_a_worker_is_idle(seconds, num_workers, deaths, joins):
    simulation = simulated(num_workers)

    def on_wait():
        simulation.num_waits += 1
        assert simulation.num_waits < MOST_WAITS, "the run does not end"
        idle = [worker for worker in simulation.workers if worker.state == "idle"]
        assert not idle or not simulation.runner._waiting, "a request waits while a worker is idle"
        if simulation.num_waits in deaths and simulation.workers:
            simulation.workers[0].actor.die()
        simulation.room += simulation.num_waits in joins

    simulation.ray.on_wait = on_wait
    jobs = [job(str(number), length) for number, length in enumerate(seconds)]
    assert names(run(simulation, jobs)) == names(jobs)


def test_no_second_is_lost_between_two_requests():
    simulation = simulated(2)
    assert len(run(simulation, [job(str(number)) for number in range(12)])) == 12
    assert simulation.ray.now == 6.0


def test_no_request_waits_for_a_worker_that_decodes_a_long_one():
    simulation = simulated(2)
    records = run(simulation, [job("long", 100.0), *(job(str(number)) for number in range(5))])
    by = {record.name: record.by for record in records}
    assert set(by.values()) == {"worker 1 on host", "worker 2 on host"}
    assert {by[str(number)] for number in range(5)} == {"worker 2 on host"}
    assert simulation.ray.now == 100.0


def test_a_worker_that_joins_late_takes_the_requests_that_wait():
    simulation = simulated(1)

    def join():
        if simulation.ray.now >= 1.0:
            simulation.room = 2

    simulation.ray.on_wait = join
    records = run(simulation, [job("0"), job("1", 50.0), job("2")])
    assert {record.name: record.by for record in records}["2"] == "worker 2 on host"


def test_timed_requests_are_handed_out_one_by_one():
    simulation = simulated(2, batch_size=8)
    records = run(simulation, [job(str(number), alone=True) for number in range(6)])
    assert Counter(record.by for record in records) == {"worker 1 on host": 3, "worker 2 on host": 3}


@pytest.mark.parametrize("num_jobs", [6, 7])
def test_the_last_requests_are_divided_evenly(num_jobs):
    simulation = simulated(2, batch_size=8)
    while [worker.state for worker in simulation.workers] != ["idle", "idle"]:
        simulation.runner._advance()
    records = run(simulation, [job(str(number)) for number in range(num_jobs)])
    assert max(Counter(record.by for record in records).values()) == math.ceil(num_jobs / 2)


@given(num_jobs=st.integers(0, 40), ends=st.lists(st.integers(1, 4), min_size=1), alone=st.integers(0, 3))
def test_a_batch_is_full_as_long_as_there_are_requests(num_jobs, ends, alone):
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

    simulation = simulated(1, decode, batch_size=4)
    jobs = [job(str(number), alone=number < alone) for number in range(num_jobs)]
    assert names(run(simulation, jobs)) == names(jobs)
    assert all(count == full for count, full in alive)


@given(
    lengths=st.lists(st.floats(0.1, 5), min_size=1, max_size=12),
    alone=st.integers(0, 3),
    poison=st.sets(st.integers(0, 11), max_size=2),
    deaths=st.lists(st.integers(1, 30), max_size=3),
)
def test_a_request_that_kills_workers_ends_alone_and_no_other_request_is_lost(lengths, alone, poison, deaths):
    simulation = simulated(2, batch_size=3)
    jobs = [job(str(number), length, alone=number < alone) for number, length in enumerate(lengths)]
    poisonous = {job.name for number, job in enumerate(jobs) if number in poison}

    def on_wait():
        simulation.num_waits += 1
        assert simulation.num_waits < MOST_WAITS, "the run does not end"
        for worker in simulation.workers:
            held = worker.requests.values()
            assert len(held) == 1 or not any(request.is_solo for request in held)
            if poisonous & worker.requests.keys() or (simulation.num_waits in deaths and len(deaths) < MAX_LOSSES):
                worker.actor.die()

    simulation.ray.on_wait = on_wait
    records = run(simulation, jobs)
    assert names(records) == names(jobs)
    given_up = {record.name: record.error for record in records if record.by == ""}
    assert poisonous <= given_up.keys()
    assert all(error.startswith("3 workers ended while they decoded it") for error in given_up.values())


def stopped(simulation, jobs):
    """The records of a run that a signal ends at the first wait for workers that decode or hang."""

    def on_wait():
        if simulation.room == 0 or any(worker.requests for worker in simulation.workers):
            simulation.ray.on_wait = lambda: None
            signal.raise_signal(signal.SIGTERM)

    simulation.ray.on_wait = on_wait
    records = []
    try:
        with Interruption(lambda: "so far", finish_first=True) as stopping:
            records += simulation.runner.run(stopping.stoppable(jobs))
    except Interrupted:
        return records


def test_a_signal_lets_requests_in_flight_end_and_drops_the_rest():
    simulation = simulated(1)
    records = stopped(simulation, (job(str(number), 10.0) for number in itertools.count()))
    assert [record.name for record in records] == ["0"]
    assert simulation.ray.now == 10.0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_one_signal_ends_a_run_whose_workers_hang(num_workers, caplog):
    simulation = simulated(num_workers)
    assert stopped(simulation, (job(str(number), math.inf) for number in itertools.count())) == []
    lines = [line for line in caplog.messages if line.startswith("records are missing")]
    assert len(lines) == num_workers, "nothing was begun without a worker, so nothing is waited for"
    assert all("worker 1 on host is decoding (1 requests)" in line for line in lines)
    assert simulation.ray.now <= STOP_SECONDS + 2


def test_a_signal_does_not_wait_for_a_first_worker():
    simulation = simulated(1)
    simulation.ray.scripts[1] = {"load": Answer()}
    assert run(simulation, []) == []
    jobs = StoppableIterator([job("a")], lambda: simulation.ray.now >= 30)
    assert list(simulation.runner.run(jobs)) == []
    assert simulation.ray.now < 32


def test_a_cluster_without_room_is_waited_for_so_long_and_no_longer():
    simulation = simulated(0)
    with pytest.raises(ScaleOutError, match="no worker could be started in 900 s: each worker needs 1 free cores"):
        simulation.runner.manifest({})
    assert simulation.ray.now == pytest.approx(ray_runner.ROOM_SECONDS, abs=2 * ray_runner.GROW_SECONDS)


def test_the_record_of_a_run_has_its_protocol_and_the_prompts_of_its_tasks():
    runner = simulated(1).runner
    runner._manifest = make_manifest(arguments={"cuda_graphs": True})
    stamp = {"label": "mine@0123", "hash": "0123", "system": "refusion", "content": {}}
    runner._args = replace(runner._args, protocol=stamp)
    manifest = runner.manifest({"refusion_gsm8k_release": "1.0"})
    assert (manifest.protocol, manifest.prompts) == (stamp, {"refusion_gsm8k_release": "release"})
    assert manifest.arguments["cuda_graphs"]


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_silent_run_reports_repeatedly_for_whom_it_waits(is_ready, caplog):
    simulation = simulated(2 if is_ready else 1)
    simulation.ray.scripts[2 if is_ready else 1] = {"load": Answer()}

    def stop_after_two_lines():
        if len([line for line in caplog.messages if "nothing has come" in line]) == 2:
            raise InterruptedError

    simulation.ray.on_wait = stop_after_two_lines
    with pytest.raises(InterruptedError):
        run(simulation, [job("a", math.inf)])
    awaited = "worker 1 on host is decoding (1 requests), worker 2 is starting (0 requests)"
    if not is_ready:
        awaited = "worker 1 is starting (0 requests), each worker needs 1 free cores, and the cluster has host"
    assert all(awaited in line for line in caplog.messages if "nothing has come" in line)


def test_the_width_cost_is_measured_before_a_job_needs_it():
    simulation = simulated(1, width_cost=False)
    simulation.ray.scripts[1] = {"width_cost": Answer(5.0, {"row_cost": 1})}
    assert [record.name for record in run(simulation, [job("a")])] == ["a"]
    assert simulation.runner._run_facts["width_cost"] == {"row_cost": 1}
    assert simulation.ray.now == 6.0


@pytest.mark.parametrize("answer", [Answer(5.0, error=ActorDiedError("out of memory")), Answer()])
def test_a_worker_that_dies_or_hangs_over_a_measurement_is_lost_and_another_measures(answer, caplog):
    simulation = simulated(1, width_cost=False)
    simulation.ray.scripts[1] = {"width_cost": answer}
    simulation.ray.scripts[2] = {"width_cost": Answer(0.0, {"row_cost": 2})}
    assert [record.error for record in run(simulation, [job("a")])] == [None]
    assert simulation.runner._run_facts["width_cost"] == {"row_cost": 2}
    assert simulation.ray.now <= MEASURING_SECONDS + 1
    (line,) = [line for line in caplog.messages if "is lost" in line]
    assert line.startswith("worker 1 on host is lost")


def dies(times):
    """Scripts of workers that die while they load the checkpoint."""
    return {number: {"load": Answer(0.0, error=ActorDiedError("out of memory"))} for number in times}


def test_a_worker_that_ends_before_it_decodes_is_replaced_a_few_times():
    simulation = simulated(1)
    simulation.ray.scripts |= dies(range(1, MAX_FAILED_STARTS))
    assert names(run(simulation, [job("a")])) == {"a": 1}
    simulation = simulated(1)
    simulation.ray.scripts |= dies(range(1, MAX_FAILED_STARTS + 1))
    with pytest.raises(ScaleOutError, match="no machine can decode; worker 1: it ended 3 times before it decoded"):
        run(simulation, [job("a")])


def test_a_worker_that_raises_a_timeout_of_its_own_is_replaced():
    class RayTaskTimeout(RayError, TimeoutError):
        pass

    simulation = simulated(1)
    simulation.ray.scripts[1] = {"load": Answer(0.0, error=RayTaskTimeout("the hub is slow"))}
    assert names(run(simulation, [job("a")])) == {"a": 1}


def test_failures_that_a_success_came_between_do_not_add_up():
    simulation = simulated(1)
    simulation.ray.scripts |= dies([1, 2, 4])

    def die_over_the_second_request():
        (worker,) = simulation.workers or [None]
        if worker and "b" in worker.requests and not worker.actor.script:
            simulation.ray.on_wait = lambda: None
            worker.actor.script |= dies([3])[3]
            worker.actor.die()

    simulation.ray.on_wait = die_over_the_second_request
    assert names(run(simulation, [job("a"), job("b")])) == {"a": 1, "b": 1}
