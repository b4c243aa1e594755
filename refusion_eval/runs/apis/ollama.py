"""Ollama's `/api/chat`, and ollada's, which has it, too."""

from collections.abc import Mapping
from typing import Any

from refusion_eval.runs.apis.api import Api, Part, Prompt
from refusion_eval.runs.server_facts import as_dict

# Ollama's and ollada's names; each ignores those of the other. A canvas is as long as the answer may be.
_OPTIONS = {"max_tokens": ("num_predict", "gen_length"), "repeat_penalty": ("repeat_penalty",)}
_SAME = ("temperature", "seed", "stop", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
_OPTIONS |= {name: (name,) for name in _SAME}


def _body(model: str, prompt: Prompt, fields: Mapping[str, Any]) -> dict[str, Any]:
    options = {option: value for name, value in fields.items() for option in _OPTIONS.get(name, ())}
    effort = fields.get("reasoning_effort")
    thinks = {} if effort is None else {"think": False if effort == "none" else effort}
    return {"model": model, "messages": prompt, "stream": True, **thinks, "options": options}


def _part(chunk: Mapping[str, Any]) -> Part:
    """The form of `/api/generate` is read, too."""
    said = as_dict(chunk.get("message"))
    text = said.get("content") if said else chunk.get("response")
    return Part(text, said.get("thinking") or chunk.get("thinking"), finish=chunk.get("done_reason"))


# A server has one of the two names of a penalty.
_WRITES = (*_OPTIONS, "repetition_penalty", "reasoning_effort")
OLLAMA = Api("/api/chat", True, _body, ("done",), _part, _WRITES, ends_without_reason=True)
