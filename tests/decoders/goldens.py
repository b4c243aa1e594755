"""Decodes a golden case of the public release through the Python API."""

from typing import Any

from refusion_eval.api import generate
from refusion_eval.types import Decoded


def decode_golden(model: Any, case: dict[str, Any], *, release_compatible: bool, **settings: Any) -> Decoded:
    """Runs a case of golden.jsonl with its own settings, and further ones."""
    named = case["settings"]
    return generate(
        model,
        case["prompt_ids"],
        decoder="refusion",
        gen_length=named["gen_length"],
        slot_size=named["slot_size"],
        block_size=case["block_size"],
        tau_slot=named["slot_threshold"],
        tau_token=named["token_threshold"],
        release_compatible=release_compatible,
        **settings,
    )
