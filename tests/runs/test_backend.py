"""What stands around a backend: warm-up, refusals and turns, which every backend gets alike."""

from dataclasses import replace

import pytest

from refusion_eval.engine.engine import Engine
from refusion_eval.errors import ConfigError
from refusion_eval.runs.backend import Backend
from refusion_eval.runs.job import Job, record_error
from refusion_eval.runs.model_args import LOOPS, Loop, parse_model_args
from refusion_eval.runs.system import System
from refusion_eval.store.records import REFUSED
from tests.scaleout.two_processes import jobs_of

ARGUMENTS = {"pretrained": "embedded:autoregressive_sft", "decoder": "autoregressive", "gen_length": 4}


class Counting(Backend):
    """Decodes nothing, and keeps what it was asked for; as all of the contract that has no default."""

    dtype = device = attention = decoder = "counting"

    def __init__(self, fails=()):
        self.asked, self.fails = [], list(fails)

    @classmethod
    def of(cls, opener):
        return cls()

    def describe(self, system):
        raise NotImplementedError

    def hardware(self):
        raise NotImplementedError

    def state(self):
        raise NotImplementedError

    def alone(self, job: Job):
        self.asked.append(job.item_id)
        sample = replace(record_error(job, "", batch_size=1), error=None, warm=False)
        return replace(sample, error="failed") if self.fails and self.fails.pop(0) else sample


class Together(Counting):
    times_together = True

    def together(self, jobs, batch_size):
        yield from (replace(self.alone(job), batch_size=batch_size) for job in jobs)
        return ()


@pytest.fixture
def run():
    jobs = jobs_of(System(parse_model_args(ARGUMENTS)), 3)

    def run(backend, **changes):
        system = System(parse_model_args({**ARGUMENTS, **changes}))
        system.backend = backend
        return [(sample.item_id, sample.error, sample.warm) for sample in system.run(jobs)]

    return run


def test_a_line_in_the_table_of_loops_is_all_that_a_backend_needs(monkeypatch):
    monkeypatch.setitem(LOOPS, "generate", Loop(f"{__name__}:Counting", {"samples": 1}, "counted"))
    args = parse_model_args({**ARGUMENTS, "loop": "generate"})
    assert isinstance(System(args).backend, Counting)
    assert args.system_name == "AR-SFT (counted)"
    with pytest.raises(ConfigError, match="loop=generate runs with samples=1 only"):
        parse_model_args({**ARGUMENTS, "loop": "generate", "samples": 2})


@pytest.mark.parametrize("kind", [Counting, Together])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_every_backend_gets_the_warm_up_that_is_asked_for(run, kind, batch_size):
    backend = kind()
    assert run(backend, warmup=2, batch_size=batch_size) == [(f"d{number}", None, True) for number in range(3)]
    assert backend.asked == ["d0", "d0", "d0", "d1", "d2"]


@pytest.mark.parametrize("kind", [Counting, Together])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_without_a_warm_up_the_first_time_measures_nothing(run, kind, batch_size):
    assert [warm for *_, warm in run(kind(), warmup=0, batch_size=batch_size)] == [False, True, True]


def test_a_warm_up_is_said_before_it_takes_its_time(run, caplog):
    class Noting(Counting):
        def alone(self, job):
            said.append(caplog.messages[-1:])
            return super().alone(job)

    said = []
    with caplog.at_level("INFO", "refusion_eval"):
        run(Noting())
    assert said[0] == ["mini_gsm8k: the first request is decoded as a warm-up"]


@pytest.mark.parametrize("kind", [Counting, Together])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_warm_up_that_fails_is_an_error_of_its_item_and_the_next_item_is_warmed_up(run, kind, batch_size):
    backend = kind(fails=[True])
    assert [error for _, error, _ in run(backend, batch_size=batch_size)] == ["failed", None, None]
    assert backend.asked == ["d0", "d1", "d1", "d2"]


def test_what_a_backend_refuses_is_recorded_and_not_decoded():
    system = System(parse_model_args(ARGUMENTS))
    jobs = jobs_of(system, 2)
    jobs[0] = replace(jobs[0], prompt_ids=[5] * 100_000)
    stops = {sample.item_id: (sample.stop == REFUSED, sample.error is None) for sample in system.run(jobs)}
    assert stops == {"d0": (True, False), "d1": (False, True)}


def test_transformers_loop_decodes_one_request_at_a_time_whatever_the_batch_size(monkeypatch):
    monkeypatch.setattr(Engine, "run_many", None)
    system = System(parse_model_args({**ARGUMENTS, "loop": "generate", "batch_size": "auto"}))
    assert system.batch_size > 1
    samples = list(system.run(jobs_of(system, 2)))
    assert [(sample.error, sample.batch_size) for sample in samples] == [(None, 1)] * 2
