"""The plain baseline gives the engine's tokens in as many forwards (`refusion_eval.bench.plain`)."""

import pytest
import torch
from transformers import Qwen3ForCausalLM

from refusion_eval import api
from refusion_eval.bench.plain import PlainEngine
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import DecodeError
from tests.models import tiny

SMALL = {"gen_length": 16, "slot_size": 4, "block_size": 8, "tau_slot": 0.1}
PROMPTS = ([1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3])


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    tiny.save_checkpoint(directory)
    stock = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return api.load_model(str(directory), dtype="float32", device="cpu"), PlainEngine(stock)


@pytest.mark.parametrize("tau_token", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_refusion_tokens_and_forwards_are_the_engines(both, prompt, tau_token):
    model, plain = both
    settings = api.decoder_settings(model, "refusion", **SMALL, tau_token=tau_token, fuse=False)
    expected = model.engine.run(DECODERS["refusion"].decode, prompt, settings)
    found = plain.run(DECODERS["refusion"].decode, prompt, settings)
    assert (found.tokens, found.num_forwards, found.stop) == (expected.tokens, expected.num_forwards, expected.stop)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_autoregressive_tokens_are_the_engines(both, prompt):
    model, plain = both
    settings = api.decoder_settings(model, "autoregressive", gen_length=12)
    expected = model.engine.run(DECODERS["autoregressive"].decode, prompt, settings)
    assert plain.run(DECODERS["autoregressive"].decode, prompt, settings).tokens == expected.tokens


def test_fused_forwards_are_refused(both):
    model, plain = both
    settings = api.decoder_settings(model, "refusion", **SMALL, tau_token=0.0, fuse=True, row_cost=0.0)
    with pytest.raises(DecodeError, match="fuse=False"):
        plain.run(DECODERS["refusion"].decode, PROMPTS[0], settings)
