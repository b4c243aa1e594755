"""The answer of a server, read from a body or from the parts of a stream, in whichever of the public forms it comes."""

import logging
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from refusion_eval.errors import DecodeError
from refusion_eval.runs.apis import APIS, Api, part_of
from refusion_eval.runs.server_facts import as_dict, as_list, facts_of
from refusion_eval.runs.server_key import Key
from refusion_eval.runs.server_wire import Passing, error_in, short
from refusion_eval.types import MOST_TOKENS
from refusion_eval.untrusted import parse_json

log = logging.getLogger(__name__)

_ABORTED = re.compile(r"abort|cancel|error|fail|time_?out", re.IGNORECASE)  # reasons of answers that lack their end
BREAKS_OFF = "the answer breaks off"
_EQUAL_PIECES = 30  # after so many equal tokens in a row Ollama ends a stream, without a word
# Where a choice of completions that has no text holds one: forms of chats, and texts that a server takes for thoughts.
_IN_PLACE_OF_TEXT = ("delta", "message", "content", "reasoning_content", "reasoning")
# What servers call the two common reasons. Every other word is kept.
_FINISHES = {"stop_sequence": "stop", "eos_token": "stop", "completed": "stop", "max_output_tokens": "length"}
_CACHED = "x-litellm-cache-key"  # a header of answers that a proxy had before


class BrokenOff(Passing):
    """An answer without its end; `loop` is its text where it is one that Ollama would end so again, and else empty."""

    def __init__(self, loop: str) -> None:
        super().__init__(BREAKS_OFF)
        self.loop = loop


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
        facts: what the server told of it, as `Sample.server` documents it; a `refusal` of any length.
        states: all parts of a stream whose parts replace each other, with their seconds since the request.
    """

    text: str
    token_ids: tuple[int, ...] | None
    finish_reason: str
    stopped_by: str
    seconds: float
    facts: Mapping[str, Any]
    reasoning: str = ""
    states: tuple[tuple[float, str], ...] = ()


def error_of(content: Any) -> str | None:
    """What an object of an answer says of a failure, whatever status it came with; None if it is none."""
    fields = as_dict(content)
    whole = as_dict(fields.get("response") or fields)
    if whole.get("status") == "failed" or fields.get("type") == "error":
        return error_in(whole)
    is_flat = "choices" not in fields and bool(fields.keys() & {"message", "detail"}) and "done" not in fields
    return error_in(content) if not fields or fields.get("error") or is_flat else None


def object_of(data: str, key: Key) -> dict[str, Any]:
    """The object of an event, without the key; Passing if it is damaged, or says that the answer failed."""
    try:
        content = key.cleaned(parse_json(key.clean(data)))
    except ValueError:
        raise Passing(f"the answer is damaged JSON: {short(key.clean(data))}") from None
    if (error := error_of(content)) is not None:
        raise Passing(f"the stream holds an error: {error}")
    return content


def model_of(chunks: Sequence[Mapping[str, Any]], headers: Mapping[str, str]) -> Any:
    """The model that answered: by the header of a gateway that fell back on another one, or by the answer."""
    if headers.get("x-litellm-attempted-fallbacks", "0") != "0" and (group := headers.get("x-litellm-model-group")):
        return group
    return next((chunk["model"] for chunk in chunks if chunk.get("model")), "")


def assemble(
    chunks: Iterable[Mapping[str, Any]],
    seconds: float,
    first_byte: float,
    *,
    api: Api = APIS["completions"],
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
        api: what was asked.
        streamed, is_done: whether the answer came as a stream, and whether that ended by `[DONE]`.
        times: when each object came, in seconds since the request.
        diffusion: as of `facts_of`.

    Raises:
        Passing: the end of the answer is missing; BrokenOff, where nothing says why.
        DecodeError: it has no text, or something else in its place.
    """
    texts: list[Any] = []
    thoughts: list[Any] = []
    ids: list[Any] = []
    others: list[str] = []
    states: list[tuple[float, str]] = []
    told: dict[str, Any] = {}
    finish = stopped_by = refusal = ""
    needs_reason = True
    for number, chunk in enumerate(chunks):
        form, part = part_of(chunk)
        needs_reason = needs_reason and not (form and form.ends_without_reason)
        told |= {name: value for name, value in {**chunk, **part.told}.items() if value}
        if part.is_whole and part.text is not None:
            texts, ids = [], []
            states += [(times[number], part.text)] if len(times) > number and isinstance(part.text, str) else []
        if part.is_whole and part.reasoning is not None:
            thoughts = []
        has_text = part.text is not None and not (api.text_only and "choices" in chunk and not _has_text(chunk))
        texts += [part.text] if has_text else []
        others += _in_place_of_text(chunk)
        thoughts += [part.reasoning] if part.reasoning is not None else []
        ids += part.ids
        finish, stopped_by = str(part.finish or finish), str(part.stopped_by or stopped_by)
        refusal = str(part.refusal or refusal) if part.is_whole else refusal + str(part.refusal or "")
    if _ABORTED.search(finish):
        raise Passing(BREAKS_OFF)
    if not (finish or is_done or not (streamed or needs_reason)):
        pieces = [str(piece) for piece in texts or thoughts if piece]
        last = {piece.strip() for piece in pieces[-_EQUAL_PIECES:]}
        raise BrokenOff("".join(pieces) if len(pieces) >= _EQUAL_PIECES and len(last) == 1 else "")
    _check_texts(texts, thoughts, others if api.text_only else None)
    facts = facts_of(told, headers or {}, diffusion=diffusion)
    facts |= {"id": short(str(told.get("id") or "")), "finish_reason": short(finish), "first_byte_seconds": first_byte}
    facts |= {"refusal": refusal} if refusal else {}
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


def _check_texts(texts: Sequence[Any], thoughts: Sequence[Any], others: Sequence[str] | None) -> None:
    """Checks what was joined; `others` is what completions have in the place of a text, and None for other answers."""
    if others is not None and not any(texts) and (others or not texts):
        held = f" but {others[0]}" if others else ""
        raise DecodeError(
            f"the choices of the answer have no text{held}: /v1/completions of the server has to answer in the form of "
            "completions, not of chats, and without a parser that takes thoughts out of texts"
        )
    if wrong := next((text for text in (*texts, *thoughts) if not isinstance(text, str | None)), None):
        raise DecodeError(f"the text of the answer is a {type(wrong).__name__}")


class Earlier:
    """The answers of a server so far, so that none counts twice."""

    def __init__(self, root: str) -> None:
        self._root, self._lock = root, threading.Lock()
        self._seen: dict[str, tuple[str, ...]] = {}  # id -> the answer that it came with
        self._ids_repeat = False

    def refuse(self, identity: str, content: tuple[str, ...]) -> None:
        """Raises Passing for an earlier answer, with its id, moment and text: it would be counted twice."""
        # An id proves nothing where a server has one for all answers, or draws from a few (Ollama: 999): that is so
        # while it has shown no second one, and once it has given an id to two answers.
        with self._lock:
            before = self._seen.setdefault(identity, content) if identity else content
            if before != content and not self._ids_repeat:
                self._ids_repeat = True
                log.warning("%s: the ids of its answers repeat, so they show no answer that is given again", self._root)
            is_old = before is not content and len(self._seen) > 1 and not self._ids_repeat
        if is_old:
            raise Passing(f"the server repeats an old answer (id {short(identity)})")
