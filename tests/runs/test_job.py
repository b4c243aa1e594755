"""What the record of a decoded job holds."""

from dataclasses import dataclass

import pytest

from refusion_eval.runs.job import Job, record
from refusion_eval.runs.settings import Resolved
from refusion_eval.runs.text import Detokenizer
from refusion_eval.store.records import SampleKey
from refusion_eval.trace import Trace
from refusion_eval.types import Decoded

END = 1000
DETOKENIZER = Detokenizer(decode=lambda tokens: bytes(tokens).decode(), special={END: "<end>"})


@dataclass(frozen=True)
class Settings:
    gen_length: int = 99


def recorded(text, until, *, stop, sealed=()):
    tokens = tuple(END if letter == "$" else ord(letter) for letter in text)
    trace = Trace()
    trace.forward("plan", len(tokens), 0)
    trace.fix(range(len(tokens)), tokens)
    trace.stop(stop, len(tokens))
    key = SampleKey(
        task="t", task_version="1", doc_hash="0" * 32, prompt_hash="1" * 32, sample=0, settings_hash="2" * 16
    )
    resolved = Resolved(settings=Settings(), sources={"gen_length": "default"}, until=until)
    job = Job(key=key, benchmark="t", item_id="0", prompt_ids=[1], resolved=resolved, sealed=sealed)
    decoded = Decoded(tokens=tokens, stop=stop, num_forwards=1, seconds=0.5, trace=trace)
    return record(job, decoded, DETOKENIZER, batch_size=1, warm=True)


@pytest.mark.parametrize("written", ["4 Q: next question", "4 Q: next$", "4 Q:"])
@pytest.mark.parametrize("stop", ["stop_string", "eos", "length"])
def test_tokens_behind_a_stop_string_are_not_counted_however_decoding_ended(written, stop):
    sample = recorded(written, ("Q:", "\n\n"), stop=stop)
    assert sample.text == "4 "
    assert sample.tokens == [ord(letter) for letter in "4 Q:"]
    assert sample.num_tokens == 4
    assert sample.stop == stop


def test_without_a_stop_string_every_token_is_counted_the_eos_included():
    sample = recorded("four$", ("Q:",), stop="eos")
    assert (sample.text, sample.num_tokens, sample.tokens[-1]) == ("four", 5, END)


def test_sealed_tokens_are_counted_alike_and_withheld():
    sample = recorded("4 Q: next", ("Q:",), stop="stop_string", sealed=("a question",))
    assert (sample.num_tokens, sample.tokens) == (4, None)


def test_the_trace_still_tells_what_was_decoded_behind_a_stop_string():
    sample = recorded("4 Q: next", ("Q:",), stop="stop_string")
    assert len(Trace.from_json(sample.trace).fixed_tokens()) == 9
