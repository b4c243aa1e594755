"""A server at its address: what it tells of itself, what it counts, and by which interface it is asked."""

import functools
import logging
import re
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.runs.apis import APIS, PROBED, Api
from refusion_eval.runs.server_attempts import Attempts, Rejected
from refusion_eval.runs.server_facts import as_dict, as_list, is_number
from refusion_eval.runs.server_key import Key
from refusion_eval.runs.server_requests import KNOWN
from refusion_eval.runs.server_wire import Passing, asked, body_text, short
from refusion_eval.store.records import LONGEST_TEXT
from refusion_eval.untrusted import parse_json

if TYPE_CHECKING:
    import ssl

    import httpx2  # the extra `server` brings it

log = logging.getLogger(__name__)

INSTALL = "a server needs the packages httpx2 and tenacity: pip install 'refusion-eval[server]'"
LARGEST_BODY = LONGEST_TEXT  # bytes, once it is unpacked
_MOST_COUNTERS, _LONGEST_COUNTER = 1000, 200
_LISTED = "listed"
# A path that is not there, and what a server is asked to find that out.
_NO_PATH = (404, 405, 501)
_PROBE = "Hello"
# Requests for facts about the server, which are no part of a record's time.
_FACT_SECONDS = 10.0
_START_SECONDS = 30.0  # in which a server has to be there when a run begins
_OWNERS = {"llamacpp": "llama.cpp", "vllm": "vLLM", "sglang": "SGLang", "tgi": "TGI", "library": "Ollama"}
_AZURE = "Azure"
_VERSION_AT = {"library": ("/api/version",), "ollada": ("/health",)}
# Settings of a server that its endpoints tell, by their names in `/props`, `/slots` and `/v1/models`.
_SETTINGS = ("n_ctx", "total_slots", "model_ftype", "max_model_len", "ftype", "n_params", "dtype", "speculative")
_COUNTERS = re.compile(
    r"^((?:llamacpp:|vllm:|sglang:|dlmserve_)\w+_(?:total|count|sum))(?:\{[^}\n]*\})? "
    r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)$",
    re.MULTILINE | re.ASCII,
)
# Ends of addresses behind which paths have no /v1: another version (LM Studio), and a deployment of Azure's.
_DEPLOYMENT = re.compile(r"/openai/deployments/([^/]+)$")
_OWN_VERSION = re.compile(rf"/v\d+$|{_DEPLOYMENT.pattern}")


@functools.cache
def _certificates() -> "ssl.SSLContext":
    """The authorities that a server's certificate may be of; reading them takes longer than most requests for facts."""
    import httpx2

    return httpx2.create_ssl_context(trust_env=False)


class Place:
    """Contacts one address only; redirects are refused, and proxies of the environment are not used.

    Args:
        base_url: http or https address, with or without /v1 at its end; of Azure that of a deployment, with its
            `?api-version=`.
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
        address, mark, query = base_url.partition("?")
        self.root, self._query = address.rstrip("/").removesuffix("/v1"), mark + query
        self._deployment = next(iter(_DEPLOYMENT.findall(self.root)), "")
        self._model, self._api = model or self._deployment, api
        self._key = Key(key_variable)
        self.clean, self._cleaned = self._key.clean, self._key.cleaned
        self._timeout, self._patience = timeout, patience
        self._attempts = Attempts(self.root, self._key)
        self._lock = threading.Lock()
        self._http: httpx2.Client | None = None
        self._described: dict[str, Any] | None = None
        self._names: set[str] = set()  # of the model at the server

    def stop(self) -> None:
        """Ends requests in flight and waiting ones, until `start`."""
        self._attempts.stopped.set()
        if self._http is not None:
            self._http.close()
            self._http = None

    def start(self) -> None:
        self._attempts.stopped.clear()
        if self._http is None:
            self._http = self._open(self._timeout)

    def _open(self, timeout: float) -> "httpx2.Client":
        import httpx2

        key = self._key.headers(of_azure=bool(self._deployment))
        return httpx2.Client(
            # Nothing packed is asked for, because a few bytes can unpack to fill the memory.
            headers={"Accept-Encoding": "identity"} | key,
            timeout=httpx2.Timeout(timeout, connect=min(timeout, 30.0)),
            # llama.cpp closes a connection after a stream, and a request that meets the end of one is lost.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            follow_redirects=False,
            trust_env=False,
            verify=_certificates(),
        )

    def _at(self, path: str) -> str:
        return self.root + (path.removeprefix("/v1") if _OWN_VERSION.search(self.root) else path) + self._query

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

        for name, api in ((name, APIS[name]) for name in PROBED):
            prompt = [{"role": "user", "content": _PROBE}] if api.takes_messages else _PROBE
            body = api.body(self.describe()["model"], prompt, {"max_tokens": 1})
            with suppress(httpx2.RequestError, Passing, DecodeError), self._open(self._timeout) as http:
                place = self._at(api.path)
                with asked(http, "POST", place, self._timeout, LARGEST_BODY, json=body) as (response, content):
                    body_text(content)
                if response.status_code not in _NO_PATH:
                    return name
        return "completions"

    def _ask(self, patience: float) -> dict[str, Any]:
        try:
            listed = self._attempts.repeat(lambda: self._fact("/v1/models", passing=True), patience)
        except Rejected as rejection:
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
        if self._deployment:
            by_id.setdefault(model, {"owned_by": _AZURE})
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
                asked(http, "GET", self._at(path), _FACT_SECONDS, LARGEST_BODY) as (response, body),
            ):
                text = body_text(body)
        except (httpx2.RequestError, Passing, DecodeError):
            if passing:
                raise
            return ""
        if passing and response.status_code not in expected:
            raise self._attempts.fault(response, text)
        return self.clean(text) if response.status_code == 200 else ""
