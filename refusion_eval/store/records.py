"""The records of a run: its `Manifest`, a `Sample` for each generated text, and a `ScoreRow` for each judgement."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from refusion_eval.errors import StoreError
from refusion_eval.types import MOST_TOKENS, Trace
from refusion_eval.untrusted import LARGEST, parse_json

# ScoreRow.metric of the verdict. Tables call it accuracy, or pass@1 if the answer is a program.
PASSED = "passed"

# Begins ScoreRow.metric of verdicts by another answer filter than the task's own; the filter's name follows.
BY_FILTER = "accuracy by "
# The verdict by this project's rule beside that of a rule which takes any formula in a text for the answer.
STATED = f"{BY_FILTER}last"

# ScoreRow.tier of a program that ran with the rights of the user and so could read the answers or forge a verdict.
NO_ISOLATION = "none"

# Sample.stop of a request that cannot be decoded, for example because prompt and response exceed the context.
REFUSED = "refused"

# Characters of a text in a record, of the texts that are names and the like, entries of a mapping and characters of its
# JSON, and settings of a sample: what is longer would only make readers slow.
LONGEST_TEXT, LONGEST_NAME = 16 << 20, 4096
_LONG_TEXTS = ("text", "error", "extracted", "reason", "reasoning")
_MOST_ENTRIES, _LARGEST_MAPPING, _MOST_SETTINGS = 10_000, 1 << 20, 1000
_ESCAPED = 12  # characters that JSON writes for one at most: the halves of a surrogate pair
_LARGEST_NUMBER = 2**64  # of a whole number that is no count, such as a seed
MOST = 2**53  # limit of whole numbers in records: all of them are exact as floats, and fit every column of a data frame
LONGEST_SLOT = 4096  # a slot is never longer; a larger one would only make readers slow
NO_CACHE = (
    "every forward computed the whole text again, without a cache (backend=transformers), so that the times measure no "
    "decoder"
)

# Manifest.decoder of runs by transformers' own greedy `generate`, one token a forward, of those by the loop of a
# release, and of those by a server.
STOCK_GENERATE, RELEASE_LOOP, SERVER = "stock_generate", "release_loop", "server"

# Fields of a Sample that its record leaves out where they are None, because most runs know none of them.
_WHERE_KNOWN = (
    *("joules", "num_experts_read", "num_thought_tokens", "cut_in_thought", "num_forced_tokens", "server", "protocol"),
)


_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Identity of a request. A resumed run generates only samples whose keys are not recorded."""

    task: str
    task_version: str
    doc_hash: str  # of the benchmark item
    prompt_hash: str  # of the rendered prompt
    sample: int  # number of the sample among those of its item, from 0
    settings_hash: str  # of the generation settings in force

    def without_prompt(self) -> SampleKey:
        """The key that all samples of an item under the same settings share, whatever they were asked with."""
        return replace(self, prompt_hash="", sample=0)

    def digest(self) -> bytes:
        return hashlib.sha256(dump(list(asdict(self).values())).encode("ascii")).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One generated text with its settings, trace and cost; with `error`, a failed attempt.

    Attributes:
        key: identity of the request.
        benchmark: benchmark that the task belongs to.
        item_id: the benchmark's own name for the item.
        text: the response; empty with an error.
        tokens: ids of the tokens kept, up to and including the first EOS or stop string; None if not recorded.
        num_tokens: number of tokens kept; None where a server does not tell it, and no tokenizer is here.
        num_forwards: model calls; 0 where a server does not tell them.
        seconds: from the prompt on the device to the last token on the host; of a server, from the request to the last
            byte of the answer.
        prefill_seconds: part of `seconds` up to the end of the first forward, which reads the prompt; None if unknown.
        num_thought_tokens: those of `num_tokens` that belong to thinking blocks, tags included; None without a block.
        cut_in_thought: whether the text ends inside a thinking block; None without a block.
        num_forced_tokens: those of `num_tokens` that no forward chose, because a thought had spent its budget and they
            ended it; None, and no key in the record, without a budget. No figure of speed counts them.
        stop: why decoding ended: eos, length, stop_string, gap (which is full), or content_filter of a server; empty
            where a server does not tell; `REFUSED` for an error that a second attempt would meet again.
        settings: the decoder settings in force.
        settings_source: origin of the value of each setting.
        trace: events as `Trace.to_json` gives them, or None.
        prompt_num_tokens: length of the prompt.
        batch_size: how many requests could run at the same time; only 1 counts for speed.
        process_id: registered process that generated the sample; the store fills in its own if empty.
        warm: whether the warm-up was over; otherwise the sample is in no speed figure.
        error: traceback or message of a failed attempt.
        created: ISO time; the store fills it in if empty.
        joules: energy that the device used in `seconds`, from its own counter; None, and no key in the record, where it
            was not measured.
        num_experts_read: experts that the forwards read, summed over layers; None, and no key in the record, without
            experts and in a batch.
        prompts: the prompts that the item was asked with: ours, release (those of ReFusion's release) or other.
        server: what a server told of the answer; None, and no key in the record, without a server. `prompt` is "ids",
            "text" or "messages", as it was sent in the last of so many `attempts`; `dropped` lists the fields of the
            request that it could not read or has no place for, and `ignored` those that it takes and does not follow;
            an error has these only, and `template`. That is "server" if the server applied its own chat template, and
            "none" if no tokenizer is here and none was applied. `tokens` says what `num_tokens` rests on: the server's
            "ids", the text split by the "tokenizer" here, or the server's "usage", and is left out where it tells none.
            `first_byte_seconds` is the client's. `model` is the model's name in the answer, where another was asked.
            Where the server tells them: `id`, `finish_reason`, `prompt_tokens`, `completion_tokens`, `cached_tokens`
            (of the prompt), `drafted_tokens`, `accepted_tokens`, its own `prefill_seconds`, `generation_seconds`,
            `queue_seconds` and `total_seconds`, `reasoning_tokens` (of the `completion_tokens`), `forwards`, a
            `refusal` in words, the `reasoning` beside the text, and `from_cache`, if a proxy had the answer before.
            `states` are those that a text went through, each with its seconds since the request.
        protocol: name and short hash of the protocol that the sample was made under, NAME@HASH, which the store fills
            in; None, and no key in the record, without a protocol.
    """

    key: SampleKey
    benchmark: str
    item_id: str
    text: str = ""
    tokens: list[int] | None = None
    num_tokens: int | None = 0
    num_forwards: int = 0
    seconds: float = 0.0
    stop: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    settings_source: Mapping[str, Any] = field(default_factory=dict)
    trace: list | None = None
    prompt_num_tokens: int = 0
    batch_size: int = 1
    process_id: str = ""
    warm: bool = True
    error: str | None = None
    created: str = ""
    prefill_seconds: float | None = None
    joules: float | None = None
    prompts: str = "ours"
    num_thought_tokens: int | None = None
    cut_in_thought: bool | None = None
    num_forced_tokens: int | None = None
    server: Mapping[str, Any] | None = None
    protocol: str | None = None
    num_experts_read: int | None = None

    def __post_init__(self) -> None:
        where = f"{self.key.task} {self.item_id}"
        counts = ("num_tokens", "num_forwards", "prompt_num_tokens", "num_thought_tokens", "num_forced_tokens")
        for name in (*counts, "num_experts_read", "seconds", "joules"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MOST:
                raise StoreError(f"{where}: {name} is {value!r}; a count or time is never negative, nor above 2**53")
        if self.prefill_seconds is not None and not 0 <= self.prefill_seconds <= self.seconds:
            raise StoreError(f"{where}: {self.prefill_seconds!r} prefill_seconds are not a part of {self.seconds!r}")
        for name in ("num_thought_tokens", "num_forced_tokens"):
            if (part := getattr(self, name)) is not None and part > (self.num_tokens or 0):
                raise StoreError(f"{where}: {part} {name} are not a part of {self.num_tokens} num_tokens")
        if not (1 <= self.batch_size <= MOST and 0 <= self.key.sample <= MOST):
            raise StoreError(f"{where}: batch_size {self.batch_size} or sample {self.key.sample} is out of its range")
        if max(len(self.settings), len(self.settings_source)) > _MOST_SETTINGS:
            raise StoreError(f"{where}: a sample has at most {_MOST_SETTINGS} settings")
        if self.tokens is not None and len(self.tokens) != self.num_tokens:
            raise StoreError(f"{where}: num_tokens is {self.num_tokens}, but {len(self.tokens)} tokens are given")
        if self.tokens and not 0 <= min(self.tokens) <= max(self.tokens) < MOST_TOKENS:
            raise StoreError(f"{where}: {min(self.tokens)} to {max(self.tokens)} are not token ids")

    def events(self) -> Trace:
        """The recorded trace, which there has to be. Raises StoreError if no decoding has such events."""
        assert self.trace is not None
        with checking(f"the stored trace of {self.key.task} {self.item_id}"):
            return Trace.from_json(self.trace)

    @property
    def num_decoded(self) -> int | None:
        """Tokens kept that forwards chose: those of all figures of speed; None where they are not known."""
        return None if self.num_tokens is None else self.num_tokens - (self.num_forced_tokens or 0)

    @property
    def slot_size(self) -> int | None:
        size = self.settings.get("slot_size")
        return size if type(size) is int and 1 <= size <= LONGEST_SLOT else None

    def body(self) -> str:
        left_out = {"key", "trace", *(name for name in _WHERE_KNOWN if getattr(self, name) is None)}
        fields = {name: getattr(self, name) for name in self.__slots__ if name not in left_out}
        return dump({"key": asdict(self.key), **fields})


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """One judgement of one sample. A new judgement replaces that of the same scorer and metric.

    Attributes:
        key: key of the judged sample.
        item_id: the benchmark's own name for the item.
        scorer: name and version of the scorer.
        metric: `PASSED` for the verdict; any other name becomes a metric of its own in tables.
        value: value of the metric, 1.0 or 0.0 for `PASSED`.
        extracted: answer found in the text, None if there is none.
        verdict: one word, e.g. correct, wrong, timed_out.
        reason: how the verdict came about.
        tier: isolation that a program ran under: "A", "B", "C" or `NO_ISOLATION`; empty without a program.
    """

    key: SampleKey
    item_id: str
    scorer: str
    metric: str = PASSED
    value: float
    extracted: str | None = None
    verdict: str = ""
    reason: str = ""
    tier: str = ""

    @property
    def followed(self) -> list[bool]:
        """Whether the text follows each instruction, in scores of a benchmark of instructions."""
        with checking(f"the score of {self.key.task} {self.item_id}"):
            flags = parse_json(self.extracted or "[]")
            if not isinstance(flags, list) or not {*map(type, flags)} <= {bool}:
                raise TypeError("its answer is no list of true and false")
        return flags

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise StoreError(f"{self.key.task} {self.item_id}: the score {self.metric} is {self.value!r}, not a number")

    def body(self) -> str:
        return dump(asdict(self))


def from_stored(kind: type[_Kind], body: str, packed_trace: bytes | None = None) -> _Kind:
    """A sample from its `body` and its packed trace, or a score from its `body`; StoreError if they are damaged."""
    with checking("a stored record"):
        fields = parse_json(body)
        fields["key"] = from_fields(SampleKey, fields["key"])
        if kind is Sample:
            told = fields.get("server")
            if told is not None:
                from_fields(_Told, told)
                if told.get("tokens") == "usage" and "completion_tokens" not in told:  # earlier versions recorded 0
                    fields["num_tokens"] = None
        record = from_fields(kind, fields, length=len(body))
    if packed_trace is not None:
        with checking(f"the stored trace of {fields['key'].task} {fields['item_id']}"):
            record = replace(record, trace=unpack(packed_trace))  # type: ignore[type-var]
    return record


def moment(created: str) -> datetime:
    """The moment of a record; ValueError for a text that is none, or none of this era."""
    found = datetime.fromisoformat(created)
    if not 1970 <= found.year <= 9000:
        raise ValueError(f"{created} is no moment of this era")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What `Sample.server` may hold."""

    prompt: str = ""
    attempts: int = 0
    dropped: Sequence[str] = ()
    ignored: Sequence[str] = ()
    tokens: str = ""
    template: str = ""
    id: str = ""
    finish_reason: str = ""
    model: str = ""
    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    cached_tokens: float | None = None
    drafted_tokens: float | None = None
    accepted_tokens: float | None = None
    first_byte_seconds: float | None = None
    prefill_seconds: float | None = None
    generation_seconds: float | None = None
    queue_seconds: float | None = None
    total_seconds: float | None = None
    reasoning_tokens: float | None = None
    forwards: float | None = None
    refusal: str = ""
    reasoning: str = ""
    from_cache: bool = False
    states: Sequence[Sequence[Any]] = ()

    def __post_init__(self) -> None:
        numbers = [value for name in self.__slots__ if type(value := getattr(self, name)) in (int, float)]
        if not all(0 <= value <= MOST for value in numbers):
            raise ValueError("a number of the server is out of range")
        if not all(
            list(map(type, state)) in ([float, str], [int, str]) and 0 <= state[0] <= MOST for state in self.states
        ):
            raise ValueError("a state of the server's text is no moment with its text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What `Manifest.protocol` holds, if anything."""

    label: str
    hash: str
    system: str
    content: Mapping[str, Any]


@contextmanager
def checking(what: str) -> Iterator[None]:
    """Turns what a value of another shape than ours raises inside the block into a StoreError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, zlib.error) as error:
        advice = "restore records.sqlite from a copy, or start the run anew in another directory"
        raise StoreError(f"{what} is damaged ({type(error).__name__}: {error}); {advice}") from error


def from_fields(kind: type[_Kind], fields: Mapping[str, Any], *, length: float = math.inf) -> _Kind:
    """A dataclass from its fields, each of the type that the class declares (else a TypeError).

    Args:
        length: characters of the JSON that the fields were read from; infinite where it is not known.
    """
    # A validation library would refuse lone surrogates, which models write and records keep. Fields of later versions
    # are ignored, so that an earlier version still reads their runs.
    if not isinstance(fields, Mapping):
        raise TypeError(f"a {type(fields).__name__} stands for a {kind.__name__}")
    declared: type = kind
    types = _types_of(declared)
    for name, (own, held_types) in types.items():
        if name not in fields:
            continue
        value = fields[name]
        if type(value) not in own:
            raise TypeError(f"{name} is a {type(value).__name__} that it cannot be")
        if held_types and value is not None:
            held = set(map(type, value.values() if isinstance(value, Mapping) else value))
            if not held <= held_types:
                raise TypeError(f"{name} holds a {(held - held_types).pop().__name__}")
        _check_size(name, value, length)
    return kind(**{name: fields[name] for name in types if name in fields})


def _check_size(name: str, value: Any, length: float) -> None:
    """Refuses (ValueError) what is out of the range of every field, or would only make readers slow."""
    # Writing a mapping anew takes as long as reading the record, so that short records are spared it. What a server
    # told holds thoughts and states, and is as large as its record may be.
    may_be_large = name != "server" and _ESCAPED * length > _LARGEST_MAPPING
    if type(value) is str:
        is_wrong = len(value) > (LONGEST_TEXT if name in _LONG_TEXTS else LONGEST_NAME)
    elif type(value) in (int, float):
        is_wrong = not (math.isfinite(value) if type(value) is float else abs(value) < _LARGEST_NUMBER)
    else:
        is_wrong = type(value) is dict and (
            len(value) > _MOST_ENTRIES or (may_be_large and len(json.dumps(value)) > _LARGEST_MAPPING)
        )
    if is_wrong:
        raise ValueError(f"{name} is too long, or out of range")


# What JSON has in the place of a type; any other type stands for itself.
_IN_JSON: Mapping[Any, set[type]] = {
    float: {int, float},
    Mapping: {dict},
    Sequence: {list},
    Any: {dict, list, str, int, float, bool, type(None)},
}


@cache
def _types_of(kind: type) -> dict[str, tuple[set[type], set[type]]]:
    """For each field of a class the types that it may have in JSON, and those of what it holds; empty for any."""

    def in_json(hints: Iterable[Any]) -> set[type]:
        kinds = [get_origin(hint) or hint for hint in hints]
        return {json_type for hint in kinds for json_type in _IN_JSON.get(hint, {hint})}

    types = {}
    for name, hint in get_type_hints(kind).items():
        own = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        types[name] = in_json(own), in_json(get_args(part)[-1] for part in own if get_args(part))
    return types


def dump(value: Any) -> str:
    """Compact ASCII JSON. Raises StoreError for values JSON does not have."""
    try:
        return json.dumps(value, ensure_ascii=True, separators=(",", ":"), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise StoreError(f"a record holds a value that is not JSON ({error}); convert it to plain types") from error


def pack(trace: Sequence[Any]) -> bytes:
    """Trace as bytes: a format letter, then JSON plain (`j`) or deflated (`z`), whichever is shorter."""
    plain = dump(trace).encode("ascii")
    if len(plain) > LARGEST:
        raise StoreError(f"the trace has more than {LARGEST >> 20} MiB; decode shorter texts, or in smaller blocks")
    deflated = zlib.compress(plain, 6)
    return b"z" + deflated if len(deflated) < len(plain) else b"j" + plain


def unpack(packed: bytes) -> list:
    """Inverse of `pack`. Raises ValueError, TypeError or zlib.error if the bytes are damaged."""
    text = packed[1:]
    if packed[:1] == b"z":
        inflating = zlib.decompressobj()  # with a bound, because a few bytes can unpack to fill the memory
        text = inflating.decompress(text, LARGEST)
        if not inflating.eof:
            raise ValueError(f"it unpacks to more than {LARGEST >> 20} MiB, or is cut")
    trace: list = parse_json(text)
    return trace


def as_json(value: Any) -> Any:
    """The value as JSON gives it back: tuples become lists, keys become strings."""
    return json.loads(json.dumps(value, default=str))


def flat(sections: Mapping[str, Any]) -> dict[str, Any]:
    """The values of mappings inside mappings, by their keys joined with dots."""
    values: dict[str, Any] = {}
    for name, value in sections.items():
        if isinstance(value, Mapping):
            values |= {f"{name}.{key}": inner for key, inner in flat(value).items()}
        else:
            values[str(name)] = value
    return values
