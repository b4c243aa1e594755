"""The training loop: resuming, refusing, writing (`refusion_eval.training.train`, `data`)."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from refusion_eval.errors import ConfigError, DataError
from refusion_eval.training.config import Objective, TrainConfig
from refusion_eval.training.data.samples import TrainingSample, encode
from refusion_eval.training.objectives.table import OBJECTIVES
from refusion_eval.training.tokenizer import train_tokenizer
from refusion_eval.training.train import build_batch, exact_share, learning_rate_share, plan_batches, train

SAMPLES = [TrainingSample((1, 2, 3 + n % 4), (3 + n % 4, 8, 9 + n % 3, 13)) for n in range(24)]
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


def test_a_state_from_before_a_setting_existed_had_its_default() -> None:
    earlier = json.loads(CONFIG.to_json())
    del earlier["block_size"]
    assert CONFIG.is_that_of(CONFIG.to_json())
    assert CONFIG.is_that_of(json.dumps(earlier))
    other = dataclasses.replace(CONFIG, objective="bd3lm", block_size=8)
    assert not other.is_that_of(json.dumps(earlier | {"objective": "bd3lm"}))
    assert not CONFIG.is_that_of(json.dumps(earlier | {"unheard_of": 1}))


def test_next_token_training_learns_a_constant_answer(tmp_path: Path) -> None:
    model = _model()
    samples = [TrainingSample((1, 2), (5, 6, 13))] * 8
    config = TrainConfig(objective="sft", num_steps=60, tokens_per_batch=64, peak_lr=1e-2, num_warmup_steps=5)
    assert exact_share(model, samples) < 1
    train(model, samples, config, tmp_path)
    assert exact_share(model, samples) == 1


@pytest.mark.parametrize(("objective", "block_size"), [("llada", 0), ("bd3lm", 4)])
def test_masked_training_learns_a_constant_answer(tmp_path: Path, objective: Objective, block_size: int) -> None:
    samples = [TrainingSample((1, 2), (5, 6, 13))] * 8
    config = TrainConfig(
        objective=objective,
        num_steps=150,
        tokens_per_batch=64,
        peak_lr=2e-2,
        num_warmup_steps=5,
        eos_multiple=8,
        block_size=block_size,
        log_every=10,
    )
    train(_model(), samples, config, tmp_path)
    losses = _losses(tmp_path)
    assert all(ar == 0 for _, ar, _ in losses)
    assert losses[-1][2] < 0.2 * losses[0][2]


# Of the batches that the embedded checkpoints were trained with: tokens, positions, and places, labels and weights of
# both losses, laid out as sequences padded to the longest. A change here makes it impossible to make them again.
@pytest.mark.parametrize(
    ("objective", "digest"),
    [
        ("pretrain", "9ea17b0b6a224c03"),
        ("sft", "bc2a48f7bce55e0a"),
        ("refusion", "cbddb4e5f11655eb"),
        ("llada", "96839b1ebd7a5078"),
        ("bd3lm", "b86290f662ae12f2"),
    ],
)
def test_batches_stay_what_they_were(objective: Objective, digest: str) -> None:
    block_size = 4 if objective == "bd3lm" else 0
    config = TrainConfig(objective=objective, num_steps=1, eos_multiple=8, block_size=block_size, seed=7)
    sha = hashlib.sha256()
    for step in range(5):
        batch = build_batch(config, SAMPLES, step, eos=13, mask=15)
        lengths = torch.tensor(batch.lengths)
        longest = max(batch.lengths)
        places_T = torch.cat([sample * longest + torch.arange(length) for sample, length in enumerate(batch.lengths)])
        tokens, positions = torch.full((len(lengths) * longest,), 14), torch.arange(longest).repeat(len(lengths))
        tokens[places_T], positions[places_T] = batch.tokens_T, batch.positions_T
        tensors = [tokens, positions]
        for targets in (batch.ar, batch.mdm):
            tensors += [places_T[targets.rows_R], targets.labels_R, targets.weights_R]
        for tensor in tensors:
            sha.update(tensor.numpy().tobytes())
    assert sha.hexdigest()[:16] == digest


def test_learning_rate_warms_up_and_ends_at_its_final_share() -> None:
    config = TrainConfig(objective="sft", num_steps=100, peak_lr=1.0, num_warmup_steps=10, final_lr_share=0.1)
    assert learning_rate_share(config, 0) == pytest.approx(0.1)
    assert learning_rate_share(config, 10) == pytest.approx(1.0)
    assert learning_rate_share(config, 100) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_steps": 0},
        {"slot_sizes": ()},
        {"slot_sizes": (0,)},
        {"eos_multiple": -1},
        {"block_size": 8},
        {"block_size": 0, "objective": "bd3lm", "eos_multiple": 8},
        {"eos_multiple": 12, "objective": "bd3lm", "block_size": 8},
        {"eos_multiple": 0, "objective": "bd3lm", "block_size": 8},
        {"normalisation": "paper", "objective": "llada"},
        {"normalisation": "paper", "objective": "bd3lm", "eos_multiple": 8, "block_size": 8},
        {"objective": "lladda"},
    ],
)
def test_a_wrong_setting_is_refused_by_name(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TrainConfig(**{"objective": "sft", "num_steps": 1, **wrong})


def test_an_unknown_objective_is_answered_with_the_known_ones() -> None:
    assert list(OBJECTIVES) == list(get_args(Objective))
    with pytest.raises(ConfigError, match=r"'lladda'; choose one of pretrain, sft, refusion, llada, bd3lm"):
        TrainConfig(objective="lladda", num_steps=1)  # type: ignore[arg-type]


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
