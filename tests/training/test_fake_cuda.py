"""One training step of every objective on CUDA tensors without storage, on a machine without a GPU.

The mode of fake tensors refuses operations whose tensors are on different devices, and copies and waits are counted.
The backward pass of the layers cannot run in it, because autograd asks for a stream of the device; it is torch's own.
The loss computes its gradients together with itself, so they are part of the test. Clipping and AdamW follow.

FSDP and DeepSpeed's ZeRO-2 cannot run in it either: both order their communication by CUDA streams, which a build of
torch for CPUs does not have. They run in two processes on the CPU instead (`test_run.py`, `test_zero2.py`).
"""

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from refusion_eval.training.config import ObjectiveConfig
from refusion_eval.training.data.collate import collate
from refusion_eval.training.objectives.example import TrainingSample
from refusion_eval.training.objectives.table import OBJECTIVES, SpecialIds
from refusion_eval.training.trainer import LossModel
from tests.engine.fake_cuda import fake_cuda, make_guard

EOS, MASK = 151645, 151670
SETTINGS = {
    "bd3lm": {"block_size": 8, "eos_multiple": 8},
    "llada": {"eos_multiple": 8},
    "idlm": {"block_size": 4},
    "wedlm": {"block_size": 4},
}


@pytest.fixture(scope="module", autouse=True)
def _guard(tmp_path_factory):
    make_guard(tmp_path_factory.mktemp("guard"))


def batch_of(objective, num_samples=3):
    config = ObjectiveConfig(objective=objective, **SETTINGS.get(objective, {}))
    samples = [TrainingSample(tuple(range(5, 20)), tuple(range(30, 90 + 7 * number))) for number in range(num_samples)]
    random = np.random.default_rng(0)
    return collate([[OBJECTIVES[objective](sample, random, config, SpecialIds(EOS, MASK)) for sample in samples]])


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_a_step_copies_its_batch_to_the_device_and_waits_for_nothing(monkeypatch, objective):
    batch = batch_of(objective)
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    with fake_cuda(monkeypatch) as launches:
        with torch.device("cuda"):
            model = LossModel(Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16), mdm_weight=1.0)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for counter in (launches.copies, launches.waits):
            counter.clear()
        outputs = model(batch)
        assert outputs["loss"].requires_grad
        for weight in model.parameters():
            weight.grad = torch.empty_like(weight)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        kinds_of_targets = sum(len(targets.rows_R) > 0 for targets in (batch.ar, batch.mdm))
        patterns = sum(not isinstance(sight, str) for sight in batch.sights)
        # Tokens, positions, ends of the examples; rows, labels and weights; blocks and noise of a pattern.
        assert launches.copies == {"to the device": 3 + 3 * kinds_of_targets + 2 * patterns}
        assert not launches.waits
        for tensor in (*outputs.values(), norm):
            assert tensor.device.type == "cuda"
        launches.copies.clear()
        outputs["terms"].cpu()  # what a line of the log costs
        assert launches.copies == {"to the host": 1}
