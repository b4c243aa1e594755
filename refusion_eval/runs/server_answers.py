"""The answer of a server, read from a body or from the parts of a stream, in whichever of the public forms it comes."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from refusion_eval.errors import DecodeError
from refusion_eval.runs.server_facts import as_dict, as_list, facts_of
from refusion_eval.runs.server_wire import Passing, error_in, short
from refusion_eval.types import MOST_TOKENS

_ABORTED = re.compile(r"abort|cancel|error|fail|time_?out", re.IGNORECASE)  # reasons of answers that lack their end
BREAKS_OFF = "the answer breaks off"
# Where a choice of completions that has no text holds one: forms of chats, and texts that a server takes for thoughts.
_IN_PLACE_OF_TEXT = ("delta", "message", "content", "reasoning_content", "reasoning")
# Names of one text, of which some servers send two: the first that is there counts.
_REASONING = ("reasoning_content", "reasoning", "thinking")
# What servers call the two common reasons. Every other word is kept.
_FINISHES = {"stop_sequence": "stop", "eos_token": "stop", "completed": "stop", "max_output_tokens": "length"}
_CACHED = "x-litellm-cache-key"  # a header of answers that a proxy had before


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        text: as the server gives it; some cut a stop string from it, some do not.
        reasoning: what the server gives as thoughts beside the text.
        token_ids: ids of all generated tokens, as many as the server counts; None if it gives none, or not all.
        finish_reason: "stop", "length", "content_filter", another word of the server's, or "" where it gives none for
            a whole answer.
        stopped_by: the stop string or what the server calls it; empty where it does not say.
        seconds: from the request to its last byte.
        facts: what the server told of it, as `Sample.server` documents it.
        states: of a stream whose parts replace each other, all of them, with their seconds since the request.
    """

    text: str
    token_ids: tuple[int, ...] | None
    finish_reason: str
    stopped_by: str
    seconds: float
    facts: Mapping[str, Any]
    reasoning: str = ""
    states: tuple[tuple[float, str], ...] = ()


class _Part(NamedTuple):
    """What one object says: a whole answer, or a part of a stream."""

    text: Any = None
    reasoning: Any = None
    is_whole: bool = False  # it replaces what came before
    finish: Any = None
    stopped_by: Any = None
    ids: Sequence[Any] = ()
    told: Mapping[str, Any] = {}  # fields of the answer that do not stand at the top
    refusal: Any = None


def _of_choices(chunk: Mapping[str, Any]) -> _Part:
    """OpenAI's completions and chats, whole or streamed."""
    # Some streams begin or end with an object that has no choice. Choices of further samples have other numbers.
    choices = (one for one in map(as_dict, as_list(chunk.get("choices"))) if one and one.get("index") in (0, None))
    choice = next(choices, {})
    verbose, said = as_dict(chunk.get("__verbose")), as_dict(choice.get("message") or choice.get("delta"))
    summary, is_diffusing = as_dict(chunk.get("reasoning_summary")).get("content"), as_dict(chunk.get("diffusion_meta"))
    reasoning = next((said[name] for name in _REASONING if said.get(name)), summary)
    reason = choice.get("finish_reason")
    return _Part(
        text=choice["text"] if "text" in choice else said.get("content"),
        reasoning=reasoning,
        is_whole="message" in choice or bool(is_diffusing.get("diffusion_content")),
        finish=as_dict(reason).get("type", reason),
        stopped_by=choice.get("stop_reason") or verbose.get("stopping_word") or choice.get("matched_stop"),
        ids=[*as_list(verbose.get("tokens")), *as_list(choice.get("token_ids"))],
        told={"meta_info": choice["meta_info"]} if choice.get("meta_info") else {},
        refusal=said.get("refusal"),
    )


def _of_responses(chunk: Mapping[str, Any]) -> _Part:
    """OpenAI's responses: a whole one, or an event of its stream, whose last one repeats all."""
    kind, whole = str(chunk.get("type") or ""), as_dict(chunk.get("response") or chunk)
    if kind.endswith("output_text.delta"):
        return _Part(text=chunk.get("delta"))
    if "reasoning" in kind and kind.endswith("text.delta"):
        return _Part(reasoning=chunk.get("delta"))
    status = whole.get("status")
    if status not in ("completed", "incomplete"):
        return _Part()
    items = list(map(as_dict, as_list(whole.get("output"))))
    parts = [as_dict(part) for item in items for part in as_list(item.get("content"))]
    thoughts = [
        as_dict(part) for item in items if item.get("type") == "reasoning" for part in as_list(item.get("summary"))
    ]
    return _Part(
        text="".join(str(part.get("text") or "") for part in parts if part.get("type") == "output_text"),
        reasoning="".join(str(part.get("text") or "") for part in thoughts),
        is_whole=True,
        finish=as_dict(whole.get("incomplete_details")).get("reason") or status,
        told=whole,
        refusal=next((part["refusal"] for part in parts if part.get("refusal")), None),
    )


def _of_generate(chunk: Mapping[str, Any]) -> _Part:
    """SGLang's `/generate`, each of whose parts is the whole text so far."""
    reason = as_dict(as_dict(chunk.get("meta_info")).get("finish_reason"))
    ids = as_list(chunk.get("output_ids"))
    return _Part(chunk.get("text"), None, True, reason.get("type"), reason.get("matched"), ids)


def _of_ollama(chunk: Mapping[str, Any]) -> _Part:
    """Ollama's `/api/chat` and `/api/generate`, and ollada's."""
    said = as_dict(chunk.get("message"))
    text = said.get("content") if said else chunk.get("response")
    return _Part(text, said.get("thinking") or chunk.get("thinking"), finish=chunk.get("done_reason"))


# Form -> keys of which an object of it has one, and what reads it; the first that fits.
_FORMS: Mapping[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], _Part]]] = {
    "choices": (("choices",), _of_choices),
    "responses": (("output", "type"), _of_responses),
    "generate": (("meta_info",), _of_generate),
    "ollama": (("done",), _of_ollama),
}


def error_of(content: Any) -> str | None:
    """What an object of an answer says of a failure, whatever status it came with; None if it is none."""
    fields = as_dict(content)
    whole = as_dict(fields.get("response") or fields)
    if whole.get("status") == "failed" or fields.get("type") == "error":
        return error_in(whole)
    is_flat = "choices" not in fields and bool(fields.keys() & {"message", "detail"}) and "done" not in fields
    return error_in(content) if not fields or fields.get("error") or is_flat else None


def assemble(
    chunks: Iterable[Mapping[str, Any]],
    seconds: float,
    first_byte: float,
    *,
    api: str = "completions",
    streamed: bool = True,
    is_done: bool = False,
    headers: Mapping[str, str] | None = None,
    times: Sequence[float] = (),
    diffusion: bool = False,
) -> Answer:
    """Joins the parts of an answer.

    Args:
        chunks: the objects that came, one where the answer did not come as a stream.
        seconds, first_byte: from the request to its last and to its first byte.
        api: what was asked. Of completions a choice must have its text in the field `text`.
        streamed, is_done: whether the answer came as a stream, and whether that ended by `[DONE]`.
        times: when each object came, in seconds since the request.
        diffusion: as of `facts_of`.

    Raises:
        Passing: the end of the answer is missing.
        DecodeError: it has no text, or something else in its place.
    """
    texts: list[Any] = []
    thoughts: list[Any] = []
    ids: list[Any] = []
    others: list[str] = []
    states: list[tuple[float, str]] = []
    told: dict[str, Any] = {}
    finish = stopped_by = refusal = ""
    forms: set[str] = set()
    for number, chunk in enumerate(chunks):
        form = next((name for name, (keys, _) in _FORMS.items() if any(key in chunk for key in keys)), "")
        part = _FORMS[form][1](chunk) if form else _Part()
        forms.add(form)
        told |= {name: value for name, value in {**chunk, **part.told}.items() if value}
        if part.is_whole and part.text is not None:
            texts, ids = [], []
            states += [(times[number], part.text)] if len(times) > number and isinstance(part.text, str) else []
        if part.is_whole and part.reasoning is not None:
            thoughts = []
        has_text = part.text is not None and (form != "choices" or api != "completions" or _has_text(chunk))
        texts += [part.text] if has_text else []
        others += _in_place_of_text(chunk) if form == "choices" else []
        thoughts += [part.reasoning] if part.reasoning is not None else []
        ids += part.ids
        finish, stopped_by = str(part.finish or finish), str(part.stopped_by or stopped_by)
        refusal = str(part.refusal or refusal)
    if _ABORTED.search(finish) or not (finish or is_done or (not streamed and "ollama" in forms)):
        raise Passing(BREAKS_OFF)
    _check_texts(texts, thoughts, others, api)
    facts = facts_of(told, headers or {}, diffusion=diffusion)
    facts |= {"id": short(str(told.get("id") or "")), "finish_reason": short(finish), "first_byte_seconds": first_byte}
    facts |= {"refusal": short(refusal)} if refusal else {}
    facts |= {"from_cache": True} if headers and headers.get(_CACHED) else {}
    are_ids = all(type(token) is int and 0 <= token < MOST_TOKENS for token in ids)
    complete = bool(ids) and are_ids and len(ids) == facts.get("completion_tokens")
    text, reasoning = ("".join(filter(None, parts)) for parts in (texts, thoughts))
    return Answer(
        text,
        tuple(ids) if complete else None,
        _FINISHES.get(finish, finish),
        stopped_by,
        seconds,
        facts,
        reasoning,
        tuple(states) if len(states) > 1 else (),
    )


def _has_text(chunk: Mapping[str, Any]) -> bool:
    return any("text" in as_dict(choice) for choice in as_list(chunk.get("choices")))


def _in_place_of_text(chunk: Mapping[str, Any]) -> list[str]:
    choices = map(as_dict, as_list(chunk.get("choices")))
    return [name for choice in choices for name in _IN_PLACE_OF_TEXT if choice.get(name)]


def _check_texts(texts: Sequence[Any], thoughts: Sequence[Any], others: Sequence[str], api: str) -> None:
    if api == "completions" and not any(texts) and (others or not texts):
        held = f" but {others[0]}" if others else ""
        raise DecodeError(
            f"the choices of the answer have no text{held}: /v1/completions of the server has to answer in the form of "
            "completions, not of chats, and without a parser that takes thoughts out of texts"
        )
    if wrong := next((text for text in (*texts, *thoughts) if not isinstance(text, str | None)), None):
        raise DecodeError(f"the text of the answer is a {type(wrong).__name__}")
