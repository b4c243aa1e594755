"""A system at work: what it records, what it finds again, and in which process it may be."""

import itertools
import time
import uuid
from contextlib import closing
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from refusion_eval.errors import ConfigError, GaveUpError, ScaleOutError
from refusion_eval.evaluation.loop import Session
from refusion_eval.lm_eval_plugin.adapter import RefusionLM
from refusion_eval.runs.job import Job, record_error
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.scaleout import channel
from refusion_eval.scaleout.channel import Channel, ProcessInfo
from refusion_eval.store.records import REFUSED, SampleKey
from refusion_eval.store.run_store import RunReader

GENERATION = {"gen_length": 16, "slot_size": 4, "block_size": 8, "warmup": 0}


def arguments(checkpoint, run_dir):
    return parse_model_args({"pretrained": checkpoint, "run_dir": str(run_dir), **GENERATION})


def jobs_of(session, *prompts):
    resolved = session.system.resolve("mini_gsm8k", {})
    keys = [SampleKey("mini_gsm8k", "1.0", f"d{number}", "p", 0, resolved.digest) for number in range(len(prompts))]
    return [
        Job(key=key, benchmark="gsm8k", item_id=str(number), prompt_ids=prompt, resolved=resolved)
        for number, (key, prompt) in enumerate(zip(keys, prompts, strict=True))
    ]


def test_a_prompt_that_is_refused_is_recorded_and_the_rest_is_decoded(checkpoint, tmp_path):
    seen = {}
    with closing(Session(arguments(checkpoint, tmp_path))) as session:
        session.run(jobs_of(session, [5, 6, 7], [5] * 10**6), lambda job, sample: seen.update({job.item_id: sample}))
    assert seen["0"].error is None
    assert "exceed the context" in seen["1"].error
    assert session.failed == [seen["1"]]


def test_one_prompt_that_is_refused_can_end_the_whole_run_before_it_begins(checkpoint, tmp_path):
    with closing(Session(arguments(checkpoint, tmp_path))) as session:
        jobs = jobs_of(session, [5, 6, 7], [5] * 10**6)
        with pytest.raises(ConfigError, match=r"mini_gsm8k item 1: .*nothing was decoded"):
            session.run(jobs, lambda job, sample: pytest.fail("something was decoded"), check_all=True)


def test_a_record_is_on_the_disk_when_it_is_handed_over_and_is_found_again(checkpoint, tmp_path):
    def recorded(job, sample):
        with RunReader.open(tmp_path) as reader:
            assert job.item_id in {stored.item_id for stored in reader.samples(traces=False)}
        texts.append(sample.text)

    texts: list[str] = []
    for _ in range(2):
        with closing(Session(arguments(checkpoint, tmp_path))) as session:
            session.run(jobs_of(session, [5, 6, 7], [8, 9]), recorded)
    assert texts[:2] == texts[2:]
    with RunReader.open(tmp_path) as reader:
        assert len({sample.process_id for sample in reader.samples(traces=False)}) == 1


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_run_gives_up_after_five_items_that_fail_for_one_reason_and_continues(
    checkpoint, tmp_path, monkeypatch, batch_size
):
    args, seen = replace(arguments(checkpoint, tmp_path), batch_size=batch_size), []
    prompts = [[5, 6, 7], *([5] * 10**6 for _ in range(2)), *([5, number] for number in range(8, 15))]
    reasons = iter(f"out of memory: {number} bytes were asked for" for number in range(99))

    def fails(*arguments):
        raise RuntimeError(next(reasons))

    with closing(Session(args)) as session, monkeypatch.context() as patch:
        for name in ("run", "run_many"):
            patch.setattr(session.system.model.engine, name, fails)
        with pytest.raises(GaveUpError, match=r"5 items in a row .*RuntimeError: out of memory.* same command again"):
            session.run(jobs_of(session, *prompts), lambda job, sample: seen.append(sample))
    assert len([sample for sample in seen if sample.stop != REFUSED]) == 5
    with closing(Session(args)) as session:
        session.run(jobs_of(session, *prompts), lambda job, sample: seen.append(sample))
        assert [sample.stop for sample in session.failed] == [REFUSED] * 2


@pytest.mark.parametrize(
    "reason",
    [
        lambda: f"the server had an error (request ID req_{uuid.uuid4().hex})",
        lambda: f"no connection, request {uuid.uuid4()}, at {time.time():.3f}",
    ],
)
def test_an_id_of_letters_and_digits_makes_no_other_reason(checkpoint, tmp_path, reason):
    class Failing:
        def run(self, jobs):
            yield from (record_error(job, reason(), batch_size=1) for job in jobs)

        def close(self):
            pass

    with closing(Session(arguments(checkpoint, tmp_path))) as session:
        session._runner = Failing()
        with pytest.raises(GaveUpError, match="5 items in a row failed for one reason"):
            session.run(jobs_of(session, *([5, number] for number in range(8))), lambda job, sample: None)
    assert len(session.failed) == 5


def test_an_answer_between_failures_is_no_failure_whose_message_has_digits_alone(checkpoint, tmp_path):
    class EveryOther:
        def run(self, jobs):
            for number, job in enumerate(jobs):
                error = record_error(job, "500", batch_size=1)
                yield error if number % 2 else replace(error, error=None)

        def close(self):
            pass

    with closing(Session(arguments(checkpoint, tmp_path))) as session:
        session._runner = EveryOther()
        session.run(jobs_of(session, *([5, number] for number in range(12))), lambda job, sample: None)
    assert len(session.failed) == 6


_CODES = ((400, "bad"), (500, "lost"))
_OF_JSON = [f'the server answered {code}:{{"code":{code},"message":"{word}"}}' for code, word in _CODES]


@pytest.mark.parametrize("reasons", [["one", "one", "one", "one", "another"] * 2, ["one"] * 5, _OF_JSON * 5])
def test_a_run_goes_on_while_reasons_differ_and_ends_as_usual_where_nothing_is_left(
    checkpoint, tmp_path, monkeypatch, reasons
):
    given = iter(reasons)

    def fails(*arguments):
        raise RuntimeError(next(given))

    with closing(Session(arguments(checkpoint, tmp_path))) as session:
        monkeypatch.setattr(session.system.model.engine, "run", fails)
        session.run(jobs_of(session, *([5, number] for number in range(len(reasons)))), lambda job, sample: None)
    assert len(session.failed) == len(reasons)


def test_a_worker_of_a_launcher_is_told_that_it_drives_no_run_but_its_objects_exist(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    worker = Channel(HashStore(), ProcessInfo(1, 2))
    monkeypatch.setattr(channel, "open_channel", lambda: worker)
    lm = RefusionLM(arguments(checkpoint, tmp_path))
    with pytest.raises(ScaleOutError, match=r"process 1 .*drives no run.*run_worker_or_return\(args\)"):
        _ = lm.session.runner


def test_a_run_that_gave_up_says_so_although_what_was_in_flight_succeeds(checkpoint, tmp_path):
    class InFlight:
        def run(self, jobs):
            *failing, good = itertools.islice(jobs, 6)
            yield from (record_error(job, "no memory", batch_size=6) for job in failing)
            assert list(jobs) == []
            yield replace(record_error(good, "", batch_size=6), error=None)

        def close(self):
            pass

    with closing(Session(arguments(checkpoint, tmp_path))) as session:
        session._runner = InFlight()
        with pytest.raises(GaveUpError, match="5 items in a row failed for one reason, so the run gave up: no memory"):
            session.run(jobs_of(session, *([5, number] for number in range(8))), lambda job, sample: None)


def test_of_several_recorded_versions_a_run_goes_on_with_the_latest_by_number(checkpoint, tmp_path):
    with closing(Session(arguments(checkpoint, tmp_path))) as session:
        jobs = jobs_of(session, [5, 6, 7], [8, 9])
        versions = [replace(job, key=replace(job.key, task_version=f"1.{9 + n}")) for n, job in enumerate(jobs)]
        session.run(versions, lambda job, sample: None)
    with closing(Session(arguments(checkpoint, tmp_path))) as session:
        assert [session.version_of("mini_gsm8k", current) for current in ("1.9", "1.11")] == ["1.9", "1.10"]
