"""What an interface of servers is: where requests go, how they are written, and what an answer says."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

# A text, token ids, or the turns of a conversation.
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class Part(NamedTuple):
    """What one object says: a whole answer, or a part of a stream."""

    text: Any = None
    reasoning: Any = None
    is_whole: bool = False  # it replaces what came before
    finish: Any = None
    stopped_by: Any = None
    ids: Sequence[Any] = ()
    told: Mapping[str, Any] = {}  # fields of the answer that do not stand at the top
    refusal: Any = None


class Api(NamedTuple):
    """An interface. A further one is a file with an `Api`, and its line in `APIS`.

    Attributes:
        path: where requests go.
        takes_messages: whether the prompt is a conversation, to which the server applies its own template.
        body: (model, prompt, fields) -> the request.
        writes: fields that have a place in the request; None for all.
        keys: of these an object of an answer has one.
        part: what such an object says. Another interface's answers are read by it, too.
        text_only: whether a choice must have its text in the field `text`.
        ends_without_reason: whether an answer that is no stream is whole without a reason.
    """

    path: str
    takes_messages: bool
    body: Callable[[str, Prompt, Mapping[str, Any]], dict[str, Any]]
    keys: tuple[str, ...]
    part: Callable[[Mapping[str, Any]], Part]
    writes: Sequence[str] | None = None
    text_only: bool = False
    ends_without_reason: bool = False
