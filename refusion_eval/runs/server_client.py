"""The client of a server with OpenAI-compatible completions: one prompt a request, streamed, retried after faults."""

import functools
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.untrusted import visible

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
_MOST_IDS = 10**6
_ABORTED = ("", "abort", "error")  # finish reasons of answers that lack their end
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
_COUNTERS = re.compile(r"^((?:llamacpp|vllm|sglang):\w+_(?:total|count|sum))(?:\{[^}]*\})? ([0-9.eE+]+)$", re.MULTILINE)


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
        # Inside JSON a character of the key may stand behind a backslash.
        self._secret = re.compile("".join(rf"\\?{re.escape(letter)}" for letter in self._key) or "(?!)")
        self._timeout, self._patience = timeout, patience
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[str, ...]] = {}  # id -> the answer that it came with
        self._ids_repeat = False
        self._http: httpx2.Client | None = None
        self._takes_ids: bool | None = None  # None until a request has shown it
        self.dropped: tuple[str, ...] = ()  # fields that the server cannot read
        self._described: dict[str, Any] | None = None

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
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
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
            raise ConfigError(f"{self.root}/v1/models answers {rejection.status}: {rejection}") from rejection
        entries = list(filter(_dict, _list(listed.get("data"))))
        by_id = {str(entry.get("id")): entry for entry in entries}
        model = self._model or next(iter(by_id), "")
        if not model:
            raise ConfigError(f"{self.root} lists no model at /v1/models; give its name with --served-model")
        names = {*by_id, *(str(alias) for entry in entries for alias in _list(entry.get("aliases")))}
        if (by_id and model not in names) or (not self._model and len(by_id) > 1):
            listing = _short(", ".join(sorted(by_id)))
            raise ConfigError(f"{self.root} serves {listing}, not {self._model or 'one'}; choose with --served-model")
        props, entry, slots = self._fact("/props"), by_id.get(model, {}), _list(self._fact("/slots").get("listed"))
        owner, defaults = str(entry.get("owned_by") or ""), _dict(props.get("default_generation_settings"))
        # Not the kinds of drafts in `/props`, which are none there whatever llama.cpp was started with.
        found = {**_dict(entry.get("meta")), **next(filter(_dict, slots), {}), **defaults, **entry, **props}
        settings = {name: found[name] for name in _SETTINGS if isinstance(found.get(name), int | float | str)}
        return {
            "name": _short(_OWNERS.get(owner, owner) or "unnamed"),
            "version": _short(str(self._fact("/version").get("version") or props.get("build_info") or "")),
            "model": _short(model),
            "settings": {name: _short(value) if isinstance(value, str) else value for name, value in settings.items()},
        }

    def counters(self) -> dict[str, float]:
        """The counters at /metrics; empty where there are none."""
        return {name: float(value) for name, value in _COUNTERS.findall(self._fact("/metrics").get("text", ""))}

    def _fact(self, path: str, *, passing: bool = False) -> dict[str, Any]:
        """The object at an address, else {"listed": ...} or {"text": ...}; empty for none, unless a fault may pass."""
        import httpx2

        try:
            with self._open(_FACT_SECONDS) as http:
                response = http.get(self.root + path)
        except httpx2.RequestError:
            if passing:
                raise
            return {}
        # `transformers serve` cannot list its models where the hub's cache is missing, and serves its one all the same.
        if passing and response.status_code not in ((200, 404, 500) if self._model else (200, 404)):
            raise self._fault(response)
        if response.status_code != 200:
            return {}
        text = self._clean(response.text)
        try:
            content = json.loads(text)
        except ValueError:
            return {"text": text}
        return content if isinstance(content, dict) else {"listed": content}

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
                    raise ConfigError(f"{self.root} refuses the model {model}: {rejection}") from rejection
                if not self._adapt(rejection, as_ids, fields):
                    asked = f"{len(prompt_ids)} prompt tokens, max_tokens {fields.get('max_tokens')}"
                    refusal = f"the server refuses the request ({rejection.status}): {rejection} ({asked})"
                    raise Refused(refusal) from rejection
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
            raise DecodeError(f"{self.root}: {self._reason(error)} ({number} attempts)") from error

    def _reason(self, error: BaseException | None) -> str:
        return self._clean(str(error) or f"no answer ({type(error).__name__})")

    def _once(self, body: Mapping[str, Any], sent: dict[str, Any]) -> Answer:
        """One attempt. Its time begins with the request, so that earlier attempts and waiting are not in it."""
        http = self._http
        if http is None:
            raise DecodeError("the run was stopped")
        sent["attempts"] = sent.get("attempts", 0) + 1
        events, first, started = [], None, time.perf_counter()
        with http.stream("POST", f"{self.root}/v1/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise self._fault(response)
            for data in _events(response):
                first = first or time.perf_counter()
                events.append(data)
                if self._stopped.is_set():
                    raise DecodeError("the run was stopped")
        ended = time.perf_counter()  # before anything is read
        chunks = [self._chunk(data) for data in events if data != "[DONE]"]
        answer = _assemble(chunks, ended - started, (first or ended) - started)
        created = next((str(chunk["created"]) for chunk in chunks if chunk.get("created")), "")
        self._refuse_repeated(str(answer.facts["id"]), (created, answer.text, answer.finish_reason))
        return answer

    def _chunk(self, data: str) -> dict[str, Any]:
        text = self._clean(data)
        try:
            content = json.loads(text)
        except ValueError as error:
            raise _Passing("the answer is damaged JSON") from error
        if not isinstance(content, dict) or content.get("error"):
            raise _Passing(f"the stream holds an error: {_message(text)}")
        return content

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

    def _fault(self, response: "httpx2.Response") -> Exception:
        """The error that a response is, by its status, with what its body says."""
        status, message = response.status_code, _message(self._clean(response.text))
        if 300 <= status < 400:
            target = _short(self._clean(response.headers.get("location", "")))
            return ConfigError(f"{self.root} redirects to {target}, which is not followed: name that address")
        if status in _ENDS_RUN:
            return ConfigError(f"{self.root} refuses every request ({status}): {message}")
        if 400 <= status < 500 and status not in _PASSING:
            return _Rejected(status, message)
        said = f"the server answers {status}: {message}" if message else f"the server answers {status}"
        return _Passing(said, _retry_after(response.headers.get("retry-after", "")))

    def _clean(self, text: str) -> str:
        return self._secret.sub("[API key]", text)


def client_of(args: ModelArgs) -> ServerClient:
    return ServerClient(
        args.base_url or "",
        model=args.served_model or "",
        key_variable=args.api_key_env or "",
        timeout=args.timeout or _TIMEOUT,
        patience=_PATIENCE if args.patience is None else args.patience,
    )


def _events(response: "httpx2.Response") -> Iterator[str]:
    """The events of a stream; the whole body where a server does not stream."""
    import httpx2

    if response.headers.get("content-type", "").startswith("application/json"):
        response.read()
        yield response.text
        return
    try:
        yield from (event.data for event in httpx2.EventSource(response))
    except httpx2.SSEError as error:
        raise _Passing(str(error)) from error


def _assemble(chunks: Sequence[Mapping[str, Any]], seconds: float, first_byte: float) -> Answer:
    """Joins the parts of an answer; raises _Passing if its end is missing."""
    texts: list[str] = []
    ids: list[Any] = []
    last: dict[str, Any] = {}
    finish = stopped_by = ""
    for chunk in chunks:
        last = {**last, **{name: value for name, value in chunk.items() if value}}
        verbose = _dict(chunk.get("__verbose"))
        ids += _list(verbose.get("tokens"))
        for choice in filter(_dict, _list(chunk.get("choices"))[:1]):
            texts.append(str(choice.get("text") or ""))
            ids += _list(choice.get("token_ids"))
            finish = str(choice.get("finish_reason") or finish)
            stopped_by = str(choice.get("stop_reason") or verbose.get("stopping_word") or stopped_by)
    if finish in _ABORTED:
        raise _Passing("the answer breaks off")
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
    counts = {name: value for name, value in told.items() if type(value) in (int, float) and 0 <= value < 2**53}
    facts: dict[str, Any] = {
        name: value / 1000 if name.endswith("_seconds") else value for name, value in counts.items()
    }
    facts |= {"id": _short(str(last.get("id") or "")), "finish_reason": _short(finish)}
    facts["first_byte_seconds"] = first_byte
    are_ids = all(type(token) is int and 0 <= token < 2**31 for token in ids) and len(ids) <= _MOST_IDS
    complete = bool(ids) and are_ids and len(ids) == facts.get("completion_tokens")
    return Answer("".join(texts), tuple(ids) if complete else None, finish, stopped_by, seconds, facts)


def _retry_after(value: str) -> float | None:
    """Seconds that a header Retry-After asks for: a number or a date."""
    if re.fullmatch(r"\d{1,6}(\.\d+)?", value):
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return None


def _message(text: str) -> str:
    """What the body of an error says, in a few words: OpenAI's form, FastAPI's, or any other."""
    try:
        content = json.loads(text)
    except ValueError:
        return _short(text)
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
