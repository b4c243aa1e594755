"""The family of embedded checkpoints (`refusion_eval.training.embedded`): order, selection, and what reads them."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from refusion_eval import api
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError
from refusion_eval.training import embedded
from refusion_eval.training.config import TrainConfig
from refusion_eval.training.data.samples import TrainingSample, encode
from refusion_eval.training.embedded import BACKBONE, STAGES, VARIANTS, build, main, train_stages
from refusion_eval.training.tokenizer import train_tokenizer

FAMILY = {
    name: dataclasses.replace(config, num_steps=4, tokens_per_batch=128, num_warmup_steps=1)
    for name, config in STAGES.items()
}
DECODERS_OF = {
    "autoregressive": ("autoregressive",),
    "autoregressive_sft": ("autoregressive",),
    "llada": ("llada", "fast_dllm_llada"),
    "bd3lm": ("bd3lm",),
}
FINE_TUNES = [name for name in STAGES if name != BACKBONE]


@pytest.fixture(scope="module")
def data() -> tuple[PreTrainedTokenizerFast, list[TrainingSample]]:
    pairs = [(f"{n} pens and {n} more?", f"{2 * n} pens") for n in range(8)]
    tokenizer = train_tokenizer([text for pair in pairs for text in pair], 300)
    return tokenizer, encode(tokenizer, pairs)


def _train(data: tuple, folder: Path, *stages: str, configs: Mapping[str, TrainConfig] = FAMILY) -> None:
    tokenizer, samples = data
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        mask_token_id=tokenizer.mask_token_id,
    )
    model = Qwen3ForCausalLM(config)
    check = {"pens": samples[:2]}
    train_stages(model, tokenizer, samples, check, folder / "work", folder / "out", stages=stages, configs=configs)


@pytest.fixture(scope="module")
def family(data: tuple, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("family")
    _train(data, folder, *STAGES)
    return folder


def test_all_fine_tunes_take_equally_many_samples_in_equally_many_steps() -> None:
    assert FINE_TUNES == ["refusion", "autoregressive_sft", "llada", "bd3lm"]
    budgets = {(STAGES[name].num_steps, STAGES[name].tokens_per_batch, STAGES[name].peak_lr) for name in FINE_TUNES}
    assert budgets == {(3600, 2560, 3e-3)}
    assert len({config.seed for config in STAGES.values()}) == len(STAGES)


def test_variants_see_the_first_samples_of_the_refusion_stage_and_differ_in_one_thing() -> None:
    refusion = STAGES["refusion"]
    for name, config in VARIANTS.items():
        same = dataclasses.replace(
            config,
            num_steps=refusion.num_steps,
            num_warmup_steps=refusion.num_warmup_steps,
            slot_sizes=refusion.slot_sizes,
        )
        assert same == refusion  # the seed among the rest: equal batches, of which a variant takes the first
        _, kind, number = name.split("_")
        if kind == "data":
            assert (config.num_steps, config.slot_sizes) == (36 * int(number), refusion.slot_sizes)
        else:
            assert (config.num_steps, config.slot_sizes) == (360, (int(number),))
        assert 1 <= config.num_warmup_steps <= config.num_steps / 10


def test_a_variant_is_trained_from_the_same_backbone_and_says_what_it_is(data: tuple, tmp_path: Path) -> None:
    configs = FAMILY | {"refusion_data_1": dataclasses.replace(FAMILY["refusion"], num_steps=2)}
    _train(data, tmp_path, "refusion_data_1", configs=configs)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["refusion_data_1"]
    readme = (tmp_path / "out" / "refusion_data_1" / "README.md").read_text()
    assert "ReFusion variant refusion_data_1" in readme
    assert "| refusion_data_1 | refusion | 2 |" in readme
    assert f"| {BACKBONE} | sft | 4 |" in readme


def test_stages_are_written_for_the_decoders_that_they_were_trained_for(family: Path) -> None:
    assert sorted(path.name for path in (family / "out").iterdir()) == sorted(STAGES)
    for name in STAGES:
        config = json.loads((family / "out" / name / "config.json").read_text())
        assert config.get("decoders", []) == list(DECODERS_OF.get(name, ()))
        assert set(config.get("decoders", [])) <= set(DECODERS)
        readme = (family / "out" / name / "README.md").read_text()
        assert f"| {name} | {STAGES[name].objective} | 4 |" in readme
        assert f"| {BACKBONE} | sft | 4 |" in readme
        lines = [json.loads(line) for line in (family / "work" / name / "metrics.jsonl").read_text().splitlines()]
        used = {"sft": {"ar"}, "refusion": {"ar", "mdm"}}.get(STAGES[name].objective, {"mdm"})
        assert {column for column in ("ar", "mdm") if lines[-1][column] > 0} == used


@pytest.mark.parametrize("stage", ["refusion", "bd3lm"])
def test_a_stage_alone_from_the_work_dir_is_what_it_is_in_any_order(
    data: tuple, family: Path, tmp_path: Path, stage: str
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / BACKBONE).symlink_to(family / "work" / BACKBONE)
    before = (family / "work" / BACKBONE / "state.pt").stat().st_mtime_ns
    _train(data, tmp_path, "llada", stage)
    assert (family / "work" / BACKBONE / "state.pt").stat().st_mtime_ns == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(["llada", stage])
    whole = load_file(family / "out" / stage / "model.safetensors")
    alone = load_file(tmp_path / "out" / stage / "model.safetensors")
    backbone = load_file(family / "out" / BACKBONE / "model.safetensors")
    assert all(torch.equal(alone[name], value) for name, value in whole.items())
    assert not all(torch.equal(backbone[name], value) for name, value in whole.items())


@pytest.mark.parametrize(
    ("stage", "decoder", "settings"),
    [
        ("llada", "llada", {"gen_length": 16, "block_length": 8}),
        ("llada", "fast_dllm_llada", {"gen_length": 16, "block_length": 8, "threshold": 0.9, "cache": "dual"}),
        ("bd3lm", "bd3lm", {"gen_length": 16, "block_length": 8}),
        ("autoregressive_sft", "autoregressive", {"gen_length": 8}),
    ],
)
def test_a_checkpoint_fits_its_decoders(family: Path, stage: str, decoder: str, settings: dict[str, Any]) -> None:
    model = api.load_model(str(family / "out" / stage), dtype="float32", device="cpu", attention="sdpa")
    assert decoder in model.decoders
    decoded = api.generate(model, [1, 2, 3, 4, 5], decoder, **settings)
    assert 0 < len(decoded.tokens) <= settings["gen_length"]
    assert model.card.mask_id not in decoded.tokens


@pytest.mark.parametrize(("stage", "decoder"), [("llada", "refusion"), ("bd3lm", "llada"), ("llada", "d2f_llada")])
def test_other_decoders_are_refused(family: Path, stage: str, decoder: str) -> None:
    model = api.load_model(str(family / "out" / stage), dtype="float32", device="cpu", attention="sdpa")
    with pytest.raises(ConfigError, match=f"does not fit decoder={decoder}"):
        api.decoder_settings(model, decoder)


def test_an_unknown_stage_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    for stages in (["llada", "lada"], []):
        with pytest.raises(ConfigError, match="known: autoregressive, refusion, autoregressive_sft, llada, bd3lm"):
            build(tmp_path / "work", tmp_path / "out", num_threads=1, stages=stages)
    assert list(tmp_path.iterdir()) == []


def test_the_command_takes_stages_with_commas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Path, list[str]]] = []
    monkeypatch.setattr(
        embedded, "build", lambda work_dir, out_dir, *, num_threads, stages: calls.append((work_dir, stages))
    )
    monkeypatch.setattr("sys.argv", ["embedded", "--work-dir", str(tmp_path), "--stages", "llada, bd3lm"])
    main()
    assert calls == [(tmp_path, ["llada", "bd3lm"])]
