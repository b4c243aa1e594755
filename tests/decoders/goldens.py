"""Decodes a golden case of the public release through the Python API."""

from typing import Any

from refusion_eval.api import decoder_settings
from refusion_eval.decoders import DECODERS
from refusion_eval.types import Decoded


def golden_settings(model: Any, case: dict[str, Any], **settings: Any) -> Any:
    """The settings of a case of golden.jsonl, and further ones."""
    named = case["settings"]
    return decoder_settings(
        model,
        "refusion",
        gen_length=named["gen_length"],
        slot_size=named["slot_size"],
        block_size=case["block_size"],
        tau_slot=named["slot_threshold"],
        tau_token=named["token_threshold"],
        **settings,
    )


def decode_golden(model: Any, case: dict[str, Any], *, release_compatible: bool, **settings: Any) -> Decoded:
    """Runs a case of golden.jsonl with its own settings, and further ones."""
    resolved = golden_settings(model, case, release_compatible=release_compatible, **settings)
    return model.engine.run(DECODERS["refusion"].decode, case["prompt_ids"], resolved)
