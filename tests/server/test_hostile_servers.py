"""Servers that lie, that never end, that send too much, or that answer in another form than they were asked for."""

import base64
import gzip
import html
import itertools
import json
import logging
import time
import zlib

import pandas as pd
import pytest
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.errors import DecodeError, RefusionEvalError
from refusion_eval.results.data_frames import load
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.results_file import read_csv
from refusion_eval.results.tables import summary, summary_table
from refusion_eval.runs import server_client, server_place
from refusion_eval.runs.server_client import Refused
from tests.server import peers
from tests.server.peers import Peer, chunk, send, serving, status, stream
from tests.server.test_client import FIELDS, client_of, completed, no_waiting  # noqa: F401 - a fixture
from tests.server.test_server_runs import run, samples

JSON, EVENTS = {"Content-Type": "application/json"}, {"Content-Type": "text/event-stream"}
KEY = "sk-Secret9"


def answering(content, headers=EVENTS):
    return Peer(lambda number, body: (200, headers, content))


def told(**more):
    """The answer of nine tokens in which a server says more; `usage` replaces its own."""
    return Peer(lambda number, body: stream(number, ("4", (7,) * 9), **more))


def whole(*choices, **more):
    return json.dumps({"id": "a", "choices": list(choices), **more}).encode()


@pytest.mark.parametrize(
    "more",
    [
        {"usage": {"completion_tokens": 10}},
        {"usage": {"completion_tokens": 10**9}, "timings": {"draft_n": 10**9, "draft_n_accepted": 10**9 - 1}},
        {"usage": {"completion_tokens": 2.5}},
        {"usage": {"completion_tokens": 2, "prompt_tokens": 2.5}},
        {"timings": {"draft_n": 0.25, "draft_n_accepted": 0.25}},
        {"timings": {"draft_n": 3, "draft_n_accepted": 4}},
        {"timings": {"draft_n": 20, "draft_n_accepted": 9}},
        {"usage": {}, "timings": {"draft_n": 20, "draft_n_accepted": 9}},
        {"metrics": {"speculative_decoding": {"num_accepted_draft_tokens": 9, "num_draft_tokens": 9}}},
        {"timings": {"prompt_ms": 0, "predicted_ms": 1e-9}},
        {"timings": {"prompt_ms": 1e-9, "predicted_ms": 1e-9}},
        {"timings": {"prompt_ms": 1, "predicted_ms": 1e9}},
        {"timings": {"prompt_ms": 1e9}},
        {"metrics": {"queue_time_ms": 1e9}},
        {"usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}},
    ],
)
def test_what_the_request_or_the_clock_makes_impossible_is_an_error_of_the_item(more):
    peer = told(**more)
    with pytest.raises(DecodeError, match="the server says what cannot be: ") as caught:
        completed(peer)
    assert not isinstance(caught.value, Refused)
    assert len(peer.bodies) == 1


def test_whole_numbers_may_be_written_as_fractions():
    facts = completed(told(usage={"completion_tokens": 9.0, "prompt_tokens": 3.0})).facts
    assert (facts["completion_tokens"], facts["prompt_tokens"]) == (9, 3)
    assert type(facts["completion_tokens"]) is int


@pytest.mark.parametrize(
    ("form", "usage"), [("stream", {}), ("stream", {"completion_tokens": 0}), ("json", {"completion_tokens": "9"})]
)
def test_tokens_that_are_not_told_are_absent_everywhere(form, usage, tmp_path):
    def answer(number, body):
        if form == "stream":
            return stream(number, ("The answer is 5.", (7,)), usage=usage)
        return 200, JSON, whole({"text": "The answer is 5.", "finish_reason": "stop"}, usage=usage, id=f"{number}")

    run_dir, out = tmp_path / "a", tmp_path / "out"
    with serving(Peer(answer)) as peer:
        result = run(peer, run_dir, model="")
    assert result.exit_code == 0, result.output
    assert "it does not tell the tokens of some answers" in " ".join(result.output.split())
    for sample in samples(run_dir):
        assert (sample.num_tokens, sample.num_decoded) == (None, None)
        assert "tokens" not in sample.server
    metrics = {figure.metric for figure in run_measurements([run_dir])}
    assert "server_latency_mean" in metrics
    assert not metrics & {"server_tps", "tps", "tokens_mean", "tpf", "server_own_tps"}
    assert {figure.tokens for figure in read_csv(run_dir / "results.csv")} == {None}
    assert load(run_dir)["tokens"].isna().all()
    shown = summary_table(summary(run_measurements([run_dir]))).markdown()
    assert "Server TPS" not in shown
    for form_of_export in ("csv", "parquet", "every-eval-ever", "lm-eval", "hf"):
        done = CliRunner().invoke(app, ["export", str(run_dir), "--format", form_of_export, "--out", str(out)])
        assert done.exit_code == 0, done.exception
    assert pd.read_csv(out / "samples.csv")["tokens"].isna().all()
    texts = [path.read_text() for path in out.rglob("*_samples.jsonl")]
    assert texts
    assert not any('"output_tokens"' in text for text in texts)
    for words in (["table", str(run_dir)], ["report", str(run_dir), "--out", str(tmp_path / "r.html")]):
        assert CliRunner().invoke(app, words).exit_code == 0
    speed = CliRunner().invoke(app, ["speed", str(run_dir)])
    assert "or a server did not tell its tokens" in str(speed.exception)


def test_a_sample_without_tokens_takes_no_part_in_the_speed_of_others(tmp_path):
    def answer(number, body):
        return stream(number, ("The answer is 5.", (7,)), **({"usage": {}} if number == 2 else {}))

    with serving(Peer(answer)) as peer:
        assert run(peer, tmp_path / "a", "--warmup", "1", model="").exit_code == 0
    assert "server_tps" not in {figure.metric for figure in run_measurements([tmp_path / "a"])}
    with serving(Peer(answer)) as peer:
        result = run(peer, tmp_path / "c", "--concurrency", "2", model="")
    assert result.exit_code == 0, result.exception
    assert "Tokens/s in sum" not in result.output


CHAT = {"index": 0, "delta": {"content": "The answer is 5."}, "finish_reason": None}


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ([CHAT, {"index": 0, "delta": {}, "finish_reason": "stop"}], "delta"),
        ([{"index": 0, "message": {"content": "5"}, "finish_reason": "stop"}], "message"),
        ([{"index": 0, "text": None, "delta": {"content": "5"}, "finish_reason": "stop"}], "delta"),
        ([{"text": "", "reasoning_content": "5?"}, {"text": "", "finish_reason": "stop"}], "reasoning_content"),
        ([{"text": "", "reasoning": "5?", "finish_reason": "stop"}], "reasoning"),
        ([{"index": 0, "finish_reason": "stop"}], ""),
        ([], ""),
        ([{"index": 1, "text": "5", "finish_reason": "stop"}], ""),
    ],
)
def test_a_choice_without_a_text_is_an_error_that_names_what_it_has(choices, named):
    parts = [b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n" for choice in choices]
    peer = answering(b"".join(parts) + b"data: [DONE]\n\n")
    with pytest.raises(DecodeError, match=f"have no text{' but ' + named if named else ''}: /v1/completions"):
        completed(peer)


@pytest.mark.parametrize("text", [5, ["5"], {"a": "5"}, True])
def test_a_text_of_another_type_is_an_error(text):
    with pytest.raises(DecodeError, match="the text of the answer is a"):
        completed(answering(whole({"text": text, "finish_reason": "stop"}), JSON))


def test_an_empty_answer_is_an_answer():
    assert completed(answering(whole({"text": "", "finish_reason": "stop"}), JSON)).text == ""


def test_the_choice_of_index_0_is_the_answer():
    def part(index, text, finish=None):
        choice = {"index": index, "text": text, "finish_reason": finish}
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"

    parts = part(1, " nine", "length") + part(0, "The answer is 7.") + part(1, "!") + part(0, "", "stop")
    answer = completed(answering(parts))
    assert (answer.text, answer.finish_reason) == ("The answer is 7.", "stop")
    both = whole(
        {"index": 1, "text": "9", "finish_reason": "length"}, {"index": 0, "text": "7", "finish_reason": "stop"}
    )
    assert completed(answering(both, JSON)).text == "7"


@pytest.mark.parametrize("charset", ["ISO-8859-1", "utf-16", "cp1252", "nonsense", '"UTF-8"'])
@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
def test_answers_are_utf_8_whatever_the_header_says(charset, kind):
    choice = {"text": "three — the 答", "finish_reason": "stop"}
    content = json.dumps({"choices": [choice]}, ensure_ascii=False).encode()
    content = content if "json" in kind else b"data: " + content + b"\n\n"
    assert completed(answering(content, {"Content-Type": f"{kind}; charset={charset}"})).text == choice["text"]


def test_a_byte_order_mark_before_the_first_event_is_no_part_of_it():
    assert completed(answering(b"\xef\xbb\xbf" + chunk("The answer is 5.", finish="stop"))).text == "The answer is 5."
    assert completed(answering(b"\xef\xbb\xbf" + whole({"text": "5", "finish_reason": "stop"}), JSON)).text == "5"


def test_facts_are_utf_8_too():
    content = json.dumps({"data": [{"id": "m—"}]}, ensure_ascii=False).encode()
    with serving(
        Peer(facts={"/v1/models": (200, {"Content-Type": "application/json; charset=latin-1"}, content)})
    ) as peer:
        assert client_of(peer).describe()["model"] == "m—"


NO_REASON = chunk("The answer is 5.", id="1") + b"data: [DONE]\n\n"


@pytest.mark.parametrize("content", [NO_REASON, NO_REASON.replace(b"null", b'""')])
def test_a_stream_that_ends_without_a_reason_is_no_answer(content):
    peer = answering(content)
    with pytest.raises(DecodeError, match=r"gives no finish_reason, and without one an answer may lack its end$"):
        completed(peer)
    assert len(peer.bodies) == 1  # no later answer of this server would have one


def test_an_answer_without_a_reason_is_tried_again_where_others_have_one(tmp_path):
    without = [None, lambda handler, _: send(handler, NO_REASON, **peers.EVENTS)]
    with serving(Peer(faults=without)) as peer:
        result = run(peer, tmp_path / "a", model="")
    assert result.exit_code == 0, result.output
    assert sorted(sample.server["attempts"] for sample in samples(tmp_path / "a")) == [1, 1, 2]
    assert not any(sample.error for sample in samples(tmp_path / "a"))


@pytest.mark.parametrize("content", [chunk("The answer is 5."), b""])
def test_a_stream_without_a_reason_and_without_its_end_breaks_off(content):
    with pytest.raises(DecodeError, match=r"the answer breaks off \(2 attempts\)"):
        completed(answering(content))


def test_the_text_of_an_answer_ends_at_its_end():
    behind = chunk(" and 5") + chunk(usage={"completion_tokens": 8}) + b"data: [DONE]\n\n"
    content = chunk("4", finish="stop", usage={"completion_tokens": 2}) + b"data: [DONE]\n\n"
    answer = completed(answering(content + behind))
    assert (answer.text, answer.facts["completion_tokens"]) == ("4", 2)
    assert completed(answering(content + b"data: {\n\n" * 1000)).text == "4"


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "server_error", {"type": "abort"}])
def test_a_reason_may_say_that_the_end_is_missing(reason):
    with pytest.raises(DecodeError, match=r"the answer breaks off \(2 attempts\)"):
        completed(answering(chunk("4", finish=reason) + b"data: [DONE]\n\n"))


def test_a_reason_may_be_an_object():
    assert completed(answering(chunk("4", finish={"type": "length", "length": 9}))).finish_reason == "length"


@pytest.mark.parametrize(
    "content",
    [
        b'{"object": "error", "message": "no quota", "code": 400}',
        b'{"detail": "no quota"}',
        b'{"error": {"message": "no quota"}}',
    ],
)
def test_an_error_in_an_answer_says_what_it_is(content):
    for body, headers in ((content, JSON), (chunk("4") + b"event: error\ndata: " + content + b"\n\n", EVENTS)):
        with pytest.raises(DecodeError, match="the stream holds an error: no quota"):
            completed(answering(body, headers))


def test_another_model_than_the_one_that_was_asked_is_said_and_recorded(tmp_path, caplog):
    peer = Peer(lambda number, body: stream(number, ("The answer is 5.", (7,)), model="other/\x1b[31m"))
    with serving(peer), caplog.at_level(logging.WARNING):
        result = run(peer, tmp_path / "a", model="")
    assert {sample.server["model"] for sample in samples(tmp_path / "a")} == {"other/\\x1b[31m"}
    said = [record.message for record in caplog.records if "answers as the model other" in record.message]
    assert len(said) == 1
    assert "it answered as the model other/" in " ".join(result.output.split())


@pytest.mark.parametrize("name", ["m", "alias"])
def test_a_model_may_answer_by_any_of_its_names(name):
    facts = {"/v1/models": {"data": [{"id": "m", "aliases": ["alias"]}]}}
    peer = Peer(lambda number, body: stream(number, ("4", (7,)), model=name), facts=facts)
    assert "model" not in completed(peer, model="m").facts


def bomb(size):
    packer = zlib.compressobj(9, wbits=31)
    return b"".join(packer.compress(b" " * (1 << 20)) for _ in range(size)) + packer.flush()


@pytest.fixture
def small(monkeypatch):
    for module in (server_client, server_place):
        monkeypatch.setattr(module, "LARGEST_BODY", 1 << 20)


BODIES = {
    "json": (b" " * (3 << 20), JSON),
    "stream": (b": comment\n" * (300 << 10), EVENTS),
    "gzip": (bomb(64), {**JSON, "Content-Encoding": "gzip"}),
    "stream in gzip": (bomb(64), {**EVENTS, "Content-Encoding": "gzip"}),
    "deflate": (zlib.compress(b" " * (64 << 20), 9), {**JSON, "Content-Encoding": "deflate"}),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("code", [200, 500])
def test_a_body_has_an_end_counted_after_it_is_unpacked(name, code, small):
    content, headers = BODIES[name]
    peer = Peer(lambda number, body: (code, headers, content))
    with pytest.raises(DecodeError, match="the answer has more than 1 MiB"):
        completed(peer)
    assert len(peer.bodies) == 1


@pytest.mark.parametrize("coding", ["gzip, gzip", "br", "zstd", "\x1b"])
def test_a_body_that_is_packed_in_another_way_is_an_error(coding):
    with pytest.raises(DecodeError, match="packs its answer"):
        completed(answering(b"x", {**JSON, "Content-Encoding": coding}))


def test_a_body_in_gzip_is_read_and_a_damaged_one_is_asked_for_again():
    content = gzip.compress(whole({"text": "4", "finish_reason": "stop"}))
    packed = {**JSON, "Content-Encoding": "gzip"}
    assert completed(answering(content, packed)).text == "4"
    with pytest.raises(DecodeError, match="cannot be unpacked"):
        completed(answering(b"\x1f\x8b" + content[5:], packed))


@pytest.mark.parametrize("path", ["/v1/models", "/props", "/slots", "/version", "/metrics"])
@pytest.mark.parametrize("name", ["json", "gzip"])
def test_facts_have_an_end_too(path, name, small):
    content, headers = BODIES[name]
    with serving(Peer(facts={**Peer().facts, path: (200, headers, content)})) as peer:
        client = client_of(peer)
        if path == "/v1/models":
            with pytest.raises(DecodeError, match="more than 1 MiB"):
                client.describe()
        else:
            assert client.describe()["settings"] == {}
            assert client.counters() == {}


def endless(*, pause, piece, head=b""):
    """Bytes without an end; `head` come first in place of a whole header."""

    def fault(handler, answer):
        handler.connection.settimeout(20)
        try:
            handler.wfile.write(head or b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            while True:
                handler.wfile.write(piece)
                handler.wfile.flush()
                time.sleep(pause)
        except OSError:
            pass

    return fault


ENDLESS = {
    "comments": endless(pause=0.05, piece=b": still here\n\n"),
    "header lines": endless(pause=0.05, piece=b"X-More: 1\r\n", head=b"HTTP/1.1 200 OK\r\n"),
    "informational": endless(pause=0.02, piece=b"HTTP/1.1 100 Continue\r\n\r\n", head=b"HTTP/1.1 100 Continue\r\n\r\n"),
    "bytes": endless(pause=0.05, piece=b" ", head=b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"),
    "an error": endless(pause=0.05, piece=b" ", head=b"HTTP/1.1 500 No\r\nContent-Type: application/json\r\n\r\n"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_answer_has_an_end_whatever_a_server_dribbles(name):
    started = time.monotonic()
    late = r"took more than 0\.4\d* s as a whole"
    # On a busy machine the time may be over before the first line of the answer is there.
    reason = rf"(the server answers 500|{late})" if name == "an error" else late
    with pytest.raises(DecodeError, match=rf"{reason} \(2 attempts\)"):
        completed(Peer(faults=[ENDLESS[name]] * 2))
    assert time.monotonic() - started < 10


def test_events_have_an_end_that_the_request_decides():
    peer = Peer(faults=[endless(pause=0, piece=chunk("a"))])
    with pytest.raises(DecodeError, match="more than 100 events, for max_tokens 9"):
        completed(peer, timeout=20)


@pytest.mark.parametrize("path", ["/v1/models", "/props", "/metrics"])
def test_facts_that_a_server_dribbles_have_an_end(path, monkeypatch):
    monkeypatch.setattr(server_place, "_FACT_SECONDS", 0.3)
    body = itertools.repeat(b" ")

    class Dribbling(Peer):
        def reply(self, asked, headers, content):
            return (200, JSON, body) if asked == path else super().reply(asked, headers, content)

    def send(handler, content, *rest, **headers):
        if content is body:
            ENDLESS["bytes"](handler, b"")
        else:
            plain(handler, content, *rest, **headers)

    plain = peers.send
    monkeypatch.setattr(peers, "send", send)
    with serving(Dribbling()) as peer:
        client = client_of(peer, timeout=20)
        if path == "/v1/models":
            with pytest.raises(DecodeError, match=r"took more than 0\.3 s as a whole"):
                client.describe()
        else:
            assert client.describe()["model"] == "m"
            assert client.counters() == {}


DEEP = b"[" * 200_000 + b"]" * 200_000
ODD_FACTS = {
    "/v1/models": (200, JSON, b'{"data": ' + DEEP + b"}"),
    "/props": (200, JSON, DEEP),
    "/slots": (200, JSON, b'[{"n_ctx": 1e400}, 5]'),
    "/metrics": (
        200,
        {},
        b"vllm:x_total 1e5e5\nvllm:y_total 1e999\nvllm:z_total 7\nvllm:" + b"n" * 999 + b"_total 1\n",
    ),
}


@pytest.mark.parametrize("path", ODD_FACTS)
def test_odd_facts_are_no_traceback(path):
    with serving(Peer(facts={**Peer().facts, path: ODD_FACTS[path]})) as peer:
        client = client_of(peer, model="m")
        described = client.describe()
        json.dumps(described, allow_nan=False)
        assert client.counters() == ({"vllm:z_total": 7.0} if path == "/metrics" else {})


@pytest.mark.parametrize("content", [{"text": 5}, {"text": "vllm:x_total 5\n"}, [5], 5, "x"])
def test_counters_are_read_from_text_only(content):
    with serving(Peer(facts={**Peer().facts, "/metrics": content})) as peer:
        assert client_of(peer).counters() in ({}, {"vllm:x_total": 5.0})


@pytest.mark.parametrize(
    "content",
    [
        b"data: " + DEEP + b"\n\n",
        b'data: {"choices": [{"text": "a", "x": ' + DEEP + b"}]}\n\n",
        b'data: {"choices": [{"text": "a"}], "usage": {"completion_tokens": ' + b"9" * 9999 + b"}}\n\n",
        b"data: 5\n\n",
        b'data: {"error": ' + b"[" * 60 + b"]" * 60 + b"}\n\n",
        b"data: {\n\n",
    ],
)
def test_odd_chunks_are_errors_of_the_item(content):
    with pytest.raises(DecodeError, match=r"damaged JSON|holds an error"):
        completed(answering(content))


@pytest.mark.parametrize("value", ["Mon, 99 Jan 99999999999999999999 00:00:00 GMT", "\x00", "1e999", "9" * 400, ", ,"])
def test_an_odd_retry_after_is_no_traceback(value):
    value = value.replace("\x00", "?")
    with pytest.raises(DecodeError, match="429"):
        completed(Peer(faults=[status(429, Retry_After=value)] * 2))


ESCAPES = {
    "plain": str,
    "unicode": lambda key: "".join(f"\\u{ord(letter):04x}" for letter in key),
    "upper": lambda key: "".join(f"\\u{ord(letter):04X}" for letter in key),
    "first": lambda key: f"\\u{ord(key[0]):04x}{key[1:]}",
    "twice": lambda key: "".join(f"\\\\u{ord(letter):04x}" for letter in key),
    "hexadecimal": lambda key: "".join(f"\\\\x{ord(letter):02x}" for letter in key),
    "html": lambda key: "".join(f"&#{ord(letter)};" for letter in key),
    "percent": lambda key: "".join(f"%{ord(letter):02X}" for letter in key),
}


CODES = {
    "base64": lambda key: base64.b64encode(key.encode()).decode(),
    "base64 of a header": lambda key: base64.b64encode(f"Bearer {key}".encode()).decode(),
    "base64 of a user": lambda key: base64.b64encode(f"user:{key}:x".encode()).decode(),
    "base64 of addresses": lambda key: base64.urlsafe_b64encode(key.encode()).decode(),
    "digits": lambda key: key.encode().hex(),
    "percent twice": lambda key: "".join(f"%25{ord(letter):02X}" for letter in key),
    "html twice": lambda key: "".join(f"&amp;#{ord(letter)};" for letter in key),
    "long": lambda key: "".join(f"\\U{ord(letter):08x}" for letter in key),
    "braces": lambda key: "".join(f"\\u{{{ord(letter):x}}}" for letter in key),
    "octal": lambda key: "".join(f"\\{ord(letter):03o}" for letter in key),
}


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
@pytest.mark.parametrize("key", [KEY, "sk-Secret9/+?>~"])
def test_the_key_is_nowhere_in_another_code(code, key, monkeypatch):
    monkeypatch.setenv("MY_KEY", key)
    written, plain = code(key), base64.b64encode(b"another text of a server").decode()
    refusing = Peer(lambda number, body: (400, JSON, json.dumps({"error": f"<{written}> {plain}"}).encode()))
    with pytest.raises(Refused) as caught:
        completed(refusing, key_variable="MY_KEY")
    shown = str(caught.value)
    assert "[API key]" in shown
    assert plain in shown
    longest = max(range(len(written)), key=lambda end: written[:end] in shown and end)
    assert longest < 12  # beside the beginning of a text before the key in one code with it


def readable(text):
    """What a reader may make of a text, by undoing every escape."""
    for _ in range(3):
        text = html.unescape(text).encode("latin-1", "backslashreplace").decode("unicode_escape", "replace")
    return text


@pytest.mark.parametrize("escape", ESCAPES.values(), ids=ESCAPES)
@pytest.mark.parametrize("place", ["text", "parts", "id", "finish", "model", "name", "error", "error body", "fact"])
def test_the_key_is_nowhere_by_any_escape(escape, place, monkeypatch, caplog):
    monkeypatch.setenv("MY_KEY", KEY)
    written = escape(KEY)
    parts = [f'{{"text": "a {written} b", "finish_reason": "stop"}}']
    if place == "parts":
        half = escape(KEY[:4]), escape(KEY[4:])
        parts = [f'{{"text": "{half[0]}"}}', f'{{"text": "{half[1]}", "finish_reason": "stop"}}']
    more = {"id": f'"id": "{written}"', "model": f'"model": "{written}"', "name": f'"{written}": 1'}
    more |= {"error": f'"error": {{"message": "{written}"}}', "finish": f'"finish": "{written}"'}
    field = more.get(place, '"x": 1')
    content = "".join(f'data: {{"choices": [{part}], {field}}}\n\n' for part in parts).encode()
    if place == "error body":
        peer = Peer(lambda number, body: (500, JSON, f'{{"error": {{"message": "{written}"}}}}'.encode()))
    else:
        peer = answering(content)
    if place == "fact":
        models = f'{{"data": [{{"id": "m", "owned_by": "{written}"}}]}}'.encode()
        peer.facts = {"/v1/models": (200, JSON, models)}
    with serving(peer), caplog.at_level(logging.DEBUG):
        client = client_of(peer, key_variable="MY_KEY")
        try:
            answer = client.complete("?", (1,), FIELDS, {})
            shown = f"{answer} {client.describe()}"
        except RefusionEvalError as error:
            shown = f"{error!r} {error} {error.__cause__!r}"
    assert "[API key]" in shown or place in ("name", "finish")
    assert KEY not in readable(shown)
    assert KEY not in readable(caplog.text)


@pytest.mark.parametrize("field", ["reasoning_content", "refusal"])
def test_the_key_in_parts_of_thoughts_or_of_a_refusal_is_in_no_record(field, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    deltas = [{field: f"Is it {KEY[:4]}"}, {field: KEY[4:]}, {"content": "4"}]
    parts = [{"choices": [{"delta": delta, "finish_reason": delta.get("content") and "stop"}]} for delta in deltas]
    content = b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts)
    answer = completed(answering(content), api="chat", prompt="[]", ids=(), key_variable="MY_KEY")
    assert "Is it [API key]" in (answer.reasoning, answer.facts.get("refusal"))
    assert KEY[4:] not in str(answer)


@pytest.mark.parametrize("coding", [KEY, KEY.lower()])
def test_a_coding_that_is_the_key_is_not_named(coding, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    with pytest.raises(DecodeError, match="packs its answer") as caught:
        completed(answering(b"x", {**EVENTS, "Content-Encoding": coding}), key_variable="MY_KEY")
    assert KEY.lower() not in str(caught.value).lower()


def test_an_old_answer_whose_id_is_the_key_is_named_without_it(monkeypatch, caplog):
    monkeypatch.setenv("MY_KEY", KEY)
    numbers = iter((1, 2, 1, 1))
    written = ESCAPES["unicode"](KEY)

    def answer(number, body):
        choice = '{"text": "4", "finish_reason": "stop"}'
        return f'data: {{"id": "{written}{next(numbers)}", "choices": [{choice}]}}\n\n'.encode()

    with serving(Peer(answer)) as peer, caplog.at_level(logging.DEBUG):
        client = client_of(peer, key_variable="MY_KEY")
        for _ in range(2):
            client.complete("?", (1,), FIELDS, {})
        with pytest.raises(DecodeError, match="repeats an old answer") as caught:
            client.complete("?", (1,), FIELDS, {})
    assert KEY not in readable(f"{caught.value}{caplog.text}")


def test_ids_that_spell_the_key_are_not_recorded(tmp_path, monkeypatch):
    from tests.server.test_server_runs import TOKENIZER

    key = "42"
    monkeypatch.setenv("MY_KEY", key)
    ids = TOKENIZER.encode(f"The answer is {key}.")
    with serving(Peer(lambda number, body: stream(number, ("x", tuple(ids))))) as peer:
        assert run(peer, tmp_path / "a", "--api-key-env", "MY_KEY").exit_code == 0
    for sample in samples(tmp_path / "a"):
        assert key not in sample.text
        assert sample.tokens is None
        assert sample.num_tokens == len(ids)


def test_a_text_of_more_tokens_than_were_asked_for_makes_no_speed(tmp_path):
    peer = Peer(lambda number, body: stream(number, ("The answer is 5. " * 500, ()), usage={}))
    with serving(peer):
        result = run(peer, tmp_path / "a")
    assert result.exit_code != 0
    assert all("where max_tokens is 96" in sample.error for sample in samples(tmp_path / "a"))
