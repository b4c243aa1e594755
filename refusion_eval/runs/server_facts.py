"""What servers tell of an answer beside its text: the table of fields that are read, and what cannot be."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from refusion_eval.errors import DecodeError
from refusion_eval.store.records import LONGEST_TEXT, MOST, dump

# No server generates a token in less; and its own clock may differ from the client's by so much, or by a share.
_SECONDS_PER_TOKEN, _CLOCK_SECONDS, _CLOCK_SHARE = 1e-5, 0.1, 0.1

Unit = Literal["tokens", "forwards", "s", "ms", "ns"]
_OF_A_SECOND = {"s": 1, "ms": 1e3, "ns": 1e9}


# dlmserve's counters of steps: of all sequences in them, of themselves, and of the requests that ended.
_STEPS, _CALLS = "dlmserve_step_batch_size_sum", "dlmserve_step_batch_size_count"
_REQUESTS = "dlmserve_committed_tokens_per_request_count"
COUNTS_STEPS = ("dlmserve",)


class Field(NamedTuple):
    """A field of an answer, of its last chunk in a stream, or of its headers, and what it means.

    Attributes:
        fact: the name in `Sample.server`.
        place: keys from the top, joined by points; or the name of a header.
        unit: what the value is counted in there.
        told_by: servers that have it.
        diffusion: whether the field counts forwards of a diffusion model (True), of any other (False), or of both.
    """

    fact: str
    place: str
    unit: Unit
    told_by: str
    diffusion: bool | None = None


# Of several fields of one fact the first that an answer has counts.
FIELDS = (
    Field("completion_tokens", "usage.completion_tokens", "tokens", "all in OpenAI's form"),
    Field("completion_tokens", "usage.output_tokens", "tokens", "OpenAI's responses"),
    Field("completion_tokens", "meta_info.completion_tokens", "tokens", "SGLang"),
    Field("completion_tokens", "eval_count", "tokens", "Ollama; ollada, of its canvas"),
    Field("prompt_tokens", "usage.prompt_tokens", "tokens", "all in OpenAI's form"),
    Field("prompt_tokens", "usage.input_tokens", "tokens", "OpenAI's responses"),
    Field("prompt_tokens", "meta_info.prompt_tokens", "tokens", "SGLang"),
    Field("prompt_tokens", "prompt_eval_count", "tokens", "Ollama"),
    Field("cached_tokens", "usage.prompt_tokens_details.cached_tokens", "tokens", "OpenAI, llama.cpp, vLLM"),
    Field("cached_tokens", "usage.input_tokens_details.cached_tokens", "tokens", "OpenAI's responses"),
    Field("cached_tokens", "usage.cached_input_tokens", "tokens", "Mercury"),
    Field("cached_tokens", "timings.cache_n", "tokens", "llama.cpp, mlx-vlm"),
    Field("cached_tokens", "meta_info.cached_tokens", "tokens", "SGLang"),
    Field("reasoning_tokens", "usage.completion_tokens_details.reasoning_tokens", "tokens", "OpenAI, SGLang"),
    Field("reasoning_tokens", "usage.output_tokens_details.reasoning_tokens", "tokens", "OpenAI's responses"),
    Field("reasoning_tokens", "usage.reasoning_tokens", "tokens", "Mercury, beside its completion_tokens"),
    Field("drafted_tokens", "timings.draft_n", "tokens", "llama.cpp, mlx-vlm"),
    Field("drafted_tokens", "metrics.speculative_decoding.num_draft_tokens", "tokens", "vLLM"),
    Field("drafted_tokens", "meta_info.spec_num_proposed_drafts", "tokens", "SGLang"),
    Field("accepted_tokens", "timings.draft_n_accepted", "tokens", "llama.cpp, mlx-vlm"),
    Field("accepted_tokens", "metrics.speculative_decoding.num_accepted_draft_tokens", "tokens", "vLLM"),
    Field("accepted_tokens", "meta_info.spec_num_correct_drafts", "tokens", "SGLang"),
    Field("forwards", "meta_info.spec_verify_ct", "forwards", "SGLang, with drafts", diffusion=False),
    Field("forwards", "meta_info.dllm_forward_counts_per_block", "forwards", "forks of SGLang", diffusion=True),
    Field("forwards", "meta_info.dllm_forward_counts", "forwards", "forks of SGLang", diffusion=True),
    Field("forwards", "nfe", "forwards", "ollada; null for every model of its catalogue"),
    Field("forwards", _STEPS, "forwards", "dlmserve, at /metrics around a request without others"),
    Field("prefill_seconds", "timings.prompt_ms", "ms", "llama.cpp, mlx-vlm"),
    Field("prefill_seconds", "metrics.time_to_first_token_ms", "ms", "vLLM"),
    Field("prefill_seconds", "stats.time_to_first_token", "s", "LM Studio"),
    Field("prefill_seconds", "prompt_eval_duration", "ns", "Ollama"),
    Field("generation_seconds", "timings.predicted_ms", "ms", "llama.cpp, mlx-vlm"),
    Field("generation_seconds", "metrics.generation_time_ms", "ms", "vLLM"),
    Field("generation_seconds", "stats.generation_time", "s", "LM Studio"),
    Field("generation_seconds", "eval_duration", "ns", "Ollama"),
    Field("total_seconds", "meta_info.e2e_latency", "s", "SGLang"),
    Field("total_seconds", "nvext.timing.total_time_ms", "ms", "Dynamo, if it is asked for"),
    Field("total_seconds", "eval_duration_s", "s", "ollada"),
    Field("total_seconds", "x-inference-time", "ms", "TGI, in a header"),
    Field("queue_seconds", "metrics.queue_time_ms", "ms", "vLLM"),
)
# Servers whose counts of tokens are of the whole canvas, with what stands there behind the end of the answer.
CANVAS = ("ollada", "dlmserve")
_DETAILS = ("completion_tokens_details", "output_tokens_details")


def facts_of(told: Mapping[str, Any], headers: Mapping[str, str], *, diffusion: bool) -> dict[str, Any]:
    """The counts and times that an answer tells, in tokens, forwards and seconds; nothing else that stands there.

    Args:
        told: the fields of the answer; of a stream those of all its chunks, the last value of each.
        diffusion: whether the user says that the model is a diffusion model.
    """
    facts: dict[str, Any] = {}
    for field in (one for one in FIELDS if one.diffusion in (None, diffusion)):
        if field.fact not in facts and (value := _value(field, told, headers)) is not None:
            facts[field.fact] = value
    # SGLang writes 0 beside details that are null: it says nothing of them.
    usage = as_dict(told.get("usage"))
    if facts.get("reasoning_tokens") == 0 and any(name in usage and usage[name] is None for name in _DETAILS):
        del facts["reasoning_tokens"]
    parts = [facts[name] for name in ("prompt_tokens", "reasoning_tokens", "completion_tokens") if name in facts]
    if len(parts) == 3 and facts["reasoning_tokens"] and usage.get("total_tokens") == sum(parts):  # they stand apart
        facts["completion_tokens"] += facts["reasoning_tokens"]
    if not facts.get("completion_tokens", 1):
        del facts["completion_tokens"]  # a server that does not count them, as an end takes a token, too
    return facts


def steps_between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The steps of one request by a server's counters, as the field of `FIELDS`; empty if others ran meanwhile."""
    steps, calls, requests = (after.get(name, 0) - before.get(name, 0) for name in (_STEPS, _CALLS, _REQUESTS))
    return {_STEPS: steps} if 0 < steps == calls and requests <= 1 else {}


def _value(field: Field, told: Mapping[str, Any], headers: Mapping[str, str]) -> int | float | None:
    value: Any = told
    for key in field.place.split("."):
        value = as_dict(value).get(key)
    if value is None and (text := headers.get(field.place, "")).isdecimal() and len(text) < len(str(MOST)):
        value = int(text)
    if field.unit == "forwards" and isinstance(value, list) and value:
        counts = [one for one in value if type(one) is int and 0 <= one < MOST]
        value = sum(counts) if len(counts) == len(value) else None
    # A record holds counts and times only, and nothing that a server writes in their place.
    if type(value) not in (int, float) or not 0 <= value < MOST:
        return None
    if field.unit in _OF_A_SECOND:
        return value / _OF_A_SECOND[field.unit]
    return int(value) if value == int(value) else value


def forwards(facts: Mapping[str, Any], *, diffusion: bool, drafts_are_told: bool = False) -> int:
    """The forwards of an answer where the server tells them; else 0.

    They are told as such, or they are the tokens less the accepted drafts: an accepted draft takes no forward of its
    own, and the prompt's forward gives the first token. Of a diffusion model, what a server calls accepted drafts saves
    no forward.

    Args:
        drafts_are_told: whether an answer without counts of drafts had none, as with llama.cpp.
    """
    # vLLM's number of steps leaves out the steps without a draft, so it is not used.
    if "forwards" in facts:
        return int(facts["forwards"])
    accepted = facts.get("accepted_tokens", 0 if drafts_are_told else None)
    tokens = facts.get("completion_tokens")
    return 0 if diffusion or tokens is None or accepted is None else max(int(tokens - accepted), 0)


def own_seconds(facts: Mapping[str, Any], seconds: float) -> float | None:
    """The server's own seconds of prompt and generation; None where it does not tell both.

    Also None where it tells of more seconds than passed here between the request and the end of its answer.
    """
    if (prefill := facts.get("prefill_seconds")) is None or (generation := facts.get("generation_seconds")) is None:
        return None
    own = prefill + generation
    most = max(own, facts.get("total_seconds") or 0, facts.get("queue_seconds") or 0)
    return None if most > seconds * (1 + _CLOCK_SHARE) + _CLOCK_SECONDS else own


def check_facts(facts: Mapping[str, Any], texts: Iterable[str], most_tokens: int, longest: float) -> None:
    """Raises DecodeError for what the request makes impossible, so that it becomes no figure.

    Args:
        texts: that a record will hold as JSON: the answer's, and its thoughts.
        longest: seconds that the answer could have taken before the client gave it up.
    """
    tokens, accepted = (facts.get(f"{name}_tokens", 0) for name in ("completion", "accepted"))
    drafted = facts.get("drafted_tokens", accepted)
    cached, read = facts.get("cached_tokens", 0), facts.get("prompt_tokens", MOST)
    parts = [facts[name] for name in ("prefill_seconds", "generation_seconds") if name in facts]
    own = max(sum(parts), facts.get("total_seconds", 0), facts.get("queue_seconds", 0))
    counts = [value for name, value in facts.items() if name.endswith("_tokens") or name == "forwards"]
    impossible = {
        f"{tokens} tokens, where max_tokens is {most_tokens}": tokens > most_tokens,
        f"{cached} cached tokens of a prompt of {read}": cached > read,
        "a part of a token": any(value != int(value) for value in counts),
        f"{accepted} accepted drafts of {drafted}": accepted > drafted,
        f"{accepted} accepted drafts among {tokens or most_tokens} tokens": accepted >= (tokens or most_tokens),
        f"{own:.3g} s of its own, where an answer may take {longest:.3g} s": own > longest,
        f"{sum(parts):.3g} s for {tokens} tokens": len(parts) == 2 and sum(parts) < tokens * _SECONDS_PER_TOKEN,
        f"a text of more than {LONGEST_TEXT >> 20} MiB": max(len(dump(text)) for text in texts) > LONGEST_TEXT,
    }
    if wrong := [what for what, holds in impossible.items() if holds]:
        raise DecodeError(f"the server says what cannot be: {', '.join(wrong)}")


def is_number(value: Any) -> bool:
    """Whether it is a number that a record may hold."""
    return isinstance(value, int | float) and -MOST <= value <= MOST


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def endpoints(client: Any) -> tuple[dict[str, Any], list[str]]:
    """What the endpoints of a server tell its `ServerClient`, as facts and in lines; it is not waited for."""
    described = client.describe(patience=0) | {"api": client.api_name}
    name = f"{described['name']} {described['version']}".strip()
    told = ", ".join(f"{setting}={value}" for setting, value in described["settings"].items())
    lines = [f"{name} serves the model {described['model']}", told, f"asked by {client.api.path}"]
    return described, [f"{client.root}: {line}" for line in lines if line]
