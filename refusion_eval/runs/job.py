"""One request, ready to be decoded: what identifies it, its prompt and its settings; and the record it leaves."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from refusion_eval.benchmarks.sealing import redact
from refusion_eval.runs.settings import Resolved
from refusion_eval.runs.text import Detokenizer
from refusion_eval.store.records import Sample, SampleKey
from refusion_eval.trace import Draft, Fix, Trace
from refusion_eval.types import Decoded, draw_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request to be decoded.

    Attributes:
        key: its identity in the run store.
        benchmark: what its task belongs to; the task's own name if that is none of the seven.
        item_id: the benchmark's name for the item.
        prompt_ids: token ids of the real prompt.
        resolved: the settings of its task.
        sealed: texts in the prompt that must not appear in anything written.
        alone: whether it is decoded alone whatever the batch size, so that its time measures speed.
    """

    key: SampleKey
    benchmark: str
    item_id: str
    prompt_ids: Sequence[int]
    resolved: Resolved
    sealed: tuple[str, ...] = ()
    alone: bool = False

    def settings(self, detokenizer: Detokenizer) -> Any:
        """The decoder's settings for this one request, to be used once: with its stop rule and its own seed.

        Where something is drawn, the seed is mixed from the run's seed, the item and the sample's number, so that
        several samples of an item differ and each can be drawn again alone.
        """
        settings = self.resolved.settings
        changes: dict[str, Any] = {"stop_rule": detokenizer.stop_rule(self.resolved.until)}
        if settings.temperature > 0:
            item = int(self.key.doc_hash[:12], 16)
            changes["seed"] = draw_key(settings.seed, item, self.key.sample) >> 1
        return replace(settings, **changes)


def doc_hash(doc: Mapping[str, Any]) -> str:
    """Hash of a task document, equal wherever the document is."""
    return _digest(json.dumps(doc, sort_keys=True, default=str))


def prompt_hash(prompt: str) -> str:
    """Hash of a rendered prompt."""
    return _digest(prompt)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def record(job: Job, decoded: Decoded, detokenizer: Detokenizer, *, batch_size: int, warm: bool) -> Sample:
    """The record of a decoded job.

    Tokens behind a stop string are no part of the output, so they are neither recorded nor counted: a parallel decoder
    may have fixed some in the step that completed the string. The trace keeps them, as it tells what happened. Of a
    job with sealed texts the token ids are withheld, because they spell what the redacted text does not say.
    """
    tokens = detokenizer.kept(decoded.tokens, job.resolved.until)
    text = redact(detokenizer.text(decoded.tokens, job.resolved.until), job.sealed)
    trace = without_tokens(decoded.trace) if job.sealed else decoded.trace
    return Sample(
        **_identity(job, batch_size),
        text=text,
        tokens=None if job.sealed else [int(token) for token in tokens],
        num_tokens=len(tokens),
        num_forwards=decoded.num_forwards,
        seconds=decoded.seconds,
        prefill_seconds=decoded.prefill_seconds,
        stop=decoded.stop,
        trace=trace.to_json(),
        warm=warm,
    )


def record_error(job: Job, error: str, *, batch_size: int) -> Sample:
    """The record of a job that could not be decoded."""
    return Sample(**_identity(job, batch_size), error=error)


def _identity(job: Job, batch_size: int) -> dict[str, Any]:
    return {
        "key": job.key,
        "benchmark": job.benchmark,
        "item_id": job.item_id,
        "settings": {**job.resolved.values, "until": list(job.resolved.until)},
        "settings_source": dict(job.resolved.sources),
        "prompt_num_tokens": len(job.prompt_ids),
        "batch_size": batch_size,
    }


def without_tokens(trace: Trace) -> Trace:
    """A copy in which every token id is 0: where and when positions were fixed stays, what they say does not."""
    blanked = [
        replace(event, tokens=(0,) * len(event.tokens)) if isinstance(event, Draft | Fix) else event
        for event in trace.events
    ]
    return Trace(blanked, trace.num_forwards)
