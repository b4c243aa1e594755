"""The records of a run: a `Sample` for each generated text and a `ScoreRow` for each judgement of it.

Records turn into plain JSON and back without loss, including lone surrogates and NaN in traces.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from refusion_eval.errors import StoreError

# ScoreRow.metric of the verdict. Tables call it accuracy, or pass@1 if the answer is a program.
PASSED = "passed"

# ScoreRow.tier of a program that ran with the rights of the user and so could read the answers or forge a verdict.
NO_ISOLATION = "none"


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Identity of a request. A resumed run generates only samples whose keys are not recorded.

    Attributes:
        task: name of the task.
        task_version: version of the task definition.
        doc_hash: hash of the benchmark item.
        prompt_hash: hash of the rendered prompt.
        sample: number of the sample among those of its item, from 0.
        settings_hash: hash of the generation settings in force.
    """

    task: str
    task_version: str
    doc_hash: str
    prompt_hash: str
    sample: int
    settings_hash: str

    def digest(self) -> bytes:
        """32 bytes that differ whenever a field differs."""
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
        num_tokens: number of tokens kept.
        num_forwards: model calls.
        seconds: from the prompt on the device to the last token on the host.
        prefill_seconds: part of `seconds` up to the end of the first forward, which reads the prompt; None if unknown.
        stop: why decoding ended.
        settings: the decoder settings in force.
        settings_source: origin of the value of each setting.
        trace: events as `Trace.to_json` gives them, or None.
        prompt_num_tokens: length of the prompt.
        batch_size: how many requests could run at the same time; only 1 counts for speed.
        process_id: registered process that generated the sample; the store fills in its own if empty.
        warm: whether the warm-up was over; otherwise the sample is in no speed figure.
        error: traceback or message of a failed attempt.
        created: ISO time; the store fills it in if empty.
    """

    key: SampleKey
    benchmark: str
    item_id: str
    text: str = ""
    tokens: list[int] | None = None
    num_tokens: int = 0
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

    def __post_init__(self) -> None:
        where = f"{self.key.task} {self.item_id}"
        for name in ("num_tokens", "num_forwards", "seconds", "prompt_num_tokens"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise StoreError(f"{where}: {name} is {value!r}; a count or time is never negative")
        if self.prefill_seconds is not None and not 0 <= self.prefill_seconds <= self.seconds:
            raise StoreError(
                f"{where}: prefill_seconds is {self.prefill_seconds!r}, not a part of {self.seconds!r} seconds"
            )
        if self.batch_size < 1:
            raise StoreError(f"{where}: batch_size is {self.batch_size}; it is at least 1")
        if self.tokens is not None and len(self.tokens) != self.num_tokens:
            raise StoreError(f"{where}: num_tokens is {self.num_tokens}, but {len(self.tokens)} tokens are given")

    def body(self) -> str:
        """All fields but the trace, as ASCII JSON."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name not in ("key", "trace")}
        return dump({"key": asdict(self.key), **fields})

    @classmethod
    def from_stored(cls, body: str, packed_trace: bytes | None) -> Sample:
        """Inverse of `body` and `pack`; fields of later versions are ignored. Raises StoreError if they are damaged."""
        values = _stored_fields(body, cls.__slots__)
        try:
            return cls(**values, trace=unpack(packed_trace) if packed_trace is not None else None)
        except TypeError as error:
            raise _damaged(error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """One judgement of one sample. A new one replaces that of the same scorer and metric.

    Attributes:
        key: key of the judged sample.
        item_id: the benchmark's own name for the item.
        scorer: name and version of the scorer.
        metric: `PASSED` for the verdict; any other name becomes a metric of its own in tables.
        value: value of the metric, 1.0 or 0.0 for `PASSED`.
        extracted: answer found in the text, None if there is none.
        verdict: one word, e.g. correct, wrong, timed_out.
        reason: how the verdict came about.
        tier: isolation that a program ran under: "A", "B", "C" or `NO_ISOLATION`; empty if the answer is no program.
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

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise StoreError(f"{self.key.task} {self.item_id}: the score {self.metric} is {self.value!r}, not a number")

    def body(self) -> str:
        """All fields as ASCII JSON."""
        return dump(asdict(self))

    @classmethod
    def from_stored(cls, body: str) -> ScoreRow:
        """Inverse of `body`; fields of later versions are ignored. Raises StoreError if it is damaged."""
        try:
            return cls(**_stored_fields(body, cls.__slots__))
        except TypeError as error:
            raise _damaged(error) from error


def _stored_fields(body: str, names: Sequence[str]) -> dict[str, Any]:
    """The fields of a record that this version knows, with its key."""
    try:
        fields = json.loads(body)
        return {name: fields[name] for name in names if name in fields} | {"key": SampleKey(**fields["key"])}
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(error) from error


def _damaged(error: Exception) -> StoreError:
    return StoreError(
        f"a stored record is damaged ({type(error).__name__}: {error}); restore records.sqlite from a copy, or start "
        "the run anew in another directory"
    )


def dump(value: Any) -> str:
    """Compact ASCII JSON. Raises StoreError for values JSON does not have."""
    try:
        return json.dumps(value, ensure_ascii=True, separators=(",", ":"), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"a record holds a value that JSON cannot carry ({error}); convert it to plain types"
        ) from error


def pack(trace: Sequence[Any]) -> bytes:
    """Trace as bytes: a format letter, then JSON plain (`j`) or deflated (`z`), whichever is shorter."""
    plain = dump(trace).encode("ascii")
    deflated = zlib.compress(plain, 6)
    return b"z" + deflated if len(deflated) < len(plain) else b"j" + plain


def unpack(packed: bytes) -> list:
    """Inverse of `pack`. Raises StoreError if the bytes are damaged."""
    try:
        text = zlib.decompress(packed[1:]) if packed[:1] == b"z" else packed[1:]
        return json.loads(text)
    except (zlib.error, ValueError) as error:
        raise StoreError(
            f"a stored trace is damaged ({error}); delete that sample's run and generate it again"
        ) from error
