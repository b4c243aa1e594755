"""OpenAI's responses, whose answers have items of several types."""

from collections.abc import Mapping
from typing import Any

from refusion_eval.runs.apis.api import Api, Part, Prompt
from refusion_eval.runs.server_facts import as_dict, as_list

_FIELDS = ("temperature", "top_p", "stream")


def _body(model: str, prompt: Prompt, fields: Mapping[str, Any]) -> dict[str, Any]:
    effort = fields.get("reasoning_effort")
    thinks = {} if effort is None else {"reasoning": {"effort": effort}}
    kept = {name: fields[name] for name in _FIELDS if name in fields}
    # Not stored, because the server would keep the prompts.
    kept |= {"max_output_tokens": fields["max_tokens"], "store": False}
    return {"model": model, "input": prompt, **thinks, **kept}


def _part(chunk: Mapping[str, Any]) -> Part:
    """A whole response, or an event of its stream, whose last one repeats all."""
    kind, whole = str(chunk.get("type") or ""), as_dict(chunk.get("response") or chunk)
    if kind.endswith("output_text.delta"):
        return Part(text=chunk.get("delta"))
    if "reasoning" in kind and kind.endswith("text.delta"):
        return Part(reasoning=chunk.get("delta"))
    status = whole.get("status")
    if status not in ("completed", "incomplete"):
        return Part()
    items = list(map(as_dict, as_list(whole.get("output"))))
    parts = [as_dict(part) for item in items for part in as_list(item.get("content"))]
    # A summary stands beside the thoughts themselves, where a server shows both.
    thoughts = [
        as_dict(part)
        for item in items
        if item.get("type") == "reasoning"
        for part in as_list(item.get("content")) or as_list(item.get("summary"))
    ]
    return Part(
        text="".join(str(part.get("text") or "") for part in parts if part.get("type") == "output_text"),
        # None replaces no thoughts that were streamed.
        reasoning="".join(str(part.get("text") or "") for part in thoughts) or None,
        is_whole=True,
        finish=as_dict(whole.get("incomplete_details")).get("reason") or status,
        told=whole,
        refusal=next((part["refusal"] for part in parts if part.get("refusal")), None),
    )


_WRITES = (*_FIELDS, "max_tokens", "reasoning_effort")
RESPONSES = Api("/v1/responses", True, _body, ("output", "type"), _part, _WRITES)
