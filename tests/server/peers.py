"""Servers of the tests, on 127.0.0.1: a scripted one whose answers can be spoilt, and llama.cpp's own."""

import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# A fault gets the handler and the answer's bytes, and sends something else, or nothing.
Fault = Callable[[BaseHTTPRequestHandler, bytes], None]
Reply = tuple[int, dict[str, str], bytes]


def transformers_serve(model: str, port: int) -> list[str]:
    """The command of transformers' own server, in float32 on the CPU."""
    script = Path(sys.executable).with_name("transformers")
    options = f"--host 127.0.0.1 --port {port} --device cpu --dtype float32"
    return [str(script), "serve", model, *options.split()]


def chunk(text: str = "", ids: tuple[int, ...] = (), finish: str | None = None, **more: Any) -> bytes:
    choice = {"text": text, "index": 0, "finish_reason": finish, "token_ids": list(ids)}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def stream(number: int, *parts: tuple[str, tuple[int, ...]], finish: str = "stop", **more: Any) -> bytes:
    """An answer in vLLM's form; `more` stands in its last chunk."""
    usage = {"prompt_tokens": 3, "completion_tokens": sum(len(ids) for _, ids in parts)}
    last = chunk(finish=finish, id=f"cmpl-{number}", **{"usage": usage, **more})
    return b"".join(chunk(text, ids, id=f"cmpl-{number}") for text, ids in parts) + last + b"data: [DONE]\n\n"


@dataclass
class Peer:
    """A server with OpenAI-compatible completions.

    Attributes:
        answer: bytes of the stream of a request, by the number of its answer and the request's body.
        faults: what happens to the next completions, in order; None leaves one as it is.
        facts: objects at other paths.
        upstream: (host, port) of a server that answers in place of `answer`; then this is a proxy.
    """

    answer: Callable[[int, dict[str, Any]], bytes | Reply] = lambda number, body: stream(number, ("4", (7,)))
    faults: list[Fault | None] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=lambda: {"/v1/models": {"data": [{"id": "m", "owned_by": "vllm"}]}})
    upstream: tuple[str, int] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, path: str, headers: dict[str, str], body: bytes) -> Reply:
        if self.upstream is not None:
            connection = http.client.HTTPConnection(*self.upstream, timeout=30)
            connection.request("POST" if body else "GET", path, body or None, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            kind = {"Content-Type": answer.headers.get("Content-Type", "")}
            return answer.status, kind, answer.read()
        if not body:
            content = self.facts.get(path)
            if isinstance(content, tuple):
                return content
            text = content if isinstance(content, str) else json.dumps(content)
            return (404, {}, b"{}") if content is None else (200, {"Content-Type": "application/json"}, text.encode())
        answered = self.answer(len(self.bodies), json.loads(body))
        return answered if isinstance(answered, tuple) else (200, {"Content-Type": "text/event-stream"}, answered)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    peer: Peer

    def do_GET(self) -> None:
        self._handle(b"")

    def do_POST(self) -> None:
        self._handle(self.rfile.read(int(self.headers["Content-Length"])))

    def _handle(self, body: bytes) -> None:
        fault = None
        with self.peer.lock:
            self.peer.paths.append(self.path)
            self.peer.headers.append(dict(self.headers))
            if body:
                self.peer.bodies.append(json.loads(body))
                fault = self.peer.faults.pop(0) if self.peer.faults else None
            status, headers, content = self.peer.reply(self.path, dict(self.headers), body)
        if fault is not None:
            fault(self, content)
            self.close_connection = True
            return
        send(self, content, status, **headers)

    def log_message(self, *arguments: Any) -> None:
        pass


def send(handler: BaseHTTPRequestHandler, content: bytes, status: int = 200, length: int | None = None, **headers: str):
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(content) if length is None else length))
    handler.end_headers()
    handler.wfile.write(content)
    handler.wfile.flush()


EVENTS = {"Content_Type": "text/event-stream"}


def status(number: int, message: str = "", **headers: str) -> Fault:
    content = json.dumps({"error": {"message": message}}).encode()
    return lambda handler, answer: send(handler, content, number, Content_Type="application/json", **headers)


def dropped(handler: BaseHTTPRequestHandler, answer: bytes) -> None:
    """The connection is reset before any answer."""
    handler.connection.shutdown(socket.SHUT_RDWR)


def truncated(handler: BaseHTTPRequestHandler, answer: bytes) -> None:
    """The connection ends in the middle of the stream, inside JSON."""
    send(handler, answer[: len(answer) // 2 + 3], length=len(answer), **EVENTS)


def cut_short(handler: BaseHTTPRequestHandler, answer: bytes) -> None:
    """The stream ends in good order, but without its last events."""
    send(handler, answer.split(b"\n\n")[0] + b"\n\n", **EVENTS)


def corrupted(handler: BaseHTTPRequestHandler, answer: bytes) -> None:
    """One event is no JSON."""
    send(handler, answer.replace(b'"choices"', b'"choic', 1), **EVENTS)


def delayed(handler: BaseHTTPRequestHandler, answer: bytes) -> None:
    """Silence for longer than any timeout of the tests."""
    time.sleep(1.0)


@contextmanager
def serving(peer: Peer, port: int = 0) -> Iterator[Peer]:
    handler = type("Handler", (_Handler,), {"peer": peer})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    peer.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield peer
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
