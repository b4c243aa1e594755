"""The fields of requests to servers, and the interfaces that known servers have."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from refusion_eval.runs.apis import Api
from refusion_eval.runs.server_facts import CANVAS

# Servers that are known to have completions, or to have chats alone; of every other one is found out what it has.
KNOWN = {"vLLM": "completions", "SGLang": "completions", "llama.cpp": "completions", "TGI": "completions"}
KNOWN |= {**dict.fromkeys(CANVAS, "chat"), "ollada": "ollama", "Ollama": "ollama", "Inception": "chat", "Azure": "chat"}

# Fields that a server takes and does not follow, by its name and interface.
_IGNORED = {
    ("ollada", "chat"): ("max_tokens", "temperature", "top_p", "seed", "stop"),
    ("ollada", "ollama"): ("seed", "stop"),
    ("dlmserve", "chat"): ("seed",),
}

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
    api: Api,
    *,
    most_tokens: int,
    temperature: float,
    seed: int,
    stops: Sequence[str] = (),
    effort: str | None = None,
    diffusing: bool = False,
) -> dict[str, Any]:
    """The fields of a request beside model and prompt: every sampling setting, because servers have defaults."""
    return {
        "max_tokens": most_tokens,
        "temperature": temperature,
        "seed": seed % 2**31,
        **_NEUTRAL,
        **({"stop": list(stops)} if stops else {}),
        **({} if effort is None else {"reasoning_effort": effort}),
        **({"diffusing": True} if diffusing else {}),
        **(ASKED_OF_CHATS if api.takes_messages else ASKED),
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def unwritten_by(api: Api, fields: Iterable[str]) -> list[str]:
    """Those of the fields that decide a text and have no place in a request of the interface."""
    about_record = (*ASKED, *ASKED_OF_CHATS, "stream", "stream_options")
    return [name for name in fields if api.writes is not None and name not in (*api.writes, *about_record)]


def ignored_by(server: str, api: str, fields: Mapping[str, Any]) -> list[str]:
    """Those of the fields that a server is known to take without following them."""
    return [name for name in _IGNORED.get((server, api), ()) if name in fields]
