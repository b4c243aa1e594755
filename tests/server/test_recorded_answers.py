"""Recorded exchanges of sixteen servers are read as they were meant, and told counts mean what they say."""

import base64
import json
from pathlib import Path

import httpx2
import pytest

from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.runs.server_answers import assemble, error_of
from refusion_eval.runs.server_client import Refused, ServerClient
from refusion_eval.runs.server_facts import CANVAS, forwards
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
APIS = {"/v1/completions": "completions", "/api/chat": "ollama"}
# What the client asks by; the other exchanges are of further interfaces, whose answers are read all the same.
ASKED = [
    (server, line)
    for server, line in LINES
    if line["request"]["path"].partition("?")[0].endswith(("/chat/completions", "/v1/completions", "/api/chat"))
]


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
        api=APIS.get(line["request"]["path"], "chat"),
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


@pytest.mark.parametrize(("server", "line"), ASKED, ids=[line["id"] for _, line in ASKED])
def test_the_client_gets_what_a_recorded_exchange_holds(server, line):
    model, content = line["request"]["body"].get("model", "lab"), b"".join(_body(line))
    peer = Peer(
        lambda number, body: (line["status"], line["headers"], content),
        facts={"/v1/models": {"data": [{"id": model, "owned_by": server}]}},
    )
    api, sent, expected = APIS.get(line["request"]["path"], "chat"), {}, line["expected"]
    prompt = line["request"]["body"].get("prompt") or json.dumps(line["request"]["body"]["messages"])
    with serving(peer):
        client = ServerClient(peer.url, model=model, api=api, timeout=60.0, patience=0.0)
        client.start()
        fields = {"max_tokens": 512, "temperature": 0.5, "stream": True}
        if not expected["error"]:
            answer = client.complete(prompt, (), fields, sent)
            assert (answer.text, answer.reasoning) == (expected["text"], expected["reasoning"] or "")
            assert answer.facts.get("completion_tokens") == expected["tokens"]
            assert sent["prompt"] == ("text" if api == "completions" else "messages")
            assert sent["attempts"] == 1
            return
        with pytest.raises((DecodeError, ConfigError)) as raised:
            client.complete(prompt, (), fields, sent)
    assert expected["error"]["contains"] in str(raised.value)
    may_pass = isinstance(raised.value, DecodeError) and not isinstance(raised.value, Refused)
    assert may_pass == expected["error"]["retry"]
    assert sent["attempts"] == (2 if may_pass else 1)
