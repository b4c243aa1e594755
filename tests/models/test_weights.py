"""A checkpoint loads whatever its shards, and every kind of broken one gives one clear error."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from refusion_eval import loading
from refusion_eval.bench.checkpoints import Shape, random_checkpoint
from refusion_eval.errors import CheckpointError
from refusion_eval.loading import LoadedModel
from refusion_eval.models.weights import padded_rows
from tests.models import tiny


@pytest.fixture
def checkpoint(tmp_path):
    tiny.save_checkpoint(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    tiny.save_checkpoint(tmp_path, shard_size="20KB")
    return tmp_path


def test_weights_are_cast_while_loading(checkpoint):
    model = tiny.load(checkpoint, torch.bfloat16)
    stored = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.weights.embedding, stored.bfloat16())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_large_weights_keep_the_16_bits_of_the_file_on_a_cpu(tmp_path, monkeypatch, dtype):
    kind = getattr(torch, dtype)
    model = tiny.save_checkpoint(tmp_path)
    model.to(kind).save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "ONE_THREAD_BYTES", 0)
    kept = LoadedModel.open(tmp_path, device="cpu")
    assert (kept.dtype, kept.weight_dtype, kept.cache_dtype) == (torch.float32, kind, torch.float32)
    weights, transformer = kept.transformer.weights, kept.transformer
    matrices = (weights.embedding, weights.head, weights.layers[1].qkv, weights.layers[1].down)
    assert {matrix.dtype for matrix in matrices} == {kind}
    assert {weights.final_norm.dtype, weights.layers[0].input_norm.dtype, transformer.dtype} == {torch.float32}


def test_on_cuda_rows_of_the_output_head_are_a_multiple_of_128():
    assert [padded_rows(size, torch.device("cuda")) for size in (1, 128, 151671)] == [128, 128, 151680]
    assert padded_rows(151671, torch.device("cpu")) == 151671


def test_a_tied_head_is_the_embedding_itself(tmp_path):
    tiny.save_checkpoint(tmp_path, tie_word_embeddings=True)
    model = tiny.load(tmp_path)
    assert model.weights.head is model.weights.embedding


def test_missing_shard(sharded):
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=gone.name):
        tiny.load(sharded)


def test_truncated_file(checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated or not safetensors"):
        tiny.load(checkpoint)


def test_wrong_shapes(checkpoint):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 96}))
    with pytest.raises(CheckpointError, match=r"gate_proj.weight has shape \(80, 48\).*\(96, 48\)"):
        tiny.load(checkpoint)


def test_missing_tensor(checkpoint):
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"no tensor model\.norm\.weight"):
        tiny.load(checkpoint)


def test_quantised_tensor(checkpoint):
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="quantised"):
        tiny.load(checkpoint)


def test_pickled_weights_are_never_opened(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights"):
        tiny.load(checkpoint)


def test_no_weights_at_all(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        tiny.load(checkpoint)


def test_index_without_a_map(sharded):
    (sharded / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weight_map"):
        tiny.load(sharded)


PEAK_SCRIPT = """
import sys
from pathlib import Path
import torch

from refusion_eval.models.checkpoint import model_config
from refusion_eval.models.weights import load_weights

def peak():  # not getrusage: its figure is handed down from the process that started this one
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

directory = Path(sys.argv[1])
config, before = model_config(directory), peak()
weights = load_weights(directory, config, torch.float32, torch.device("cpu"))
print(peak() - before)
"""


@pytest.mark.process
def test_loading_takes_hardly_more_memory_than_the_checkpoint(tmp_path):
    shape = Shape(
        hidden_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=3072,
        vocab_size=8000,
    )
    random_checkpoint(shape, tmp_path, torch.float32)
    num_bytes = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    done = subprocess.run(
        [sys.executable, "-c", PEAK_SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert 0.9 * num_bytes < int(done.stdout) < 1.2 * num_bytes
