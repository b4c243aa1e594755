"""The training loop: resuming, refusing, writing (`refusion_eval.training.train`, `data`)."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from refusion_eval.errors import ConfigError, DataError
from refusion_eval.training.check import exact_share
from refusion_eval.training.data import Sample, encode, plan_batches
from refusion_eval.training.tokenizer import train_tokenizer
from refusion_eval.training.train import TrainConfig, learning_rate_share, train

SAMPLES = [Sample((1, 2, 3 + n % 4), (3 + n % 4, 8, 9 + n % 3, 13)) for n in range(24)]
CONFIG = TrainConfig(
    objective="refusion",
    num_steps=8,
    tokens_per_batch=64,
    num_warmup_steps=2,
    eos_multiple=8,
    log_every=2,
    save_every=4,
)


def _model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=16,
        max_position_embeddings=64,
        eos_token_id=13,
        pad_token_id=14,
        mask_token_id=15,
    )
    return Qwen3ForCausalLM(config)


def _losses(run_dir: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["ar"], line["mdm"]) for line in lines]


@pytest.mark.parametrize("muon_lr", [0.0, 0.02])
def test_an_interrupted_run_resumes_to_the_same_losses_and_weights(tmp_path: Path, muon_lr: float) -> None:
    config = dataclasses.replace(CONFIG, muon_lr=muon_lr)
    whole, resumed = _model(), _model()
    train(whole, SAMPLES, config, tmp_path / "whole")

    def stop_at_six(line: dict) -> None:
        if line["step"] == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(_model(), SAMPLES, config, tmp_path / "cut", on_log=stop_at_six)
    train(resumed, SAMPLES, config, tmp_path / "cut")
    assert _losses(tmp_path / "cut") == _losses(tmp_path / "whole")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_a_state_of_another_configuration_is_refused(tmp_path: Path) -> None:
    train(_model(), SAMPLES, CONFIG, tmp_path)
    with pytest.raises(ConfigError, match="was trained with"):
        train(_model(), SAMPLES, dataclasses.replace(CONFIG, peak_lr=0.1), tmp_path)


def test_next_token_training_learns_a_constant_answer(tmp_path: Path) -> None:
    model = _model()
    samples = [Sample((1, 2), (5, 6, 13))] * 8
    config = TrainConfig(objective="sft", num_steps=60, tokens_per_batch=64, peak_lr=1e-2, num_warmup_steps=5)
    assert exact_share(model, samples) < 1
    train(model, samples, config, tmp_path)
    assert exact_share(model, samples) == 1


def test_learning_rate_warms_up_and_ends_at_its_final_share() -> None:
    config = TrainConfig(objective="sft", num_steps=100, peak_lr=1.0, num_warmup_steps=10, final_lr_share=0.1)
    assert learning_rate_share(config, 0) == pytest.approx(0.1)
    assert learning_rate_share(config, 10) == pytest.approx(1.0)
    assert learning_rate_share(config, 100) == pytest.approx(0.1)


@pytest.mark.parametrize("wrong", [{"num_steps": 0}, {"slot_sizes": ()}, {"slot_sizes": (0,)}, {"eos_multiple": -1}])
def test_a_wrong_setting_is_refused_by_name(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TrainConfig(**{"objective": "sft", "num_steps": 1, **wrong})


def test_an_epoch_holds_each_sample_once_within_the_token_limit() -> None:
    lengths = [3 + n % 17 for n in range(500)]
    batches = plan_batches(lengths, tokens_per_batch=100, seed=0, epoch=0, pool=100)
    assert sorted(number for batch in batches for number in batch) == list(range(500))
    assert all(len(batch) * max(lengths[number] for number in batch) <= 100 for batch in batches)
    assert batches != plan_batches(lengths, tokens_per_batch=100, seed=0, epoch=1, pool=100)


def test_samples_are_chat_turns_with_one_eos_and_empty_responses_are_refused() -> None:
    tokenizer = train_tokenizer(["user\nhow many 12 pens?", "assistant\nThe answer is 12."] * 5, 300)
    (sample,) = encode(tokenizer, [("how many pens?", "The answer is 12.")])
    assert tokenizer.decode(sample.prompt) == "<|im_start|>user\nhow many pens?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(sample.answer) == "The answer is 12.<|im_end|>"
    with pytest.raises(DataError, match="row 1"):
        encode(tokenizer, [("a", "b"), ("c", "")])


def test_digits_are_split_and_special_tokens_are_single_ids(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["1212 1212 1212 pens"] * 20, 300)
    assert tokenizer.tokenize("1212") == ["1", "2", "1", "2"]
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>"):
        assert len(tokenizer(token)["input_ids"]) == 1
