"""A tiny model inside a larger one gives its tokens and probabilities (`refusion_eval.bench.checkpoints`)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import refusion_eval
from refusion_eval.bench.checkpoints import SHAPES, Shape, config_of, inflate, inflated_transformer
from refusion_eval.errors import ConfigError
from refusion_eval.models.attention import side_by_side
from refusion_eval.models.device import weight_bytes
from tests.models import tiny

SHAPE = Shape(
    hidden_size=320,
    num_hidden_layers=6,
    num_attention_heads=12,
    num_key_value_heads=4,
    intermediate_size=640,
    vocab_size=2300,
)
SETTINGS = {"gen_length": 64, "slot_size": 8, "block_size": 32, "tau_slot": 0.6, "tau_token": 0.3}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def inflated(checkpoint, tmp_path_factory, request) -> Path:
    target = tmp_path_factory.mktemp("inflated") / "model"
    inflate(Path(checkpoint), target, SHAPE, request.param)
    return target


@pytest.fixture(scope="module")
def models(checkpoint, inflated):
    return [refusion_eval.load_model(str(path), dtype="float32", device="cpu") for path in (checkpoint, inflated)]


def _prompt(model) -> list[int]:
    text = "Tom has 4 boxes with 6 pens each. Tom sells 5 of them. Then Tom gets 2 more. "
    text += "How many pens are there in the end?\n\nSolve this step by step. End with: The answer is <number>."
    return model.tokenizer.encode(model.tokenizer.render_chat([{"role": "user", "content": text}]))


def test_all_probabilities_agree(models) -> None:
    prompt = torch.tensor(_prompt(models[0]))
    probs = []
    for model in models:
        transformer = model.engine.model
        hidden = transformer.hidden(prompt, torch.arange(len(prompt)), len(prompt) - 1, side_by_side([len(prompt)]))
        probs.append(transformer.logits(hidden).softmax(dim=-1))
    small, large = probs
    num_tokens = small.shape[1]
    torch.testing.assert_close(large[:, :num_tokens], small, atol=1e-4, rtol=0)
    assert large[:, num_tokens:].max() == 0


def test_a_model_that_is_made_in_memory_is_that_of_the_files(checkpoint, inflated, tmp_path) -> None:
    loaded = refusion_eval.load_model(str(inflated), dtype="bfloat16", device="cpu", attention="sdpa").transformer
    dtype = load_file(next(inflated.glob("model-00002*")))["model.layers.0.mlp.up_proj.weight"].dtype
    made = inflated_transformer(Path(checkpoint), SHAPE, dtype, torch.device("cpu"))
    assert replace(made.config, dtype=loaded.config.dtype) == loaded.config
    parts = [vars(made.weights), vars(loaded.weights)]
    layers = [[tensor for layer in part["layers"] for tensor in vars(layer).values()] for part in parts]
    ends = [[part[name] for name in ("embedding", "final_norm", "head")] for part in parts]
    for ours, theirs in zip(layers[0] + ends[0], layers[1] + ends[1], strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours.to(torch.bfloat16), theirs)


@pytest.mark.parametrize("decoder", ["refusion", "autoregressive"])
def test_tokens_and_forwards_are_the_same(models, decoder) -> None:
    settings = SETTINGS if decoder == "refusion" else {"gen_length": 64}
    small, large = (refusion_eval.generate(model, _prompt(model), decoder=decoder, **settings) for model in models)
    assert large.tokens == small.tokens
    assert len(small.tokens) > 5
    if decoder == "autoregressive":  # fusing weighs the cost of rows, which differs
        assert large.num_forwards == small.num_forwards


def test_weights_without_influence_are_not_zero(inflated) -> None:
    index = json.loads((inflated / "model.safetensors.index.json").read_text())["weight_map"]
    for number in (0, SHAPE.num_hidden_layers - 1):
        path = inflated / index[f"model.layers.{number}.mlp.up_proj.weight"]
        for name, tensor in load_file(path).items():
            assert (tensor == 0).float().mean() < 0.8, name
            assert torch.isfinite(tensor).all()


def test_a_shape_with_a_name_has_the_sizes_of_the_model_that_it_names(models) -> None:
    assert models[1].config.head_dim == SHAPE.head_dim == 128 > models[0].config.head_dim
    config = config_of(SHAPES["8B"])
    assert weight_bytes(config, torch.bfloat16) == 15_134_640_128  # with the vocabulary of ReFusion


def test_a_shape_that_is_too_small_is_refused(checkpoint, tmp_path) -> None:
    narrow = replace(SHAPE, hidden_size=100)
    with pytest.raises(ConfigError, match="hidden_size is 100, the checkpoint needs at least"):
        inflate(Path(checkpoint), tmp_path / "model", narrow, torch.float32)
    with pytest.raises(ConfigError, match="head_dim 100 is no multiple of the checkpoint's 64"):
        inflate(Path(checkpoint), tmp_path / "model", replace(SHAPE, head_dim=100), torch.float32)
    assert not (tmp_path / "model").exists()


def test_another_family_is_refused(tmp_path) -> None:
    tiny.save_checkpoint(tmp_path / "llama", family="llama")
    with pytest.raises(ConfigError, match="model_type is 'llama'; only 'qwen3'"):
        inflate(tmp_path / "llama", tmp_path / "model", SHAPE, torch.float32)
