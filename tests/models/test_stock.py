"""Checkpoints under classes of transformers: one that lacks a tensor is refused, and seen by names and shapes alone."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.errors import CheckpointError
from refusion_eval.models.diffusion_gemma import OLDEST, check_version
from refusion_eval.models.stock import check_stock, load_stock
from tests.models import tiny

LOOPS = [["--backend", "transformers"], ["--loop", "generate"]]


def without(folder: Path, *names: str) -> Path:
    """The checkpoint without tensors whose names hold one of these."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    kept = {name: value for name, value in tensors.items() if not any(part in name for part in names)}
    assert len(kept) < len(tensors)
    save_file(kept, file, metadata={"format": "pt"})
    return folder


def checkpoint(folder: Path, **changes: object) -> Path:
    tiny.save_checkpoint(folder, **changes)
    tiny.save_word_tokenizer(folder, tiny.VOCAB_SIZE - 2)
    return folder


def asked(command: str, folder: Path, *more: str, decoder: str = "autoregressive"):
    return CliRunner().invoke(app, [command, "--model", str(folder), "--decoder", decoder, *more])


@pytest.mark.parametrize("loop", LOOPS, ids=" ".join)
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_checkpoint_without_a_tensor_is_refused_by_check_and_by_run(tmp_path, loop, name):
    folder = without(checkpoint(tmp_path / "model"), name)
    words = ["--tasks", "mini_gsm8k", "--limit", "1", "--run-dir", str(tmp_path / "run"), "--set", "gen_length=2"]
    for done in (asked("check", folder, *loop), asked("run", folder, *loop, *words)):
        assert isinstance(done.exception, CheckpointError)
        assert name in str(done.exception)


@pytest.mark.parametrize("loop", LOOPS, ids=" ".join)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_whole_checkpoint_fits_with_a_head_of_its_own_and_with_a_tied_one(tmp_path, loop, family):
    for is_tied in (False, True):
        folder = checkpoint(tmp_path / str(is_tied), family=family, tie_word_embeddings=is_tied)
        assert asked("check", folder, *loop).exit_code == 0


def test_of_a_model_for_texts_and_images_the_part_for_texts_is_checked(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = AutoConfig.for_model("qwen3_5", text_config=sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    check_stock(AutoModelForCausalLM, tmp_path)
    with pytest.raises(CheckpointError, match="missing keys"):
        check_stock(AutoModelForCausalLM, without(tmp_path, "layers.1.mlp.down_proj"))


def test_what_is_seen_of_tensors_by_their_names_is_what_loading_tells(tmp_path):
    folder = checkpoint(tmp_path / "model", family="qwen3_moe")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 32}))  # of another shape
    told = []
    for look in (check_stock, lambda *of: load_stock(*of, tiny.torch.float32, tiny.CPU)):
        with pytest.raises(CheckpointError, match="4 mismatched keys in the weights, such as") as found:
            look(AutoModelForCausalLM, folder)
        told.append(str(found.value))
    assert told[0] == told[1]


def test_tensors_of_no_class_are_told_and_not_used(tmp_path, caplog):
    folder = checkpoint(tmp_path / "model")
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"extra": tiny.torch.zeros(2)}, file, metadata={"format": "pt"})
    assert asked("check", folder, *LOOPS[0]).exit_code == 0
    assert "1 unexpected keys in the weights, such as extra; they are not used" in caplog.text


def test_check_refuses_a_diffusion_gemma_that_lacks_a_tensor(tmp_path):
    try:
        check_version(tmp_path)
    except CheckpointError:
        pytest.skip(f"needs transformers {'.'.join(map(str, OLDEST))}")
    tiny.save_diffusion_gemma(tmp_path)
    assert asked("check", tmp_path, decoder="diffusion_gemma").exit_code == 0
    done = asked("check", without(tmp_path, "decoder.layers.0.layer_scalar"), decoder="diffusion_gemma")
    assert isinstance(done.exception, CheckpointError)
    assert "missing keys in the weights, such as decoder.layers.0.layer_scalar" in str(done.exception)
