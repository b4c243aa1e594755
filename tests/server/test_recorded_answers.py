"""Recorded exchanges of sixteen servers are read as they were meant, and told counts mean what they say."""

import base64
import json
from pathlib import Path

import httpx2
import pytest

from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.runs.apis import APIS
from refusion_eval.runs.server_answers import assemble, error_of
from refusion_eval.runs.server_client import Refused, ServerClient
from refusion_eval.runs.server_facts import CANVAS, forwards
from refusion_eval.runs.server_requests import fields_of
from refusion_eval.runs.server_wire import Passing, error_in, events_of, short
from refusion_eval.untrusted import parse_json
from tests.server.peers import Peer, serving

pytest.importorskip("tenacity", reason="needs the extra `server`")

FOLDER = Path(__file__).parents[1] / "data" / "servers"
LINES = [
    (path.stem, line)
    for path in sorted(FOLDER.glob("*.jsonl"))
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines())
    if "expected" in line
]
SIDES = [
    {"server": path.stem, **line}
    for path in sorted(FOLDER.glob("*.jsonl"))
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines())
    if line.get("side")
]
# What a record has where a golden says that it should warn.
WARNED = {
    "another model answered": "model",
    "answer from a cache": "from_cache",
    "prompt from a cache": "cached_tokens",
    "settings ignored": "ignored",
}
API_AT = {api.path: name for name, api in APIS.items()}
# Where Ollama is asked by `/api/generate`, which the client does not speak, its answers are read all the same.
ASKED = [(server, line) for server, line in LINES if line["request"]["path"] != "/api/generate"]


def _body(line):
    for chunk in line.get("chunks") or [{"text": line["body"]}]:
        yield base64.b64decode(chunk["base64"]) if "base64" in chunk else chunk["text"].encode()


def _objects(response, body):
    for data in events_of(response, body):
        if data == "[DONE]":
            return
        try:
            content = parse_json(data)
        except ValueError:
            raise Passing(f"damaged JSON: {short(data)}") from None
        if (error := error_of(content)) is not None:
            raise Passing(error)
        yield content


def _read(server, line):
    headers = {name.lower(): value for name, value in line["headers"].items()}
    response = httpx2.Response(line["status"], headers=headers, request=httpx2.Request("POST", "http://here"))
    chunks = list(_objects(response, _body(line)))
    return assemble(
        chunks,
        1.0,
        0.1,
        api=APIS[API_AT.get(line["request"]["path"], "chat")],
        streamed=headers["content-type"] != "application/json",
        headers=headers,
        diffusion=(line.get("told") or {}).get("kind") == "diffusion",
    )


@pytest.mark.parametrize(("server", "line"), LINES, ids=[line["id"] for _, line in LINES])
def test_a_recorded_exchange_is_read_as_it_was_meant(server, line):
    expected = line["expected"]
    if line["status"] != 200:
        body = b"".join(_body(line)).decode()
        assert expected["error"]["contains"] in (error_in(parse_json(body)) if body.startswith("{") else body)
        return
    if expected["error"]:
        with pytest.raises(Passing, match=expected["error"]["contains"]):
            _read(server, line)
        return
    answer, is_diffusion = _read(server, line), (line.get("told") or {}).get("kind") == "diffusion"
    facts = answer.facts
    assert answer.text == expected["text"]
    assert answer.reasoning == (expected["reasoning"] or "")
    assert (answer.finish_reason or None) == expected["finish"]
    assert facts.get("completion_tokens") == expected["tokens"]
    assert facts.get("prompt_tokens") == expected["prompt_tokens"]
    assert facts.get("reasoning_tokens") == expected["reasoning_tokens"]
    seconds = facts.get("generation_seconds", facts.get("total_seconds"))
    assert seconds == (None if expected["seconds"] is None else pytest.approx(expected["seconds"]))
    told = forwards(facts, diffusion=is_diffusion or server in CANVAS) or None
    assert told in expected.get("forwards_any", [expected["forwards"]])
    assert (expected["tokens_kind"] == "canvas") == (server in CANVAS and expected["tokens"] is not None)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    tenacity = pytest.importorskip("tenacity")
    monkeypatch.setattr(tenacity, "wait_random_exponential", lambda **options: tenacity.wait_fixed(0.001))


def _prompt(body):
    """What the user asked, as the client has it: a text, or a conversation."""
    asked = body.get("messages") or body.get("input")
    turns = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    return body.get("prompt") or body.get("text") or json.dumps(turns)


class Recorded(Peer):
    """A server of one exchange, which refuses the fields that the recorded one refuses."""

    def __init__(self, server, line):
        self.line, self.content = line, b"".join(_body(line))
        rules = (side["refuse"] for side in SIDES if side.get("refuse") and side["server"] == server)
        self.rule, self.num_refused = next(rules, None), 0
        super().__init__(self.answered)

    def answered(self, number, body):
        unknown = set(body) - set(self.rule["allowed"]) if self.rule else set()
        barred = [name for name in (self.rule or {}).get("value_error", []) if body.get(name) is not None]
        if unknown or barred:
            detail = [{"loc": ["body", name], "msg": "Extra inputs are not permitted"} for name in unknown]
            detail = detail or [{"loc": ["body"], "msg": f"Value error, Parameter(s) {barred} are not supported"}]
            detail = [one | {"type": "value_error", "input": body} for one in detail]
            self.num_refused += 1
            return 422, {"Content-Type": "application/json"}, json.dumps({"detail": detail}).encode()
        return self.line["status"], self.line["headers"], self.content


@pytest.mark.parametrize(("server", "line"), ASKED, ids=[line["id"] for _, line in ASKED])
def test_the_client_gets_what_a_recorded_exchange_holds(server, line, monkeypatch):
    monkeypatch.setenv("MY_KEY", "KEY")
    request, check, expected, sent = line["request"], line.get("check") or {}, line["expected"], {}
    model, (path, mark, query) = request["body"].get("model", "lab"), request["path"].partition("?")
    ends = {name: api.path.removeprefix("/v1") for name, api in APIS.items() if path.endswith(api.path[3:])}
    name = max(ends, key=lambda name: len(ends[name]))  # the end of a chat is that of completions, too
    base = path.removesuffix(ends[name])
    peer, is_diffusion = Recorded(server, line), (line.get("told") or {}).get("kind") == "diffusion"
    peer.facts = {f"{base}/models": {"data": [{"id": model, "owned_by": server}]}}
    with serving(peer):
        client = ServerClient(
            f"{peer.url}{base}{mark}{query}",
            model="" if query else model,
            api=None if query else name,
            key_variable="MY_KEY",
            diffusion=is_diffusion,
            timeout=60.0,
            patience=0.0,
        )
        client.start()
        diffusing = "diffusing" in check.get("body_has", {})
        fields = fields_of(client.api, most_tokens=512, temperature=0.5, seed=0, diffusing=diffusing)
        if expected["error"]:
            with pytest.raises((DecodeError, ConfigError)) as raised:
                client.complete(_prompt(request["body"]), (), fields, sent)
        else:
            answer = client.complete(_prompt(request["body"]), (), fields, sent)
    posts = [path for path in peer.paths if path == request["path"]]
    assert len(posts) == len(peer.bodies) == sent["attempts"]
    assert check.get("body_has", {}).items() <= peer.bodies[-1].items()
    assert check.get("headers_has", {}).items() <= peer.headers[-1].items()
    assert ("api-key" in peer.headers[-1], "Authorization" in peer.headers[-1]) == (bool(query), not query)
    assert peer.num_refused <= 2  # unknown fields, and known ones that it does not take
    if not expected["error"]:
        assert (answer.text, answer.reasoning) == (expected["text"], expected["reasoning"] or "")
        assert answer.facts.get("completion_tokens") == expected["tokens"]
        told = forwards(answer.facts, diffusion=is_diffusion or server in CANVAS) or None
        assert told in expected.get("forwards_any", [expected["forwards"]])
        assert sent["prompt"] == ("messages" if client.api.takes_messages else "text")
        warned = WARNED.get(expected.get("warn", ""))
        assert warned is None or {**answer.facts, **sent}[warned]
        return
    assert expected["error"]["contains"] in str(raised.value)
    may_pass = isinstance(raised.value, DecodeError) and not isinstance(raised.value, Refused)
    assert may_pass == expected["error"]["retry"]
    is_sent_without = peer.bodies[0].keys() > peer.bodies[-1].keys() or client.dropped  # what it does not know
    assert sent["attempts"] == (2 if may_pass or (is_sent_without and not peer.num_refused) else 1) + peer.num_refused


@pytest.mark.parametrize(("requests", "others", "told"), [(1, 0, 32), (0, 0, 32), (2, 0, None), (1, 3, None)])
def test_steps_of_dlmserve_are_counted_around_a_request_that_runs_alone(requests, others, told):
    (line,) = [line for _, line in LINES if line["id"] == "dlmserve-01"]
    text = "dlmserve_step_batch_size_count {}.0\ndlmserve_step_batch_size_sum {}.0\n"
    after = f"dlmserve_committed_tokens_per_request_count {requests}.0\n"
    counters = iter([text.format(40, 40), text.format(72, 72 + others) + after] * 2)

    class Counting(Recorded):
        def reply(self, path, headers, body):
            if path == "/metrics":
                return 200, {"Content-Type": "text/plain"}, next(counters).encode()
            return super().reply(path, headers, body)

    peer = Counting("dlmserve", line)
    peer.facts = {"/v1/models": {"data": [{"id": line["request"]["body"]["model"], "owned_by": "dlmserve"}]}}
    with serving(peer):
        client = ServerClient(peer.url, timeout=60.0, patience=0.0)
        client.start()
        # As the server takes it, so that there is one request.
        fields = {"max_tokens": 64, "temperature": 0.0, "stream": True}
        prompt = _prompt(line["request"]["body"])
        alone, beside = (client.complete(prompt, (), fields, {}, is_alone=alone) for alone in (True, False))
    assert alone.facts.get("forwards") == told
    assert forwards(alone.facts, diffusion=True) == (told or 0)
    assert "forwards" not in beside.facts


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_server_that_refuses_a_field_that_it_does_not_get_is_asked_twice(api):
    refused = {"error": {"message": "Unsupported parameter: top_k"}}
    peer = Peer(lambda number, body: (400, {"Content-Type": "application/json"}, json.dumps(refused).encode()))
    with serving(peer):
        client = ServerClient(peer.url, api=api, timeout=60.0, patience=0.0)
        client.start()
        fields = fields_of(client.api, most_tokens=64, temperature=0.0, seed=0)
        with pytest.raises(Refused, match="top_k"):
            client.complete("[]", (), fields, {})
    assert ["top_k" in body for body in peer.bodies] == [True, False]


def test_a_seed_that_a_diffusion_model_refuses_by_another_name_is_left_out():
    (refused,) = [line for _, line in LINES if line["id"] == "sglang-06"]
    (answered,) = [line for _, line in LINES if line["id"] == "sglang-01"]

    def answer(number, body):
        line = refused if "seed" in body else answered
        return line["status"], line["headers"], b"".join(_body(line))

    peer, sent = Peer(answer), {}
    with serving(peer):
        client = ServerClient(peer.url, api="chat", diffusion=True, timeout=60.0, patience=0.0)
        client.start()
        fields = fields_of(client.api, most_tokens=512, temperature=0.0, seed=3)
        assert client.complete("[]", (), fields, sent).text == answered["expected"]["text"]
    assert "seed" in sent["dropped"]


def test_a_model_that_a_gateway_fell_back_on_is_recorded_though_the_answer_has_the_asked_name():
    headers = {"x-litellm-attempted-fallbacks": "1", "x-litellm-model-group": "small"}
    choice = {"message": {"content": "4"}, "finish_reason": "stop", "index": 0}
    content = json.dumps({"choices": [choice], "model": "m", "usage": {"completion_tokens": 2}}).encode()
    replies = [({}, None), ({**headers, "x-litellm-attempted-fallbacks": "0"}, None), (headers, "small")]
    for told, model in replies:
        peer = Peer(lambda number, body, told=told: (200, {"Content-Type": "application/json", **told}, content))
        with serving(peer):
            client = ServerClient(peer.url, api="chat", timeout=60.0, patience=0.0)
            client.start()
            answer = client.complete("[]", (), {"max_tokens": 64, "temperature": 0.0, "stream": True}, {})
        assert answer.facts.get("model") == model


def test_thoughts_of_a_response_stand_in_its_content_or_else_in_its_summary():
    said = {"type": "message", "content": [{"type": "output_text", "text": "4"}]}
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Four."}]}
    both = summary | {"content": [{"type": "reasoning_text", "text": "2+2"}]}
    for thoughts, read in ((summary, "Four."), (both, "2+2")):
        whole = {"id": "r", "status": "completed", "output": [thoughts, said]}
        answer = assemble([{"type": "response.completed", "response": whole}], 1.0, 0.5, api=APIS["responses"])
        assert (answer.text, answer.reasoning) == ("4", read)


def test_the_pieces_of_a_refusal_are_one_and_a_whole_one_replaces_them():
    pieces = [{"choices": [{"delta": {"refusal": piece}}]} for piece in ("I cannot ", "help.")]
    whole = {"choices": [{"message": {"content": None, "refusal": "I cannot help."}, "finish_reason": "stop"}]}
    for chunks in ([*pieces, {"choices": [{"delta": {}, "finish_reason": "stop"}]}], [*pieces, whole]):
        assert assemble(chunks, 1.0, 0.5, api=APIS["chat"]).facts["refusal"] == "I cannot help."


@pytest.mark.parametrize(
    ("told", "diffusion", "counted"),
    [
        ({"spec_verify_ct": 7}, False, 7),
        ({"spec_verify_ct": 7}, True, 0),
        ({"dllm_forward_counts_per_block": [4, 3]}, True, 7),
        ({"dllm_forward_counts_per_block": [4, 3]}, False, 0),
    ],
)
def test_the_kind_of_the_model_decides_which_field_of_sglang_counts_forwards(told, diffusion, counted):
    choice = {"message": {"content": "4"}, "finish_reason": "stop", "index": 0, "meta_info": told}
    content = json.dumps({"choices": [choice], "usage": {"completion_tokens": 20}}).encode()
    peer = Peer(lambda number, body: (200, {"Content-Type": "application/json"}, content))
    with serving(peer):
        client = ServerClient(peer.url, api="chat", diffusion=diffusion, timeout=60.0, patience=0.0)
        client.start()
        answer = client.complete("[]", (), {"max_tokens": 64, "temperature": 0.0, "stream": True}, {})
    assert forwards(answer.facts, diffusion=diffusion) == counted
