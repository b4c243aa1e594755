"""The text that a task sees, and the record of a decoded job."""

from dataclasses import dataclass

import pytest

from refusion_eval.runs.job import Detokenizer, Job, record
from refusion_eval.runs.settings import Resolved
from refusion_eval.store.records import SampleKey
from refusion_eval.types import Decoded, Trace

END = 1000
DETOKENIZER = Detokenizer(decode=lambda tokens: bytes(tokens).decode("utf-8", "replace"), special={END: "<end>"})


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


def ids(text):
    parts = text.split("<end>")
    tokens = list(parts[0].encode())
    for part in parts[1:]:
        tokens += [END, *part.encode()]
    return tokens


@pytest.mark.parametrize(
    ("written", "until", "text"),
    [
        ("a b\n", (), "a b\n"),
        ("answer 4Q: next", ("Q:",), "answer 4"),
        ("one two one", ("two", "one"), ""),
        ("one\n\ntwo", ("two", "\n\n"), "one"),
        ("4<end>", (), "4"),
        ("4<end>5", (), "45"),
        ("4<end>5", ("<end>",), "4"),
        ("<end>5", ("<end>",), ""),
        ("a<end>bQ:c", ("Q:",), "ab"),
        (" keeps blanks ", ("x",), " keeps blanks "),
        ("", ("x",), ""),
    ],
)
def test_text_is_cut_at_the_first_stop_string_and_nothing_else_is_removed(written, until, text):
    assert DETOKENIZER.text(ids(written), until) == text


def test_without_stop_strings_there_is_no_rule():
    assert DETOKENIZER.stop_rule(()) is None


@pytest.mark.parametrize("step", [1, 2, 3, 50])
@pytest.mark.parametrize("stop", ["Q:", "é\n\n", "<end>"])
def test_rule_fires_when_the_stop_string_is_complete_and_not_before(step, stop):
    tokens = ids("some longer text, then é\n\nQ:<end> and more of it")
    rule = DETOKENIZER.stop_rule((stop,))
    for length in range(step, len(tokens) + step, step):
        seen = tokens[:length]
        fired = rule(seen)
        assert fired == (stop in DETOKENIZER.spelled(seen))
        if fired:
            break
    else:
        pytest.fail("never fired")


def test_a_rule_follows_a_request_that_begins_again():
    tokens = ids("xQ: and a longer text")
    rule = DETOKENIZER.stop_rule(("Q:",))
    rule(ids("nothing to stop at in this longer text"))
    assert rule(tokens)


@pytest.mark.parametrize(
    ("written", "until", "kept"),
    [
        ("4Q: next<end>", ("Q:",), "4Q:"),
        ("4Q: next", ("Q:", "next"), "4Q:"),
        ("next Q:Q:", ("Q:", "next"), "next"),
        ("4<end>", ("<end>",), "4<end>"),
        ("4é\n\nnext", ("é\n",), "4é\n"),
        ("4<end>", ("Q:",), "4<end>"),
        ("4 Q", (), "4 Q"),
        ("", ("x",), ""),
    ],
)
def test_tokens_are_kept_up_to_the_end_of_the_first_complete_stop_string(written, until, kept):
    assert list(DETOKENIZER.kept(ids(written), until)) == ids(kept)


def test_kept_tokens_of_a_long_text_are_found_in_few_looks():
    looks = []
    counting = Detokenizer(lambda tokens: looks.append(1) or DETOKENIZER.decode(tokens), DETOKENIZER.special)
    assert len(counting.kept(ids("word " * 200 + "Q:" + " more" * 200), ("Q:",))) == 1002
    assert len(looks) < 15
