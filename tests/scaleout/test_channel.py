"""The channel and the two sides that talk over it, in threads of one process."""

import json
import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest

from refusion_eval.errors import ConfigError, ScaleOutError
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.system import System
from refusion_eval.runs.terminal import Interrupted, Interruption
from refusion_eval.scaleout import messages, torchrun
from refusion_eval.scaleout.channel import REQUIRED_VARIABLES, Channel, Finished, ProcessInfo
from refusion_eval.scaleout.messages import Setup
from refusion_eval.scaleout.torchrun import TorchrunRunner, run_worker_or_return
from tests.scaleout.two_processes import ARGUMENTS, jobs_of

ALONE = ProcessInfo(0, 1)


def test_every_job_is_claimed_by_exactly_one_process(store):
    number = Channel(store, ALONE).open_round({}, [{"name": job} for job in range(50)])
    claimed = []

    def claim_all():
        claimed.extend(job["name"] for _, job in Channel(store, ALONE).claims(number, 50))

    with ThreadPoolExecutor(4) as pool:
        claiming = [pool.submit(claim_all) for _ in range(4)]
        for future in claiming:
            future.result()
    assert sorted(claimed) == list(range(50))


def test_no_job_is_claimed_after_the_end_of_the_claims(store):
    driver, worker = Channel(store, ALONE), Channel(store, ALONE)
    number = driver.open_round({}, ["a", "b", "c"])
    claims = worker.claims(number, 3)
    assert next(claims) == (0, "a")
    assert driver.end_claims(number, 3) == 1
    assert list(claims) == []
    assert driver.end_claims(number, 3) <= 3


def test_messages_arrive_once_in_the_order_of_each_process(store):
    def send_all(rank):
        channel = Channel(store, ProcessInfo(rank, 3))
        for number in range(20):
            channel.send({"number": number, "text": "\ud800"})

    driver, received = Channel(store, ProcessInfo(0, 3)), []
    with ThreadPoolExecutor(3) as pool:
        sending = [pool.submit(send_all, rank) for rank in range(3)]
        while not all(future.done() for future in sending):
            received += driver.messages()
    received += driver.messages()
    assert len(received) == 60
    for rank in range(3):
        assert [message["number"] for message in received if message["rank"] == rank] == list(range(20))


def test_a_claim_ends_when_the_driver_is_done(store):
    driver, worker = Channel(store, ALONE), Channel(store, ALONE)
    number = driver.open_round({}, ["a job"])
    driver.finish(max_seconds=0)
    with pytest.raises(Finished):
        next(worker.claims(number, 1))
    with pytest.raises(Finished):
        worker.wait_for_round(number + 1)


def test_a_store_that_is_gone_is_one_clear_error():
    class Gone:
        def set_timeout(self, timeout: timedelta):
            pass

        def add(self, key, value):
            raise RuntimeError("Connection reset by peer\nwith a trace of C++")

    with pytest.raises(ScaleOutError, match=r"cannot be reached any more \(Connection reset by peer\); run the same"):
        next(Channel(Gone(), ALONE).claims(0, 1))


def facts(samples):
    return sorted((sample.key.doc_hash, sample.text, sample.tokens, sample.num_forwards) for sample in samples)


def gate_driver(monkeypatch, runner, gate):
    """Passes the jobs that the driver claims for itself through a generator."""
    decode = messages.decode

    def gated(system, jobs, max_batch_size):
        return decode(system, gate(jobs) if system is runner._system else jobs, max_batch_size)

    monkeypatch.setattr(messages, "decode", gated)


def slowly(monkeypatch, runner, worker_first, driver_claims=None):
    """Makes the driver wait with its own jobs until the worker has made records; then sets `driver_claims`."""

    def gate(jobs):
        worker_first.wait(60)
        for job in jobs:
            if driver_claims is not None:
                driver_claims.set()
            yield job

    gate_driver(monkeypatch, runner, gate)


def when_sent(monkeypatch, count, until=None):
    """An event that is set when the worker has sent some records; the worker then waits for the event `until`."""
    happened, sent = threading.Event(), []
    write = messages.record_to_json

    def recorded(sample, hardware):
        sent.append(sample)
        if len(sent) >= count:
            happened.set()
            if until is not None:
                until.wait(60)
        return json.loads(json.dumps(write(sample, hardware)))

    monkeypatch.setattr(messages, "record_to_json", recorded)
    return happened


def test_both_processes_decode_and_several_calls_find_the_same_worker(processes, monkeypatch):
    runner = processes.runner()
    slowly(monkeypatch, runner, when_sent(monkeypatch, 2))
    jobs = jobs_of(processes.system, 6)
    alone = facts(System(processes.system.args).run(jobs))
    first = list(runner.run(jobs))
    assert facts(first) == alone
    assert {sample.process_id for sample in first} >= {"worker 1"}
    assert facts(runner.run(iter(jobs))) == alone  # a source that cannot say how long it is
    assert list(runner.run([])) == []
    (registered,) = processes.registered
    assert registered[0].num_processes == 2
    assert processes.status() == 0


def test_another_system_in_the_same_process_is_decoded_as_it_would_be_alone(processes, monkeypatch):
    for gen_length in (16, 8):
        runner = processes.runner(gen_length=gen_length, block_size=8, slot_size=4)
        slowly(monkeypatch, runner, when_sent(monkeypatch, 1))
        jobs = jobs_of(processes.system, 3)
        assert facts(runner.run(jobs)) == facts(System(processes.system.args).run(jobs))
    assert len(processes.registered) == 2  # in one run directory each


def test_few_requests_are_shared_although_one_batch_would_hold_all(processes, monkeypatch):
    driver_claims = threading.Event()  # without it the worker may take all jobs before the driver's thread runs
    runner = processes.runner(batch_size=16)
    slowly(monkeypatch, runner, when_sent(monkeypatch, 1, driver_claims), driver_claims)
    samples = list(runner.run(jobs_of(processes.system, 6)))
    assert {sample.batch_size for sample in samples} <= {1, 3}
    assert max(Counter(sample.process_id for sample in samples).values()) < 6


def test_records_of_a_round_that_was_given_up_are_not_taken_for_those_of_the_next(processes):
    runner = processes.runner()
    jobs = jobs_of(processes.system, 6)
    abandoned = runner.run(jobs)
    next(abandoned)
    abandoned.close()
    assert facts(runner.run(jobs)) == facts(System(processes.system.args).run(jobs))


def beside_a_dead_process(store, monkeypatch):
    """A runner of two processes, of which the other one sent a heartbeat, claimed the first job and died."""
    monkeypatch.setattr(messages, "STOP_SECONDS", 0.2)
    system = System(parse_model_args(ARGUMENTS))
    runner = TorchrunRunner(Channel(store, ProcessInfo(0, 2)), system, lambda hardware, pid: "")

    def gate(jobs):
        dead = Channel(store, ProcessInfo(1, 2))
        with dead.heartbeat():
            next(dead.claims(0, 100))
        yield from jobs

    gate_driver(monkeypatch, runner, gate)
    return runner, system


def stopped_at_the_first(runner, jobs):
    """The records of a run that a signal ends when the first one is there."""
    done = []

    def decode():
        with Interruption(lambda: "", finish_first=True) as stopping:
            for sample in runner.run(stopping.stoppable(jobs)):
                if not done:
                    os.kill(os.getpid(), signal.SIGTERM)
                done.append(sample)

    with pytest.raises(Interrupted):
        decode()
    return done


def test_after_a_signal_no_published_job_is_begun(store):
    system = System(parse_model_args(ARGUMENTS))
    runner = TorchrunRunner(Channel(store, ProcessInfo(0, 2)), system, lambda hardware, pid: "")
    assert len(stopped_at_the_first(runner, jobs_of(system, 20))) == 1


@pytest.mark.parametrize("num_jobs", [20, 2])  # with two, none is left to decode when the signal comes
def test_after_a_signal_a_dead_process_is_not_waited_for(store, monkeypatch, num_jobs):
    runner, system = beside_a_dead_process(store, monkeypatch)
    done = stopped_at_the_first(runner, jobs_of(system, num_jobs))
    assert 1 <= len(done) < min(num_jobs, 10)


def test_a_process_that_is_lost_with_a_job_ends_the_run_with_an_error(store, monkeypatch):
    monkeypatch.setattr(torchrun, "SILENCE_SECONDS", 0.2)
    runner, system = beside_a_dead_process(store, monkeypatch)
    records = runner.run(jobs_of(system, 4))
    assert len([next(records) for _ in range(3)]) == 3  # all but the one that was lost
    with pytest.raises(ScaleOutError, match=r"process 1 has not answered for 0\.2 s; what is recorded stays: run the"):
        next(records)


def test_a_worker_with_other_weights_of_the_same_name_ends_the_run(processes, monkeypatch):
    def check(setup, system):
        real_check(replace(setup, fingerprint={**setup.fingerprint, "checkpoint": "another hash"}), system)

    real_check = Setup.check
    monkeypatch.setattr(Setup, "check", check)
    runner = processes.runner()
    gate_driver(monkeypatch, runner, lambda jobs: iter(()))  # the driver decodes nothing
    with pytest.raises(ScaleOutError, match=r"process 1 gave up: .*checkpoint: driver \"another hash\", here"):
        list(runner.run(jobs_of(processes.system, 3)))
    assert processes.status() == 1


def test_facts_that_the_driver_measured_reach_the_worker(processes, monkeypatch):
    monkeypatch.delitem(ARGUMENTS, "row_cost")
    monkeypatch.delitem(ARGUMENTS, "free_rows")
    monkeypatch.setitem(ARGUMENTS, "fuse", True)  # only fused forwards need what rows cost
    runner = processes.runner()
    processes.system.get_or_compute = lambda name, compute: {"free_rows": 3, "row_cost": 0.5}
    slowly(monkeypatch, runner, when_sent(monkeypatch, 1))
    costs = []
    decode = messages.decode

    def observed(system, jobs, max_batch_size):
        yield from decode(system, jobs, max_batch_size)
        if system is not runner._system:
            costs.append(system.engine.width_cost)

    monkeypatch.setattr(messages, "decode", observed)
    list(runner.run(jobs_of(processes.system, 3)))
    assert processes.status() == 0
    assert [tuple(cost) for cost in costs] == [(3, 0.5)]


@pytest.mark.parametrize(
    ("environment", "info"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, None),
        ({"RANK": "3", "WORLD_SIZE": "4"}, None),
        ({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, ProcessInfo(3, 4)),
        (
            {
                **dict(zip(REQUIRED_VARIABLES, ("3", "4", "a", "1"), strict=True)),
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "2",
            },
            ProcessInfo(3, 4, 1, 2),
        ),
    ],
)
def test_a_launcher_is_known_by_its_variables(environment, info):
    assert ProcessInfo.from_environment(environment) == info


def test_a_launcher_that_sets_bad_variables_is_refused():
    with pytest.raises(ScaleOutError, match="start the processes with torchrun"):
        ProcessInfo.from_environment({"RANK": "first", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"})


def test_ray_under_a_launcher_is_refused(store, monkeypatch):
    monkeypatch.setattr(torchrun, "open_channel", lambda: Channel(store, ProcessInfo(0, 2)))
    with pytest.raises(ConfigError, match="without torchrun"):
        run_worker_or_return(parse_model_args({**ARGUMENTS, "engine": "ray"}))
