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
from refusion_eval.models.adapter import LoraAdapter
from refusion_eval.models.checkpoint import Experts, model_config
from refusion_eval.models.device import cache_bytes_per_row, expert_bytes, weight_bytes
from refusion_eval.models.experts import mix_experts, route
from refusion_eval.models.layers import linear, swiglu
from refusion_eval.models.weights import ExpertWeights, count_parameters, load_weights, tensor_shapes
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
        for expert in range(tiny.MIXTURE["num_experts"] if f"{prefix}0.gate_proj.weight" in weights else 0):
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


def test_shares_of_a_sigmoid_stay_in_float32_until_the_sum_of_16_bit_rows_is_done():
    torch.manual_seed(0)
    x, bias = torch.randn(5, 6).bfloat16(), torch.zeros(8)
    gate_up, down = torch.randn(8, 4, 6).bfloat16(), torch.randn(8, 6, 2).bfloat16()
    ids, shares = route(x, ExpertWeights(torch.randn(8, 6), bias, gate_up, down), SIGMOID)
    assert shares.dtype == torch.float32
    found = mix_experts(x, ids, shares, gate_up, down, torch.tensor(0))
    each = torch.stack([linear(swiglu(linear(x, up)), out) for up, out in zip(gate_up, down, strict=True)])  # E, T, C
    chosen = each[ids.t(), torch.arange(5)]
    assert torch.equal(found, (chosen.float() * shares.t()[:, :, None]).sum(dim=0).bfloat16())


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_router_of_sigmoids_is_counted_in_float32(tmp_path: Path, dtype: torch.dtype):
    save_llada2(tmp_path)
    config = model_config(tmp_path)
    weights = load_weights(tmp_path, config, dtype, tiny.CPU)
    parts = [weights.final_norm, weights.head]  # of the embedding a forward reads a few rows
    for layer in weights.layers:
        experts = () if layer.experts is None else vars(layer.experts).values()
        norms = layer.qk_norm[[0, -1]]  # one row for all heads of a kind
        parts += [part for name, part in vars(layer).items() if name not in ("experts", "qk_norm")] + [*experts, norms]
    assert weight_bytes(config, dtype, 10**6) == sum(part.nbytes for part in parts)


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


LLADA2 = {
    "model_type": "llada2_moe",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
    "rope_theta": 600.0,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "num_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "use_bias": False,
    "use_qkv_bias": True,
}


def save_llada2(directory: Path, **changes: object) -> dict[str, torch.Tensor]:
    """A random checkpoint in LLaDA2's layout, with biases; returns its tensors."""
    (directory / "config.json").write_text(json.dumps(LLADA2 | changes))
    generator = torch.Generator().manual_seed(0)
    shapes = tensor_shapes(model_config(directory))
    tensors = {name: torch.randn(*shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return tensors


@pytest.mark.parametrize("has_norm", [True, False])
def test_only_the_first_part_of_a_head_turns(tmp_path: Path, has_norm: bool):
    tensors = save_llada2(tmp_path, use_qk_norm=has_norm)
    model, num_rows = tiny.load(tmp_path), 5
    x, positions = torch.randn(num_rows, 24), torch.tensor([0, 3, 40, 41, 300])
    q, k, v = model.project(model.weights.layers[0], x, *model.rotary.lookup(positions, 300))

    prefix = "model.layers.0.attention."
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * tensors["model.layers.0.input_layernorm.weight"]
    rows = normed @ tensors[f"{prefix}query_key_value.weight"].t() + tensors[f"{prefix}query_key_value.bias"]
    heads = rows.view(num_rows, 8, 12)
    angles = positions[:, None] * 600.0 ** (-torch.arange(0, 6, 2) / 6)

    def turned(part: torch.Tensor, norm: str) -> torch.Tensor:
        if has_norm:
            part = part / (part.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * tensors[f"{prefix}{norm}.weight"]
        first, second, rest = part.split((3, 3, 6), dim=-1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    expected = [turned(heads[:, :4], "query_layernorm"), turned(heads[:, 4:6], "key_layernorm")]
    for mine, theirs in zip((q, k), expected, strict=True):  # the entries of a head are in another order
        products = [torch.einsum("thd,shd->hts", part, part) for part in (mine, theirs)]
        torch.testing.assert_close(*products, atol=1e-4, rtol=1e-4)
    crossed = [torch.einsum("thd,sd->hts", a, b[:, 0]) for a, b in ((q, k), expected)]
    torch.testing.assert_close(*crossed, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(v, heads[:, 6:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bias": True}, "use_bias is True"),
        ({"partial_rotary_factor": 0.25}, "3 of the 12 entries of a head would turn"),
        ({"topk_group": 0}, "topk_group is 0"),
        ({"n_group": 3}, "2 of 8 experts in 2 of 3 groups cannot be chosen"),
        ({"num_experts_per_tok": 5}, "5 of 8 experts in 2 of 4 groups cannot be chosen"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor is None"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1; it must be a whole number, 0 or more"),
        ({"num_shared_experts": "1"}, "num_shared_experts is '1'"),
        ({"use_qkv_bias": "false"}, "use_qkv_bias is 'false'; it must be true or false"),
    ],
)
def test_what_llada2_does_not_have_is_refused(tmp_path: Path, changes: dict, message: str):
    (tmp_path / "config.json").write_text(json.dumps(LLADA2 | changes))
    with pytest.raises(CheckpointError, match=message):
        model_config(tmp_path)


# Without these the public code computes with a default of its own, such as a bias, or not at all.
NEEDED = {*LLADA2} - {"model_type", "first_k_dense_replace", "num_shared_experts", "num_key_value_heads", "rope_theta"}


@pytest.mark.parametrize("key", sorted(NEEDED - {"head_dim", "use_qkv_bias"}))
def test_a_key_without_which_nothing_can_be_computed_is_named(tmp_path: Path, key: str):
    (tmp_path / "config.json").write_text(json.dumps({name: LLADA2[name] for name in LLADA2.keys() - {key}}))
    with pytest.raises(CheckpointError, match=f"config.json: {key} is ") as raised:
        model_config(tmp_path)
    assert "\n" not in str(raised.value)


def test_experts_without_shared_ones_and_without_groups(tmp_path: Path):
    save_llada2(tmp_path, num_shared_experts=0, n_group=1, topk_group=1)
    model = tiny.load(tmp_path)
    logits = tiny.forward(model, tiny.new_cache(model), range(7), range(7), causal(7))
    assert logits.isfinite().all()
    assert count_parameters(model.config) == sum(
        tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values()
    )


def test_an_adapter_is_refused(tmp_path: Path):
    pytest.importorskip("peft")
    save(tmp_path)
    with pytest.raises(CheckpointError, match="adapters are not merged into experts"):
        LoraAdapter(tmp_path, model_config(tmp_path))
