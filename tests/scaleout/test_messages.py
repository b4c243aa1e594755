"""Jobs and records come out of a trip through JSON as they went in."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_eval.benchmarks import BENCHMARKS, OTHER, OURS, RELEASE, Task
from refusion_eval.config import field_types
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ScaleOutError
from refusion_eval.runs.job import Job
from refusion_eval.runs.settings_tables import Resolved
from refusion_eval.scaleout.messages import RecordReader, job_from_json, job_to_json, record_to_json
from refusion_eval.store.manifest import Hardware
from refusion_eval.store.records import Sample, SampleKey
from refusion_eval.types import MOST_TOKENS
from tests.examples import examples

# Any text, lone surrogates included.
TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
COUNT = st.integers(0, 2**31)
SECONDS = st.floats(0, 1e9)
ANY_FLOAT = st.floats(allow_nan=False)
KEYS = st.builds(SampleKey, TEXT, TEXT, TEXT, TEXT, COUNT, TEXT)
TOKENS = st.lists(st.integers(0, MOST_TOKENS - 1), max_size=6)

# Beside the defaults: settings that JSON does not carry as they are (tuples, None, numbers at the edges).
CHANGES = {
    "eos_ids": TOKENS.filter(bool).map(tuple),
    "temperature": st.floats(0, 5),
    "seed": st.integers(0, 2**62),
    "gen_length": st.sampled_from([32, 64, 512]),
}


def settings_of(decoder):
    settings_type = DECODERS[decoder].Settings
    fields = field_types(settings_type)
    needed = {"mask_id": 2**32} if "mask_id" in fields else {}
    known = {name: values for name, values in CHANGES.items() if name in fields}
    return st.fixed_dictionaries(known).map(lambda changes: settings_type(**needed, **changes))


def resolved_of(decoder):
    return st.builds(
        Resolved,
        settings=settings_of(decoder),
        sources=st.dictionaries(TEXT, TEXT, max_size=3),
        until=st.lists(TEXT, max_size=3).map(tuple),
        task=st.none() | st.builds(Task, st.sampled_from(list(BENCHMARKS.values())), st.booleans()),
    )


def jobs_of(decoder):
    return st.builds(
        Job,
        key=KEYS,
        benchmark=TEXT,
        item_id=TEXT,
        prompt_ids=TOKENS,
        prompt=TEXT,
        prompts=st.sampled_from([OURS, RELEASE, OTHER]),
        resolved=resolved_of(decoder),
        sealed=st.lists(TEXT, max_size=2).map(tuple),
        alone=st.booleans(),
    )


def travelled(value):
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("decoder", DECODERS)
@examples(25)
@given(data=st.data())
def test_a_job_arrives_as_it_was_sent(decoder, data):
    job = data.draw(jobs_of(decoder))
    arrived = job_from_json(travelled(job_to_json(job)), DECODERS[decoder].Settings)
    assert arrived == job
    assert arrived.resolved.digest == job.resolved.digest
    assert type(arrived.resolved.settings) is type(job.resolved.settings)


SAMPLES = st.builds(
    Sample,
    key=KEYS,
    benchmark=TEXT,
    item_id=TEXT,
    text=TEXT,
    num_forwards=COUNT,
    seconds=SECONDS,
    stop=TEXT,
    settings=st.dictionaries(TEXT, TEXT | COUNT | st.none() | st.booleans() | ANY_FLOAT, max_size=3),
    settings_source=st.dictionaries(TEXT, TEXT, max_size=3),
    trace=st.none() | st.lists(st.lists(TEXT | COUNT | ANY_FLOAT | TOKENS, max_size=4), max_size=3),
    warm=st.booleans(),
    error=st.none() | TEXT,
)


def arrived(sample):
    """A record as the driver reads it."""
    reader = RecordReader(lambda hardware, pid: "process 1")
    return reader.read("worker 1", travelled(record_to_json(sample, Hardware())))


@settings(deadline=None)
@given(SAMPLES, st.none() | TOKENS)
def test_a_record_arrives_as_it_was_sent(sample, tokens):
    sample = dataclasses.replace(sample, tokens=tokens, num_tokens=len(tokens or ()))
    assert arrived(sample) == dataclasses.replace(sample, process_id="process 1")


def test_numbers_that_json_lacks_survive_in_a_trace():
    key = SampleKey("t", "1", "d", "p", 0, "s")
    sample = Sample(key=key, benchmark="t", item_id="0", trace=[["select", float("nan"), float("-inf")]])
    (event,) = arrived(sample).trace
    assert event[1] != event[1]
    assert event[2] == float("-inf")


@dataclasses.dataclass(frozen=True)
class Settings:
    gen_length: int = 99


@dataclasses.dataclass(frozen=True)
class LaterSettings:
    gen_length: int = 99
    invented_since: bool = True


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [(LaterSettings, Settings, "refused here"), (Settings, LaterSettings, "have the digest")],
)
def test_a_worker_of_another_version_is_told_so(ours, theirs, message):
    resolved = Resolved(settings=ours(), sources={})
    key = SampleKey("gsm8k", "1", "d", "p", 0, resolved.digest)
    job = Job(key=key, benchmark="gsm8k", item_id="3", prompt_ids=[1], resolved=resolved)
    with pytest.raises(ScaleOutError, match=rf"gsm8k item 3.*{message}.*one version"):
        job_from_json(travelled(job_to_json(job)), theirs)
