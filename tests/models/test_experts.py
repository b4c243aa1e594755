"""Mixtures of experts: the logits of the public models, both layouts of their tensors, and what is read of them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from refusion_eval.api import LoadedModel, decoder_settings, load_model
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.metrics import bytes_read
from refusion_eval.models.checkpoint import Experts
from refusion_eval.models.device import cache_bytes_per_row, expert_bytes, weight_bytes
from refusion_eval.models.experts import mix_experts, route
from refusion_eval.models.layers import linear, swiglu
from refusion_eval.models.weights import ExpertWeights, count_parameters, load_weights
from refusion_eval.types import bidirectional, block_causal, causal
from tests.models import tiny

RECORDED = [f"{name}_{number}" for name in ("qwen3moe", "llada2", "sdarmoe") for number in (1, 2)]


@pytest.fixture(scope="module")
def systems(systems_2027: Path) -> Path:
    """Checkpoints and logits of the public models."""
    return systems_2027 / "parity" / "systems2027"


@pytest.mark.parametrize("name", RECORDED)
def test_logits_are_those_of_the_public_code(systems: Path, name: str):
    model, recorded = tiny.load(systems / "checkpoints" / name), np.load(systems / "logits" / f"logits_{name}.npz")
    tokens, sizes = recorded["input_ids"].flatten().tolist(), np.bincount(recorded["block_ids"].flatten()).tolist()
    count = len(tokens)
    for key, attention in (
        ("logits_full", bidirectional(count)),
        ("logits_causal", causal(count)),
        ("logits_block_causal", block_causal(sizes)),
    ):
        logits = tiny.forward(model, tiny.new_cache(model), tokens, range(count), attention)
        np.testing.assert_allclose(logits.numpy(), recorded[key].reshape(logits.shape), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", RECORDED)
def test_16_bit_weights_give_nearly_the_same_logits_on_a_cpu(systems: Path, tmp_path: Path, name: str):
    source = systems / "checkpoints" / name
    weights = load_file(source / "model.safetensors")
    short = {key: value.bfloat16() if value.ndim > 1 else value for key, value in weights.items()}
    save_file(short, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    wide = tiny.load(tmp_path)  # the same numbers in float32
    widened = load_weights(tmp_path, wide.config, torch.float32, tiny.CPU, widened=True)
    assert widened.layers[-1].experts.gate_up.dtype == torch.bfloat16
    model = type(wide)(wide.config, widened)
    tokens = range(9)
    found, expected = (
        tiny.forward(each, tiny.new_cache(each), tokens, tokens, causal(len(tokens))) for each in (model, wide)
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def packed(source: Path, target: Path) -> None:
    """Writes a checkpoint whose experts of a layer are one tensor, as transformers holds them in memory."""
    weights = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = {part: [] for part in ("gate", "up", "down")}
        for expert in range(config["num_experts"] if f"{prefix}0.gate_proj.weight" in weights else 0):
            for part, found in parts.items():
                found.append(weights.pop(f"{prefix}{expert}.{part}_proj.weight"))
        if parts["gate"]:
            both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
            weights[f"{prefix}gate_up_proj"] = torch.stack(both)
            weights[f"{prefix}down_proj"] = torch.stack(parts["down"])
    target.mkdir(exist_ok=True)
    save_file(weights, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))


def save(directory: Path, **changes: object) -> None:
    """A random checkpoint with each expert's tensors apart, as they are published."""
    tiny.save_checkpoint(directory, family="qwen3_moe", **changes)
    weights = load_file(directory / "model.safetensors")
    assert "model.layers.1.mlp.experts.5.up_proj.weight" in weights


def test_both_layouts_of_the_tensors_are_one_model(tmp_path: Path, caplog):
    save(tmp_path, mlp_only_layers=[0])
    packed(tmp_path, tmp_path / "packed")
    apart, together = tiny.load(tmp_path), tiny.load(tmp_path / "packed")
    assert apart.weights.layers[0].experts is None
    for name in ("router", "gate_up", "down"):
        assert torch.equal(*(getattr(each.weights.layers[1].experts, name) for each in (apart, together)))
    assert not caplog.records


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_missing_and_a_surplus_tensor_are_noticed(tmp_path: Path, caplog, is_packed: bool):
    save(tmp_path)
    if is_packed:
        packed(tmp_path, tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"model.layers.1.mlp.experts.6.up_proj.weight": torch.zeros(24, 48)}, path)
    tiny.load(tmp_path)
    assert "1 tensors are not used: model.layers.1.mlp.experts.6.up_proj.weight" in caplog.text
    lacking = "model.layers.1.mlp.experts." + ("down_proj" if is_packed else "3.down_proj.weight")
    weights.pop(lacking)
    save_file(weights, path)
    for look in (tiny.load, lambda folder: LoadedModel.open(folder).check_files()):
        with pytest.raises(CheckpointError, match=f"no tensor {lacking}"):
            look(tmp_path)


def test_layers_without_experts_are_those_that_the_config_names(tmp_path: Path):
    save(tmp_path, num_hidden_layers=4, decoder_sparse_step=2)
    model = tiny.load(tmp_path)
    assert model.config.experts.layers == {1, 3}
    assert [layer.experts is None for layer in model.weights.layers] == [True, False, True, False]


SIGMOID = Experts(
    num_experts=8,
    num_chosen=3,
    width=2,
    layers=frozenset({0}),
    score="sigmoid",
    scale=2.5,
    num_groups=4,
    num_kept_groups=2,
)


def test_groups_are_chosen_by_their_two_best_and_shares_are_without_the_bias():
    logits = torch.tensor([[3.0, -9.0, 1.0, 1.1, 0.0, 0.9, -1.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.9, 0.9])
    weights = ExpertWeights(torch.eye(8), bias, torch.empty(0), torch.empty(0))
    ids, shares = route(logits, weights, SIGMOID)
    # Scores and bias: [0.95, 0], [0.73, 0.75], [0.5, 0.71], [1.17, 1.17]: the last group and the second one are kept.
    assert sorted(ids[0].tolist()) == [3, 6, 7]
    scores = logits[0, ids[0]].sigmoid()
    torch.testing.assert_close(shares[0], 2.5 * scores / scores.sum())


@pytest.mark.parametrize("normalised", [True, False])
def test_shares_of_a_softmax_are_over_all_experts(normalised: bool):
    experts = Experts(
        num_experts=4, num_chosen=2, width=2, layers=frozenset({0}), score="softmax", normalised=normalised
    )
    logits = torch.tensor([[1.0, 2.0, 0.5, -1.0]])
    ids, shares = route(logits, ExpertWeights(torch.eye(4), None, torch.empty(0), torch.empty(0)), experts)
    expected = logits.softmax(-1)[0, :2].flip(0)
    assert ids.tolist() == [[1, 0]]
    torch.testing.assert_close(shares[0], expected / expected.sum() if normalised else expected)


def test_only_the_experts_that_rows_chose_are_read():
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(5, 6), torch.randn(9, 8, 6), torch.randn(9, 6, 4)
    ids, shares = torch.tensor([[0, 3], [3, 7], [9, 9], [7, 0], [3, 0]]), torch.rand(5, 2)
    gate_up[[1, 2, 4, 5, 6, 8]] = down[[1, 2, 4, 5, 6, 8]] = torch.nan
    num_read = torch.tensor(10)
    found = mix_experts(x, ids, shares, gate_up, down, num_read)
    assert num_read == 13
    for row in range(5):
        terms = [
            share * linear(swiglu(linear(x[row : row + 1], gate_up[expert])), down[expert])[0]
            for expert, share in zip(ids[row].tolist(), shares[row], strict=True)
            if expert < 9  # padding chooses none
        ]
        torch.testing.assert_close(found[row], sum(terms, torch.zeros(6)))


def test_bytes_are_those_of_the_experts_that_were_read(systems: Path):
    model = load_model(str(systems / "checkpoints" / "qwen3moe_2"), device="cpu")
    experts, config = model.config.experts, model.config
    out = model.engine.run(*request(model, 5))
    # Each further forward has one row, which chooses 3 experts in each of 2 layers; the first has 5 rows.
    least = 6 * out.num_forwards
    assert least < out.num_experts_read <= least + 2 * experts.num_experts - 6
    sizes = {
        "weight_bytes": weight_bytes(config, torch.float32),
        "cache_bytes_per_row": 0,
        "expert_bytes": expert_bytes(config, torch.float32),
        "experts_of_a_row": 6,
    }
    outside = sizes["weight_bytes"] - 6 * sizes["expert_bytes"]
    assert bytes_read(out.trace, **sizes, num_experts_read=out.num_experts_read) == (
        out.num_forwards * outside + out.num_experts_read * sizes["expert_bytes"]
    )
    assert bytes_read(out.trace, **sizes) is None  # in a batch nobody knows whose they are
    everything = count_parameters(config) - config.vocab_size * config.hidden_size  # without the embedding
    assert weight_bytes(config, torch.int8, 10**6) == everything
    assert cache_bytes_per_row(config, torch.float32) > 0


def request(model, num_tokens: int):
    settings = decoder_settings(model, "autoregressive", gen_length=6)
    return DECODERS["autoregressive"].decode, list(range(num_tokens)), settings


def test_the_expected_number_of_experts_grows_from_those_of_one_row_to_all():
    numbers = [SIGMOID.num_read(rows) for rows in (1, 2, 8, 1000)]
    assert numbers[0] == pytest.approx(3)
    assert numbers == sorted(numbers)
    assert numbers[-1] == pytest.approx(8)


def test_compiled_forwards_are_refused_and_not_taken(tmp_path: Path):
    save(tmp_path)
    assert load_model(tmp_path, device="cpu").attention == "sdpa"
    with pytest.raises(ConfigError, match="compiled forwards have no experts; use attention='sdpa'"):
        load_model(tmp_path, device="cpu", attention="native")
