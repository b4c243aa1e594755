"""A merged adapter equals a checkpoint merged by hand, and peft; what cannot be merged is refused."""

import json
import math
import sys
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import refusion_eval
from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.models.adapter import LoraAdapter
from refusion_eval.models.checkpoint import FAMILIES, model_config
from refusion_eval.models.weights import load_weights
from refusion_eval.types import causal
from tests.models import tiny

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "somewhere/else",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_alpha": 16,
    "lora_dropout": 0.1,
    "modules_to_save": None,
    "r": 4,
    "rank_pattern": {},
    "alpha_pattern": {},
    "target_modules": ["v_proj", "q_proj"],
    "use_dora": False,
    "use_rslora": False,
}


def named(family: str, module: str) -> str:
    return tiny.llada_name(module) if family == "llada" else module


def save_adapter(directory: Path, base: Path, targets, ranks=lambda module: 4, key="", **changes) -> dict[str, tuple]:
    """Writes a random adapter for some matrices of a checkpoint; returns {module: (A, B)}."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(3)
    pairs, tensors = {}, {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if any(module.endswith(target) for target in targets):
            rank = ranks(module)
            low = torch.randn(rank, weight.shape[1], generator=generator) * 0.2
            high = torch.randn(weight.shape[0], rank, generator=generator) * 0.2
            pairs[module] = (low, high)
            tensors[f"base_model.model.{module}.lora_A{key}.weight"] = low
            tensors[f"base_model.model.{module}.lora_B{key}.weight"] = high
    save_file(tensors, directory / "adapter_model.safetensors")
    config = CONFIG | {"target_modules": list(targets)} | changes
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return pairs


def load_merged(base: Path, adapter: Path, dtype=torch.float32):
    config = model_config(base)
    merge = LoraAdapter(adapter, config).merge
    return tiny.Transformer(config, load_weights(base, config, dtype, tiny.CPU, merge))


def logits(model) -> torch.Tensor:
    tokens = list(range(3, 15))
    return tiny.forward(model, tiny.new_cache(model), tokens, range(12), causal(12))


def check_by_hand(base: Path, adapter: Path, pairs, scale, target: Path, dtype=torch.float32) -> None:
    """Merges into the checkpoint's own tensors, writes that as a checkpoint, and compares."""
    tensors = load_file(base / "model.safetensors")
    for module, (low, high) in pairs.items():
        name = f"{module}.weight"
        tensors[name] = tensors[name] + scale(module) * (high.double() @ low.double()).float()
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((base / "config.json").read_bytes())
    got, expected = logits(load_merged(base, adapter, dtype)), logits(tiny.load(target, dtype))
    tolerance = 1e-4 if dtype == torch.float32 else 0.02 * expected.abs().max().item()
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)
    assert (got - logits(tiny.load(base, dtype))).abs().max() > 10 * tolerance


@pytest.fixture
def base(tmp_path):
    tiny.save_checkpoint(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("key", ["", ".default"])
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if not family.router])
def test_every_matrix_of_every_family(tmp_path, family, key):
    tiny.save_checkpoint(tmp_path / "base", family=family)
    targets = sorted({named(family, target) for target in ALL_TARGETS})
    if family == "llada":
        targets = ["attn_out", "ff_out", "ff_proj", "k_proj", "q_proj", "up_proj", "v_proj"]
    pairs = save_adapter(tmp_path / "adapter", tmp_path / "base", targets, key=key)
    assert len(pairs) == 2 * 7 + 1
    check_by_hand(tmp_path / "base", tmp_path / "adapter", pairs, lambda module: 16 / 4, tmp_path / "merged")


@pytest.mark.parametrize("family", ["llada", "Dream"])
def test_targets_of_d2f(tmp_path, family):
    tiny.save_checkpoint(tmp_path / "base", family=family)
    targets = ["q_proj", "k_proj", "v_proj", "attn_out" if family == "llada" else "o_proj"]
    pairs = save_adapter(tmp_path / "adapter", tmp_path / "base", targets, lambda module: 32, r=32, lora_alpha=32)
    assert len(pairs) == 2 * 4
    check_by_hand(tmp_path / "base", tmp_path / "adapter", pairs, lambda module: 1, tmp_path / "merged")


def test_rank_stabilised_scale(base, tmp_path):
    pairs = save_adapter(tmp_path / "adapter", base, ["q_proj"], use_rslora=True)
    check_by_hand(base, tmp_path / "adapter", pairs, lambda module: 16 / 2, tmp_path / "merged")


def test_ranks_and_scales_of_single_modules(base, tmp_path):
    pairs = save_adapter(
        tmp_path / "adapter",
        base,
        ["q_proj", "up_proj"],
        lambda module: 2 if "q_proj" in module else 4,
        rank_pattern={"q_proj": 2},
        alpha_pattern={r"^model\.layers\.1\.mlp\.up_proj": 1},
    )

    def scale(module: str) -> float:
        alpha = 1 if module == "model.layers.1.mlp.up_proj" else 16
        return alpha / (2 if "q_proj" in module else 4)

    check_by_hand(base, tmp_path / "adapter", pairs, scale, tmp_path / "merged")


@pytest.mark.parametrize(
    "selection",
    [
        {"target_modules": r".*1\.self_attn\.[qk]_proj", "exclude_modules": ["k_proj"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
    ],
)
def test_targets_as_one_expression_or_in_some_layers(base, tmp_path, selection):
    pairs = save_adapter(tmp_path / "adapter", base, ["1.self_attn.q_proj"], **selection)
    assert list(pairs) == ["model.layers.1.self_attn.q_proj"]
    check_by_hand(base, tmp_path / "adapter", pairs, lambda module: 4, tmp_path / "merged")


def test_a_short_dtype_is_rounded_once_after_the_sum(base, tmp_path):
    pairs = save_adapter(tmp_path / "adapter", base, ["o_proj"])
    module = "model.layers.0.self_attn.o_proj"
    low, high = pairs[module]
    exact = load_file(base / "model.safetensors")[f"{module}.weight"] + 4 * high @ low
    merged = load_merged(base, tmp_path / "adapter", torch.bfloat16).weights.layers[0].out
    assert math.isclose((merged == exact.bfloat16()).float().mean().item(), 1, abs_tol=0.01)


def test_load_model_merges_and_says_so(base, tmp_path):
    save_adapter(tmp_path / "adapter", base, ["q_proj", "down_proj"])
    plain = refusion_eval.load_model(str(base), device="cpu")
    adapted = refusion_eval.load_model(str(base), device="cpu", adapter=str(tmp_path / "adapter"))
    assert (plain.adapter, adapted.adapter) == (None, str(tmp_path / "adapter"))
    assert torch.equal(logits(adapted.engine.model), logits(load_merged(base, tmp_path / "adapter")))
    assert not torch.allclose(logits(adapted.engine.model), logits(plain.engine.model))


def test_peft_computes_the_same(tmp_path):
    reference = tiny.save_checkpoint(tmp_path / "base", family="llama")
    wrapped = peft.get_peft_model(
        reference,
        peft.LoraConfig(
            r=4,
            lora_alpha=3,
            target_modules=["q_proj", "down_proj"],
            rank_pattern={"layers.1.self_attn.q_proj": 2},
            alpha_pattern={"down_proj": 7},
            use_rslora=True,
            init_lora_weights=False,
        ),
    )
    wrapped.save_pretrained(tmp_path / "adapter")
    expected = tiny.oracle(wrapped.eval(), list(range(3, 15)), list(range(12)), torch.ones(12, 12).tril().bool())
    torch.testing.assert_close(
        logits(load_merged(tmp_path / "base", tmp_path / "adapter")), expected, atol=1e-4, rtol=0
    )
    assert not torch.allclose(expected, logits(tiny.load(tmp_path / "base")), atol=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"some_new_switch": 3}, "some_new_switch is 3"),
        ({"r": 0}, "positive integer"),
        ({"r": None}, "cannot be read by peft"),
        ({"rank_pattern": {"(": 2}}, "cannot be read by peft"),
        ({"target_modules": None}, "cannot be read by peft.*target_modules"),
        ({"target_modules": ["q_proj", "qkv"]}, "names 'qkv', which matches no matrix"),
        ({"target_modules": "all-linear"}, "lacks model.layers.0.self_attn.k_proj"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "names 'embed_tokens'"),
        ({"target_modules": ["q_proj", "k_proj"]}, "lacks .*k_proj"),
        ({"target_modules": ["k_proj"]}, "q_proj.* is not a LoRA matrix of a target"),
        ({"layers_to_transform": 0}, "layers.1.self_attn.q_proj.* is not a LoRA matrix of a target"),
        ({"r": 8}, r"size mismatch.*\[4, 48\].*\[8, 48\]"),
    ],
)
def test_what_the_config_may_not_say(base, tmp_path, changes, message):
    save_adapter(tmp_path / "adapter", base, ["q_proj"], **changes)
    with pytest.raises(CheckpointError, match=message):
        load_merged(base, tmp_path / "adapter")


def change_tensors(adapter: Path, change) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: {name: t for name, t in tensors.items() if name != FIRST + "lora_B.weight"},
            "lacks model.layers.0.self_attn.q_proj.lora_B",
        ),
        (lambda tensors: tensors | {FIRST + "lora_magnitude_vector": torch.ones(64)}, "is not a LoRA matrix"),
        (lambda tensors: tensors | {FIRST + "lora_B.bias": torch.ones(64)}, "is not a LoRA matrix"),
        (lambda tensors: tensors | {"base_model.model.other.lora_A.weight": torch.ones(4, 4)}, "is not a LoRA matrix"),
        (lambda tensors: {name: t.to(torch.int8) for name, t in tensors.items()}, "floating-point"),
    ],
)
def test_tensors_that_do_not_fit(base, tmp_path, change, message):
    save_adapter(tmp_path / "adapter", base, ["q_proj"])
    change_tensors(tmp_path / "adapter", change)
    with pytest.raises(CheckpointError, match=message):
        load_merged(base, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"hidden_size": 64}, r"size mismatch.*\[4, 48\].*take the base that the adapter was made for"),
        ({"num_hidden_layers": 1}, "is not a LoRA matrix of a target"),
        ({"num_hidden_layers": 3}, r"lacks model\.layers\.2"),
        ({"family": "llada"}, "is not a LoRA matrix of a target"),
    ],
)
def test_an_adapter_of_another_base(base, tmp_path, other, message):
    save_adapter(tmp_path / "adapter", base, ["q_proj"])
    tiny.save_checkpoint(tmp_path / "other", **other)
    with pytest.raises(CheckpointError, match=message):
        load_merged(tmp_path / "other", tmp_path / "adapter")


def test_a_tied_head_cannot_be_adapted(tmp_path):
    tiny.save_checkpoint(tmp_path / "base", tie_word_embeddings=True)
    save_adapter(tmp_path / "adapter", tmp_path / "base", ["q_proj"], target_modules=["q_proj", "lm_head"])
    with pytest.raises(CheckpointError, match="names 'lm_head'"):
        load_merged(tmp_path / "base", tmp_path / "adapter")


def test_a_missing_library_is_one_line(base, tmp_path, monkeypatch):
    save_adapter(tmp_path / "adapter", base, ["q_proj"])
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="needs peft, which is not installed"):
        refusion_eval.load_model(str(base), device="cpu", adapter=str(tmp_path / "adapter"))


def test_missing_files(base, tmp_path):
    save_adapter(tmp_path / "adapter", base, ["q_proj"])
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"pickled weights \(adapter_model\.bin\)"):
        load_merged(base, tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"no adapter_model\.safetensors"):
        load_merged(base, tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        refusion_eval.load_model(str(base), device="cpu", adapter=str(base))
    with pytest.raises(CheckpointError, match="no directory"):
        refusion_eval.load_model(str(base), device="cpu", adapter=str(tmp_path / "nowhere"))


def test_an_adapter_for_the_rows_of_masks_is_not_merged_into_all_rows(base, tmp_path):
    save_adapter(tmp_path / "adapter", base, ["q_proj"])
    model = refusion_eval.load_model(str(base), device="cpu", adapter=str(tmp_path / "adapter"))
    with pytest.raises(ConfigError, match=r"idlm: an adapter .* rows of masks only, which is not computed"):
        refusion_eval.generate(model, [3, 4], decoder="idlm", gen_length=4)
    refusion_eval.generate(model, [3, 4], decoder="wedlm", gen_length=4)
