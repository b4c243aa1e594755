"""One request, ready to be decoded: its identity, its prompt and its settings; and the record of its result."""

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
    """A request that is ready to be decoded.

    Attributes:
        key: identity in the run store.
        benchmark: name of the task's benchmark; the task's own name if it belongs to no benchmark of this project.
        item_id: the benchmark's id of the item.
        prompt_ids: token ids of the prompt, with the real texts in place of markers.
        resolved: the settings of the task.
        sealed: texts in the prompt that must not be written anywhere.
        alone: whether the request is decoded alone whatever the batch size, so that its time measures speed.
    """

    key: SampleKey
    benchmark: str
    item_id: str
    prompt_ids: Sequence[int]
    resolved: Resolved
    sealed: tuple[str, ...] = ()
    alone: bool = False

    def settings(self, detokenizer: Detokenizer) -> Any:
        """The decoder's settings for one decoding of this request: with its stop rule and its own seed.

        At a temperature above 0 the seed is mixed from the run's seed, the item and the sample's number, so that
        several samples of an item differ and each of them can be drawn again alone.
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

    Tokens after a stop string are no part of the output, so they are neither recorded nor counted: a parallel decoder
    may have fixed some of them in the step that completed the string. The trace keeps them, because it tells what
    happened. If the job has sealed texts, token ids are withheld, because they spell what is redacted in the text.
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
    """A copy in which every token id is 0; it still tells where and when positions were fixed."""
    blanked = [
        replace(event, tokens=(0,) * len(event.tokens)) if isinstance(event, Draft | Fix) else event
        for event in trace.events
    ]
    return Trace(blanked, trace.num_forwards)
