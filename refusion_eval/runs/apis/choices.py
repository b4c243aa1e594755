"""OpenAI's completions and chats, whose answers have choices."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from refusion_eval.runs.apis.api import Api, Part, Prompt
from refusion_eval.runs.server_facts import as_dict, as_list

# Names of one text, of which some servers send two: the first that is there counts.
_REASONING = ("reasoning_content", "reasoning", "thinking")


def _body(name_of_prompt: str, model: str, prompt: Prompt, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": model, name_of_prompt: prompt, **fields}


def _part(chunk: Mapping[str, Any]) -> Part:
    # Some streams begin or end with an object that has no choice. Choices of further samples have other numbers.
    choices = (one for one in map(as_dict, as_list(chunk.get("choices"))) if one and one.get("index") in (0, None))
    choice = next(choices, {})
    verbose, said = as_dict(chunk.get("__verbose")), as_dict(choice.get("message") or choice.get("delta"))
    summary, is_diffusing = as_dict(chunk.get("reasoning_summary")).get("content"), as_dict(chunk.get("diffusion_meta"))
    reasoning = next((said[name] for name in _REASONING if said.get(name)), summary)
    reason = choice.get("finish_reason")
    return Part(
        text=choice["text"] if "text" in choice else said.get("content"),
        reasoning=reasoning,
        is_whole="message" in choice or bool(is_diffusing.get("diffusion_content")),
        finish=as_dict(reason).get("type", reason),
        stopped_by=choice.get("stop_reason") or verbose.get("stopping_word") or choice.get("matched_stop"),
        ids=[*as_list(verbose.get("tokens")), *as_list(choice.get("token_ids"))],
        told={"meta_info": choice["meta_info"]} if choice.get("meta_info") else {},
        refusal=said.get("refusal"),
    )


COMPLETIONS = Api("/v1/completions", False, partial(_body, "prompt"), ("choices",), _part, text_only=True)
CHAT = Api("/v1/chat/completions", True, partial(_body, "messages"), ("choices",), _part)
