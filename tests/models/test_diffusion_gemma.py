"""DiffusionGemma's encoder and decoder: logits of the release, what is loaded, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from refusion_eval.api import generate, load_model
from refusion_eval.errors import CheckpointError, ConfigError, DecodeError
from refusion_eval.models import diffusion_gemma
from refusion_eval.models.stock import stock_config
from refusion_eval.types import Commit, Forward, Read, Response, bidirectional, causal


def place(folder: Path, number: int) -> Path:
    return folder / "parity" / "systems2027" / "checkpoints" / f"dgemma_{number}"


def copy(source: Path, target: Path, change=lambda tensors: tensors, **config: Any) -> Path:
    """A copy of a checkpoint with other tensors, and other entries of config.json; None leaves one out."""
    target.mkdir()
    entries = json.loads((source / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps({key: value for key, value in entries.items() if value is not None}))
    save_file(change(load_file(source / "model.safetensors")), target / "model.safetensors")
    return target


@pytest.mark.parametrize("number", [1, 2])
def test_states_and_logits_are_those_of_the_release(systems_2027: Path, number: int):
    # The two write sizes of full layers by `global_head_dim` and by `per_layer_config`.
    wanted = np.load(systems_2027 / "parity" / "systems2027" / "logits" / f"logits_dgemma_{number}.npz")
    model = load_model(place(systems_2027, number), dtype="float32", device="cpu").engine.model
    prompt, first, second = (wanted[name].tolist() for name in ("input_ids", "canvas_ids", "canvas_ids_2"))
    length, size, cache = len(prompt), len(first), model.new_cache()
    here, behind = (range(length + number * size, length + (number + 1) * size) for number in range(2))
    computed = {"encoder_hidden": model.encode(prompt, range(length), cache)}
    computed["logits_first"] = model.denoise(first, here, cache, None)
    before = computed["logits_first"] / float(wanted["self_conditioning_temperature"])
    computed["logits_self_conditioned"] = model.denoise(second, here, cache, before)
    computed["encoder_hidden_canvas"] = model.encode(second, here, cache)
    computed["logits_next_canvas"] = model.denoise(first, behind, cache, None)
    for name, value in computed.items():
        assert np.abs(value.numpy() - wanted[name]).max() < 1e-4, name


def test_no_tensor_of_the_vision_tower_is_loaded_or_needed(systems_2027: Path, tmp_path: Path):
    def text_only(tensors):
        return {name: value for name, value in tensors.items() if "vision" not in name}

    without = copy(place(systems_2027, 1), tmp_path / "text", text_only, vision_config=None)
    outs = []
    for folder in (place(systems_2027, 1), without):
        model = load_model(folder, device="cpu")
        names = [name for name, _ in model.engine.model._module.named_parameters()]
        assert names
        assert not [name for name in names if "vision" in name]
        outs.append(generate(model, [5, 6, 7], "diffusion_gemma", gen_length=24, max_denoising_steps=4).tokens)
    assert outs[0] == outs[1]


def test_the_halves_share_their_weights_but_for_the_scalars_of_layers(systems_2027: Path):
    module = load_model(place(systems_2027, 1), device="cpu").engine.model._module
    decoder = dict(module.decoder.named_parameters())
    encoder = dict(module.encoder.language_model.named_parameters())
    assert [name for name, one in encoder.items() if one.data_ptr() != decoder[name].data_ptr()] == []
    assert {name.partition(".")[0] for name in decoder.keys() - encoder.keys()} == {"self_conditioning"}
    pairs = zip(module.encoder.language_model.layers, module.decoder.layers, strict=True)
    assert all(one.layer_scalar != other.layer_scalar for one, other in pairs)


def test_weights_that_do_not_fit_are_refused(systems_2027: Path, tmp_path: Path):
    def without(tensors):
        return {name: value for name, value in tensors.items() if "layers.1.mlp.up_proj" not in name}

    def surplus(tensors):
        return tensors | {"model.decoder.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)}

    def misshapen(tensors):
        return tensors | {"model.decoder.norm.weight": torch.zeros(3)}

    for name, change, message in (
        ("a", without, "missing keys in the weights, such as decoder.layers.1.mlp.up_proj.weight"),
        ("b", surplus, "unexpected keys in the weights, such as model.decoder.layers.9"),
        ("c", misshapen, "norm.weight"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_model(copy(place(systems_2027, 1), tmp_path / name, change), device="cpu")


def test_an_older_transformers_is_told_in_one_line(systems_2027: Path, monkeypatch):
    monkeypatch.setattr(diffusion_gemma.transformers, "__version__", "5.23.1")
    with pytest.raises(CheckpointError, match=r"needs transformers 5\.24 or later, and 5\.23\.1 is installed; upgrade"):
        load_model(place(systems_2027, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "transformers"}, "backend=transformers is not for DiffusionGemma; leave it out"),
        ({"attention": "native"}, "attention=native is for backend=own only"),
        ({"cuda_graphs": True}, "cuda_graphs=True is for backend=own only"),
        ({"tune": True}, "tune=True is for backend=own only"),
    ],
)
def test_options_of_other_forwards_are_refused(systems_2027: Path, options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        load_model(place(systems_2027, 1), **options)


def test_it_fits_its_own_decoder_alone_and_has_its_end_tokens(systems_2027: Path):
    model = load_model(place(systems_2027, 2), device="cpu")
    assert model.decoders == ("diffusion_gemma",)
    assert (model.card.eos_ids, dict(model.card.sizes)) == ((1, 3), {"canvas_length": 16, "vocab_size": 160})
    with pytest.raises(ConfigError, match="does not fit decoder=autoregressive"):
        generate(model, [5], "autoregressive")
    with pytest.raises(ConfigError, match=r"it fits refusion"):
        generate(load_model("embedded"), [5], "diffusion_gemma")


def asking(*forwards: Forward):
    def decode(prompt, settings, trace):
        for forward in forwards:
            _ = yield forward  # which `yield from` could not send an answer to
        return Response((1,), "length")

    return decode


ENCODE = Forward([5, 6], range(2), causal(2), (), kind="encode")
DENOISE = Forward([5, 6], range(2, 4), bidirectional(2), (Read((0, 1)),), Commit((0, 1)), "denoise")


@pytest.mark.parametrize(
    ("forwards", "message"),
    [
        ([Forward([5, 6], range(2), causal(2), (Read((1,)),))], "causal rows of which none is read"),
        ([ENCODE, Forward([5], [2], causal(1), (), Commit((1,)))], "keeps all of its 2 rows"),
        ([ENCODE, DENOISE, Forward([5], [2], causal(1), (), Commit((0,)))], "a decoder none"),
        ([ENCODE, Forward([5], [2], bidirectional(1), (), Commit((0, 1)), self_conditioning=0.5)], "conditioned on"),
    ],
)
def test_forwards_of_other_decoders_are_refused(systems_2027: Path, forwards: list[Forward], message: str):
    engine = load_model(place(systems_2027, 1), device="cpu").engine
    with pytest.raises(DecodeError, match=message):
        engine.run(asking(*forwards), [5, 6], None)


def test_other_models_are_not_conditioned_on_their_logits():
    engine = load_model("embedded", device="cpu").engine
    with pytest.raises(DecodeError, match="takes no logits of the forward before"):
        engine.run(asking(Forward([5], [0], causal(1), (Read((0,)),), self_conditioning=1.0)), [5], None)


def test_of_layers_that_differ_the_size_of_most_is_read(systems_2027: Path):
    assert (stock_config(place(systems_2027, 1)).num_kv_heads, stock_config(place(systems_2027, 2)).head_dim) == (2, 8)
