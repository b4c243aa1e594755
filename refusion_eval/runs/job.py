"""Jobs, which are requests that are ready to be decoded, and the record of each result."""

import bisect
import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

from refusion_eval.benchmarks import OURS, THOUGHT_TOKEN, closes_thought, opens_thought, thinking_blocks
from refusion_eval.benchmarks.rows import redact
from refusion_eval.decoders.thoughts import has_budget
from refusion_eval.runs.settings_tables import Resolved
from refusion_eval.store.records import Sample, SampleKey
from refusion_eval.types import HOLE, PROMPT_END, THINK_START, Decoded, Draft, Fix, StopRule, Trace, draw_key

if TYPE_CHECKING:  # texts are judged without a tokenizer, and transformers loads slowly
    from refusion_eval.models.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Detokenizer:
    # A stop string may itself be a special token ("<|im_end|>", "</s>"), so stop strings are searched in the text with
    # special tokens spelled out; the text that is returned leaves them out.
    decode: Callable[[Sequence[int]], str]  # of ordinary tokens
    special: Mapping[int, str]  # the spelling of every special token

    @classmethod
    def of(cls, tokenizer: "Tokenizer") -> Self:
        inner = tokenizer.inner
        special = {int(token): str(inner.convert_ids_to_tokens(token)) for token in inner.all_special_ids}
        special |= {int(token): str(added) for token, added in inner.added_tokens_decoder.items() if added.special}
        return cls(tokenizer.decode, special)

    def _pieces(self, tokens: Sequence[int]) -> list[tuple[str, bool]]:
        """Splits tokens into pieces of text, each with whether it is a special token."""
        result: list[tuple[str, bool]] = []
        for are_special, run in itertools.groupby(tokens, key=self.special.__contains__):
            if are_special:
                result += [(self.special[token], True) for token in run]
            else:
                result.append((self.decode(list(run)), False))
        return result

    def spelled(self, tokens: Sequence[int]) -> str:
        return "".join(text for text, _ in self._pieces(tokens))

    def text(self, tokens: Sequence[int], until: Sequence[str] = ()) -> str:
        """The text without special tokens but the tags of thoughts, up to the first occurrence of any stop string."""
        pieces = self._pieces(tokens)
        whole = "".join(text for text, _ in pieces)
        starts = [start for stop in until if (start := whole.find(stop)) >= 0]
        num_left = min(starts, default=len(whole))
        kept = ""
        for text, is_special in pieces:
            kept += text[:num_left] if not is_special or THOUGHT_TOKEN.fullmatch(text) else ""
            num_left = max(0, num_left - len(text))
        return kept

    def kept(self, tokens: Sequence[int], until: Sequence[str]) -> Sequence[int]:
        """The shortest prefix of the tokens whose text contains a stop string; all tokens if there is none."""

        def has_stopped(length: int) -> bool:
            text = self.spelled(tokens[:length])
            return any(stop in text for stop in until)

        if not has_stopped(len(tokens)):
            return tokens
        # A text that contains a stop string still does when tokens are appended.
        return tokens[: bisect.bisect_left(range(len(tokens)), True, key=has_stopped)]

    def stop_rule(self, until: Sequence[str]) -> StopRule | None:
        """A rule that ends decoding once a stop string is complete. It has state, so every request needs its own."""
        if not until:
            return None
        # Only the end of the text is spelled out each time. A token is at least one byte, so a stop string that has
        # just become complete reaches back at most its own length in bytes.
        reach = max(len(stop.encode()) for stop in until) + 4
        checked = 0

        def rule(tokens: Sequence[int]) -> bool:
            nonlocal checked
            if len(tokens) < checked:  # the request is decoded again from its beginning
                checked = 0
            tail = self.spelled(tokens[max(0, checked - reach) :])
            checked = len(tokens)
            return any(stop in tail for stop in until)

        return rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    key: SampleKey
    benchmark: str  # the task's own name if it belongs to no benchmark of this project
    item_id: str
    prompt_ids: Sequence[int]  # with the real texts in place of markers
    resolved: Resolved
    prompt: str = ""  # the text of these ids, for servers that take no ids
    prompts: str = OURS  # or RELEASE or OTHER
    sealed: tuple[str, ...] = ()  # texts in the prompt that must not be written anywhere
    alone: bool = False  # is decoded alone whatever the batch size, so that its time measures speed

    def settings(self, detokenizer: Detokenizer) -> Any:
        """The settings for one decoding of this request: with its stop rule and, if it draws, a seed of its own."""
        settings = self.resolved.settings
        changes: dict[str, Any] = {"stop_rule": detokenizer.stop_rule(self.resolved.until)}
        if self.key.sample or getattr(settings, "is_random", bool(settings.temperature)):
            # Several samples of an item differ, and each of them can be drawn again alone, in any order and batch.
            item = int(self.key.doc_hash[:12], 16)
            changes["seed"] = draw_key(settings.seed, item, self.key.sample) >> 1
        return replace(settings, **changes)


def sample_key(
    task: str, task_version: str, doc: Mapping[str, Any], prompt: str, resolved: Resolved, sample: int = 0
) -> SampleKey:
    """The identity of a request in the run store; the prompt and the document hold markers of sealed texts."""
    return SampleKey(task, task_version, doc_hash(doc), prompt_hash(prompt), sample, resolved.digest)


def doc_hash(doc: Mapping[str, Any]) -> str:
    return prompt_hash(json.dumps(doc, sort_keys=True, default=str))


def prompt_hash(prompt: str) -> str:
    return hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def record(job: Job, decoded: Decoded, detokenizer: Detokenizer, *, batch_size: int) -> Sample:
    """The record of a decoding, which `WarmUp` marks as warm."""
    # A parallel decoder may have fixed tokens after a stop string in the step that completed it. They are neither
    # recorded nor counted; the trace keeps them, because it tells what happened.
    tokens = detokenizer.kept(decoded.tokens, job.resolved.until)
    text = redact(detokenizer.text(decoded.tokens, job.resolved.until), job.sealed)
    # Token ids spell the texts that are redacted, so they are withheld.
    trace = _without_tokens(decoded.trace) if job.sealed else decoded.trace
    return Sample(
        **_identity(job, batch_size),
        text=text,
        tokens=None if job.sealed else [int(token) for token in tokens],
        num_tokens=len(tokens),
        num_forwards=decoded.num_forwards,
        seconds=decoded.seconds,
        prefill_seconds=decoded.prefill_seconds,
        joules=decoded.joules,
        num_experts_read=decoded.num_experts_read,
        stop=decoded.stop,
        trace=trace.to_json(),
        warm=False,
        num_forced_tokens=_num_forced(decoded, len(tokens), job.resolved.settings),
        **_thoughts(tokens, job.prompt_ids, detokenizer),
    )


def _thoughts(tokens: Sequence[int], prompt_ids: Sequence[int], detokenizer: Detokenizer) -> dict[str, Any]:
    """The fields of a record with a thinking block; a token across a block's border belongs before the border."""

    def num_characters(length: int) -> int:  # never fewer with more tokens: a half character may become a whole one
        return len(detokenizer.spelled(tokens[:length]).rstrip("\ufffd"))

    text = detokenizer.spelled(tokens)
    before = prompt_ids[: prompt_ids.index(HOLE)] if HOLE in prompt_ids else prompt_ids
    is_open = opens_thought(detokenizer.spelled(before[-PROMPT_END:]))
    blocks = thinking_blocks(text, is_open=is_open)
    if not blocks:
        return {}
    numbers = [bisect.bisect_left(range(len(tokens)), end, key=num_characters) for block in blocks for end in block]
    return {
        "num_thought_tokens": sum(numbers[1::2]) - sum(numbers[::2]),
        "cut_in_thought": blocks[-1][1] == len(text) and not closes_thought(text),
    }


def _num_forced(decoded: Decoded, num_kept: int, settings: Any) -> int | None:
    """The tokens kept that ended a thought at its budget; None without a budget."""
    if not has_budget(settings):
        return None
    return min(decoded.num_forced, max(0, num_kept - settings.thought_budget))  # a stop string may have cut them off


def response(sample: Sample) -> str:
    """The text that is judged: with the tag of a thought that the prompt opened and the text does not close."""
    is_open = sample.cut_in_thought and not thinking_blocks(sample.text)
    return f"{THINK_START}{sample.text}" if is_open else sample.text


def record_error(job: Job, error: str, *, batch_size: int, stop: str = "") -> Sample:
    return Sample(**_identity(job, batch_size), error=redact(error, job.sealed), stop=stop)


def _identity(job: Job, batch_size: int) -> dict[str, Any]:
    return {
        "key": job.key,
        "benchmark": job.benchmark,
        "item_id": job.item_id,
        "settings": {**job.resolved.values, "until": list(job.resolved.until)},
        "settings_source": dict(job.resolved.sources),
        "prompt_num_tokens": len(job.prompt_ids),
        "batch_size": batch_size,
        "prompts": job.prompts,
    }


def _without_tokens(trace: Trace) -> Trace:
    """A copy in which every token id is 0; it still tells where and when positions were fixed."""
    blanked = [
        replace(event, tokens=(0,) * len(event.tokens)) if isinstance(event, Draft | Fix) else event
        for event in trace.events
    ]
    return Trace(blanked, trace.num_forwards, trace.num_unrecorded)


class WarmUp:
    """Decodes the first job of each settings untimed, because one-off costs, such as compiling, come with it."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._warm: set[str] = set()  # digests of the settings whose one-off costs are over
        self._timed: set[SampleKey] = set()  # jobs whose next decoding measures speed

    def __call__(self, job: Job, decode: Callable[[Job], Sample]) -> Sample | None:
        """Makes ready for a timed decoding; returns the record of one that failed, which leaves the settings cold."""
        if (digest := job.resolved.digest) not in self._warm:
            if not self._number:  # the first request warms up for the others, and is not timed
                self._warm.add(digest)
                return None
            # A long response of a slow model takes minutes, in which nothing else is shown.
            log.info("%s: the first request is decoded as a warm-up", job.key.task)
            started = time.perf_counter()
            for _ in range(self._number):
                if (sample := decode(job)).error is not None:
                    return sample
            self._warm.add(digest)
            seconds = time.perf_counter() - started
            log.info("%s: %d warm-up decodings, %.1f s", job.key.task, self._number, seconds)
        self._timed.add(job.key)
        return None

    def marked(self, sample: Sample) -> Sample:
        """The record, marked as warm if its time measures speed."""
        is_timed = sample.key in self._timed
        self._timed.discard(sample.key)
        return replace(sample, warm=True) if is_timed else sample


class JobRunner(Protocol):
    def run(self, jobs: Iterable[Job]) -> Iterator[Sample]:
        """Yields the record of each job as it ends. The jobs that are decoded alone come first in `jobs`."""

    def close(self) -> None:
        """Releases other processes; harmless if there are none."""
