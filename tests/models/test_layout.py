"""A checkpoint of an architecture that computes what a family computes, under other names."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import refusion_eval
from refusion_eval.errors import CheckpointError
from tests.models import tiny

LAYOUT = {
    "like": "qwen3",
    "kind": "llada",
    "tensors": {
        "embedding": "embed",
        "layer": "blocks.{}.",
        "out": "attention.o",
        "final_norm": "norm_f",
        "head": "head",
    },
    "keys": {"hidden_size": "width", "num_layers": "depth"},
}
NAMES = {
    "model.embed_tokens": "embed",
    "model.layers.": "blocks.",
    "self_attn.o_proj": "attention.o",
    "model.norm": "norm_f",
    "lm_head": "head",
}


@pytest.fixture
def renamed(tmp_path):
    """Folders of a checkpoint of Qwen3, and of the same weights under other names with a layout file."""
    tiny.save_checkpoint(tmp_path / "plain", family="qwen3")
    (tmp_path / "renamed").mkdir()
    for path in (tmp_path / "plain").iterdir():
        (tmp_path / "renamed" / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "plain" / "model.safetensors")
    for before, after in NAMES.items():
        weights = {name.replace(before, after): tensor for name, tensor in weights.items()}
    save_file(weights, tmp_path / "renamed" / "model.safetensors")
    path = tmp_path / "renamed" / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "mine", "mask_token_id": tiny.MASK_ID}
    config |= {"width": config.pop("hidden_size"), "depth": config.pop("num_hidden_layers")}
    path.write_text(json.dumps(config))
    (tmp_path / "renamed" / "refusion_layout.json").write_text(json.dumps(LAYOUT))
    return tmp_path / "plain", tmp_path / "renamed"


def test_a_layout_file_maps_names_and_says_what_fits(renamed):
    plain, other = (refusion_eval.load_model(str(folder), device="cpu") for folder in renamed)
    assert (other.config.family, other.decoders[0]) == ("mine", "llada")
    ours, theirs = (model.transformer.weights for model in (other, plain))
    assert torch.equal(ours.layers[1].out, theirs.layers[1].out)
    prompt, settings = (
        [3, 5, 9],
        {"gen_length": 8, "block_length": 8, "mask_id": tiny.MASK_ID, "eos_ids": (tiny.EOS_ID,)},
    )
    answers = [refusion_eval.generate(model, prompt, decoder="llada", **settings).tokens for model in (other, plain)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"like": "gpt2"}, "like is 'gpt2'; name one of qwen3"),
        ({"tensors": {"queries": "q"}}, "unexpected keyword argument 'queries'"),
        ({"kind": "diffusion"}, "kind is 'diffusion'; choose one of causal, masked"),
        ({"norm": "layer"}, "unexpected keyword argument 'norm'"),
    ],
)
def test_a_wrong_entry_is_refused(renamed, change, message):
    (renamed[1] / "refusion_layout.json").write_text(json.dumps(LAYOUT | change))
    with pytest.raises(CheckpointError, match=message):
        refusion_eval.load_model(str(renamed[1]), device="cpu")
