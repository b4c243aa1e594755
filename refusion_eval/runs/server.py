"""A model that a server runs: what stands for its checkpoint here, and its records."""

import contextlib
import functools
import ipaddress
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, Self
from urllib.parse import urlsplit

from refusion_eval.benchmarks.rows import redact
from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.models.card import Card, checkpoint_card
from refusion_eval.models.location import locate
from refusion_eval.models.tokenizer import Tokenizer
from refusion_eval.runs.backend import Backend, Description, Opener
from refusion_eval.runs.hardware import collect_hardware
from refusion_eval.runs.job import Job, record, record_error
from refusion_eval.runs.model_args import OF_CHATS, ModelArgs, server_place
from refusion_eval.runs.server_answers import Answer
from refusion_eval.runs.server_client import Refused, ServerClient, client_of
from refusion_eval.runs.server_facts import CANVAS, endpoints, forwards
from refusion_eval.runs.server_requests import fields_of
from refusion_eval.runs.systems import NO_FILES
from refusion_eval.store.manifest import Hardware
from refusion_eval.store.records import LONGEST_TEXT, REFUSED, SERVER, Sample, dump
from refusion_eval.types import Decoded, StopReason, Trace

# The text split again here may have more tokens than the server generated, but not so many times as many.
_MOST_TIMES = 2
UNKNOWN = "unknown"  # dtype and device of a server, where the user does not name them
# Finish reasons that are neither the end token's nor a stop string's.
_ENDED_BY_SERVER: Mapping[str, StopReason] = {"length": "length", "content_filter": "content_filter"}


class ServedFiles:
    """The files of a server's model that are read here: tokenizer and end tokens, if there are any, and no weights."""

    def __init__(self, args: ModelArgs) -> None:
        self.directory: Path | None = None
        self.revision: str | None = None
        self.card = Card(args.served_model or NO_FILES, UNKNOWN, None, (), "causal")
        if args.has_files:
            name, self.directory, self.revision = locate(args.checkpoint, args.revision)
            self.card = checkpoint_card(name, self.directory)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the files; without files one that makes no tokens, so that prompts are sent as text."""
        return _NoTokenizer() if self.directory is None else Tokenizer(self.directory)


class _NoTokenizer(Tokenizer):
    def __init__(self) -> None:
        names = ("chat_template", "bos_token", "bos_token_id", "eos_token", "eos_token_id")
        self.inner = SimpleNamespace(**dict.fromkeys(names), all_special_ids=(), added_tokens_decoder={})

    def encode(self, text: str, *, plain: bool = False) -> list[int]:
        return []

    def render_chat(self, messages: Any, **_: Any) -> str:
        raise ConfigError("the chat template of the server's model is not here; name its checkpoint (pretrained=...)")

    def decode(self, tokens: Any, *, skip_special_tokens: bool = True) -> str:
        return ""


class Server(Backend):
    """Has a server complete the prompts of jobs, and records its answers."""

    ends_no_thoughts = "a server"
    times_together = True
    no_prompts = "the chat template of a server's model is not here"
    decoder = attention = SERVER

    def __init__(self, args: ModelArgs, files: ServedFiles) -> None:
        self._args = args
        self.files = files
        self._has_files = files.directory is not None
        self.dtype, self.device = (UNKNOWN if name == "auto" else name for name in (args.dtype, args.device))

    @classmethod
    def of(cls, opener: Opener) -> Self:
        return cls(opener.args, opener.prepared(ServedFiles(opener.args)))

    @functools.cached_property
    def client(self) -> ServerClient:
        return client_of(self._args)

    def describe(self, system: Opener) -> Description:
        """What the server's endpoints tell."""
        return Description(*endpoints(self.client))

    def identity(self) -> dict[str, Any]:
        """What tells the server from another one: its address as it was given, or its name here; what runs there."""
        described, (_, _, address) = self.client.describe(), self.client.root.partition("://")
        place = {"server_name": self._args.server_name} if self._args.server_name else {"address": address}
        asked = {"api": self.client.api_name} if self.takes_messages else {}
        asked |= {name: value for name in OF_CHATS if (value := getattr(self._args, name))}
        return {"server": place | {name: described[name] for name in ("name", "version", "model")} | asked}

    def hardware(self) -> Hardware:
        """This machine where the user says so by the server's threads and it is here; else the server by its name."""
        host = urlsplit(self.client.root).hostname or ""
        if (threads := self._args.server_threads) is not None:
            if not _is_here(host):
                raise ConfigError(f"server_threads is for a server on this machine, and {host} is another one")
            return collect_hardware(threads)
        if self._args.server_name:
            return Hardware(server=f"server {self._args.server_name}")
        described, place = self.client.describe(), server_place(self.client.root)
        return Hardware(server=f"server {described['name']} {described['version']} at {place}".replace("  ", " "))

    def state(self) -> dict[str, Any]:
        """Settings and counters of the server now, and its address, which another process may find elsewhere."""
        return {
            "address": self.client.root,
            "settings": self.client.describe()["settings"],
            "counters": self.client.counters(),
        }

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        self.client.start()
        try:
            yield
        finally:
            self.client.stop()

    def alone(self, job: Job) -> Sample:
        return self._sample(job, 1)

    def together(self, jobs: Iterator[Job], batch_size: int) -> Generator[Sample, None, Iterable[Job]]:
        # Its threads end with the process: a second signal does not wait for a server that is silent.
        pool, ended, num_pending = ThreadPool(batch_size), SimpleQueue[Sample | BaseException](), 0
        try:
            for job in jobs:
                pool.apply_async(self._sample, (job, batch_size), callback=ended.put, error_callback=ended.put)
                num_pending += 1
                if num_pending == batch_size:
                    yield _good(ended.get())
                    num_pending -= 1
            for _ in range(num_pending):
                yield _good(ended.get())
        finally:
            pool.close()
        return ()

    @property
    def takes_messages(self) -> bool:
        return self.client.api.takes_messages

    def _complete(self, job: Job, sent: dict[str, Any], *, is_alone: bool) -> Answer:
        settings = job.settings(self.detokenizer)
        fields = fields_of(
            self.client.api,
            most_tokens=settings.gen_length,
            temperature=settings.temperature,
            seed=settings.seed,
            stops=job.resolved.until,
            effort=self._args.reasoning_effort,
            diffusing=self._args.diffusing,
        )
        return self.client.complete(job.prompt, job.prompt_ids, fields, sent, is_alone=is_alone)

    def _sample(self, job: Job, concurrency: int) -> Sample:
        template = SERVER if self.takes_messages else "" if self._has_files else "none"
        sent: dict[str, Any] = {"template": template} if template else {}
        try:
            answer = self._complete(job, sent, is_alone=concurrency == 1)
            return self._record(job, replace(answer, facts={**answer.facts, **sent}), concurrency)
        except DecodeError as error:
            stop = REFUSED if isinstance(error, Refused) else ""
            return replace(record_error(job, str(error), batch_size=concurrency, stop=stop), server=sent)

    def _record(self, job: Job, answer: Answer, concurrency: int) -> Sample:
        until, most_tokens = job.resolved.until, job.resolved.settings.gen_length
        stop = self._stop(answer, until)
        ids, counted_by = self._ids(answer, stop, most_tokens)
        described = self.client.describe()
        # What some servers count is their canvas, with what stands there behind the answer.
        told = None if described["name"] in CANVAS else answer.facts.get("completion_tokens")
        tokens = told if ids is None else len(ids)
        facts = {**answer.facts, **({} if tokens is None else {"tokens": counted_by})}
        facts |= {"reasoning": answer.reasoning} if answer.reasoning else {}
        facts = {name: redact(told, job.sealed) if isinstance(told, str) else told for name, told in facts.items()}
        facts |= self._states(job, answer) if self._args.diffusing else {}
        # llama.cpp counts drafts only in answers that had any.
        are_told = described["name"] == "llama.cpp"
        num_forwards = forwards(facts, diffusion=bool(self._args.diffusion), drafts_are_told=are_told)
        decoded = Decoded(tuple(ids or ()), stop or "eos", num_forwards, answer.seconds, Trace())
        sample = record(job, decoded, self.detokenizer, batch_size=concurrency)
        changes: dict[str, Any] = {"trace": None, "server": facts}
        if stop is None:
            changes["stop"] = ""
        if answer.token_ids is None:
            changes["tokens"] = None
        if ids is None:
            changes["num_tokens"] = tokens
        if not self._has_files or self.takes_messages:
            cut = min((place for text in until if (place := answer.text.find(text)) >= 0), default=None)
            changes["text"] = redact(answer.text[:cut], job.sealed)
        elif (text := self.client.clean(sample.text)) != sample.text:  # ids that spell the key
            changes |= {"text": text, "tokens": None}
        return replace(sample, **changes)

    def _states(self, job: Job, answer: Answer) -> dict[str, Any]:
        """The states of the text as records have them; none where their JSON is longer than that of one text may be."""
        states = [[seconds, redact(text, job.sealed)] for seconds, text in answer.states]
        return {} if len(dump(states)) > LONGEST_TEXT else {"states": states}

    def _ids(self, answer: Answer, stop: StopReason | None, most_tokens: int) -> tuple[tuple[int, ...] | None, str]:
        """The ids of the tokens of an answer, and what their number rests on; None where the server alone counts."""
        if not self._has_files:
            return answer.token_ids, "usage"
        is_counted = "completion_tokens" in answer.facts and self.client.describe()["name"] not in CANVAS
        if answer.token_ids is not None or (self.takes_messages and is_counted):
            return answer.token_ids, "usage" if answer.token_ids is None else "ids"
        # The text is split again, up to its stop string, and the end token that it lacks is added.
        end = self.files.card.eos_ids[:1] if stop == "eos" else ()
        ids = (*self.files.tokenizer.encode(answer.reasoning + answer.text), *end)
        if len(ids) > _MOST_TIMES * most_tokens:
            split = f"{len(ids)} tokens here, where max_tokens is {most_tokens}"
            raise DecodeError(f"the text of the answer has {split}: name the files of the model that the server runs")
        return ids, "tokenizer"

    def _stop(self, answer: Answer, until: tuple[str, ...]) -> StopReason | None:
        """Why an answer ended; None where the server does not tell."""
        if answer.finish_reason in _ENDED_BY_SERVER:
            return _ENDED_BY_SERVER[answer.finish_reason]
        text = self.detokenizer.spelled(answer.token_ids or ()) or answer.text
        if answer.stopped_by in until or any(stop in text for stop in until):
            return "stop_string"
        return "eos" if answer.finish_reason else None


def _good(outcome: Sample | BaseException) -> Sample:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
