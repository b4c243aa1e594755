"""The memory that a training needs, against sums by hand and against the model that transformers makes."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from refusion_eval.errors import ConfigError
from refusion_eval.models.checkpoint import parse_model_config
from refusion_eval.models.weights import count_parameters
from refusion_eval.training.config import read_run_config
from refusion_eval.training.cost import check_memory, num_adapter_weights, training_memory

QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
WEIGHTS = 8_190_735_360  # of Qwen3-8B, as its model card counts them


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return parse_model_config(QWEN3_8B, tmp_path_factory.mktemp("model"))


def config(*settings: str):
    return read_run_config("refusion_8b", ["data.files=[train.jsonl]", *settings])


@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_are_those_of_the_model(tmp_path, tied: bool) -> None:
    raw = QWEN3_8B | {"tie_word_embeddings": tied}
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**raw))
    counted = sum(weight.numel() for weight in model.parameters())
    assert count_parameters(parse_model_config(raw, tmp_path)) == counted
    if not tied:
        assert counted == WEIGHTS


def test_the_adapters_are_those_of_peft(shapes) -> None:
    import peft

    lora = config("backbone.lora={rank: 8, alpha: 16}").backbone.lora
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**QWEN3_8B))
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=list(lora.target_modules)))
    trained = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    assert num_adapter_weights(lora, shapes) == trained


@pytest.mark.parametrize(
    ("settings", "num_processes", "gigabytes"),
    [
        ([], 1, 2 * 8.19 + 4 * 8.19 + 12 * 8.19),
        ([], 8, 2 * 8.19 + 2 * 8.19),
        (["optimisation.offload_optimizer=true"], 1, 2 * 8.19 + 4 * 8.19),
        (["parallelism=fsdp", "backbone.dtype=float32"], 4, 16 * 8.19 / 4),
        (["parallelism=ddp", "backbone.dtype=float32"], 4, 16 * 8.19),
        (["parallelism=ddp", "backbone.lora={rank: 8, alpha: 16}"], 4, 2 * 8.19 + 12 * 0.0218),
    ],
)
def test_the_memory_of_each_parallelism(shapes, settings, num_processes, gigabytes) -> None:
    assert training_memory(config(*settings), shapes, num_processes) / 1e9 == pytest.approx(gigabytes, rel=2e-3)


def test_a_run_that_cannot_fit_is_refused_with_its_ways_out(shapes) -> None:
    with pytest.raises(ConfigError, match=r"needs 147\.4 GB on each device .*more GPUs.*offload_optimizer=true"):
        check_memory(config(), shapes, 1, 80e9)
    with pytest.raises(ConfigError, match="parallelism=fsdp"):
        check_memory(config("parallelism=ddp", "backbone.dtype=float32"), shapes, 1, 80e9)
    assert "32.8 GB on each device" in check_memory(config(), shapes, 8, 80e9)
    adapters = config("parallelism=ddp", "backbone.lora={rank: 8, alpha: 16}")
    assert "16.6 GB" in check_memory(adapters, shapes, 1, 80e9)


def test_without_a_gpu_nothing_is_refused(shapes) -> None:
    assert "147.4 GB" in check_memory(config(), shapes, 1, None)


def test_offloading_belongs_to_zero2() -> None:
    with pytest.raises(ConfigError, match="needs parallelism=zero2"):
        config("parallelism=fsdp", "backbone.dtype=float32", "optimisation.offload_optimizer=true")
    assert config().identity() == config("optimisation.offload_optimizer=true").identity()
