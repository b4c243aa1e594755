"""The forward on a CUDA device against the CPU; skipped where there is none."""

from dataclasses import fields

import pytest
import torch

from refusion_eval.decoders import autoregressive, refusion
from refusion_eval.decoders.autoregressive import AutoregressiveSettings
from refusion_eval.decoders.refusion import RefusionSettings
from refusion_eval.engine.engine import Engine, Request
from refusion_eval.engine.recorded import recorder
from refusion_eval.models.attention import Backend, attend_over, flash_attn_func
from refusion_eval.models.cache import KVCache
from refusion_eval.models.device import choose_device
from refusion_eval.models.transformer import Transformer
from refusion_eval.models.weights import LayerWeights, Weights
from refusion_eval.types import causal
from tests.engine.random_model import VOCAB_SIZE, random_transformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def moved(model: Transformer, device: str, dtype: torch.dtype) -> Transformer:
    def to(part: LayerWeights | Weights, names: list[str]) -> dict[str, torch.Tensor]:
        weights = {name: getattr(part, name) for name in names}
        return {name: weight.to(device, dtype) for name, weight in weights.items() if weight is not None}

    of_layer = [field.name for field in fields(LayerWeights)]
    layers = tuple(LayerWeights(**to(layer, of_layer)) for layer in model.weights.layers)
    return Transformer(model.config, Weights(layers=layers, **to(model.weights, ["embedding", "final_norm", "head"])))


def logits(model: Transformer, backend: Backend) -> torch.Tensor:
    cache = KVCache(model.config, 1, len(PROMPT), model.dtype, model.device)
    cache.stage(0, len(PROMPT))
    positions = torch.arange(len(PROMPT), device=model.device)
    attend = attend_over(cache, [causal(len(PROMPT))], backend)
    hidden = model.hidden(torch.tensor(PROMPT, device=model.device), positions, len(PROMPT) - 1, attend)
    return model.logits(hidden).float().cpu()


def test_float32_logits_are_those_of_the_cpu():
    model = random_transformer()
    assert torch.allclose(logits(moved(model, "cuda", torch.float32), "sdpa"), logits(model, "sdpa"), atol=1e-3)


def test_float32_tokens_are_those_of_the_cpu_fused_or_not():
    model = random_transformer()
    here, there = Engine(model, "sdpa"), Engine(moved(model, "cuda", torch.float32), "sdpa")
    greedy = AutoregressiveSettings(gen_length=12)
    decode = autoregressive.decode
    assert there.run(decode, PROMPT, greedy).tokens == here.run(decode, PROMPT, greedy).tokens
    for fuse in (False, True):
        settings = RefusionSettings(gen_length=16, slot_size=4, block_size=8, mask_id=VOCAB_SIZE - 1, fuse=fuse)
        mine = here.run(refusion.decode, PROMPT, settings)
        assert there.run(refusion.decode, PROMPT, settings).tokens == mine.tokens


def test_recorded_graphs_give_the_tokens_of_free_forwards():
    model = moved(random_transformer(), "cuda", torch.float32)
    free, graphed = Engine(model, "sdpa"), Engine(model, "sdpa", record=recorder(model.device))
    for prompt in (PROMPT, PROMPT * 100, PROMPT):
        for fuse in (False, True):
            settings = RefusionSettings(
                gen_length=32, slot_size=8, block_size=16, mask_id=VOCAB_SIZE - 1, tau_token=0.0, fuse=fuse
            )
            mine = graphed.run(refusion.decode, prompt, settings)
            assert mine.tokens == free.run(refusion.decode, prompt, settings).tokens


def test_no_kernel_of_a_decoding_is_of_cudnn():
    """In bfloat16 on compute capability 9 and above, where torch may prefer it."""
    choose_device("cuda")
    model = moved(random_transformer(), "cuda", torch.bfloat16)
    settings = RefusionSettings(gen_length=32, slot_size=8, block_size=16, mask_id=VOCAB_SIZE - 1, tau_token=0.0)
    for record in (None, recorder(model.device)):
        engine = Engine(model, "sdpa", record=record)
        engine.run(refusion.decode, PROMPT, settings)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            engine.run(refusion.decode, PROMPT[:5], settings)
        names = [event.key for event in profiled.key_averages()]
        assert names
        assert not [name for name in names if "cudnn" in name.lower()]


def test_batches_of_recorded_graphs_give_the_tokens_of_free_forwards():
    model = moved(random_transformer(), "cuda", torch.float32)
    free, graphed = Engine(model, "sdpa"), Engine(model, "sdpa", record=recorder(model.device))
    settings = RefusionSettings(gen_length=32, slot_size=8, block_size=16, mask_id=VOCAB_SIZE - 1, tau_token=0.0)
    requests = [Request(refusion.decode, PROMPT[:length] * 60, settings) for length in (3, 8, 5, 6)]
    together, expected = (dict(engine.run_many(requests, 3)) for engine in (graphed, free))
    assert [together[index].tokens for index in range(4)] == [expected[index].tokens for index in range(4)]


@pytest.mark.skipif(flash_attn_func is None, reason="flash-attn is not installed")
def test_flash_attention_agrees_with_sdpa_in_bfloat16():
    model = moved(random_transformer(), "cuda", torch.bfloat16)
    assert torch.allclose(logits(model, "flash"), logits(model, "sdpa"), atol=0.1, rtol=0.05)
