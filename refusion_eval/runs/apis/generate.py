"""SGLang's `/generate`, which takes a prompt as it is, and whose forks tell the forwards of diffusion models."""

from collections.abc import Mapping
from typing import Any

from refusion_eval.runs.apis.api import Api, Part, Prompt
from refusion_eval.runs.server_facts import as_dict, as_list

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "stop")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def _body(model: str, prompt: Prompt, fields: Mapping[str, Any]) -> dict[str, Any]:
    settings = {name: fields[name] for name in (*_FIELDS, *_PENALTIES) if name in fields}
    settings |= {"max_new_tokens": fields["max_tokens"]}
    settings |= {"sampling_seed": fields["seed"]} if "seed" in fields else {}
    asked = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
    return {**asked, "sampling_params": settings, "stream": bool(fields.get("stream"))}


def _part(chunk: Mapping[str, Any]) -> Part:
    """Each part is the whole text so far."""
    reason = as_dict(as_dict(chunk.get("meta_info")).get("finish_reason"))
    ids = as_list(chunk.get("output_ids"))
    return Part(chunk.get("text"), None, True, reason.get("type"), reason.get("matched"), ids)


# A server has one of the two names of a penalty.
_WRITES = (*_FIELDS, *_PENALTIES, "repeat_penalty", "max_tokens", "seed")
GENERATE = Api("/generate", False, _body, ("meta_info",), _part, _WRITES)
