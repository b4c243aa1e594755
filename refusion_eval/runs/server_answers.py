"""Asks a server and reads its answer within bounds: bytes, events, the parts of a completion, and facts."""

import codecs
import json
import re
import socket
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from refusion_eval.errors import DecodeError
from refusion_eval.store.records import LONGEST_TEXT, MOST
from refusion_eval.types import MOST_TOKENS
from refusion_eval.untrusted import parse_json, visible

if TYPE_CHECKING:  # the extra `server` brings it
    import httpx2

_LONGEST_MESSAGE = 300
_ABORTED = re.compile(r"abort|cancel|error|fail|time_?out", re.IGNORECASE)  # reasons of answers that lack their end
BREAKS_OFF = "the answer breaks off"
# No server generates a token in less; and its own clock may differ from the client's by so much, or by a share.
_SECONDS_PER_TOKEN, _CLOCK_SECONDS, _CLOCK_SHARE = 1e-5, 0.1, 0.1
# Where a choice that has no text holds one: forms of chats, and texts that a server takes for thoughts.
_IN_PLACE_OF_TEXT = ("delta", "message", "content", "reasoning_content", "reasoning")
# A coding of a body that a server may use although none is asked for -> what zlib has to expect.
_PACKED = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class Passing(Exception):
    """An attempt failed for a reason that may pass, after `retry_after` seconds if the server says so."""

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion.

    Attributes:
        text: as the server gives it; some cut a stop string from it, some do not.
        token_ids: ids of all generated tokens, as many as the server counts; None if it gives none, or not all.
        finish_reason: "stop", "length", "content_filter", or another word of the server's.
        stopped_by: the stop string or what the server calls it; empty where it does not say.
        seconds: from the request to its last byte.
        facts: what the server told of it, as `Sample.server` documents it.
    """

    text: str
    token_ids: tuple[int, ...] | None
    finish_reason: str
    stopped_by: str
    seconds: float
    facts: Mapping[str, Any]


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
        raise DecodeError(f"the server packs its answer ({short(coding)}), which was not asked for")
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
    plain = httpx2.Response(200, headers={"content-type": kind}, content=_without_mark(body), request=response.request)
    try:
        yield from (event.data for event in httpx2.EventSource(plain))
    except httpx2.SSEError as error:
        raise Passing(str(error)) from None


def assemble(
    chunks: Sequence[Mapping[str, Any]], seconds: float, first_byte: float, *, is_done: bool = False
) -> Answer:
    """Joins the parts of an answer; raises Passing if its end is missing, and DecodeError if it has no text."""
    texts: list[Any] = []
    others: list[str] = []
    ids: list[Any] = []
    last: dict[str, Any] = {}
    finish = stopped_by = ""
    for chunk in chunks:
        last = {**last, **{name: value for name, value in chunk.items() if value}}
        verbose = as_dict(chunk.get("__verbose"))
        ids += as_list(verbose.get("tokens"))
        of_answer = (one for one in filter(as_dict, as_list(chunk.get("choices"))) if one.get("index") in (0, None))
        for choice in list(of_answer)[:1]:
            others += [name for name in _IN_PLACE_OF_TEXT if choice.get(name)]
            if "text" in choice:
                texts.append(choice["text"])
            ids += as_list(choice.get("token_ids"))
            reason = choice.get("finish_reason")
            finish = str(as_dict(reason).get("type", reason) or finish)
            stopped_by = str(choice.get("stop_reason") or verbose.get("stopping_word") or stopped_by)
    if _ABORTED.search(finish) or not (finish or is_done):
        raise Passing(BREAKS_OFF)
    if not any(texts) and (others or not texts):
        held = f" but {others[0]}" if others else ""
        raise DecodeError(
            f"the choices of the answer have no text{held}: /v1/completions of the server has to answer in the form of "
            "completions, not of chats, and without a parser that takes thoughts out of texts"
        )
    if wrong := next((text for text in texts if not isinstance(text, str | None)), None):
        raise DecodeError(f"the text of the answer is a {type(wrong).__name__}")
    usage, timings, metrics = as_dict(last.get("usage")), as_dict(last.get("timings")), as_dict(last.get("metrics"))
    drafts = as_dict(metrics.get("speculative_decoding"))
    told: dict[str, Any] = {
        "completion_tokens": usage.get("completion_tokens"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "cached_tokens": as_dict(usage.get("prompt_tokens_details")).get("cached_tokens", timings.get("cache_n")),
        "drafted_tokens": timings.get("draft_n", drafts.get("num_draft_tokens")),
        "accepted_tokens": timings.get("draft_n_accepted", drafts.get("num_accepted_draft_tokens")),
        "prefill_seconds": timings.get("prompt_ms", metrics.get("time_to_first_token_ms")),
        "generation_seconds": timings.get("predicted_ms", metrics.get("generation_time_ms")),
        "queue_seconds": metrics.get("queue_time_ms"),
    }
    # A record holds counts and times only, and nothing that a server writes in their place.
    counts = {name: value for name, value in told.items() if type(value) in (int, float) and 0 <= value < MOST}
    facts: dict[str, Any] = {
        name: value / 1000 if name.endswith("_seconds") else int(value) if value == int(value) else value
        for name, value in counts.items()
    }
    if not facts.get("completion_tokens", 1):
        del facts["completion_tokens"]  # a server that does not count them, as an end takes a token, too
    facts |= {"id": short(str(last.get("id") or "")), "finish_reason": short(finish)}
    facts["first_byte_seconds"] = first_byte
    are_ids = all(type(token) is int and 0 <= token < MOST_TOKENS for token in ids)
    complete = bool(ids) and are_ids and len(ids) == facts.get("completion_tokens")
    text = "".join(filter(None, texts))
    return Answer(text, tuple(ids) if complete else None, finish, stopped_by, seconds, facts)


def check_facts(answer: Answer, most_tokens: int) -> None:
    """Raises DecodeError for what the request or the client's clock makes impossible, so that it becomes no figure."""
    facts, seconds = answer.facts, answer.seconds
    tokens, accepted = (facts.get(f"{name}_tokens", 0) for name in ("completion", "accepted"))
    drafted = facts.get("drafted_tokens", accepted)
    cached, read = facts.get("cached_tokens", 0), facts.get("prompt_tokens", MOST)
    parts = [facts[name] for name in ("prefill_seconds", "generation_seconds") if name in facts]
    own = max(sum(parts), facts.get("queue_seconds", 0))
    counts = [value for name, value in facts.items() if name.endswith("_tokens")]
    impossible = {
        f"{tokens} tokens, where max_tokens is {most_tokens}": tokens > most_tokens,
        f"{cached} cached tokens of a prompt of {read}": cached > read,
        "a part of a token": any(value != int(value) for value in counts),
        f"{accepted} accepted drafts of {drafted}": accepted > drafted,
        f"{accepted} accepted drafts among {tokens or most_tokens} tokens": accepted >= (tokens or most_tokens),
        f"{own:.3g} s of its own, in {seconds:.3g} s": own > seconds * (1 + _CLOCK_SHARE) + _CLOCK_SECONDS,
        f"{own:.3g} s for {tokens} tokens": len(parts) == 2 and sum(parts) < tokens * _SECONDS_PER_TOKEN,
        f"a text of more than {LONGEST_TEXT >> 20} MiB": len(answer.text) > LONGEST_TEXT,
    }
    if wrong := [what for what, holds in impossible.items() if holds]:
        raise DecodeError(f"the server says what cannot be: {', '.join(wrong)}")


def is_number(value: Any) -> bool:
    """Whether it is a number that a record may hold."""
    return isinstance(value, int | float) and -MOST <= value <= MOST


def error_message(text: str) -> str:
    """What the body of an error says, in a few words: OpenAI's form, FastAPI's, or any other."""
    try:
        return error_in(parse_json(text))
    except ValueError:
        return short(text)


def error_in(content: Any) -> str:
    error = as_dict(content).get("error", as_dict(content).get("detail", content))
    found = as_dict(error).get("message", error)
    return short(found if isinstance(found, str) else json.dumps(found))


def short(text: str) -> str:
    shown = visible(" ".join(text.split()))
    return shown if len(shown) <= _LONGEST_MESSAGE else f"{shown[:_LONGEST_MESSAGE]} ..."


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
