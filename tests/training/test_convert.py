"""Conversion between the release's layout and the backbone's (`refusion_eval.training.checkpoints.convert`)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.loading import load_model
from refusion_eval.models.weights import CheckpointFiles
from refusion_eval.training.checkpoints.backbone import load_backbone, load_tokenizer
from refusion_eval.training.checkpoints.convert import convert
from refusion_eval.training.checkpoints.save import save_backbone
from refusion_eval.training.config import BackboneConfig
from tests.training.backbones import END_ID, FAMILIES, NUM_ROWS, change_json, logits_of, save_backbone_of

NUM_WORDS = 50
START_ID, MASK_ID, NUM_IDS = NUM_WORDS, NUM_WORDS + 1, NUM_WORDS + 2
TOKENS = torch.tensor([[3, 4, 5, 9, 8, 20, 21, 30, MASK_ID, MASK_ID]])
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 64


def _trained(directory: Path, family: str = "qwen3", tied: bool = False, **changes: Any) -> Path:
    """A checkpoint as it is saved here, with spare rows."""
    save_backbone_of(directory / "stock", family, tied, num_words=NUM_WORDS, **changes)
    config = BackboneConfig(model=str(directory / "stock"), dtype="float32")
    tokenizer = load_tokenizer(config)
    save_backbone(load_backbone(config, tokenizer), tokenizer, directory / "trained")
    return directory / "trained"


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def _read(directory: Path, name: str = "config.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / name).read_text())
    return content


# --- there and back


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_the_release_s_layout_cuts_spare_rows_and_nothing_else(tmp_path: Path, family: str, tied: bool) -> None:
    trained = _trained(tmp_path, family, tied)
    convert(str(trained), tmp_path / "release", "release")
    before, after = _tensors(trained), _tensors(tmp_path / "release")
    assert before.keys() == after.keys()
    assert ("lm_head.weight" in after) != tied
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor[:NUM_IDS] if name in VOCABULARY else tensor), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["release", "stock", "trained"]


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_round_trips_are_bit_exact_for_every_token(tmp_path: Path, family: str, tied: bool) -> None:
    trained = _trained(tmp_path, family, tied)
    convert(str(trained), tmp_path / "release", "release")
    convert(str(tmp_path / "release"), tmp_path / "back", "stock", rows=NUM_ROWS)
    convert(str(tmp_path / "back"), tmp_path / "again", "release")
    first, back = _tensors(trained), _tensors(tmp_path / "back")
    assert first.keys() == back.keys()
    for name, tensor in first.items():
        assert back[name].shape == tensor.shape
        known = slice(NUM_IDS) if name in VOCABULARY else slice(None)
        assert torch.equal(back[name][known], tensor[known]), name
        if name in VOCABULARY:
            torch.testing.assert_close(back[name][-1], tensor[:NUM_IDS].mean(dim=0))
    for path in (tmp_path / "release").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name
    ignored = ("transformers_version", "layer_types")
    configs = [{key: value for key, value in _read(some).items() if key not in ignored} for some in (trained,)]
    configs += [{key: value for key, value in _read(tmp_path / "back").items() if key not in ignored}]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    ("family", "tied", "changes"), [*((*some, {}) for some in FAMILIES), ("llama", False, {"rope_parameters": LLAMA3})]
)
def test_either_layout_opens_in_transformers_and_here_with_equal_logits(
    tmp_path: Path, family: str, tied: bool, changes: dict[str, Any]
) -> None:
    trained = _trained(tmp_path, family, tied, **changes)
    convert(str(trained), tmp_path / "release", "release")
    convert(str(tmp_path / "release"), tmp_path / "back", "stock")
    expected = logits_of(AutoModelForCausalLM.from_pretrained(trained), TOKENS)
    for name in ("release", "back"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        found = logits_of(model, TOKENS)
        torch.testing.assert_close(found[..., :NUM_IDS], expected[..., :NUM_IDS], atol=1e-5, rtol=0)
        assert model.config.vocab_size == NUM_IDS
        assert AutoTokenizer.from_pretrained(tmp_path / name).mask_token_id == MASK_ID
        ours = load_model(str(tmp_path / name), device="cpu")
        assert (ours.card.mask_id, ours.card.eos_ids) == (MASK_ID, (END_ID,))
        assert ours.tokenizer.encode("<|mask|><end>") == [MASK_ID, END_ID]


# --- files around the weights


def test_config_has_the_keys_of_the_release(tmp_path: Path, shared: Path) -> None:
    convert(str(_trained(tmp_path)), tmp_path / "release", "release")
    written, released = _read(tmp_path / "release"), _read(shared / "parity" / "tiny")
    assert released.keys() - written.keys() == {"transformers_version"}
    assert written.keys() - released.keys() == set()
    assert written["architectures"] == ["Qwen3ForCausalLM"]
    ids = ("bos_token_id", "eos_token_id", "mask_token_id", "vocab_size")
    assert [written[name] for name in ids] == [START_ID, END_ID, MASK_ID, NUM_IDS]
    assert (written["torch_dtype"], written["rope_theta"], written["rope_scaling"]) == ("float32", 5000.0, None)


def test_a_release_in_its_own_layout_comes_back_as_it_was(tmp_path: Path, shared: Path) -> None:
    source = shared / "parity" / "tiny"
    convert(str(source), tmp_path / "stock", "stock", rows=320)
    convert(str(tmp_path / "stock"), tmp_path / "back", "release")
    released = {key: value for key, value in _read(source).items() if key != "transformers_version"}
    assert _read(tmp_path / "back") == released
    before, after = _tensors(source), _tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert _read(tmp_path / "stock")["rope_parameters"] == {"rope_type": "default", "rope_theta": 10_000.0}


def test_tokenizer_files_are_those_of_transformers_4(tmp_path: Path) -> None:
    trained = _trained(tmp_path)
    change_json(trained / "tokenizer_config.json", extra_special_tokens=["w7"], backend="tokenizers")
    convert(str(trained), tmp_path / "release", "release")
    tokenizer = _read(tmp_path / "release", "tokenizer_config.json")
    assert "backend" not in tokenizer
    assert tokenizer["additional_special_tokens"] == ["w7"]
    assert tokenizer["added_tokens_decoder"][str(MASK_ID)]["content"] == "<|mask|>"
    special = _read(tmp_path / "release", "special_tokens_map.json")
    assert (special["mask_token"], special["bos_token"]) == ("<|mask|>", "<|beginoftext|>")
    assert AutoTokenizer.from_pretrained(tmp_path / "release").all_special_ids


def test_code_is_left_behind(tmp_path: Path) -> None:
    trained = _trained(tmp_path)
    change_json(trained / "config.json", auto_map={"AutoModel": "own.Own"}, architectures=["Own"])
    (trained / "own.py").write_text("raise SystemExit")
    for to in ("release", "stock"):
        target = tmp_path / f"plain {to}"
        convert(str(trained), target, to)  # type: ignore[arg-type]
        assert "auto_map" not in _read(target)
        assert _read(target)["architectures"] == ["Qwen3ForCausalLM"]
        assert not list(target.glob("*.py"))


@pytest.mark.parametrize(
    ("family", "hidden_size", "num_rows"), [("qwen3", 8, 151_936), ("qwen2", 8, 151_936), ("qwen2", 3584, 152_064)]
)
def test_qwen_s_own_number_of_rows_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, hidden_size: int, num_rows: int
) -> None:
    sizes = {"hidden_size": hidden_size, "num_hidden_layers": 1, "intermediate_size": 4, "num_key_value_heads": 1}
    sizes |= {"num_attention_heads": 1, "vocab_size": NUM_IDS, "head_dim": 2}
    trained = _trained(tmp_path, family, True, **sizes)
    monkeypatch.setattr("refusion_eval.training.checkpoints.convert._QWEN_IDS", NUM_IDS)
    monkeypatch.setattr("refusion_eval.training.checkpoints.convert._write_weights", lambda *_: None)
    convert(str(trained), tmp_path / "stock rows", "stock")
    assert _read(tmp_path / "stock rows")["vocab_size"] == num_rows


# --- streaming


def test_shards_are_read_and_written_one_tensor_and_one_shard_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refusion_eval.training.checkpoints.save.SHARD_BYTES", 40_000)
    trained = _trained(tmp_path)
    num_shards = len(list(trained.glob("*.safetensors")))
    assert num_shards > 2
    held: list[int] = []
    alive: list[str] = []
    read = CheckpointFiles.read

    def counted(self: CheckpointFiles, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = read(self, name, shape)
        alive.append(name)
        held.append(len(alive))
        return tensor

    def saved(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, path, metadata=metadata)
        alive.clear()

    monkeypatch.setattr(CheckpointFiles, "read", counted)
    monkeypatch.setattr("refusion_eval.training.checkpoints.convert.save_file", saved)
    convert(str(trained), tmp_path / "release", "release", dtype="bfloat16")
    before, after = _tensors(trained), _tensors(tmp_path / "release")
    assert max(held) < len(before) / 2
    assert all(path.stat().st_size < 45_000 for path in (tmp_path / "release").glob("*.safetensors"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        cut = tensor[:NUM_IDS] if name in VOCABULARY else tensor
        assert torch.equal(after[name], cut.to(torch.bfloat16)), name
    assert _read(tmp_path / "release")["torch_dtype"] == "bfloat16"
    AutoModelForCausalLM.from_pretrained(tmp_path / "release")


# --- what is refused


def test_a_target_that_is_there_is_refused_and_left_alone(tmp_path: Path) -> None:
    trained = _trained(tmp_path)
    (tmp_path / "target").mkdir()
    with pytest.raises(ConfigError, match="target exists already; name a new directory"):
        convert(str(trained), tmp_path / "target", "release")
    with pytest.raises(ConfigError, match="exists already"):
        convert(str(trained), trained, "stock")
    assert not list((tmp_path / "target").iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"to": "release", "rows": 60}, "rows=60 is for the layout stock"),
        ({"to": "stock", "rows": 51}, "rows=51 is less than the tokenizer's 52 ids"),
    ],
)
def test_settings_that_cannot_be_met(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(str(_trained(tmp_path)), tmp_path / "target", **settings)
    assert not (tmp_path / "target").exists()


def test_checkpoints_that_are_no_plain_masked_model(tmp_path: Path) -> None:
    trained, target = _trained(tmp_path), tmp_path / "target"
    with pytest.raises(CheckpointError, match="has no mask token"):
        convert(str(tmp_path / "stock"), target, "release")
    tensors = _tensors(trained)
    save_file(tensors | {"model.extra.weight": torch.zeros(2)}, trained / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensors that Qwen3ForCausalLM does not have \(model.extra.weight\)"):
        convert(str(trained), target, "release")
    save_file({name: tensor for name, tensor in tensors.items() if "norm" not in name}, trained / "model.safetensors")
    with pytest.raises(CheckpointError, match="has no tensor"):
        convert(str(trained), target, "release")
    change_json(trained / "config.json", vocab_size=NUM_WORDS)
    with pytest.raises(CheckpointError, match="has 52 ids, but the vocabulary 50 rows"):
        convert(str(trained), target, "release")
    (trained / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        convert(str(trained), target, "release")
    change_json(trained / "config.json", model_type="Dream")
    with pytest.raises(CheckpointError, match="model_type is 'Dream'; convert supports qwen3, qwen2, llama"):
        convert(str(trained), target, "release")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stock", "trained"]


def test_the_command(tmp_path: Path) -> None:
    trained = _trained(tmp_path)
    result = CliRunner().invoke(app, ["convert", str(trained), str(tmp_path / "release"), "--to", "release"])
    assert result.exit_code == 0
    assert "in the layout release" in result.output
    assert _read(tmp_path / "release")["vocab_size"] == NUM_IDS
    again = CliRunner().invoke(app, ["convert", str(trained), str(tmp_path / "release"), "--to", "release"])
    assert isinstance(again.exception, ConfigError)
    for wrong in (["--to", "stok"], ["--to", "stock", "--dtype", "int8"]):
        refused = CliRunner().invoke(app, ["convert", str(trained), str(tmp_path / "other"), *wrong])
        assert refused.exit_code == 2
        assert wrong[-1] in refused.output
