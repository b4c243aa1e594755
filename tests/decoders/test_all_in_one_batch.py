"""Requests of every decoder that fits a checkpoint, in one batch: each gives the tokens and forwards it gives alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from refusion_eval.api import decoder_settings, generate_stream, load_model
from refusion_eval.types import Decoded, draw_key

CHECKPOINTS = ("llada_2", "llada_5", "dream_1", "dream_3", "qwen3_2", "qwen3_5")
REUSE: dict[str, Any] = {"prompt_interval_steps": 9, "gen_interval_steps": 4, "transfer_ratio": 0.25}
SETTINGS: Mapping[str, list[dict[str, Any]]] = {
    "autoregressive": [{}, {"temperature": 1.0, "seed": 3}],
    "bd3lm": [{"block_length": 8}, {"block_length": 8, "threshold": 0.6}, {"block_length": 4, "temperature": 0.8}],
    "d2f_dream": [{"block_size": 8, "skip_threshold": 0.7}],
    "d2f_llada": [{"block_size": 8, "skip_threshold": 0.7}],
    "d3llm_dream": [{"block_size": 8, "threshold": 0.8, "cache_delay_iter": 1, "refresh_interval": 3}],
    "d3llm_llada": [{"block_size": 8, "threshold": 0.8}, {"block_size": 8, "cache_delay_iter": 2, "early_stop": True}],
    "dream": [{"steps": 9}, {"temperature": 0.7, "top_p": 0.9}, {"alg": "origin"}, REUSE],
    "esolm": [{}],
    "fast_dllm_dream": [{"block_length": 8, "cache": cache} for cache in ("dual", "prefix", "sparse")],
    "fast_dllm_v2": [{"block_length": 8, "small_block_size": 4, "use_block_cache": cache} for cache in (True, False)],
    "fast_dllm_llada": [
        {"block_length": 8, "threshold": 0.6, "cache": cache} for cache in ("dual", "prefix", "none", "sparse")
    ],
    "idlm": [{}, {"temperature": 1.0}, {"temperature": 0.7, "fast_verify": True, "gen_block_size": 3}],
    "llada": [
        {"block_length": 8, "steps": 12},
        {"block_length": 24, "cfg_scale": 0.5, "temperature": 0.6},
        {"block_length": 8, **REUSE},
        {"block_length": 8, "draft_steps": 3},
    ],
    "llada2": [{"block_length": 8, "threshold": 0.6, "edit_threshold": threshold} for threshold in (None, 0.3)],
    "refusion": [
        {"slot_size": 4, "block_size": 8, "fuse": fuse, **changes}
        for fuse in (True, False)
        for changes in ({}, {"completion": "verifier"}, {"completion": "verifier", "temperature": 0.7})
    ],
    "sdar": [
        {"block_length": 8},
        {"remasking_strategy": "entropy_bounded"},
        {"block_length": 8, "draft_steps": 5, "eager_acceptance_mode": True},
        {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "remasking_strategy": "low_confidence_dynamic"},
    ],
    "wedlm": [{}, {"temperature": 0.7, "window_size": 5}, {"block_size": 8, "confidence_threshold": 0.6}],
}


def prompt(number: int) -> list[int]:
    return [draw_key(11, number, position) % 180 for position in range(3 + 7 * number % 23)]


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("batch_size", [3, 16])
def test_every_decoder_decodes_among_the_others_as_it_does_alone(shared: Path, name: str, batch_size: int):
    model = load_model(str(shared / "parity" / "baselines" / "checkpoints" / name), dtype="float32", device="cpu")
    requests = []
    for decoder in model.decoders:
        for chosen in SETTINGS.get(decoder, [{}]):
            settings = {"gen_length": 24, "eos_ids": (190, 189), **chosen}
            requests.append((decoder, prompt(len(requests)), decoder_settings(model, decoder, **settings)))
    together = dict(generate_stream(model, requests, batch_size))
    assert len(together) == len(requests) > 3
    for number, (decoder, prompt_ids, settings) in enumerate(requests):
        ((_, alone),) = generate_stream(model, [(decoder, prompt_ids, settings)], batch_size=1)
        assert isinstance(alone, Decoded)
        got = together[number]
        assert isinstance(got, Decoded)
        assert (decoder, got.tokens, got.num_forwards) == (decoder, alone.tokens, alone.num_forwards)
