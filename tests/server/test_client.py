"""The client: what it sends, what it makes of answers, and every fault that may pass."""

import contextlib
import functools
import json
import logging
import sys
import threading
from multiprocessing.pool import ThreadPool

import pytest

from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.runs.server_client import Refused, ServerClient
from refusion_eval.runs.server_place import INSTALL
from tests.server import peers
from tests.server.peers import Peer, chunk, serving, status, stream

pytest.importorskip("tenacity", reason="needs the extra `server`")

FIELDS = {"max_tokens": 9, "temperature": 0.0, "top_k": -1, "stream": True}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Waits between attempts are kept, but are short."""
    tenacity = pytest.importorskip("tenacity")
    monkeypatch.setattr(tenacity, "wait_random_exponential", lambda **options: tenacity.wait_fixed(0.001))


def client_of(peer, patience=0.0, timeout=0.2, **options):
    client = ServerClient(peer.url, timeout=timeout, patience=patience, **options)
    client.start()
    return client


def completed(peer, *, prompt="How many?", ids=(1, 2, 3), fields=FIELDS, sent=None, **options):
    with serving(peer):
        return client_of(peer, **options).complete(prompt, ids, fields, {} if sent is None else sent)


def test_the_prompt_is_sent_as_token_ids_with_every_field_and_nothing_else():
    peer, sent = Peer(), {}
    answer = completed(peer, sent=sent)
    assert peer.bodies == [{"model": "m", "prompt": [1, 2, 3], **FIELDS}]
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("4", (7,), "stop")
    assert sent == {"prompt": "ids", "attempts": 1}


def test_a_server_that_takes_no_ids_gets_the_text_and_is_asked_once():
    def answer(number, body):
        if not isinstance(body["prompt"], str):
            return 400, {"Content-Type": "application/json"}, b'{"detail": "prompt must be a string."}'
        return stream(number, ("4", (7,)))

    peer, sent = Peer(answer), ({}, {})
    with serving(peer):
        client = client_of(peer)
        for of_one in sent:
            client.complete("How many?", (1, 2, 3), FIELDS, of_one)
    assert [body["prompt"] for body in peer.bodies] == [[1, 2, 3], "How many?", "How many?"]
    assert sent == ({"prompt": "text", "attempts": 2}, {"prompt": "text", "attempts": 1})


@pytest.mark.parametrize(
    ("status_code", "refusal"),
    [
        (422, {"detail": "Unexpected fields in the request: {'top_k', 'seed'}"}),
        (422, {"detail": [{"loc": ["body", "top_k"], "msg": "extra"}, {"loc": ["body", "seed"], "msg": "extra"}]}),
        (400, {"error": {"message": "Unrecognized request arguments supplied: top_k, seed"}}),
    ],
)
def test_fields_that_are_refused_are_dropped_said_once_and_recorded(status_code, refusal, caplog):
    def answer(number, body):
        if {"top_k", "seed"} & body.keys():
            return status_code, {"Content-Type": "application/json"}, json.dumps(refusal).encode()
        return stream(number, ("4", (7,)))

    peer, sent = Peer(answer), ({}, {})
    with serving(peer), caplog.at_level(logging.WARNING):
        client = client_of(peer)
        for of_one in sent:
            client.complete("?", (1,), {**FIELDS, "seed": 1}, of_one)
    assert len(peer.bodies) == 3
    assert [set(of_one["dropped"]) for of_one in sent] == [{"top_k", "seed"}] * 2
    assert [record.message.count("top_k") for record in caplog.records] == [1]


LENGTH = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."


@pytest.mark.parametrize(
    ("api", "message"),
    [
        *((api, "'max_tokens' or 'max_completion_tokens' is too large: 9.") for api in ("completions", "chat")),
        *((api, LENGTH) for api in ("completions", "generate", "responses")),
    ],
)
def test_a_length_is_named_otherwise_only_for_a_chat_that_does_not_know_its_name(api, message):
    peer = Peer(lambda number, body: refused(message))
    with pytest.raises(Refused, match="max_tokens"):
        completed(peer, prompt="[]", ids=(), fields={"max_tokens": 9, "temperature": 0.0}, api=api)
    assert len(peer.bodies) == 1


def refused(message, number=400):
    return number, {"Content-Type": "application/json"}, json.dumps({"error": {"message": message}}).encode()


@pytest.mark.parametrize(("api", "message"), [("chat", LENGTH), ("completions", "prompt must be a string")])
def test_requests_in_flight_are_adapted_each_by_what_it_was_sent_with(api, message):
    in_flight = threading.Barrier(3)

    def refusal(handler, answer):
        in_flight.wait(5.0)
        status(400, message)(handler, answer)

    with serving(Peer(faults=[refusal] * 3)) as peer:
        client = client_of(peer, api=api, timeout=5.0)
        client.describe()
        with ThreadPool(3) as pool:
            answers = pool.map(lambda _: client.complete("[]", (1, 2), FIELDS, {}).text, range(3))
    assert answers == ["4"] * 3
    adapted = [body.get("max_completion_tokens") if api == "chat" else body["prompt"] for body in peer.bodies[3:]]
    assert adapted == [9 if api == "chat" else "[]"] * 3


@pytest.mark.parametrize(
    "message",
    [
        "Input validation error: `temperature` must be strictly positive",
        "Unsupported parameter: 'temperature' is not supported with this model.",
        "Unexpected fields in the request: {'temperature'}",
    ],
)
@pytest.mark.parametrize("number", [400, 422])
def test_a_temperature_is_left_out_only_where_it_is_the_one_that_the_interfaces_have_by_themselves(message, number):
    peer = Peer(lambda _, body: refused(message, number) if "temperature" in body else stream(1, ("4", (7,))))
    with pytest.raises(ConfigError, match=r"refuses temperature=0\.0: .*--set temperature=1\.0"):
        completed(peer, api="chat", prompt="[]", ids=())
    assert len(peer.bodies) == 1
    if "strictly" not in message:
        sent = {}
        completed(peer, api="chat", prompt="[]", ids=(), fields={**FIELDS, "temperature": 1.0}, sent=sent)
        assert sent["dropped"] == ["temperature"]


def test_sampling_is_refused_where_a_server_would_be_greedy_without_saying_so():
    refusal = b'{"detail": "Unexpected fields in the request: {\'top_k\'}"}'
    peer = Peer(lambda number, body: (422, {"Content-Type": "application/json"}, refusal))
    with pytest.raises(ConfigError, match="samples only"):
        completed(peer, fields={**FIELDS, "temperature": 1.0})


@pytest.mark.parametrize(
    "fault",
    [
        peers.dropped,
        peers.truncated,
        peers.cut_short,
        peers.corrupted,
        peers.delayed,
        *(status(number) for number in (408, 429, 500, 502, 503)),
    ],
)
def test_a_fault_that_passes_costs_one_more_attempt(fault):
    peer = Peer(lambda number, body: stream(number, ("The answer ", (5,)), ("is 4", (6, 7))), faults=[fault])
    answer = completed(peer)
    assert (answer.text, answer.token_ids) == ("The answer is 4", (5, 6, 7))
    assert len(peer.bodies) == 2


def test_a_server_that_starts_again_is_waited_for(monkeypatch):
    tenacity = pytest.importorskip("tenacity")
    with serving(Peer()) as first:
        client = client_of(first, patience=30.0)
        assert client.complete("?", (1,), FIELDS, {}).facts["id"] == "cmpl-1"
    again = contextlib.ExitStack()
    second = Peer(lambda number, body: stream(number + 1, ("5", (8,))))
    restart = functools.cache(lambda: again.enter_context(serving(second, int(first.url.rpartition(":")[2]))))
    monkeypatch.setattr(tenacity, "sleep_using_event", lambda event: lambda seconds: restart())
    with again:
        assert client.complete("?", (1,), FIELDS, {}).text == "5"


def test_a_fault_that_stays_is_an_error_of_the_item_after_two_attempts():
    peer, sent = Peer(faults=[status(503)] * 9), {}
    with pytest.raises(DecodeError, match=r"answers 503 \(2 attempts\)$") as caught:
        completed(peer, sent=sent)
    assert not isinstance(caught.value, Refused)
    assert len(peer.bodies) == sent["attempts"] == 2


def test_attempts_are_those_really_made():
    sent = {}
    completed(Peer(faults=[status(500), peers.dropped, peers.corrupted, None]), patience=30.0, sent=sent)
    assert sent["attempts"] == 4


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b'{"error": {"message": "CUDA out of memory, sk/\\"x and sk\\/\\"x"}}', "application/json"),
        (b'<html>\n <p>CUDA out of memory, sk/"x and sk/"x' + b"x" * 9999, "text/html"),
    ],
)
def test_an_error_holds_a_short_part_of_the_body_without_the_key(content, kind, monkeypatch):
    monkeypatch.setenv("MY_KEY", 'sk/"x')

    def fails(handler, answer):
        peers.send(handler, content, 500, Content_Type=kind)

    with pytest.raises(DecodeError) as caught:
        completed(Peer(faults=[fails] * 2), key_variable="MY_KEY")
    message = str(caught.value)
    assert "the server answers 500: " in message
    assert "CUDA out of memory, [API key] and [API key]" in message
    assert "sk" not in message
    assert len(message.splitlines()) == 1
    assert len(message) < 500


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_server_gave_up_is_asked_again(reason):
    peer = Peer(lambda number, body: stream(number, ("4", (7,)), finish=reason if number < 2 else "stop"))
    assert completed(peer).finish_reason == "stop"
    assert len(peer.bodies) == 2


@pytest.mark.parametrize("header", ["7", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_retry_after_says_how_long_to_wait(header, monkeypatch):
    tenacity = pytest.importorskip("tenacity")
    waited = []
    monkeypatch.setattr(tenacity, "sleep_using_event", lambda event: waited.append)
    completed(Peer(faults=[status(429, Retry_After=header)]), patience=60.0)
    assert waited == [7.0 if header == "7" else 0.0]


def told(number, text="4", created=5):
    return stream(number, (text, (7,)), created=created)


def test_an_old_answer_is_asked_again_where_other_answers_have_ids_of_their_own():
    peer = Peer(lambda number, body: told(1 if number == 3 else number))
    with serving(peer):
        client = client_of(peer)
        ids = [client.complete(prompt, (1,), FIELDS, {}).facts["id"] for prompt in ("1?", "2?", "3?")]
    assert ids == ["cmpl-1", "cmpl-2", "cmpl-4"]


@pytest.mark.parametrize(
    "answer",
    [
        lambda number, body: told(1),  # one id, one moment and one text, as a server of a few lines answers
        lambda number, body: told(number % 2, text=f"{number}"),  # Ollama draws ids out of 999
        lambda number, body: told(number % 2, created=number),
    ],
)
def test_ids_that_repeat_prove_no_repetition(answer, caplog):
    peer = Peer(answer)
    with serving(peer), caplog.at_level(logging.WARNING):
        client = client_of(peer)
        for number in range(6):
            client.complete(f"{number}?", (1,), FIELDS, {})
    assert len(peer.bodies) == 6
    assert [record.message.count("ids of its answers repeat") for record in caplog.records] in ([], [1])


@pytest.mark.parametrize(
    "message",
    [
        "request (2800 tokens) exceeds the available context size (2048 tokens), try increasing it",
        "This model's maximum context length is 2048 tokens. However, your prompt has 2800 input tokens",
    ],
)
def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(message):
    peer = Peer(faults=[status(400, message)])
    with pytest.raises(Refused, match=r"2800.*2048|2048.*2800"):
        completed(peer)
    assert len(peer.bodies) == 1


@pytest.mark.parametrize("number", [401, 403, 404])
def test_what_concerns_every_request_ends_the_run(number):
    with pytest.raises(ConfigError, match=str(number)):
        completed(Peer(faults=[status(number, "no")]))


def test_a_model_that_the_server_does_not_serve_is_refused_before_a_request():
    peer = Peer()
    with pytest.raises(ConfigError, match="serves m, not other"):
        completed(peer, model="other")
    assert peer.bodies == []


def test_a_model_that_is_refused_with_400_ends_the_run():
    peer = Peer(facts={}, faults=[status(400, "Server is pinned to '/a'; requested 'other'.")])
    with pytest.raises(ConfigError, match="refuses the model other"):
        completed(peer, model="other", api="completions")


def test_a_redirect_is_not_followed():
    other = Peer()
    with serving(other):
        peer = Peer(faults=[status(307, Location=f"{other.url}/v1/completions")])
        with pytest.raises(ConfigError, match="redirects to"):
            completed(peer)
    assert other.paths == []


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    proxy = Peer()
    with serving(proxy):
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        assert completed(Peer()).text == "4"
    assert proxy.paths == []


def test_the_key_is_sent_and_is_in_no_text_of_the_server(monkeypatch, caplog):
    monkeypatch.setenv("MY_KEY", "sk-secret")
    peer = Peer(lambda number, body: stream(number, ("sk-secret", (7,))), faults=[status(429, "sk-secret"), None])
    with caplog.at_level(logging.DEBUG):
        answer = completed(peer, key_variable="MY_KEY")
        with pytest.raises(Refused) as caught:
            completed(Peer(faults=[status(400, "Incorrect key: sk-secret")]), key_variable="MY_KEY")
    assert {headers["Authorization"] for headers in peer.headers} == {"Bearer sk-secret"}
    assert answer.text == "[API key]"
    assert "sk-secret" not in f"{caught.value} {caplog.text}"


@pytest.mark.parametrize("key", ["", " ", "sk\nsecret", "sk-sécret"])
def test_a_key_that_is_missing_or_fits_no_header_is_an_error_that_names_its_variable(key, monkeypatch):
    monkeypatch.setenv("MY_KEY", key)
    with pytest.raises(ConfigError, match="MY_KEY: there is no such variable"):
        ServerClient("http://127.0.0.1:1", key_variable="MY_KEY", timeout=1, patience=0)


def test_a_missing_extra_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "tenacity", None)
    with pytest.raises(ConfigError) as caught:
        ServerClient("http://127.0.0.1:1", timeout=1, patience=0)
    assert str(caught.value) == INSTALL


def test_ids_that_are_not_as_many_as_the_server_counts_are_not_taken():
    parts = chunk("4 and", (7,), id="a") + chunk(finish="stop", id="a", usage={"completion_tokens": 2})
    answer = completed(Peer(lambda number, body: parts))
    assert (answer.text, answer.token_ids) == ("4 and", None)


def test_an_answer_without_a_stream_is_read_too():
    whole = json.dumps({"id": "a", "choices": [{"text": "4", "finish_reason": "length"}]}).encode()
    answer = completed(Peer(lambda number, body: (200, {"Content-Type": "application/json"}, whole)))
    assert (answer.text, answer.finish_reason) == ("4", "length")


def test_numbers_that_no_record_may_hold_are_left_out():
    usage = {"prompt_tokens": -1, "completion_tokens": "many"}
    parts = chunk("4", id="a") + chunk(finish="stop", id="a", usage=usage, timings={"prompt_ms": True, "draft_n": [1]})
    facts = completed(Peer(lambda number, body: parts)).facts
    assert facts.keys() == {"id", "finish_reason", "first_byte_seconds"}


LLAMA = {"timings": {"prompt_ms": 5, "predicted_ms": 15, "draft_n": 9, "draft_n_accepted": 4, "cache_n": 2}}
VLLM = {
    "metrics": {
        "time_to_first_token_ms": 5,
        "generation_time_ms": 15,
        "queue_time_ms": 2.5,
        "speculative_decoding": {"num_spec_steps": 2, "num_accepted_draft_tokens": 4, "num_draft_tokens": 9},
    }
}


@pytest.mark.parametrize(("told", "more"), [(LLAMA, {"cached_tokens": 2}), (VLLM, {"queue_seconds": 0.0025})])
def test_seconds_and_drafts_are_read_from_both_engines(told, more):
    facts = completed(Peer(lambda number, body: stream(number, ("a", (1,) * 9), **told))).facts
    wanted = {"prefill_seconds": 0.005, "generation_seconds": 0.015, "drafted_tokens": 9, "accepted_tokens": 4, **more}
    assert {name: facts[name] for name in wanted} == wanted


PROPS = {
    "build_info": "b1",
    "total_slots": 2,
    "default_generation_settings": {"n_ctx": 64, "params": {"speculative.types": "none"}},
}


def test_a_server_is_described_by_what_its_endpoints_tell():
    metrics = '# HELP x\nllamacpp:n_decode_total 44\nvllm:tokens_total{engine="0"} 3.5e1\nother_total 1\n'
    facts = {"/v1/models": {"data": [{"id": "m", "owned_by": "llamacpp"}]}, "/props": PROPS, "/metrics": metrics}
    peer = Peer(facts=facts | {"/slots": [{"id": 0, "speculative": True}]})
    with serving(peer):
        client = client_of(peer)
        described, counters = client.describe(), client.counters()
    assert described["settings"] == {"n_ctx": 64, "total_slots": 2, "speculative": True}  # not as /props have it
    assert {name: described[name] for name in ("name", "version", "model")} == {
        "name": "llama.cpp",
        "version": "b1",
        "model": "m",
    }
    assert counters == {"llamacpp:n_decode_total": 44.0, "vllm:tokens_total": 35.0}
