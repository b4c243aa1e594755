"""The client of a server with completions or chats: one prompt a request, streamed, retried after faults."""

import functools
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.runs.server_answers import BREAKS_OFF, Answer, assemble, error_of
from refusion_eval.runs.server_facts import as_dict, as_list, check_facts, is_number
from refusion_eval.runs.server_key import Key
from refusion_eval.runs.server_requests import APIS, BASIC, KNOWN, Api, Prompt
from refusion_eval.runs.server_wire import Passing, asked, body_text, error_message, events_of, short
from refusion_eval.store.records import LONGEST_TEXT
from refusion_eval.untrusted import parse_json

if TYPE_CHECKING:  # the extra `server` brings both
    import httpx2
    import tenacity

log = logging.getLogger(__name__)

INSTALL = "a server needs the packages httpx2 and tenacity: pip install 'refusion-eval[server]'"
# Answers that a later attempt may change; every 5xx is one too.
_PASSING = (408, 425, 429)
# Answers that concern every request, so that the run ends: the key, credit, its rights, and the model or the path.
_ENDS_RUN = (401, 402, 403, 404)
_FEWEST_ATTEMPTS = 2  # whatever time the first one took
# Bytes of a body once it is unpacked, and what each token that may be generated adds to that: events of some servers
# repeat the request. Events of a stream for each such token, and a few beside them.
_LARGEST_BODY, _BYTES_PER_TOKEN = LONGEST_TEXT, 4096
_EVENTS_PER_TOKEN, _MORE_EVENTS = 4, 64
# Seconds that a whole answer may take, as multiples of the silence that is allowed: so many, and one more for so many
# tokens that may be generated.
_WHOLE, _TOKENS_PER_TIMEOUT = 2.0, 1000
_MOST_COUNTERS, _LONGEST_COUNTER = 1000, 200
_LISTED = "listed"
# Words of a refusal of a value, with which the field itself is known.
_VALUE = re.compile(r"greater|less than|between|range|unsupported value|only the default|at (?:least|most)", re.I)
# A path that is not there, and what a server is asked to find that out.
_NO_PATH = (404, 405, 501)
_PROBE = "Hello"
# Words of a 400 that is about a field of the request; with a 422 the name of the field suffices.
_UNKNOWN_FIELD = re.compile(
    r"unrecogni[sz]ed|unknown|unexpected|unsupported|not (supported|permitted)|extra", re.IGNORECASE
)
# Requests for facts about the server, which are no part of a record's time.
_FACT_SECONDS = 10.0
# Seconds that a user may set.
_TIMEOUT, _PATIENCE = 600.0, 300.0
_START_SECONDS = 30.0  # in which a server has to be there when a run begins
_OWNERS = {"llamacpp": "llama.cpp", "vllm": "vLLM", "sglang": "SGLang", "tgi": "TGI", "library": "Ollama"}
_VERSION_AT = {"library": ("/api/version",), "ollada": ("/health",)}
# Settings of a server that its endpoints tell, by their names in `/props`, `/slots` and `/v1/models`.
_SETTINGS = ("n_ctx", "total_slots", "model_ftype", "max_model_len", "ftype", "n_params", "dtype", "speculative")
_COUNTERS = re.compile(
    r"^((?:llamacpp|vllm|sglang):\w+_(?:total|count|sum))(?:\{[^}\n]*\})? (\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)$",
    re.MULTILINE | re.ASCII,
)


_T = TypeVar("_T")


class Refused(DecodeError):
    """The server refuses this request, and would refuse it again."""


class _Rejected(Exception):
    """The server cannot read the request as it is."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    """Contacts one address only; redirects are refused, and proxies of the environment are not used.

    Args:
        base_url: http or https address, with or without /v1 at its end.
        model: the model's name at the server; empty for the only one that it lists.
        key_variable: environment variable that holds the key; empty for none. The key itself is kept out of every
            text: where a server repeats it, a placeholder stands for it.
        api: name of the interface in `APIS`; None to find out what the server has.
        timeout: seconds of silence after which an attempt has failed.
        patience: seconds during which failed attempts are repeated; there are two at least.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str = "",
        key_variable: str = "",
        api: str | None = None,
        timeout: float,
        patience: float,
    ) -> None:
        try:
            import httpx2
            import tenacity  # noqa: F401
        except ImportError as error:
            raise ConfigError(INSTALL) from error
        self.root = base_url.rstrip("/").removesuffix("/v1")
        self._model, self._api = model, api
        self._length_name = "max_tokens"  # of the field that says how long an answer may be
        self._key = Key(key_variable)
        self.clean, self._cleaned = self._key.clean, self._key.cleaned
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
            headers={"Accept-Encoding": "identity"} | self._key.headers,
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

    @property
    def api(self) -> Api:
        return APIS[self.api_name]

    @functools.cached_property
    def api_name(self) -> str:
        """The interface that was asked for, that the server is known to have, or that answers to one token."""
        name = self._api or KNOWN.get(self.describe()["name"]) or self._found()
        if self._api is None and name != "completions":
            log.warning("%s is asked by its %s (--server-api chooses)", self.root, APIS[name].path)
        return name

    def _found(self) -> str:
        import httpx2

        for name, api in APIS.items():
            prompt = [{"role": "user", "content": _PROBE}] if api.takes_messages else _PROBE
            body = api.body(self.describe()["model"], prompt, {"max_tokens": 1})
            with suppress(httpx2.RequestError, Passing, DecodeError), self._open(self._timeout) as http:
                place = self.root + api.path
                with asked(http, "POST", place, self._timeout, _LARGEST_BODY, json=body) as (response, content):
                    body_text(content)
                if response.status_code not in _NO_PATH:
                    return name
        return "completions"

    def _ask(self, patience: float) -> dict[str, Any]:
        try:
            listed = self._retried(lambda: self._fact("/v1/models", passing=True), patience)
        except _Rejected as rejection:
            raise ConfigError(f"{self.root}/v1/models answers {rejection.status}: {rejection}") from None
        entries = list(filter(as_dict, as_list(listed.get("data"))))
        by_id = {str(entry.get("id")): entry for entry in entries}
        if not by_id:  # ollada, and Ollama behind some gateways
            tagged = map(as_dict, as_list(self._fact("/api/tags").get("models")))
            owner = "ollada" if "loaded" in self._fact("/health") else "library"
            by_id = {str(entry["name"]): {"owned_by": owner} for entry in tagged if entry.get("name")}
        model = self._model or next(iter(by_id), "")
        if not model:
            raise ConfigError(f"{self.root} lists no model at /v1/models; give its name with --served-model")
        aliases = {name: set(map(str, as_list(entry.get("aliases")))) for name, entry in by_id.items()}
        names = by_id.keys() | set().union(*aliases.values())
        self._names = {model}.union(*({name} | others for name, others in aliases.items() if model in {name} | others))
        if (by_id and model not in names) or (not self._model and len(by_id) > 1):
            listing = short(", ".join(sorted(by_id)))
            raise ConfigError(f"{self.root} serves {listing}, not {self._model or 'one'}; choose with --served-model")
        props, entry, slots = self._fact("/props"), by_id.get(model, {}), as_list(self._fact("/slots").get(_LISTED))
        owner, defaults = str(entry.get("owned_by") or ""), as_dict(props.get("default_generation_settings"))
        # Not the kinds of drafts in `/props`, which are none there whatever llama.cpp was started with.
        found = {**as_dict(entry.get("meta")), **next(filter(as_dict, slots), {}), **defaults, **entry, **props}
        settings = {
            name: found[name] for name in _SETTINGS if isinstance(found.get(name), str) or is_number(found.get(name))
        }
        places = ("/version", *_VERSION_AT.get(owner, ()))
        told = (self._fact(place).get("version") for place in places)
        version = next(filter(None, told), props.get("build_info"))
        return {
            "name": short(_OWNERS.get(owner, owner) or "unnamed"),
            "version": short(str(version or "")),
            "model": short(model),
            "settings": {name: short(value) if isinstance(value, str) else value for name, value in settings.items()},
        }

    def counters(self) -> dict[str, float]:
        """The counters at /metrics; empty where there are none."""
        found = ((name, float(value)) for name, value in _COUNTERS.findall(self._text_at("/metrics")))
        kept = [(name, value) for name, value in found if len(name) <= _LONGEST_COUNTER and is_number(value)]
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
                asked(http, "GET", self.root + path, _FACT_SECONDS, _LARGEST_BODY) as (response, body),
            ):
                text = body_text(body)
        except (httpx2.RequestError, Passing, DecodeError):
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
            as_ids, dropped = self._sends_ids(prompt_ids), self.dropped
            kind = "messages" if self.api.takes_messages else "ids" if as_ids else "text"
            sent |= {"prompt": kind, **({"dropped": list(dropped)} if dropped else {})}
            kept = {name: value for name, value in fields.items() if name not in dropped}
            kept = {self._length_name if name == "max_tokens" else name: value for name, value in kept.items()}
            asked: Prompt = list(prompt_ids) if as_ids else json.loads(prompt) if kind == "messages" else prompt
            body = self.api.body(model, asked, kept)
            try:
                attempt = functools.partial(self._once, body, fields["max_tokens"], sent)
                answer = self._retried(attempt, self._patience)
            except _Rejected as rejection:
                if re.search(rf"['\"`]{re.escape(model)}['\"`]", str(rejection)):  # not about this prompt
                    raise ConfigError(f"{self.root} refuses the model {model}: {rejection}") from None
                if not self._adapt(rejection, as_ids, fields):
                    asked_for = f"{len(prompt_ids)} prompt tokens, max_tokens {fields.get('max_tokens')}"
                    refusal = f"the server refuses the request ({rejection.status}): {rejection} ({asked_for})"
                    raise Refused(refusal) from None
                continue
            if as_ids:
                self._takes_ids = True
            return answer

    def _sends_ids(self, prompt_ids: Sequence[int]) -> bool:
        return bool(prompt_ids) and self._takes_ids is not False and not self.api.takes_messages

    def _adapt(self, rejection: _Rejected, as_ids: bool, fields: Mapping[str, Any]) -> bool:
        """Whether the request can be sent in another form: with the prompt as text, or without fields."""
        text = str(rejection)
        if as_ids and self._takes_ids is None and "prompt" in text and "string" in text:
            with self._lock:
                if self._takes_ids is None:
                    log.warning("%s takes no token ids: prompts are sent as text, which it splits itself", self.root)
                self._takes_ids = False
            return True
        if re.search(r"\btemperature\b", text) and _VALUE.search(text):
            raise ConfigError(
                f"{self.root} refuses temperature={fields['temperature']}: {text}. Set one that it takes, such as "
                "--set temperature=1.0, and draw several samples (--samples 4), whose accuracy has an interval"
            )
        if "max_completion_tokens" in text and self._length_name == "max_tokens":
            log.warning("%s wants max_completion_tokens in place of max_tokens", self.root)
            self._length_name = "max_completion_tokens"
            return True
        needed = ("max_tokens", "stream")
        named = [name for name in fields if name not in needed and re.search(rf"\b{name}\b", text)]
        more = [name for name in fields if name not in BASIC and name not in self.dropped]
        # A chat that refuses one of the fields that not all have would refuse the next one, too.
        unknown = more if self.api.takes_messages and set(named) & set(more) else named
        if not unknown or not (rejection.status == 422 or _UNKNOWN_FIELD.search(text)):
            return False
        if "Unexpected fields in the request" in text and fields.get("temperature") and not self.api.takes_messages:
            raise ConfigError(  # the words of transformers
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
            retry=tenacity.retry_if_exception_type((httpx2.RequestError, Passing)),
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
        except (httpx2.RequestError, Passing) as error:
            number = retrying.statistics.get("attempt_number", 1)
            # Without the cause, whose traceback would show what the server wrote.
            raise DecodeError(f"{self.root}: {self._reason(error)} ({number} attempts)") from None

    def _reason(self, error: BaseException | None) -> str:
        return self.clean(str(error) or f"no answer ({type(error).__name__})")

    def _once(self, body: Mapping[str, Any], most_tokens: int, sent: dict[str, Any]) -> Answer:
        """One attempt. Its time begins with the request, so that earlier attempts and waiting are not in it."""
        http = self._http
        if http is None:
            raise DecodeError("the run was stopped")
        sent["attempts"] = sent.get("attempts", 0) + 1
        longest = self._timeout * (_WHOLE + most_tokens / _TOKENS_PER_TIMEOUT)
        largest = _LARGEST_BODY + most_tokens * _BYTES_PER_TOKEN
        events: list[str] = []
        times: list[float] = []
        is_done, started = False, time.perf_counter()
        place = self.root + self.api.path
        with asked(http, "POST", place, longest, largest, json=body) as (response, content):
            if response.status_code != 200:
                raise self._fault(response, body_text(content))
            headers = {name.lower(): self.clean(value) for name, value in response.headers.items()}
            for data in events_of(response, content):
                if is_done := data == "[DONE]":
                    break
                times.append(time.perf_counter() - started)
                events.append(data)
                if self._stopped.is_set():
                    raise DecodeError("the run was stopped")
                if len(events) > _EVENTS_PER_TOKEN * most_tokens + _MORE_EVENTS:
                    raise DecodeError(
                        f"the answer has more than {len(events) - 1} events, for max_tokens {most_tokens}"
                    )
        seconds = time.perf_counter() - started  # before anything is read
        chunks = [self._chunk(data) for data in events]
        streamed = headers.get("content-type", "").partition(";")[0].strip() != "application/json"
        answer = assemble(
            chunks,
            seconds,
            next(iter(times), seconds),
            streamed=streamed,
            is_done=is_done,
            headers=headers,
            times=times,
            api=self.api_name,
        )
        if streamed and not answer.finish_reason:
            if not self._gives_reasons:
                raise DecodeError("the server gives no finish_reason, and without one an answer may lack its end")
            raise Passing(BREAKS_OFF)
        self._gives_reasons = True
        # The key may come in parts, too.
        answer = replace(answer, text=self.clean(answer.text), facts=self._cleaned(answer.facts))
        check_facts(answer.facts, answer.text, most_tokens, longest)
        created = next((str(chunk["created"]) for chunk in chunks if chunk.get("created")), "")
        self._refuse_repeated(str(answer.facts["id"]), (created, answer.text, answer.finish_reason))
        return self._noticed(answer, next((chunk["model"] for chunk in chunks if chunk.get("model")), ""))

    def _chunk(self, data: str) -> dict[str, Any]:
        try:
            content = self._cleaned(parse_json(self.clean(data)))
        except ValueError:
            raise Passing(f"the answer is damaged JSON: {short(self.clean(data))}") from None
        if (error := error_of(content)) is not None:
            raise Passing(f"the stream holds an error: {error}")
        return content

    def _noticed(self, answer: Answer, model: Any) -> Answer:
        """The answer with another model's name than was asked for in its facts; says once which."""
        if not model or str(model) in self._names:
            return answer
        asked, name = self.describe()["model"], short(str(model))
        with self._lock:
            is_new = name not in self._told and len(self._told) < _MORE_EVENTS
            self._told.update([name] if is_new else [])
        if is_new:
            log.warning("%s answers as the model %s, and %s was asked", self.root, name, asked)
        return replace(answer, facts={**answer.facts, "model": name})

    def _refuse_repeated(self, identity: str, content: tuple[str, ...]) -> None:
        """Raises Passing for an earlier answer, with its id, moment and text: it would be counted twice."""
        # An id proves nothing where a server has one for all answers, or draws from a few (Ollama: 999): that is so
        # while it has shown no second one, and once it has given an id to two answers.
        with self._lock:
            before = self._seen.setdefault(identity, content) if identity else content
            if before != content and not self._ids_repeat:
                self._ids_repeat = True
                log.warning("%s: the ids of its answers repeat, so they show no answer that is given again", self.root)
            is_old = before is not content and len(self._seen) > 1 and not self._ids_repeat
        if is_old:
            raise Passing(f"the server repeats an old answer (id {short(identity)})")

    def _fault(self, response: "httpx2.Response", text: str) -> Exception:
        """The error that a response is, by its status, with what the text of its body says."""
        status, message = response.status_code, self.clean(error_message(self.clean(text)))
        if 300 <= status < 400:
            target = short(self.clean(response.headers.get("location", "")))
            return ConfigError(f"{self.root} redirects to {target}, which is not followed: name that address")
        if status in _ENDS_RUN:
            return ConfigError(f"{self.root} refuses every request ({status}): {message}")
        if 400 <= status < 500 and status not in _PASSING:
            return _Rejected(status, message)
        said = f"the server answers {status}: {message}" if message else f"the server answers {status}"
        return Passing(said, _retry_after(response.headers))


def client_of(args: ModelArgs) -> ServerClient:
    return ServerClient(
        args.base_url or "",
        model=args.served_model or "",
        api=args.server_api,
        key_variable=args.api_key_env or "",
        timeout=args.timeout or _TIMEOUT,
        patience=_PATIENCE if args.patience is None else args.patience,
    )


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait: by retry-after-ms, or by Retry-After as a number or a date."""
    milliseconds, value = headers.get("retry-after-ms", ""), headers.get("retry-after", "")
    if re.fullmatch(r"\d{1,9}(\.\d+)?", milliseconds):
        return float(milliseconds) / 1000
    if re.fullmatch(r"\d{1,6}(\.\d+)?", value):
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None
