"""The text that a task sees, and the record of a decoded job."""

from dataclasses import dataclass

import pytest

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.benchmarks.rows import LONGEST_QUOTE, WITHHELD
from refusion_eval.runs.job import Detokenizer, Job, record, record_error, response
from refusion_eval.runs.settings_tables import Resolved
from refusion_eval.store.records import Sample, SampleKey, from_stored
from refusion_eval.types import Decoded, Trace

END = 1000
DETOKENIZER = Detokenizer(decode=lambda tokens: bytes(tokens).decode("utf-8", "replace"), special={END: "<end>"})

KEY = SampleKey(task="t", task_version="1", doc_hash="0" * 32, prompt_hash="1" * 32, sample=0, settings_hash="2" * 16)


@dataclass(frozen=True)
class Settings:
    gen_length: int = 99


def job_of(until, sealed, prompt):
    resolved = Resolved(settings=Settings(), sources={"gen_length": "default"}, until=until)
    return Job(key=KEY, benchmark="t", item_id="0", prompt_ids=list(prompt.encode()), resolved=resolved, sealed=sealed)


def recorded(text, until, *, stop, sealed=(), prompt="?"):
    tokens = tuple(END if byte == ord("$") else byte for byte in text.encode())
    trace = Trace()
    trace.forward("plan", len(tokens), 0)
    trace.fix(range(len(tokens)), tokens)
    trace.stop(stop, len(tokens))
    decoded = Decoded(tokens=tokens, stop=stop, num_forwards=1, seconds=0.5, trace=trace)
    return record(job_of(until, sealed, prompt), decoded, DETOKENIZER, batch_size=1)


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


def test_an_error_withholds_sealed_texts():
    sealed = " ".join(f"word{number}" for number in range(LONGEST_QUOTE + 1))
    sample = record_error(job_of((), (sealed,), "?"), f"ValueError: cannot read {sealed}", batch_size=1)
    assert sample.error == f"ValueError: cannot read {WITHHELD}"


def test_sealed_tokens_are_counted_alike_and_withheld():
    sample = recorded("4 Q: next", ("Q:",), stop="stop_string", sealed=("a question",))
    assert (sample.num_tokens, sample.tokens) == (4, None)


@pytest.mark.parametrize(
    ("prompt", "text", "num_thought_tokens", "cut"),
    [
        ("?", "<think>abc</think>4$", len("<think>abc</think>"), False),
        ("?<think>\n", "abc</think>4$", len("abc</think>"), False),
        ("?", "abc</think>4", len("abc</think>"), False),
        ("?", "1<think>abc$", len("<think>abc") + 1, True),
        ("?<think>", "abc", 3, True),
        ("?<think>", "abc$", 4, True),
        ("?", "<think>a</think>4<think>b</think>5", len("<think>a</think>") * 2, False),
        ("?", "<think>a</think>", len("<think>a</think>"), False),
        ("?<think>\n\n</think>\n\n", "4 <think>a", len("<think>a"), True),
    ],
)
def test_tokens_of_thoughts_are_counted_apart(prompt, text, num_thought_tokens, cut):
    sample = recorded(text, (), stop="eos", prompt=prompt)
    assert (sample.num_thought_tokens, sample.cut_in_thought) == (num_thought_tokens, cut)
    assert from_stored(Sample, sample.body()).num_thought_tokens == num_thought_tokens


@pytest.mark.parametrize("prompt", ["?", "<think>\n\n</think>\n\n", "What does <think> mean in a prompt?"])
def test_a_record_without_a_thought_has_no_field_of_thoughts(prompt):
    sample = recorded("4 apples$", (), stop="eos", prompt=prompt)
    assert "thought" not in sample.body()


def test_thoughts_are_counted_in_tokens_that_may_be_longer_than_a_letter_or_shorter():
    words = {1: "<th", 2: "ink>", 3: "some words ", 4: "</think>", 5: "an answer"}
    of_words = Detokenizer(decode=lambda tokens: "".join(words[token] for token in tokens), special={4: "</think>"})
    tokens = (1, 2, 3, 3, 4, 5, 5)
    job = Job(
        key=KEY,
        benchmark="t",
        item_id="0",
        prompt_ids=[5],
        resolved=Resolved(settings=Settings(), sources={}, until=()),
    )
    decoded = Decoded(tokens=tokens, stop="length", num_forwards=1, seconds=0.5, trace=Trace())
    sample = record(job, decoded, of_words, batch_size=1)
    assert sample.text == "<think>some words some words </think>an answeran answer"
    assert (sample.num_thought_tokens, sample.cut_in_thought) == (5, False)
    emoji = recorded("é\U0001f600<think>\U0001f600", (), stop="length")
    assert emoji.num_thought_tokens == len("<think>") + 4


def test_a_thought_that_the_prompt_opened_and_nothing_closed_is_never_judged():
    sample = recorded("The answer is 5.", (), stop="length", prompt="?<think>\n")
    assert response(sample) == "<think>The answer is 5."
    assert BENCHMARKS["gsm8k"].extract(response(sample), {}).answer is None
    for text in ("The answer is 5.", "<think>5", "5</think>6"):
        assert response(recorded(text, (), stop="length")) == text


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
