"""Asks a server within bounds of time and bytes, and reads the events of its answer and what its errors say."""

import codecs
import json
import socket
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from refusion_eval.errors import DecodeError
from refusion_eval.runs.server_facts import as_dict, as_list
from refusion_eval.untrusted import parse_json, visible

if TYPE_CHECKING:  # the extra `server` brings it
    import httpx2

_LONGEST_MESSAGE = 300
# A coding of a body that a server may use although none is asked for -> what zlib has to expect.
_PACKED = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class Passing(Exception):
    """An attempt failed for a reason that may pass, after `retry_after` seconds if the server says so."""

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class _Ending:
    """Ends the connection of a request when its time as a whole is over, whatever bytes still come."""

    def __init__(self, seconds: float) -> None:
        self.is_over = False
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self.timer = threading.Timer(seconds, self._end)
        self.timer.daemon = True

    def trace(self, name: str, info: Mapping[str, Any]) -> None:
        """Called by the HTTP library with every step of a request."""
        if name.endswith(("connect_tcp.complete", "start_tls.complete")):
            with self._lock:
                self._socket = info["return_value"].get_extra_info("socket")
            if self.is_over:
                self._end()

    def _end(self) -> None:
        self.is_over = True
        with self._lock, suppress(OSError):
            if self._socket is not None:
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


@contextmanager
def asked(
    http: "httpx2.Client", method: str, address: str, seconds: float, largest: int, **content: Any
) -> "Iterator[tuple[httpx2.Response, Iterator[bytes]]]":
    """A request's response and its unpacked body, both within bounds.

    Args:
        seconds: that it may take as a whole.
        largest: bytes that its body may have, once it is unpacked.

    Raises:
        Passing: it takes longer.
        DecodeError: the body is longer, or packed in a way that nobody asked for.
        httpx2.RequestError: the connection fails.
    """
    import httpx2

    ending = _Ending(seconds)
    ending.timer.start()
    try:
        with http.stream(method, address, extensions={"trace": ending.trace}, **content) as response:
            yield response, unpacked(response, largest)
    except httpx2.RequestError:
        if not ending.is_over:
            raise
    finally:
        ending.timer.cancel()
    if ending.is_over:
        raise Passing(f"the answer took more than {seconds:g} s as a whole")


def unpacked(response: "httpx2.Response", largest: int) -> Iterator[bytes]:
    coding = response.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity", *_PACKED):
        # Not by its name, which a server may have made of the key.
        raise DecodeError("the server packs its answer by a Content-Encoding that was not asked for")
    unpacker = zlib.decompressobj(_PACKED[coding]) if coding in _PACKED else None
    total = 0
    for piece in response.iter_raw():
        try:
            plain = unpacker.decompress(piece, largest + 1 - total) if unpacker else piece
        except zlib.error:
            raise Passing("the answer is damaged: it cannot be unpacked") from None
        total += len(plain)
        if total > largest:
            raise DecodeError(f"the answer has more than {largest >> 20} MiB")
        yield plain


def body_text(body: Iterator[bytes]) -> str:
    return b"".join(body).decode("utf-8-sig", "replace")


def _without_mark(body: Iterator[bytes]) -> Iterator[bytes]:
    """The pieces of a body without a byte order mark before them."""
    start = b""
    while len(start) < len(codecs.BOM_UTF8) and (piece := next(body, None)) is not None:
        start += piece
    yield start.removeprefix(codecs.BOM_UTF8)
    yield from body


def events_of(response: "httpx2.Response", body: Iterator[bytes]) -> Iterator[str]:
    """The events of a stream; the whole body where a server does not stream. Both are UTF-8, whatever a header says."""
    import httpx2

    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        yield body_text(body)
        return
    if kind == "application/x-ndjson":
        yield from _lines(body)
        return
    plain = httpx2.Response(200, headers={"content-type": kind}, content=_without_mark(body), request=response.request)
    try:
        # An event without data is none, such as an annotation of Dynamo's.
        yield from (event.data for event in httpx2.EventSource(plain) if event.data)
    except httpx2.SSEError as error:
        raise Passing(str(error)) from None


def _lines(body: Iterator[bytes]) -> Iterator[str]:
    rest = b""
    for piece in body:
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode("utf-8", "replace") for line in lines if line.strip())
    if rest.strip():
        yield rest.decode("utf-8", "replace")


def error_message(text: str) -> str:
    """What the body of an error says, in a few words: OpenAI's form, FastAPI's, or any other."""
    try:
        return error_in(parse_json(text))
    except ValueError:
        return short(text)


def error_in(content: Any) -> str:
    error = as_dict(content).get("error", as_dict(content).get("detail", content))
    found = as_dict(error).get("message", error)
    if isinstance(found, list) and found and all("msg" in as_dict(one) for one in found):
        # FastAPI's, which stand beside the whole request: what is wrong, and with which fields.
        places: dict[str, list[str]] = {}
        for one in found:
            places.setdefault(str(one["msg"]), []).append(".".join(map(str, as_list(one.get("loc"))[1:])))
        found = "; ".join(f"{said} ({', '.join(filter(None, where))})" for said, where in places.items())
    return short(found if isinstance(found, str) else json.dumps(found))


def short(text: str) -> str:
    shown = visible(" ".join(text.split()))
    return shown if len(shown) <= _LONGEST_MESSAGE else f"{shown[:_LONGEST_MESSAGE]} ..."
