"""Bytes that a forward reads, counted from shapes."""

import dataclasses

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from refusion_eval.models.checkpoint import ModelConfig
from refusion_eval.models.device import cache_bytes_per_row, copy_bandwidth, weight_bytes

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_positions=64,
    tied_head=True,
    dtype="float32",
)


FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_with_a_tied_head_every_parameter_is_read_by_each_forward(family):
    make_config, make_model = FAMILIES[family]
    model = make_model(
        make_config(
            vocab_size=300,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=True,
        )
    )
    config = dataclasses.replace(CONFIG, family=family)
    assert weight_bytes(config, torch.float32) == 4 * sum(parameter.numel() for parameter in model.parameters())


def test_a_cache_row_holds_keys_and_values_of_every_layer():
    assert cache_bytes_per_row(CONFIG, torch.bfloat16) == 2 * (3 * 2 * 16) * 2


def test_copy_bandwidth_is_that_of_a_memory_and_not_of_a_disk():
    assert copy_bandwidth(torch.device("cpu")) > 1e8
