"""Requests to servers, by the interface that they have: completions, chats in OpenAI's form, or Ollama's chats."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from refusion_eval.runs.server_facts import CANVAS

# A text, token ids, or the turns of a conversation.
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class Api(NamedTuple):
    """An interface: where requests go, what their prompt is, and how their fields are written."""

    path: str
    takes_messages: bool  # whether the prompt is a conversation, to which the server applies its own template
    body: Callable[[str, Prompt, Mapping[str, Any]], dict[str, Any]]  # (model, prompt, fields)


# Ollama's and ollada's names; each ignores those of the other. A canvas is as long as the answer may be.
_OPTIONS = {"max_tokens": ("num_predict", "gen_length"), "repeat_penalty": ("repeat_penalty",)}
_OF_OLLAMA = ("temperature", "seed", "stop", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
_OPTIONS |= {name: (name,) for name in _OF_OLLAMA}


def _completions(model: str, prompt: Prompt, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, **fields}


def _chat(model: str, prompt: Prompt, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": model, "messages": prompt, **fields}


def _ollama(model: str, prompt: Prompt, fields: Mapping[str, Any]) -> dict[str, Any]:
    options = {option: value for name, value in fields.items() for option in _OPTIONS.get(name, ())}
    effort = fields.get("reasoning_effort")
    thinks = {} if effort is None else {"think": False if effort == "none" else effort}
    return {"model": model, "messages": prompt, "stream": True, **thinks, "options": options}


APIS: Mapping[str, Api] = {
    "completions": Api("/v1/completions", False, _completions),
    "chat": Api("/v1/chat/completions", True, _chat),
    "ollama": Api("/api/chat", True, _ollama),
}
# Servers that are known to have completions, or to have chats alone; of every other one is found out what it has.
KNOWN = {"vLLM": "completions", "SGLang": "completions", "llama.cpp": "completions", "TGI": "completions"}
KNOWN |= {**dict.fromkeys(CANVAS, "chat"), "ollada": "ollama", "Ollama": "ollama", "Inception": "chat"}

# Fields that every chat in OpenAI's form knows. Where a server refuses another one, all others are left out at once.
BASIC = ("max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options", "reasoning_effort")
# Fields that ask for what a record holds, each of one kind of server: token ids, nothing from a cache of prompts, no
# token that is added to a prompt, and SGLang's counts.
ASKED = {"return_token_ids": True, "verbose": True, "cache_prompt": False, "add_special_tokens": False}
ASKED_OF_CHATS = {"cache_prompt": False, "return_meta_info": True}
# A server has defaults of its own for fields that are not sent (llama.cpp: temperature 0.8, top-k 40). Two names for
# one penalty: vLLM's and SGLang's, and llama.cpp's.
_NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def fields_of(
    api: Api, *, most_tokens: int, temperature: float, seed: int, stops: Sequence[str], reasoning_effort: str | None
) -> dict[str, Any]:
    """The fields of a request beside model and prompt: every sampling setting, because servers have defaults."""
    return {
        "max_tokens": most_tokens,
        "temperature": temperature,
        "seed": seed % 2**31,
        **_NEUTRAL,
        **({"stop": list(stops)} if stops else {}),
        **({} if reasoning_effort is None else {"reasoning_effort": reasoning_effort}),
        **(ASKED_OF_CHATS if api.takes_messages else ASKED),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
