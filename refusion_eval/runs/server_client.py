"""The client of a server with completions or chats: one prompt a request, streamed, retried after faults."""

import functools
import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.runs.apis import Prompt
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.runs.server_answers import BREAKS_OFF, Answer, BrokenOff, Earlier, assemble, model_of, object_of
from refusion_eval.runs.server_attempts import Rejected
from refusion_eval.runs.server_facts import CANVAS, COUNTS_STEPS, check_facts, steps_between
from refusion_eval.runs.server_place import LARGEST_BODY, Place
from refusion_eval.runs.server_requests import BASIC, ignored_by, unwritten_by
from refusion_eval.runs.server_wire import Passing, asked, body_text, events_of, short

log = logging.getLogger(__name__)

# Bytes that each token that may be generated adds to those of a body: events of some servers repeat the request.
# Events of a stream for each such token, and a few beside them.
_BYTES_PER_TOKEN = 4096
_EVENTS_PER_TOKEN, _MORE_EVENTS = 4, 64
# Seconds that a whole answer may take, as multiples of the silence that is allowed: so many, and one more for so many
# tokens that may be generated.
_WHOLE, _TOKENS_PER_TIMEOUT = 2.0, 1000
# Words of a refusal of a value, with which the field itself is known.
_VALUE = re.compile(
    r"greater|less than|between|range|positive|unsupported value|only the default|at (?:least|most)", re.I
)
# Words of a 400 that is about a field of the request; with a 422 the name of the field suffices.
_UNKNOWN_FIELD = re.compile(
    r"unrecogni[sz]ed|unknown|unexpected|unsupported|not (support|permitted)|extra", re.IGNORECASE
)
# Seconds that a user may set.
_TIMEOUT, _PATIENCE = 600.0, 300.0


class Refused(DecodeError):
    """The server refuses this request, and would refuse it again."""


class ServerClient(Place):
    """Has a server complete prompts, as often as it takes.

    Args:
        base_url, options: as `Place` documents them.
        diffusion: as of `facts_of`.
    """

    def __init__(self, base_url: str, *, diffusion: bool = False, **options: Any) -> None:
        super().__init__(base_url, **options)
        self._diffusion = diffusion
        self._length_name = "max_tokens"  # of the field that says how long an answer may be
        self._earlier = Earlier(self.root)
        self._takes_ids: bool | None = None  # None until a request has shown it
        self.dropped: tuple[str, ...] = ()  # fields that the server cannot read
        self._told: set[str] = set()  # names of other models that were said once
        self._gives_reasons = False  # why its answers end

    def complete(
        self,
        prompt: str,
        prompt_ids: Sequence[int],
        fields: Mapping[str, Any],
        sent: dict[str, Any],
        *,
        is_alone: bool = False,
    ) -> Answer:
        """One completion, after as many attempts as it needs.

        Args:
            prompt, prompt_ids: the same prompt; its token ids are sent where there are any and the server takes them.
            fields: the other fields of the request.
            sent: gets `prompt`, `dropped`, `ignored` and `attempts`, as `Sample.server` has them, also of a failure.
            is_alone: whether no other request of this client runs beside it, so that counters of a server are its own.

        Raises:
            Refused: the server refuses this request for good.
            DecodeError: all attempts failed.
            ConfigError: the server refuses every request: the key, the model, or a redirect.
        """
        model = self.describe()["model"]
        loops: set[str] = set()
        counts_steps = is_alone and self.describe()["name"] in COUNTS_STEPS
        while True:
            as_ids = bool(prompt_ids) and self._takes_ids is not False and not self.api.takes_messages
            length_name = self._length_name
            dropped = (*self.dropped, *unwritten_by(self.api, fields))
            kind = "messages" if self.api.takes_messages else "ids" if as_ids else "text"
            kept = {name: value for name, value in fields.items() if name not in dropped}
            ignored = ignored_by(self.describe()["name"], self.api_name, kept)
            sent |= {"prompt": kind, **({"dropped": list(dropped)} if dropped else {})}
            sent |= {"ignored": ignored} if ignored else {}
            kept = {length_name if name == "max_tokens" else name: value for name, value in kept.items()}
            asked: Prompt = list(prompt_ids) if as_ids else json.loads(prompt) if kind == "messages" else prompt
            body = self.api.body(model, asked, kept)
            try:
                attempt = functools.partial(self._once, body, fields, sent, counts_steps, loops)
                answer = self._attempts.repeat(attempt, self._patience)
            except Rejected as rejection:
                if not self._adapt(rejection, as_ids, fields, dropped, length_name):
                    if re.search(rf"['\"`]{re.escape(model)}['\"`]", str(rejection)):  # not about this prompt
                        raise ConfigError(f"{self.root} refuses the model {model}: {rejection}") from None
                    asked_for = f"{len(prompt_ids)} prompt tokens, max_tokens {fields.get('max_tokens')}"
                    refusal = f"the server refuses the request ({rejection.status}): {rejection} ({asked_for})"
                    raise Refused(refusal) from None
                continue
            if as_ids:
                self._takes_ids = True
            return answer

    def _adapt(
        self, rejection: Rejected, as_ids: bool, fields: Mapping[str, Any], dropped: Sequence[str], length_name: str
    ) -> bool:
        """Whether the request can be sent in another form: with the prompt as text, or without fields.

        Args:
            rejection: the server's refusal of the request with these fields but the dropped ones, and with the prompt
                as ids or not. Another request may have shown since then what the server does not take.
            length_name: by which it had `max_tokens`.
        """
        text = str(rejection)
        if as_ids and self._takes_ids is not True and "prompt" in text and "string" in text:
            with self._lock:
                if self._takes_ids is None:
                    log.warning("%s takes no token ids: prompts are sent as text, which it splits itself", self.root)
                self._takes_ids = False
            return True
        is_unknown = rejection.status == 422 or bool(_UNKNOWN_FIELD.search(text))
        # Only chats have the other name, and a length that is too large is called by both (vLLM).
        is_wish = "max_completion_tokens" in text and _UNKNOWN_FIELD.search(text) and self.api_name == "chat"
        if is_wish and length_name == "max_tokens":
            with self._lock:
                if self._length_name == length_name:
                    log.warning("%s wants max_completion_tokens in place of max_tokens", self.root)
                self._length_name = "max_completion_tokens"
            return True
        # Without a temperature these interfaces sample, most of them at 1.
        needed = ("max_tokens", "stream", *(() if fields.get("temperature") == 1 else ("temperature",)))
        sent = [name for name in fields if name not in dropped]
        named = [name for name in sent if name not in needed and re.search(rf"\b(sampling_)?{name}\b", text)]
        is_refused = _VALUE.search(text) or (is_unknown and not named)
        if "temperature" in sent and re.search(r"\btemperature\b", text) and is_refused:
            raise ConfigError(
                f"{self.root} refuses temperature={fields['temperature']}: {text}. Set one that it takes, such as "
                "--set temperature=1.0, and draw several samples (--samples 4), whose accuracy has an interval"
            )
        more = [name for name in sent if name not in BASIC]
        # A chat that refuses one of the fields that not all have would refuse the next one, too.
        unknown = list(dict.fromkeys(named + more)) if self.api.takes_messages and set(named) & set(more) else named
        if not unknown or not is_unknown:
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

    def _once(
        self,
        body: Mapping[str, Any],
        fields: Mapping[str, Any],
        sent: dict[str, Any],
        counts_steps: bool,
        loops: set[str],
    ) -> Answer:
        """One attempt. Its time begins with the request, so that earlier attempts and waiting are not in it.

        Args:
            counts_steps: whether the server's counters are read before and after, which tell the steps between.
            loops: texts of earlier attempts that were broken off for their repetition.
        """
        http, most_tokens = self._http, fields["max_tokens"]
        if http is None:
            raise DecodeError("the run was stopped")
        sent["attempts"] = sent.get("attempts", 0) + 1
        longest = self._timeout * (_WHOLE + most_tokens / _TOKENS_PER_TIMEOUT)
        largest = LARGEST_BODY + most_tokens * _BYTES_PER_TOKEN
        events: list[str] = []
        times: list[float] = []
        place = self._at(self.api.path)
        before = self.counters() if counts_steps else None
        is_done, started = False, time.perf_counter()
        with asked(http, "POST", place, longest, largest, json=body) as (response, content):
            if response.status_code != 200:
                raise self._attempts.fault(response, body_text(content))
            headers = {name.lower(): self.clean(value) for name, value in response.headers.items()}
            for data in events_of(response, content):
                if is_done := data == "[DONE]":
                    break
                times.append(time.perf_counter() - started)
                events.append(data)
                if self._attempts.stopped.is_set():
                    raise DecodeError("the run was stopped")
                if len(events) > _EVENTS_PER_TOKEN * most_tokens + _MORE_EVENTS:
                    raise DecodeError(
                        f"the answer has more than {len(events) - 1} events, for max_tokens {most_tokens}"
                    )
        seconds = time.perf_counter() - started  # before anything is read
        chunks = [object_of(data, self._key) for data in events]
        chunks += [] if before is None else [steps_between(before, self.counters())]
        streamed = headers.get("content-type", "").partition(";")[0].strip() != "application/json"
        join = functools.partial(
            assemble,
            chunks,
            seconds,
            next(iter(times), seconds),
            streamed=streamed,
            headers=headers,
            times=times,
            api=self.api,
            diffusion=self._diffusion,
        )
        is_loop = False
        try:
            answer = join(is_done=is_done)
        except BrokenOff as fault:
            is_loop = fault.loop in loops and fields["temperature"] == 0  # a further attempt would end so again
            loops.update(filter(None, [fault.loop]))
            if not is_loop:
                raise
            answer = join(is_done=True)
        if streamed and not (answer.finish_reason or is_loop):
            if not self._gives_reasons:
                raise DecodeError("the server gives no finish_reason, and without one an answer may lack its end")
            raise Passing(BREAKS_OFF)
        self._gives_reasons |= not is_loop
        # The key may come in parts, too.
        states = tuple((moment, self.clean(text)) for moment, text in answer.states)
        text, reasoning = self.clean(answer.text), self.clean(answer.reasoning)
        facts = self._cleaned(answer.facts)
        facts |= {"refusal": short(facts["refusal"])} if "refusal" in facts else {}  # not before the key is out of it
        answer = replace(answer, text=text, reasoning=reasoning, facts=facts, states=states)
        # A canvas may be longer than the answer may be.
        checked = dict(facts)
        if self.describe()["name"] in CANVAS:
            checked.pop("completion_tokens", None)
        check_facts(checked, (text, reasoning), most_tokens, longest)
        created = next((str(chunk["created"]) for chunk in chunks if chunk.get("created")), "")
        self._earlier.refuse(str(answer.facts["id"]), (created, answer.text, answer.finish_reason))
        return self._noticed(answer, model_of(chunks, headers))

    def _noticed(self, answer: Answer, model: Any) -> Answer:
        """The answer with another model's name than was asked for in its facts; says once which.

        A deployment of Azure's has a name of its own, so that its first answer tells the model.
        """
        asked, name = self.describe()["model"], short(str(model))
        with self._lock:
            if self._deployment and model and "answers_as" not in self.describe()["settings"]:
                self.describe()["settings"]["answers_as"] = name
                self._names.add(str(model))
            if not model or str(model) in self._names:
                return answer
            is_new = name not in self._told and len(self._told) < _MORE_EVENTS
            self._told.update([name] if is_new else [])
        if is_new:
            log.warning("%s answers as the model %s, and %s was asked", self.root, name, asked)
        return replace(answer, facts={**answer.facts, "model": name})


def client_of(args: ModelArgs) -> ServerClient:
    return ServerClient(
        args.base_url or "",
        model=args.served_model or "",
        api=args.server_api,
        key_variable=args.api_key_env or "",
        diffusion=args.diffusion,
        timeout=args.timeout or _TIMEOUT,
        patience=_PATIENCE if args.patience is None else args.patience,
    )
