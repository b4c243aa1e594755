"""Muon with AdamW for the other weights (`miniature.muon`)."""

import copy
from collections.abc import Iterator

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from miniature.muon import MuonAdamW, muon
from miniature.run import MiniatureConfig
from refusion_eval.errors import ConfigError
from refusion_eval.training.config import OptimisationConfig, read_run_config

CONFIG = OptimisationConfig(max_steps=4, global_batch_size=4, lr=1e-2, weight_decay=0.1, beta2=0.98)


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 40}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2))


def gradients() -> Iterator[torch.Tensor]:
    """Tokens of one step after another."""
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(0, 40, (2, 12), generator=generator)


def train(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> None:
    for tokens in batches:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def three_batches() -> list[torch.Tensor]:
    source = gradients()
    return [next(source) for _ in range(3)]


def test_matrices_of_the_layers_take_orthogonal_steps_of_the_size_of_adamw(model: Qwen3ForCausalLM) -> None:
    before = copy.deepcopy(model.state_dict())
    train(model, muon(model, CONFIG), three_batches()[:1])
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and ".layers." in name:
            step = weight.detach() - before[name] * (1 - CONFIG.lr * CONFIG.weight_decay)
            values = torch.linalg.svdvals(step) / (CONFIG.lr * 0.2 * max(weight.shape) ** 0.5)
            # Five iterations bring the singular values near 1, not to it; those of a gradient differ by far more.
            assert values.median() == pytest.approx(0.9, abs=0.3), name
            assert values.max() < 1.3, name


def test_all_other_weights_take_the_steps_of_adamw(model: Qwen3ForCausalLM) -> None:
    other = copy.deepcopy(model)
    (batch, *_) = three_batches()
    train(model, muon(model, CONFIG), [batch])
    vectors = [weight for weight in other.parameters() if weight.ndim == 1]
    tables = [weight for name, weight in other.named_parameters() if weight.ndim == 2 and ".layers." not in name]
    groups = [{"params": tables, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    train(other, torch.optim.AdamW(groups, lr=CONFIG.lr, betas=(0.9, 0.98)), [batch])
    trained = dict(model.named_parameters())
    same = [name for name, weight in other.named_parameters() if torch.equal(weight, trained[name])]
    assert same == [name for name, weight in other.named_parameters() if weight.ndim == 1 or ".layers." not in name]


def test_a_schedule_reaches_both_kinds_of_weights(model: Qwen3ForCausalLM) -> None:
    optimizer = muon(model, CONFIG)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, three_batches()[:1])
    schedule.step()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_training_goes_on_from_a_saved_state_as_if_it_had_not_stopped(model: Qwen3ForCausalLM) -> None:
    whole = copy.deepcopy(model)
    train(whole, muon(whole, CONFIG), three_batches())
    first, *rest = three_batches()
    optimizer = muon(model, CONFIG)
    train(model, optimizer, [first])
    state = copy.deepcopy(optimizer.state_dict())
    continued = muon(model, CONFIG)
    continued.load_state_dict(state)
    assert isinstance(continued, MuonAdamW)
    train(model, continued, rest)
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


@pytest.mark.parametrize("setting", ["parallelism=fsdp", "backbone.lora={rank: 4, alpha: 8}"])
def test_muon_needs_whole_matrices(setting: str) -> None:
    settings = ("data.files=[x]", "backbone.tokenizer=x", "optimisation.optimizer=muon", setting)
    with pytest.raises(ConfigError, match="needs whole matrices in every process"):
        read_run_config("tiny", settings, MiniatureConfig)


def test_runs_with_adamw_continue_runs_of_the_package() -> None:
    settings = ("data.files=[x]", "backbone.tokenizer=x")
    with_choice = read_run_config("tiny", settings, MiniatureConfig)
    assert with_choice.identity() == read_run_config("tiny", settings).identity()
    muon_config = read_run_config("tiny", (*settings, "optimisation.optimizer=muon"), MiniatureConfig)
    assert muon_config.identity()["optimisation"]["optimizer"] == "muon"
