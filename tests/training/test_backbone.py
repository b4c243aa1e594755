"""Backbones: what is refused, how vocabularies grow, adapters, checkpoints."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from refusion_eval import api
from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.loading import load_model
from refusion_eval.training.checkpoints.backbone import check_backbone, load_backbone, load_tokenizer
from refusion_eval.training.checkpoints.save import save_backbone
from refusion_eval.training.config import BackboneConfig, LoraSettings, Objective
from refusion_eval.training.data.packed import ATTENTION, hidden_states
from refusion_eval.training.objectives.loss import hybrid_loss
from refusion_eval.types import causal
from tests.models import tiny
from tests.training.backbones import (
    END_ID,
    FAMILIES,
    NUM_ROWS,
    batch_for,
    change_json,
    logits_of,
    save_backbone_of,
    save_tokenizer,
)

START_ID, MASK_ID = NUM_ROWS, NUM_ROWS + 1
TOKENS = torch.tensor([[3, 4, 5, 9, 8, 20, 21, 30]])
LORA = LoraSettings(rank=2, alpha=4, target_modules=("q_proj", "v_proj", "down_proj"))
SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def _config(directory: Path, **settings: Any) -> BackboneConfig:
    defaults: dict[str, Any] = {"model": str(directory), "dtype": "float32", "gradient_checkpointing": False}
    return BackboneConfig(**defaults | settings)


def _loaded(directory: Path, **settings: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    config = _config(directory, **settings)
    check_backbone(config, max_length=16)
    tokenizer = load_tokenizer(config)
    return load_backbone(config, tokenizer), tokenizer


def _gradients(model: PreTrainedModel, objective: Objective = "refusion") -> dict[str, torch.Tensor]:
    model.zero_grad()
    hybrid_loss(model, batch_for(objective, MASK_ID)).total.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _step(model: PreTrainedModel, size: float = 0.3) -> None:
    """Some steps of gradient descent, which move adapters away from nothing."""
    for _ in range(3):
        gradients = _gradients(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in gradients:
                    parameter -= size * gradients[name]


# --- vocabularies


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_new_rows_are_the_mean_of_the_known_ones_which_stay(tmp_path: Path, family: str, tied: bool) -> None:
    stock = save_backbone_of(tmp_path, family, tied)
    model, tokenizer = _loaded(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.mask_token_id) == (START_ID, MASK_ID)
    layers = [(stock.get_input_embeddings(), model.get_input_embeddings())]
    layers += [(stock.get_output_embeddings(), model.get_output_embeddings())]
    for before, after in layers:
        assert after.weight.shape[0] == NUM_ROWS + 2
        assert torch.equal(after.weight[:NUM_ROWS], before.weight)
        for row in (START_ID, MASK_ID):
            torch.testing.assert_close(after.weight[row], before.weight.mean(dim=0))
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    found = logits_of(model, TOKENS)
    torch.testing.assert_close(found[..., :NUM_ROWS], logits_of(stock, TOKENS), atol=1e-5, rtol=0)
    assert model.config.vocab_size == NUM_ROWS + 2


def test_new_tokens_begin_with_the_spare_rows_of_their_ids_as_in_the_release(tmp_path: Path) -> None:
    stock = save_backbone_of(tmp_path, num_words=50)
    model, tokenizer = _loaded(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.mask_token_id) == (50, 51)
    assert torch.equal(model.lm_head.weight, stock.lm_head.weight)
    assert torch.equal(model.get_input_embeddings().weight, stock.get_input_embeddings().weight)


def test_the_mean_of_known_rows_leaves_spare_ones_out(tmp_path: Path) -> None:
    stock = save_backbone_of(tmp_path, num_words=50)
    model, tokenizer = _loaded(tmp_path, new_rows="mean")
    assert (tokenizer.bos_token_id, tokenizer.mask_token_id) == (50, 51)
    before, after = stock.lm_head.weight, model.lm_head.weight
    assert after.shape == before.shape
    torch.testing.assert_close(after[51], before[:50].mean(dim=0))
    unchanged = [row for row in range(NUM_ROWS) if row not in (50, 51)]
    assert torch.equal(after[unchanged], before[unchanged])
    assert not torch.equal(after[51], before[51])


def test_a_trained_mask_keeps_its_row(tmp_path: Path) -> None:
    save_backbone_of(tmp_path / "stock")
    model, tokenizer = _loaded(tmp_path / "stock")
    with torch.no_grad():
        model.model.embed_tokens.weight[MASK_ID] = 7.0
    save_backbone(model, tokenizer, tmp_path / "trained")
    again, tokenizer = _loaded(tmp_path / "trained")
    assert tokenizer.mask_token_id == MASK_ID
    assert len(again.model.embed_tokens.weight) == NUM_ROWS + 2
    assert (again.model.embed_tokens.weight[MASK_ID] == 7).all()


def test_config_and_generation_config_name_the_special_tokens(tmp_path: Path) -> None:
    save_backbone_of(tmp_path)
    model, _ = _loaded(tmp_path)
    ids = {"bos_token_id": START_ID, "eos_token_id": END_ID, "pad_token_id": END_ID}
    assert {name: getattr(model.config, name) for name in ids} == ids
    assert {name: getattr(model.generation_config, name) for name in ids} == ids
    assert model.config.mask_token_id == MASK_ID


def test_an_existing_mask_token_is_kept(tmp_path: Path) -> None:
    save_backbone_of(tmp_path, num_words=50)
    save_tokenizer(tmp_path, 50, mask_token="w40", bos_token="w41")
    tokenizer = load_tokenizer(_config(tmp_path))
    assert (tokenizer.mask_token_id, tokenizer.bos_token_id, len(tokenizer)) == (40, 41, 50)
    change_json(tmp_path / "config.json", mask_token_id=42)
    assert load_tokenizer(_config(tmp_path)).mask_token_id == 42


def _full_vocabulary(directory: Path) -> PreTrainedModel:
    """A Llama whose tokenizer has a token for each row, of which w40, w41 and <end> are special."""
    stock = save_backbone_of(directory, "llama", tied=True)
    save_tokenizer(directory, NUM_ROWS, bos_token="w41", additional_special_tokens=["w40"])
    return stock


@pytest.mark.parametrize("new_rows", ["spare", "mean"])
def test_a_special_token_becomes_the_mask_of_a_full_vocabulary(tmp_path: Path, new_rows: str) -> None:
    stock = _full_vocabulary(tmp_path)
    model, tokenizer = _loaded(tmp_path, mask_token="w40", new_rows=new_rows)
    assert (tokenizer.mask_token_id, model.config.mask_token_id, len(tokenizer)) == (40, 40, NUM_ROWS)
    before, rows = stock.model.embed_tokens.weight, model.model.embed_tokens.weight
    others = torch.arange(NUM_ROWS) != 40
    assert torch.equal(rows[others], before[others])
    torch.testing.assert_close(rows[40], before[40] if new_rows == "spare" else before[others].mean(dim=0))

    save_backbone(model, tokenizer, tmp_path / "trained")
    assert json.loads((tmp_path / "trained" / "config.json").read_text())["mask_token_id"] == 40
    settings = {"slot_size": 4, "block_size": 4, "gen_length": 8}
    decoded = api.generate(api.load_model(str(tmp_path / "trained")), "w5 w6", "refusion", **settings)
    assert decoded.tokens
    assert 40 not in decoded.tokens
    model, _ = _loaded(tmp_path / "trained", mask_token="w40", new_rows="mean")  # it is trained now, and stays
    assert torch.equal(model.model.embed_tokens.weight[40], rows[40])
    with pytest.raises(ConfigError, match=r"mask_token=<x> is no special token"):
        _loaded(tmp_path / "trained", mask_token="<x>")


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("<none>", "is no special token of the tokenizer; choose a token that no text has: w40"),
        ("w7", "is no special token"),
        ("<end>", "begins, ends or fills texts"),
        ("w41", "begins, ends or fills texts"),
        ("w39", "stands in the chat template"),
        ("w40", r"mask_token_id=38\); choose"),
    ],
)
def test_a_token_with_another_use_is_refused_as_the_mask(tmp_path: Path, token: str, message: str) -> None:
    _full_vocabulary(tmp_path)
    specials = ["w38", "w39", "w40"]
    template = "{{ 'w39' }}{{ messages[0]['content'] }}"
    save_tokenizer(tmp_path, NUM_ROWS, bos_token="w41", additional_special_tokens=specials, chat_template=template)
    if token == "w40":
        change_json(tmp_path / "config.json", mask_token_id=38)
    elif token == "<none>":
        save_tokenizer(tmp_path, NUM_ROWS, bos_token="w41", additional_special_tokens=["w40"])
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(_config(tmp_path, mask_token=token))


@pytest.mark.parametrize(
    ("num_words", "settings", "ids"),
    [
        (151_669, {}, (151_669, 151_670)),  # Qwen3, as in ReFusion's release
        (151_665, {}, (151_665, 151_666)),  # Qwen2.5, as in Dream
        (128_256, {"bos_token": "w5"}, (5, 128_256)),  # Llama 3
    ],
)
def test_new_tokens_take_the_ids_of_the_published_models(
    tmp_path: Path, num_words: int, settings: dict[str, Any], ids: tuple[int, int]
) -> None:
    save_tokenizer(tmp_path, num_words, **settings)
    tokenizer = load_tokenizer(BackboneConfig(shape=SHAPE, tokenizer=str(tmp_path)))
    assert (tokenizer.bos_token_id, tokenizer.mask_token_id) == ids
    assert len(tokenizer) == ids[1] + 1


def test_the_release_s_tokens_are_found_though_its_tokenizer_does_not_name_them(shared: Path) -> None:
    tokenizer = load_tokenizer(_config(shared / "parity" / "tiny"))
    assert (tokenizer.bos_token_id, tokenizer.mask_token_id, tokenizer.eos_token_id) == (298, 299, 297)
    assert len(tokenizer) == 300


# --- random weights


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_random_weights_depend_on_shape_and_seed_alone(tmp_path: Path, family: str) -> None:
    save_tokenizer(tmp_path, 30)
    config = BackboneConfig(shape=SHAPE | {"model_type": family}, tokenizer=str(tmp_path), dtype="float32", seed=4)
    check_backbone(config, max_length=4096)
    tokenizer = load_tokenizer(config)
    state = torch.get_rng_state()
    first = load_backbone(config, tokenizer)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(77)
    second = load_backbone(config, tokenizer)
    assert all(torch.equal(one, two) for one, two in zip(first.parameters(), second.parameters(), strict=True))
    assert first.model.embed_tokens.weight.shape == (32, 16)
    assert first.model.layers[0].self_attn.q_proj.weight.shape == (16, 16)
    other = load_backbone(dataclasses.replace(config, seed=5), tokenizer)
    assert not torch.equal(other.model.embed_tokens.weight, first.model.embed_tokens.weight)


# --- training


@pytest.mark.parametrize("objective", get_args(Objective))
@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_every_objective_trains_every_family_in_bfloat16(
    tmp_path_factory: pytest.TempPathFactory, family: str, tied: bool, objective: Objective
) -> None:
    directory = tmp_path_factory.getbasetemp() / f"stock-{family}-{tied}"
    if not directory.exists():
        save_backbone_of(directory, family, tied)
    model, _ = _loaded(directory, dtype="bfloat16")
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    gradients = _gradients(model, objective)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    row = model.get_input_embeddings().weight.grad[MASK_ID]
    assert (row.norm() > 0) == (objective not in ("pretrain", "sft") or tied)


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_gradient_checkpointing_gives_equal_gradients(tmp_path: Path, family: str, lora: LoraSettings | None) -> None:
    save_backbone_of(tmp_path, family)
    plain, _ = _loaded(tmp_path, lora=lora)
    frugal, _ = _loaded(tmp_path, lora=lora, gradient_checkpointing=True)
    assert any(getattr(module, "gradient_checkpointing", False) for module in frugal.modules())
    for objective in ("refusion", "bd3lm"):
        expected, found = _gradients(plain, objective), _gradients(frugal, objective)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-6)


# --- adapters


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_adapters_and_new_rows_alone_are_trained_and_merge_to_the_same_logits(
    tmp_path: Path, family: str, tied: bool
) -> None:
    save_backbone_of(tmp_path / "stock", family, tied)
    full, _ = _loaded(tmp_path / "stock")
    model, tokenizer = _loaded(tmp_path / "stock", lora=LORA)
    tokens = torch.cat((TOKENS, torch.tensor([[MASK_ID, MASK_ID]])), dim=1)
    torch.testing.assert_close(logits_of(model, tokens), logits_of(full, tokens))

    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    rows = [name for name in trained if ".lora_" not in name]
    assert len(trained) == 2 * 2 * len(LORA.target_modules) + 1
    assert [trained[name].shape[0] for name in rows] == [2]
    frozen = {name: value.clone() for name, value in model.named_parameters() if name not in trained}
    assert _gradients(model).keys() == trained.keys()
    _step(model)
    assert all(torch.equal(value, dict(model.named_parameters())[name]) for name, value in frozen.items())

    expected, before = logits_of(model, tokens), copy.deepcopy(model.state_dict())
    assert (expected - logits_of(full, tokens)).abs().max() > 0.1
    save_backbone(model, tokenizer, tmp_path / "trained")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32)
    torch.testing.assert_close(logits_of(merged, tokens), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_saved_adapters_can_be_put_on_the_grown_backbone(tmp_path: Path, tied: bool) -> None:
    from peft import PeftModel

    save_backbone_of(tmp_path / "stock", tied=tied)
    model, tokenizer = _loaded(tmp_path / "stock", lora=LORA)
    _step(model)
    save_backbone(model, tokenizer, tmp_path / "trained")
    base, _ = _loaded(tmp_path / "stock")
    again = PeftModel.from_pretrained(base, tmp_path / "trained" / "adapter")
    torch.testing.assert_close(logits_of(again, TOKENS), logits_of(model, TOKENS))
    tensors = load_file(tmp_path / "trained" / "adapter" / "adapter_model.safetensors")
    assert sum("lora_" not in name for name in tensors) == 1


def test_adapters_depend_on_the_seed_and_a_known_mask_trains_no_row(tmp_path: Path) -> None:
    save_backbone_of(tmp_path, num_words=50)
    save_tokenizer(tmp_path, 50, mask_token="w40", bos_token="w41")
    models = [_loaded(tmp_path, lora=LORA, seed=seed)[0] for seed in (1, 1, 2)]
    first, same, other = (dict(model.named_parameters()) for model in models)
    assert all(".lora_" in name for name, parameter in first.items() if parameter.requires_grad)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


# --- checkpoints


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_a_saved_model_opens_in_transformers_and_here_with_the_same_logits(
    tmp_path: Path, family: str, tied: bool
) -> None:
    save_backbone_of(tmp_path / "stock", family, tied)
    model, tokenizer = _loaded(tmp_path / "stock")
    hidden_states(model, batch_for("refusion", MASK_ID))
    assert model.config._attn_implementation == ATTENTION
    save_backbone(model, tokenizer, tmp_path / "trained", decoders=("refusion",))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stock", "trained"]
    assert ATTENTION not in (tmp_path / "trained" / "config.json").read_text()

    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32)
    expected = logits_of(model, TOKENS)
    torch.testing.assert_close(logits_of(stock, TOKENS), expected, atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "trained").mask_token_id == MASK_ID
    ours = load_model(str(tmp_path / "trained"), device="cpu")
    assert (ours.card.mask_id, ours.card.eos_ids, ours.card.decoders) == (MASK_ID, (END_ID,), ("refusion",))
    assert ours.tokenizer.encode("<|mask|><end>") == [MASK_ID, END_ID]
    lean = tiny.load(tmp_path / "trained")
    rows = range(TOKENS.shape[1])
    found = tiny.forward(lean, tiny.new_cache(lean), TOKENS[0].tolist(), rows, causal(len(rows)))
    torch.testing.assert_close(found, expected[0], atol=1e-4, rtol=0)


def test_large_weights_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_backbone_of(tmp_path / "stock")
    model, tokenizer = _loaded(tmp_path / "stock")
    monkeypatch.setattr("refusion_eval.training.checkpoints.save.SHARD_BYTES", 40_000)
    save_backbone(model.to(torch.bfloat16), tokenizer, tmp_path / "trained")
    files = sorted((tmp_path / "trained").glob("*.safetensors"))
    assert len(files) > 2
    assert all(path.stat().st_size < 45_000 for path in files)
    index = json.loads((tmp_path / "trained" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(2 * value.numel() for value in model.state_dict().values())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.bfloat16)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.to(torch.bfloat16)), name


def test_a_save_that_fails_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    save_backbone_of(tmp_path / "stock")
    model, tokenizer = _loaded(tmp_path / "stock")
    save_backbone(model, tokenizer, tmp_path / "trained")
    before = {path.name: path.read_bytes() for path in (tmp_path / "trained").iterdir()}
    with pytest.raises(AttributeError):
        save_backbone(model, None, tmp_path / "trained")  # type: ignore[arg-type]
    assert {path.name: path.read_bytes() for path in (tmp_path / "trained").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stock", "trained"]


def test_llama_s_rotary_scaling_is_written_for_both_versions_of_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    save_backbone_of(tmp_path / "stock", "llama", rope_parameters=rope)
    model, tokenizer = _loaded(tmp_path / "stock")
    save_backbone(model, tokenizer, tmp_path / "trained")
    written = json.loads((tmp_path / "trained" / "config.json").read_text())
    assert written["rope_parameters"] == rope
    assert written["rope_scaling"] | {"rope_theta": written["rope_theta"]} == rope
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32)
    torch.testing.assert_close(logits_of(stock, TOKENS), logits_of(model, TOKENS), atol=1e-5, rtol=0)


# --- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "neither of model and shape"),
        ({"model": "x", "shape": SHAPE}, "both of model and shape"),
        ({"shape": SHAPE}, "random weights have no tokenizer"),
        ({"shape": SHAPE, "tokenizer": "x", "revision": "main"}, "revision='main' belongs to a model"),
        ({"model": "x", "dtype": "float16"}, "dtype='float16'; choose one of bfloat16, float32"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BackboneConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0, "alpha": 1}, "rank=0; it must be at least 1"),
        ({"rank": 2, "alpha": 0}, "alpha=0; it must be above 0"),
        ({"rank": 2, "alpha": 4, "dropout": 1.0}, "dropout=1.0; it must be below 1"),
        ({"rank": 2, "alpha": 4, "target_modules": ()}, "target_modules is"),
    ],
)
def test_adapters_that_adapt_nothing(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoraSettings(**settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'; supported are qwen3, qwen2, llama"),
        ({"model_type": "Own", "auto_map": {"AutoModel": "own.Own"}}, "brings code of its own, which is never run"),
        ({"model_type": "llada"}, "model_type is 'llada'"),
        (
            {"model_type": "qwen3_moe"},
            "qwen3_moe is a mixture of experts, which is not trained here: the auxiliary loss",
        ),
        ({"model_type": "diffusion_gemma"}, "diffusion_gemma is not trained here: no objective here has its canvases"),
        ({"architectures": ["OwnForCausalLM"]}, "not Qwen3ForCausalLM; code that comes with a checkpoint is never run"),
        ({"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window is True"),
        ({"attention_bias": True}, "attention_bias is True"),
    ],
)
def test_models_that_cannot_be_trained(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_backbone_of(tmp_path)
    change_json(tmp_path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        check_backbone(_config(tmp_path), max_length=16)


def test_pickled_or_missing_weights_and_tokenizers(tmp_path: Path) -> None:
    save_backbone_of(tmp_path / "stock")
    weights = tmp_path / "stock" / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(CheckpointError, match="only pickled weights"):
        check_backbone(_config(tmp_path / "stock"), max_length=16)
    weights.with_name("pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        check_backbone(_config(tmp_path / "stock"), max_length=16)
    (tmp_path / "stock" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        load_tokenizer(_config(tmp_path / "stock"))
    with pytest.raises(CheckpointError, match="no directory"):
        check_backbone(_config(tmp_path / "absent"), max_length=16)


def test_weights_that_do_not_fit_their_config(tmp_path: Path) -> None:
    save_backbone_of(tmp_path)
    change_json(tmp_path / "config.json", num_hidden_layers=3, layer_types=None)
    with pytest.raises(CheckpointError, match="missing keys"):
        _loaded(tmp_path)


def test_tokenizers_that_samples_cannot_be_made_with(tmp_path: Path) -> None:
    save_backbone_of(tmp_path)
    save_tokenizer(tmp_path, NUM_ROWS, chat_template=None)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat_template"):
        check_backbone(_config(tmp_path), max_length=16)
    save_tokenizer(tmp_path, NUM_ROWS, eos_token=None)
    with pytest.raises(ConfigError, match="has no eos_token"):
        check_backbone(_config(tmp_path), max_length=16)
    save_tokenizer(tmp_path, NUM_ROWS)
    change_json(tmp_path / "config.json", mask_token_id=300)
    with pytest.raises(ConfigError, match="mask_token_id=300, for which"):
        check_backbone(_config(tmp_path), max_length=16)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; choose qwen3, qwen2, llama"),
        ({"hidden_sise": 16}, "unknown entry 'hidden_sise'; did you mean hidden_size"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "2 query heads must be a multiple of 3"),
        ({"vocab_size": 12}, "vocab_size is 12, but the tokenizer has 32 ids"),
    ],
)
def test_impossible_shapes(tmp_path: Path, shape: dict[str, Any], message: str) -> None:
    save_tokenizer(tmp_path, 30)
    with pytest.raises(ConfigError, match=message):
        check_backbone(BackboneConfig(shape=SHAPE | shape, tokenizer=str(tmp_path)), max_length=16)


def test_a_shape_has_to_state_its_sizes(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, 30)
    with pytest.raises(ConfigError, match="hidden_size, intermediate_size, num_hidden_layers, num_attention_heads not"):
        check_backbone(BackboneConfig(shape={"model_type": "llama"}, tokenizer=str(tmp_path)), max_length=16)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "q_prj", "gate"])
def test_adapters_on_what_is_no_matrix_of_a_layer(target: str) -> None:
    with pytest.raises(ConfigError, match=f"target_modules.*='{target}'; choose one of q_proj"):
        LoraSettings(rank=2, alpha=4, target_modules=("q_proj", target))  # type: ignore[arg-type]


def test_lengths_that_do_not_fit(tmp_path: Path) -> None:
    save_backbone_of(tmp_path)
    check_backbone(_config(tmp_path), max_length=512)
    with pytest.raises(ConfigError, match="513 tokens do not fit into the model's 512 positions"):
        check_backbone(_config(tmp_path), max_length=513)
