"""Interfaces of servers, a file each."""

from collections.abc import Mapping
from typing import Any

from refusion_eval.runs.apis.api import Api, Part, Prompt
from refusion_eval.runs.apis.choices import CHAT, COMPLETIONS
from refusion_eval.runs.apis.generate import GENERATE
from refusion_eval.runs.apis.ollama import OLLAMA
from refusion_eval.runs.apis.responses import RESPONSES

__all__ = ["APIS", "PROBED", "Api", "Part", "Prompt", "part_of"]

APIS: Mapping[str, Api] = {
    "completions": COMPLETIONS,
    "chat": CHAT,
    "responses": RESPONSES,
    "generate": GENERATE,
    "ollama": OLLAMA,
}
# What an unknown server is tried with, in this order; the others have to be asked for.
PROBED = ("completions", "chat", "ollama")


def part_of(chunk: Mapping[str, Any]) -> tuple[Api | None, Part]:
    """What an object of an answer says, by the first interface whose form it has, and which that is."""
    for api in APIS.values():
        if any(key in chunk for key in api.keys):
            return api, api.part(chunk)
    return None, Part()
