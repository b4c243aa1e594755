"""The parts of the GPU path, on the CPU and, where there is one, on a CUDA device (`pytest -m gpu`)."""

import csv
import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from refusion_eval import api
from refusion_eval.bench.bench import mini_prompts
from refusion_eval.bench.checkpoints import SHAPES, Shape, inflate
from refusion_eval.bench.gpu_check import REFUSION_SETTINGS, REHEARSAL
from refusion_eval.decoders import DECODERS
from refusion_eval.engine.engine import Request
from refusion_eval.models.attention import grouped_attention
from refusion_eval.paths import embedded_path
from refusion_eval.types import Decoded

ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 0.02
# A CPU that multiplies no bfloat16 itself computes it much more slowly than float32: it trains the smallest model.
SMALL = Shape(64, 2, 2, 1, 128, 2300)


def attention_in_float32(q_THD, keys_GKD, values_GKD, mask_TK):
    """`grouped_attention` by torch's plain kernel in float32."""
    num_shared = q_THD.shape[1] // keys_GKD.shape[0]
    keys, values = (tensor.float().repeat_interleave(num_shared, dim=0) for tensor in (keys_GKD, values_GKD))
    with sdpa_kernel(SDPBackend.MATH):
        attended = scaled_dot_product_attention(q_THD.float().transpose(0, 1), keys, values, attn_mask=mask_TK.float())
    return attended.transpose(0, 1)


@pytest.mark.parametrize(
    ("device", "lengths"), [("cpu", (320, 321)), pytest.param("cuda", range(289, 354), marks=ON_CUDA)]
)
def test_attention_under_a_mask_agrees_with_float32_arithmetic(device, lengths):
    generator = torch.Generator().manual_seed(0)
    for num_keys in lengths:
        for num_queries in (1, 8, 40):
            sizes = ((num_queries, 32), (8, num_keys), (8, num_keys))
            drawn = [torch.randn(*size, 128, generator=generator).to(device, torch.bfloat16) for size in sizes]
            mask = torch.zeros(num_queries, num_keys, dtype=torch.bfloat16, device=device)
            hidden = torch.ones(num_queries, num_queries, device=device).triu(1).bool()
            mask[:, -num_queries:].masked_fill_(hidden, -math.inf)
            attended = grouped_attention(*drawn, mask, is_causal=False).float()
            torch.testing.assert_close(attended, attention_in_float32(*drawn, mask), atol=TOLERANCE, rtol=0)
            if num_queries > 1:  # an attention that ignores its mask would be found out
                unmasked = attention_in_float32(*drawn, torch.zeros_like(mask))
                assert (attended - unmasked).abs().max() > TOLERANCE


@pytest.mark.parametrize(("device", "num_prompts"), [("cpu", 2), pytest.param("cuda", 8, marks=ON_CUDA)])
def test_a_second_batch_has_as_much_room_as_the_first(device, num_prompts, tmp_path):
    """The prompts of the second batch outgrow the buffer of the first, as those of a run's second task may."""
    inflate(embedded_path("refusion"), tmp_path / "model", REHEARSAL, torch.bfloat16)
    model = api.load_model(str(tmp_path / "model"), dtype="bfloat16", device=device)
    settings = api.decoder_settings(model, "refusion", **REFUSION_SETTINGS | {"gen_length": 32})
    prompts = [list(prompt) * (600 // len(prompt) + 1) for prompt in mini_prompts(model, num_prompts)]
    for _ in range(2):
        requests = (Request(DECODERS["refusion"].decode, prompt, settings) for prompt in prompts)
        assert all(isinstance(result, Decoded) for _, result in model.engine.run_many(requests, 64))


@pytest.mark.parametrize(
    ("shape", "steps", "lr", "hidden"),
    [
        pytest.param(SMALL, 10, 1e-2, {"CUDA_VISIBLE_DEVICES": ""}, marks=pytest.mark.slow),
        pytest.param(SHAPES["0.6B"], 20, 3e-4, {}, marks=ON_CUDA),
    ],
    ids=["cpu", "cuda"],
)
def test_a_training_in_bfloat16_has_finite_losses_that_fall(shape, steps, lr, hidden, tmp_path, monkeypatch):
    for name, value in hidden.items():
        monkeypatch.setenv(name, value)
    sizes = {name: size for name, size in asdict(shape).items() if name != "vocab_size"}
    settings = {
        "backbone.shape": json.dumps(sizes | {"model_type": "qwen3", "head_dim": 64}),
        "optimisation.compute_dtype": "bfloat16",
        "optimisation.max_steps": steps,
        "optimisation.lr": lr,
        "output.run_dir": tmp_path / "training",
        "output.log_every": 1,
        "output.save_every": steps,
        "data.cache_dir": tmp_path / "tokens",
    }
    changes = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "refusion_eval.training.run", "--config", "tiny", *changes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    rows = csv.DictReader((tmp_path / "training" / "log.csv").read_text(encoding="utf-8").splitlines())
    losses = [float(row["total"]) for row in rows]
    assert len(losses) == steps
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
