"""The client of a server with OpenAI-compatible completions: one prompt a request, streamed, retried after faults."""

import base64
import codecs
import functools
import json
import logging
import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.store.records import LONGEST_TEXT, MOST
from refusion_eval.types import MOST_TOKENS
from refusion_eval.untrusted import parse_json, visible

if TYPE_CHECKING:  # the extra `server` brings both
    import httpx2
    import tenacity

log = logging.getLogger(__name__)

INSTALL = "a server needs the packages httpx2 and tenacity: pip install 'refusion-eval[server]'"
# Answers that a later attempt may change; every 5xx is one too.
_PASSING = (408, 409, 425, 429)
# Answers that concern every request, so that the run ends: the key, its rights, and the model or the path.
_ENDS_RUN = (401, 403, 404)
_FEWEST_ATTEMPTS = 2  # whatever time the first one took
_LONGEST_MESSAGE = 300
_ABORTED = re.compile(r"abort|cancel|error|fail|time_?out", re.IGNORECASE)  # reasons of answers that lack their end
_BREAKS_OFF = "the answer breaks off"
# Bytes of a body once it is unpacked, and what each token that may be generated adds to that: events of some servers
# repeat the request. Events of a stream for each such token, and a few beside them.
_LARGEST_BODY, _BYTES_PER_TOKEN = LONGEST_TEXT, 4096
_EVENTS_PER_TOKEN, _MORE_EVENTS = 4, 64
# Seconds that a whole answer may take, as multiples of the silence that is allowed: so many, and one more for so many
# tokens that may be generated.
_WHOLE, _TOKENS_PER_TIMEOUT = 2.0, 1000
# No server generates a token in less; and its own clock may differ from the client's by so much, or by a share.
_SECONDS_PER_TOKEN, _CLOCK_SECONDS, _CLOCK_SHARE = 1e-5, 0.1, 0.1
_MOST_COUNTERS, _LONGEST_COUNTER = 1000, 200
_LISTED = "listed"
# Where a choice that has no text holds one: forms of chats, and texts that a server takes for thoughts.
_IN_PLACE_OF_TEXT = ("delta", "message", "content", "reasoning_content", "reasoning")
# Words of a 400 that is about a field of the request; with a 422 the name of the field suffices.
_UNKNOWN_FIELD = re.compile(
    r"unrecogni[sz]ed|unknown|unexpected|unsupported|not (supported|permitted)|extra", re.IGNORECASE
)
# Requests for facts about the server, which are no part of a record's time.
_FACT_SECONDS = 10.0
# Seconds that a user may set.
_TIMEOUT, _PATIENCE = 600.0, 300.0
_START_SECONDS = 30.0  # in which a server has to be there when a run begins
_OWNERS = {"llamacpp": "llama.cpp", "vllm": "vLLM", "sglang": "SGLang", "tgi": "TGI"}
# Settings of a server that its endpoints tell, by their names in `/props`, `/slots` and `/v1/models`.
_SETTINGS = ("n_ctx", "total_slots", "model_ftype", "max_model_len", "ftype", "n_params", "dtype", "speculative")
_COUNTERS = re.compile(
    r"^((?:llamacpp|vllm|sglang):\w+_(?:total|count|sum))(?:\{[^}\n]*\})? (\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)$",
    re.MULTILINE | re.ASCII,
)
# A coding of a body that a server may use although none is asked for -> what zlib has to expect.
_PACKED = {"gzip": 31, "x-gzip": 31, "deflate": 15}
# How a character may stand in a text: after backslashes, as JSON, Python, URLs and HTML write it.
_ESCAPES = (
    *(r"\\*{char}", r"\\+u(?:0000)?00{code:02x}", r"\\+u\{{0*{code:x}\}}", r"\\+x{code:02x}", r"\\+{code:03o}"),
    *(r"%(?:25)*{code:02x}", r"&(?:amp;)*#x0*{code:x};", r"&(?:amp;)*#0*{code};"),
)


_T = TypeVar("_T")


class Refused(DecodeError):
    """The server refuses this request, and would refuse it again."""


class _Passing(Exception):
    """An attempt failed for a reason that may pass, after `retry_after` seconds if the server says so."""

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class _Rejected(Exception):
    """The server cannot read the request as it is."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


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


class ServerClient:
    """Contacts one address only; redirects are refused, and proxies of the environment are not used.

    Args:
        base_url: http or https address, with or without /v1 at its end.
        model: the model's name at the server; empty for the only one that it lists.
        key_variable: environment variable that holds the key; empty for none. The key itself is kept out of every
            text: where a server repeats it, a placeholder stands for it.
        timeout: seconds of silence after which an attempt has failed.
        patience: seconds during which failed attempts are repeated; there are two at least.
    """

    def __init__(self, base_url: str, *, model: str = "", key_variable: str = "", timeout: float, patience: float):
        try:
            import httpx2
            import tenacity  # noqa: F401
        except ImportError as error:
            raise ConfigError(INSTALL) from error
        self.root = base_url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._key = os.environ.get(key_variable, "").strip() if key_variable else ""
        if key_variable and not (self._key.isascii() and self._key.isprintable() and self._key):
            raise ConfigError(
                f"api_key_env={key_variable}: there is no such variable, or it holds no key of plain ASCII"
            )
        forms = ("|".join(_ESCAPES).format(char=re.escape(char), code=ord(char)) for char in self._key)
        codes = ("".join(f"(?:{form})" for form in forms), self._key.encode().hex(), *_in_base64(self._key.encode()))
        self._secret = re.compile("|".join(codes), re.IGNORECASE)
        self._timeout, self._patience = timeout, patience
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[str, ...]] = {}  # id -> the answer that it came with
        self._ids_repeat = False
        self._http: httpx2.Client | None = None
        self._takes_ids: bool | None = None  # None until a request has shown it
        self.dropped: tuple[str, ...] = ()  # fields that the server cannot read
        self._described: dict[str, Any] | None = None
        self._names: set[str] = set()  # of the model at the server
        self._told: set[str] = set()  # names of other models that were said once
        self._gives_reasons = False  # why its answers end

    def stop(self) -> None:
        """Ends requests in flight and waiting ones, until `start`."""
        self._stopped.set()
        if self._http is not None:
            self._http.close()
            self._http = None

    def start(self) -> None:
        self._stopped.clear()
        if self._http is None:
            self._http = self._open(self._timeout)

    def _open(self, timeout: float) -> "httpx2.Client":
        import httpx2

        return httpx2.Client(
            # Nothing packed is asked for, because a few bytes can unpack to fill the memory.
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            timeout=httpx2.Timeout(timeout, connect=min(timeout, 30.0)),
            # llama.cpp closes a connection after a stream, and a request that meets the end of one is lost.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            follow_redirects=False,
            trust_env=False,
        )

    def describe(self, patience: float = _START_SECONDS) -> dict[str, Any]:
        """Name, version, model and settings of the server, as far as its endpoints tell; ConfigError if it has none."""
        if self._described is None:
            self._described = self._ask(min(self._patience, patience))
        return self._described

    def _ask(self, patience: float) -> dict[str, Any]:
        try:
            listed = self._retried(lambda: self._fact("/v1/models", passing=True), patience)
        except _Rejected as rejection:
            raise ConfigError(f"{self.root}/v1/models answers {rejection.status}: {rejection}") from None
        entries = list(filter(_dict, _list(listed.get("data"))))
        by_id = {str(entry.get("id")): entry for entry in entries}
        model = self._model or next(iter(by_id), "")
        if not model:
            raise ConfigError(f"{self.root} lists no model at /v1/models; give its name with --served-model")
        aliases = {name: set(map(str, _list(entry.get("aliases")))) for name, entry in by_id.items()}
        names = by_id.keys() | set().union(*aliases.values())
        self._names = {model}.union(*({name} | others for name, others in aliases.items() if model in {name} | others))
        if (by_id and model not in names) or (not self._model and len(by_id) > 1):
            listing = _short(", ".join(sorted(by_id)))
            raise ConfigError(f"{self.root} serves {listing}, not {self._model or 'one'}; choose with --served-model")
        props, entry, slots = self._fact("/props"), by_id.get(model, {}), _list(self._fact("/slots").get(_LISTED))
        owner, defaults = str(entry.get("owned_by") or ""), _dict(props.get("default_generation_settings"))
        # Not the kinds of drafts in `/props`, which are none there whatever llama.cpp was started with.
        found = {**_dict(entry.get("meta")), **next(filter(_dict, slots), {}), **defaults, **entry, **props}
        settings = {
            name: found[name] for name in _SETTINGS if isinstance(found.get(name), str) or _plain(found.get(name))
        }
        return {
            "name": _short(_OWNERS.get(owner, owner) or "unnamed"),
            "version": _short(str(self._fact("/version").get("version") or props.get("build_info") or "")),
            "model": _short(model),
            "settings": {name: _short(value) if isinstance(value, str) else value for name, value in settings.items()},
        }

    def counters(self) -> dict[str, float]:
        """The counters at /metrics; empty where there are none."""
        found = ((name, float(value)) for name, value in _COUNTERS.findall(self._text_at("/metrics")))
        kept = [(name, value) for name, value in found if len(name) <= _LONGEST_COUNTER and _plain(value)]
        return dict(kept[:_MOST_COUNTERS])

    def _fact(self, path: str, *, passing: bool = False) -> dict[str, Any]:
        """The object at an address, or a list as {_LISTED: ...}; empty for none, unless a fault may pass."""
        try:
            content = self._cleaned(parse_json(self._text_at(path, passing=passing)))
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {_LISTED: content}

    def _text_at(self, path: str, *, passing: bool = False) -> str:
        """The text at an address; empty where there is none, unless a fault may pass."""
        import httpx2

        # `transformers serve` cannot list its models where the hub's cache is missing, and serves its one all the same.
        expected = (200, 404, 500) if self._model else (200, 404)
        try:
            with (
                self._open(_FACT_SECONDS) as http,
                _asked(http, "GET", self.root + path, _FACT_SECONDS, _LARGEST_BODY) as (response, body),
            ):
                text = _text(body)
        except (httpx2.RequestError, _Passing, DecodeError):
            if passing:
                raise
            return ""
        if passing and response.status_code not in expected:
            raise self._fault(response, text)
        return self.clean(text) if response.status_code == 200 else ""

    def complete(
        self, prompt: str, prompt_ids: Sequence[int], fields: Mapping[str, Any], sent: dict[str, Any]
    ) -> Answer:
        """One completion, after as many attempts as it needs.

        Args:
            prompt, prompt_ids: the same prompt; its token ids are sent where there are any and the server takes them.
            fields: the other fields of the request.
            sent: gets `prompt`, `dropped` and `attempts` as `Sample.server` documents them, also of a failure.

        Raises:
            Refused: the server refuses this request for good.
            DecodeError: all attempts failed.
            ConfigError: the server refuses every request: the key, the model, or a redirect.
        """
        model = self.describe()["model"]
        while True:
            as_ids, dropped = bool(prompt_ids) and self._takes_ids is not False, self.dropped
            sent |= {"prompt": "ids" if as_ids else "text", **({"dropped": list(dropped)} if dropped else {})}
            body = {"model": model, "prompt": list(prompt_ids) if as_ids else prompt, **fields}
            body = {name: value for name, value in body.items() if name not in dropped}
            try:
                answer = self._retried(functools.partial(self._once, body, sent), self._patience)
            except _Rejected as rejection:
                if re.search(rf"['\"`]{re.escape(model)}['\"`]", str(rejection)):  # not about this prompt
                    raise ConfigError(f"{self.root} refuses the model {model}: {rejection}") from None
                if not self._adapt(rejection, as_ids, fields):
                    asked = f"{len(prompt_ids)} prompt tokens, max_tokens {fields.get('max_tokens')}"
                    refusal = f"the server refuses the request ({rejection.status}): {rejection} ({asked})"
                    raise Refused(refusal) from None
                continue
            if as_ids:
                self._takes_ids = True
            return answer

    def _adapt(self, rejection: _Rejected, as_ids: bool, fields: Mapping[str, Any]) -> bool:
        """Whether the request can be sent in another form: with the prompt as text, or without fields."""
        text = str(rejection)
        if as_ids and self._takes_ids is None and "prompt" in text and "string" in text:
            with self._lock:
                if self._takes_ids is None:
                    log.warning("%s takes no token ids: prompts are sent as text, which it splits itself", self.root)
                self._takes_ids = False
            return True
        needed = ("max_tokens", "stream")
        unknown = [name for name in fields if name not in needed and re.search(rf"\b{name}\b", text)]
        if not unknown or not (rejection.status == 422 or _UNKNOWN_FIELD.search(text)):
            return False
        if "Unexpected fields in the request" in text and fields.get("temperature"):  # the words of transformers
            raise ConfigError(
                "`transformers serve` samples only where the checkpoint's generation config does; set T=0"
            )
        with self._lock:
            if new := [name for name in unknown if name not in self.dropped]:
                log.warning("%s refuses %s: sent without, as the records say", self.root, ", ".join(new))
                self.dropped += tuple(new)
        return True

    def _retried(self, attempt: Callable[[], _T], patience: float) -> _T:
        import httpx2
        import tenacity

        backoff = tenacity.wait_random_exponential(multiplier=0.5, max=30)

        def wait(state: "tenacity.RetryCallState") -> float:
            asked = getattr(state.outcome and state.outcome.exception(), "retry_after", None)
            return backoff(state) if asked is None else min(asked, patience)

        def tell(state: "tenacity.RetryCallState") -> None:
            level = logging.WARNING if state.attempt_number == 1 and patience else logging.DEBUG
            error = state.outcome.exception() if state.outcome else None
            log.log(level, "%s: %s; it is tried again", self.root, self._reason(error))

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((httpx2.RequestError, _Passing)),
            wait=wait,
            stop=tenacity.stop_any(
                tenacity.stop_when_event_set(self._stopped),
                tenacity.stop_all(tenacity.stop_after_attempt(_FEWEST_ATTEMPTS), tenacity.stop_after_delay(patience)),
            ),
            sleep=tenacity.sleep_using_event(self._stopped),
            before_sleep=tell,
            reraise=True,
        )
        try:
            return retrying(attempt)
        except (httpx2.RequestError, _Passing) as error:
            number = retrying.statistics.get("attempt_number", 1)
            # Without the cause, whose traceback would show what the server wrote.
            raise DecodeError(f"{self.root}: {self._reason(error)} ({number} attempts)") from None

    def _reason(self, error: BaseException | None) -> str:
        return self.clean(str(error) or f"no answer ({type(error).__name__})")

    def _once(self, body: Mapping[str, Any], sent: dict[str, Any]) -> Answer:
        """One attempt. Its time begins with the request, so that earlier attempts and waiting are not in it."""
        http = self._http
        if http is None:
            raise DecodeError("the run was stopped")
        sent["attempts"] = sent.get("attempts", 0) + 1
        most_tokens = body["max_tokens"]
        seconds = self._timeout * (_WHOLE + most_tokens / _TOKENS_PER_TIMEOUT)
        largest = _LARGEST_BODY + most_tokens * _BYTES_PER_TOKEN
        events: list[str] = []
        first, is_done, started = None, False, time.perf_counter()
        place = f"{self.root}/v1/completions"
        with _asked(http, "POST", place, seconds, largest, json=body) as (response, content):
            if response.status_code != 200:
                raise self._fault(response, _text(content))
            for data in _events(response, content):
                first = first or time.perf_counter()
                if is_done := data == "[DONE]":
                    break
                events.append(data)
                if self._stopped.is_set():
                    raise DecodeError("the run was stopped")
                if len(events) > _EVENTS_PER_TOKEN * most_tokens + _MORE_EVENTS:
                    raise DecodeError(
                        f"the answer has more than {len(events) - 1} events, for max_tokens {most_tokens}"
                    )
        ended = time.perf_counter()  # before anything is read
        chunks = [self._chunk(data) for data in events]
        answer = _assemble(chunks, ended - started, (first or ended) - started, is_done=is_done)
        if not (answer.finish_reason or self._gives_reasons):
            raise DecodeError("the server gives no finish_reason, and without one an answer may lack its end")
        if not answer.finish_reason:
            raise _Passing(_BREAKS_OFF)
        self._gives_reasons = True
        # The key may come in parts, too.
        answer = replace(answer, text=self.clean(answer.text), facts=self._cleaned(answer.facts))
        _check_facts(answer, most_tokens)
        created = next((str(chunk["created"]) for chunk in chunks if chunk.get("created")), "")
        self._refuse_repeated(str(answer.facts["id"]), (created, answer.text, answer.finish_reason))
        return self._noticed(answer, next((chunk["model"] for chunk in chunks if chunk.get("model")), ""))

    def _chunk(self, data: str) -> dict[str, Any]:
        try:
            content = self._cleaned(parse_json(self.clean(data)))
        except ValueError:
            raise _Passing("the answer is damaged JSON") from None
        is_error = "choices" not in _dict(content) and _dict(content).keys() & {"message", "detail"}
        if not isinstance(content, dict) or content.get("error") or is_error:
            raise _Passing(f"the stream holds an error: {_error_in(content)}")
        return content

    def _noticed(self, answer: Answer, model: Any) -> Answer:
        """The answer with another model's name than was asked for in its facts; says once which."""
        if not model or str(model) in self._names:
            return answer
        asked, name = self.describe()["model"], _short(str(model))
        with self._lock:
            is_new = name not in self._told and len(self._told) < _MORE_EVENTS
            self._told.update([name] if is_new else [])
        if is_new:
            log.warning("%s answers as the model %s, and %s was asked", self.root, name, asked)
        return replace(answer, facts={**answer.facts, "model": name})

    def _refuse_repeated(self, identity: str, content: tuple[str, ...]) -> None:
        """Raises _Passing for an earlier answer, with its id, moment and text: it would be counted twice."""
        # An id proves nothing where a server has one for all answers, or draws from a few (Ollama: 999): that is so
        # while it has shown no second one, and once it has given an id to two answers.
        with self._lock:
            before = self._seen.setdefault(identity, content) if identity else content
            if before != content and not self._ids_repeat:
                self._ids_repeat = True
                log.warning("%s: the ids of its answers repeat, so they show no answer that is given again", self.root)
            is_old = before is not content and len(self._seen) > 1 and not self._ids_repeat
        if is_old:
            raise _Passing(f"the server repeats an old answer (id {_short(identity)})")

    def _fault(self, response: "httpx2.Response", text: str) -> Exception:
        """The error that a response is, by its status, with what the text of its body says."""
        status, message = response.status_code, self.clean(_message(self.clean(text)))
        if 300 <= status < 400:
            target = _short(self.clean(response.headers.get("location", "")))
            return ConfigError(f"{self.root} redirects to {target}, which is not followed: name that address")
        if status in _ENDS_RUN:
            return ConfigError(f"{self.root} refuses every request ({status}): {message}")
        if 400 <= status < 500 and status not in _PASSING:
            return _Rejected(status, message)
        said = f"the server answers {status}: {message}" if message else f"the server answers {status}"
        return _Passing(said, _retry_after(response.headers.get("retry-after", "")))

    def clean(self, text: str) -> str:
        """The text with a placeholder for the key, in whatever escapes a server writes it."""
        return self._secret.sub("[API key]", text) if self._key else text

    def _cleaned(self, value: Any) -> Any:
        """A value of JSON with clean texts; nested no deeper than `parse_json` allows."""
        if isinstance(value, Mapping):
            return {self.clean(name): self._cleaned(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._cleaned(inner) for inner in value]
        return self.clean(value) if isinstance(value, str) else value


def client_of(args: ModelArgs) -> ServerClient:
    return ServerClient(
        args.base_url or "",
        model=args.served_model or "",
        key_variable=args.api_key_env or "",
        timeout=args.timeout or _TIMEOUT,
        patience=_PATIENCE if args.patience is None else args.patience,
    )


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
def _asked(
    http: "httpx2.Client", method: str, address: str, seconds: float, largest: int, **content: Any
) -> "Iterator[tuple[httpx2.Response, Iterator[bytes]]]":
    """A request's response and its unpacked body, both within bounds.

    Args:
        seconds: that it may take as a whole.
        largest: bytes that its body may have, once it is unpacked.

    Raises:
        _Passing: it takes longer.
        DecodeError: the body is longer, or packed in a way that nobody asked for.
        httpx2.RequestError: the connection fails.
    """
    import httpx2

    ending = _Ending(seconds)
    ending.timer.start()
    try:
        with http.stream(method, address, extensions={"trace": ending.trace}, **content) as response:
            yield response, _unpacked(response, largest)
    except httpx2.RequestError:
        if not ending.is_over:
            raise
    finally:
        ending.timer.cancel()
    if ending.is_over:
        raise _Passing(f"the answer took more than {seconds:g} s as a whole")


def _unpacked(response: "httpx2.Response", largest: int) -> Iterator[bytes]:
    coding = response.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity", *_PACKED):
        raise DecodeError(f"the server packs its answer ({_short(coding)}), which was not asked for")
    unpacker = zlib.decompressobj(_PACKED[coding]) if coding in _PACKED else None
    total = 0
    for piece in response.iter_raw():
        try:
            plain = unpacker.decompress(piece, largest + 1 - total) if unpacker else piece
        except zlib.error:
            raise _Passing("the answer is damaged: it cannot be unpacked") from None
        total += len(plain)
        if total > largest:
            raise DecodeError(f"the answer has more than {largest >> 20} MiB")
        yield plain


def _text(body: Iterator[bytes]) -> str:
    return b"".join(body).decode("utf-8-sig", "replace")


def _without_mark(body: Iterator[bytes]) -> Iterator[bytes]:
    """The pieces of a body without a byte order mark before them."""
    start = b""
    while len(start) < len(codecs.BOM_UTF8) and (piece := next(body, None)) is not None:
        start += piece
    yield start.removeprefix(codecs.BOM_UTF8)
    yield from body


def _events(response: "httpx2.Response", body: Iterator[bytes]) -> Iterator[str]:
    """The events of a stream; the whole body where a server does not stream. Both are UTF-8, whatever a header says."""
    import httpx2

    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        yield _text(body)
        return
    plain = httpx2.Response(200, headers={"content-type": kind}, content=_without_mark(body), request=response.request)
    try:
        yield from (event.data for event in httpx2.EventSource(plain))
    except httpx2.SSEError as error:
        raise _Passing(str(error)) from None


def _assemble(
    chunks: Sequence[Mapping[str, Any]], seconds: float, first_byte: float, *, is_done: bool = False
) -> Answer:
    """Joins the parts of an answer; raises _Passing if its end is missing, and DecodeError if it has no text."""
    texts: list[Any] = []
    others: list[str] = []
    ids: list[Any] = []
    last: dict[str, Any] = {}
    finish = stopped_by = ""
    for chunk in chunks:
        last = {**last, **{name: value for name, value in chunk.items() if value}}
        verbose = _dict(chunk.get("__verbose"))
        ids += _list(verbose.get("tokens"))
        of_answer = (one for one in filter(_dict, _list(chunk.get("choices"))) if one.get("index") in (0, None))
        for choice in list(of_answer)[:1]:
            others += [name for name in _IN_PLACE_OF_TEXT if choice.get(name)]
            if "text" in choice:
                texts.append(choice["text"])
            ids += _list(choice.get("token_ids"))
            reason = choice.get("finish_reason")
            finish = str(_dict(reason).get("type", reason) or finish)
            stopped_by = str(choice.get("stop_reason") or verbose.get("stopping_word") or stopped_by)
    if _ABORTED.search(finish) or not (finish or is_done):
        raise _Passing(_BREAKS_OFF)
    if not any(texts) and (others or not texts):
        held = f" but {others[0]}" if others else ""
        raise DecodeError(
            f"the choices of the answer have no text{held}: /v1/completions of the server has to answer in the form of "
            "completions, not of chats, and without a parser that takes thoughts out of texts"
        )
    if wrong := next((text for text in texts if not isinstance(text, str | None)), None):
        raise DecodeError(f"the text of the answer is a {type(wrong).__name__}")
    usage, timings, metrics = _dict(last.get("usage")), _dict(last.get("timings")), _dict(last.get("metrics"))
    drafts = _dict(metrics.get("speculative_decoding"))
    told: dict[str, Any] = {
        "completion_tokens": usage.get("completion_tokens"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "cached_tokens": _dict(usage.get("prompt_tokens_details")).get("cached_tokens", timings.get("cache_n")),
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
    facts |= {"id": _short(str(last.get("id") or "")), "finish_reason": _short(finish)}
    facts["first_byte_seconds"] = first_byte
    are_ids = all(type(token) is int and 0 <= token < MOST_TOKENS for token in ids)
    complete = bool(ids) and are_ids and len(ids) == facts.get("completion_tokens")
    text = "".join(filter(None, texts))
    return Answer(text, tuple(ids) if complete else None, finish, stopped_by, seconds, facts)


def _check_facts(answer: Answer, most_tokens: int) -> None:
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


def _in_base64(key: bytes) -> Iterator[str]:
    """Patterns of a key in base64, behind each number of bytes, as far as its own bits decide the letters."""
    for before in range(3 if key else 0):
        coded = base64.b64encode(bytes(before) + key)[(8 * before + 5) // 6 : 8 * (before + len(key)) // 6].decode()
        yield f"(?-i:{coded.replace('+', '[+-]').replace('/', '[/_]')})"


def _plain(value: Any) -> bool:
    """Whether it is a number that a record may hold."""
    return isinstance(value, int | float) and -MOST <= value <= MOST


def _retry_after(value: str) -> float | None:
    """Seconds that a header Retry-After asks for: a number or a date."""
    if re.fullmatch(r"\d{1,6}(\.\d+)?", value):
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None


def _message(text: str) -> str:
    """What the body of an error says, in a few words: OpenAI's form, FastAPI's, or any other."""
    try:
        return _error_in(parse_json(text))
    except ValueError:
        return _short(text)


def _error_in(content: Any) -> str:
    error = _dict(content).get("error", _dict(content).get("detail", content))
    found = _dict(error).get("message", error)
    return _short(found if isinstance(found, str) else json.dumps(found))


def _short(text: str) -> str:
    shown = visible(" ".join(text.split()))
    return shown if len(shown) <= _LONGEST_MESSAGE else f"{shown[:_LONGEST_MESSAGE]} ..."


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
