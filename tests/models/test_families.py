"""Every family computes what transformers' own class computes, and what it does not compute is refused."""

import json
import random
from dataclasses import replace

import pytest
import torch

from refusion_eval.errors import CheckpointError
from refusion_eval.models.checkpoint import FAMILIES, model_config
from refusion_eval.models.transformer import Transformer
from refusion_eval.types import bidirectional, causal
from tests.models import tiny

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NUM_TOKENS = 19
TOKENS = random.Random(1).choices(range(tiny.VOCAB_SIZE), k=NUM_TOKENS)


def compare(directory, reference, positions=range(NUM_TOKENS)):
    model = tiny.load(directory)
    lower = torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).tril()
    for attention, visible in ((causal(NUM_TOKENS), lower), (bidirectional(NUM_TOKENS), lower | ~lower)):
        got = tiny.forward(model, tiny.new_cache(model), TOKENS, positions, attention)
        expected = tiny.oracle(reference, TOKENS, list(positions), visible)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"llada2_moe"}))  # which transformers does not have
def test_logits_equal_transformers(tmp_path, family, shard_size, num_kv_heads):
    reference = tiny.save_checkpoint(tmp_path, family=family, shard_size=shard_size, num_key_value_heads=num_kv_heads)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or shard_size == "1GB"
    compare(tmp_path, reference)


@pytest.mark.parametrize("family", ["qwen2", "llama", "a2d-qwen3", "llada", "illada"])
def test_tied_heads(tmp_path, family):
    reference = tiny.save_checkpoint(tmp_path, family=family, tie_word_embeddings=True)
    model = tiny.load(tmp_path)
    assert model.weights.head is model.weights.embedding
    compare(tmp_path, reference)


@pytest.mark.parametrize("rope", ["parameters", "top level"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_scaled_rotary_positions(tmp_path, family, rope):
    reference = tiny.save_checkpoint(tmp_path, family=family, rope=rope, rope_parameters=LLAMA3)
    model = tiny.load(tmp_path)
    plain = Transformer(replace(model.config, rope_scaling=None), model.weights)
    positions = range(0, 20 * NUM_TOKENS, 20)
    scaled, unscaled = (
        tiny.forward(each, tiny.new_cache(each), TOKENS, positions, causal(NUM_TOKENS)) for each in (model, plain)
    )
    assert (scaled - unscaled).abs().max() > 0.1
    compare(tmp_path, reference, positions)


def test_biases_are_added_where_few_rows_meet_a_large_matrix(monkeypatch, tmp_path):
    reference = tiny.save_checkpoint(tmp_path, family="qwen2")
    monkeypatch.setattr("refusion_eval.models.layers.SMALL_MATRIX", 10)
    compare(tmp_path, reference)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        *[("llada", {key: True}, key) for key in ("alibi", "scale_logits", "include_bias", "include_qkv_bias")],
        *[("llada", {key: True}, key) for key in ("attention_layer_norm", "input_emb_norm")],
        *[("llada", {key: True}, key) for key in ("multi_query_attention", "bias_for_layer_norm")],
        ("llada", {"layer_norm_type": "default"}, "layer_norm_type is 'default'; only 'rms' is computed"),
        ("llada", {"layer_norm_with_affine": False}, "layer_norm_with_affine"),
        ("llada", {"block_type": "sequential"}, "block_type is 'sequential'"),
        ("llada", {"block_type": None}, "block_type is None"),
        ("llada", {"block_group_size": 2}, "block_group_size"),
        ("llada", {"activation_type": "swiglu"}, "activation_type"),
        ("llada", {"rope": False}, "rope is False"),
        ("llada", {"rope": None}, "rope is None"),
        ("llada", {"rope_full_precision": False}, "rope_full_precision"),
        ("llada", {"clip_qkv": 8.0}, "clip_qkv"),
        ("llada", {"d_model": None}, "d_model is None"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("illada", {"layer_norm_eps": 1e-5}, "layer_norm_eps"),
        ("llama", {"rope_parameters": LLAMA3 | {"factor": None}}, "rotary scaling 'llama3' lacks a number"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rotary scaling"),
        ("llama", {"partial_rotary_factor": 0.5}, "part of each head"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("Dream", {"use_sliding_window": True}, "use_sliding_window"),
        ("Dream", {"use_mrope": True}, "use_mrope"),
        ("Dream", {"quantization_config": {"bits": 4}}, "quantised"),
        ("sdar", {"attention_bias": True}, "attention_bias"),
        (
            "sdar",
            {"model_type": "gpt_oss", "num_experts": 128},
            "'gpt_oss' has layers of experts .num_experts 128., and",
        ),
        ("llada", {"n_routed_experts": 256}, "'llada' has layers of experts"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size is None"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "7 of 6 experts"),
        ("qwen3_moe", {"num_experts": None, "num_local_experts": None}, "num_experts is None"),
        ("qwen3_moe", {"mlp_only_layers": "0"}, "mlp_only_layers is '0'; it must be a list"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, family, changes, message):
    tiny.save_checkpoint(tmp_path, family=family)
    model_config(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    with pytest.raises(CheckpointError, match=message):
        model_config(tmp_path)


def test_a_missing_bias_is_one_clear_error(tmp_path):
    tiny.save_checkpoint(tmp_path, family="llama")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "qwen2"}))
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.0\.self_attn\.q_proj\.bias"):
        tiny.load(tmp_path)


def test_the_dtype_of_a_checkpoint_that_names_only_its_precision(tmp_path):
    tiny.save_checkpoint(tmp_path, family="llada")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"precision": "amp_bf16"}))
    assert model_config(tmp_path).dtype == "bfloat16"
