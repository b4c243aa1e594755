"""A checkpoint gives the logits that transformers gives from the same files, whatever its layout, or says why not."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from refusion_eval.errors import CheckpointError
from refusion_eval.types import causal
from tests.models import tiny

TOKENS = [3, 1, 4, 1, 5, 9]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def write(folder, tensors, name="model.safetensors"):
    save_file(dict(tensors), folder / name, metadata={"format": "pt"})


def set_config(folder, **entries):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def write_index(folder, shards):
    """Writes shards, and an index of their names; where a tensor is in several, the map names the first."""
    weight_map = {}
    for name, tensors in shards.items():
        write(folder, tensors, name)
        weight_map |= {tensor: name for tensor in tensors if tensor not in weight_map}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def halves(tensors):
    """Two shards; the first has a layer's tensors with other values, the second all that are meant."""
    names = sorted(tensors)
    half = len(names) // 2
    return {name: tensors[name] for name in names[:half]}, {name: tensors[name] for name in names[half:]}


def changed(tensor):
    return tensor.flip(0).contiguous()


def tied_and_equal(folder, tensors):
    set_config(folder, tie_word_embeddings=True)
    write(folder, tensors | {HEAD: tensors[EMBEDDING].clone()})


def tied_and_different(folder, tensors):
    set_config(folder, tie_word_embeddings=True)


def tied_and_different_in_another_dtype(folder, tensors):
    set_config(folder, tie_word_embeddings=True)
    write(folder, tensors | {HEAD: tensors[HEAD].bfloat16()})


def tied_without_head(folder, tensors):
    set_config(folder, tie_word_embeddings=True)
    write(folder, {name: tensor for name, tensor in tensors.items() if name != HEAD})


def tied_without_embedding(folder, tensors):
    set_config(folder, tie_word_embeddings=True)
    write(folder, {name: tensor for name, tensor in tensors.items() if name != EMBEDDING})


def one_file_beside_shards(folder, tensors):
    first, second = halves({name: changed(tensor) for name, tensor in tensors.items()})
    write_index(folder, {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second})


def one_file_beside_the_index_of_missing_shards(folder, tensors):
    one_file_beside_shards(folder, tensors)
    for shard in folder.glob("model-0*.safetensors"):
        shard.unlink()


def doubled_in_two_shards(folder, tensors):
    first, second = halves(tensors)
    (folder / "model.safetensors").unlink()
    name = next(iter(second))
    shards = {"a.safetensors": first | {name: changed(second[name])}, "b.safetensors": second}
    write_index(folder, shards)


def shards_whose_names_sort_otherwise_than_the_map(folder, tensors):
    first, second = halves(tensors)
    (folder / "model.safetensors").unlink()
    name = next(iter(first))
    write_index(folder, {"z.safetensors": first, "a.safetensors": second | {name: changed(first[name])}})


def a_tensor_that_the_map_does_not_name(folder, tensors):
    first, second = halves(tensors)
    (folder / "model.safetensors").unlink()
    write_index(folder, {"a.safetensors": first, "b.safetensors": second})
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][next(iter(second))]
    path.write_text(json.dumps(index))


def shards_that_no_map_names(folder, tensors):
    write(folder, {name: changed(tensor) for name, tensor in tensors.items()}, "older.safetensors")


def without_the_prefix_of_the_base_model(folder, tensors):
    set_config(folder, tie_word_embeddings=True)
    write(folder, {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != HEAD})


def without_the_prefix_and_with_a_head(folder, tensors):
    write(folder, {name.removeprefix("model."): tensor for name, tensor in tensors.items()})


def with_a_prefix_before_the_head(folder, tensors):
    write(folder, {f"model.{name.removeprefix('model.')}": tensor for name, tensor in tensors.items()})


def in_several_dtypes(folder, tensors):
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    write(
        folder, {name: tensor.to(dtypes[number % 4]) for number, (name, tensor) in enumerate(sorted(tensors.items()))}
    )


def with_tensors_that_nobody_uses(folder, tensors):
    write(
        folder, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "extra.weight": torch.ones(2)}
    )


def as_it_is(folder, tensors):
    pass


# What a layout is warned of; "" for nothing.
LAYOUTS = {
    as_it_is: "",
    tied_and_equal: "",
    tied_and_different: "ties the output head to the embedding",
    tied_and_different_in_another_dtype: "ties the output head to the embedding",
    tied_without_head: "",
    tied_without_embedding: "",
    one_file_beside_shards: "model.safetensors is read, and not the shards",
    one_file_beside_the_index_of_missing_shards: "model.safetensors is read, and not the shards",
    doubled_in_two_shards: "1 tensors are in several files; the last file counts",
    shards_whose_names_sort_otherwise_than_the_map: "1 tensors are in several files",
    a_tensor_that_the_map_does_not_name: "",
    shards_that_no_map_names: "",
    without_the_prefix_of_the_base_model: "",
    without_the_prefix_and_with_a_head: "",
    with_a_prefix_before_the_head: "",
    in_several_dtypes: "",
    with_tensors_that_nobody_uses: "1 tensors are not used: extra.weight",
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_logits_are_those_of_transformers_from_the_same_files(tmp_path, caplog, family, layout):
    tiny.save_checkpoint(tmp_path, family=family)
    layout(tmp_path, tensors_of(tmp_path))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    with caplog.at_level(logging.WARNING, logger="refusion_eval"):
        ours = tiny.load(tmp_path)
    visible = torch.ones(len(TOKENS), len(TOKENS)).tril().bool()
    expected = tiny.oracle(theirs, TOKENS, list(range(len(TOKENS))), visible)
    found = tiny.forward(ours, tiny.new_cache(ours), TOKENS, range(len(TOKENS)), causal(len(TOKENS)))
    assert torch.allclose(found, expected, atol=1e-4), (found - expected).abs().max()
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("refusion_eval")]
    assert len(messages) == bool(LAYOUTS[layout])
    assert all(LAYOUTS[layout] in message for message in messages)


@pytest.mark.parametrize("name", [EMBEDDING, HEAD, "model.layers.1.mlp.up_proj.weight"])
def test_a_missing_tensor_is_an_error_where_transformers_draws_one(tmp_path, name):
    tiny.save_checkpoint(tmp_path)
    tensors = tensors_of(tmp_path)
    del tensors[name]
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=f"has no tensor {name}"):
        tiny.load(tmp_path)
