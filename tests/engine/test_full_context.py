"""backend=transformers: architectures that this project's transformer does not compute, under its decoders."""

import json
import logging
import shutil

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

import refusion_eval
from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.evaluation.loop import evaluate
from refusion_eval.paths import embedded_path
from refusion_eval.results.measured import run_measurements
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.store.records import NO_CACHE
from refusion_eval.types import ForwardDone
from tests.models import tiny

VOCAB_SIZE, MASK_ID, EOS_ID = 1925, 1924, 1922  # those of the embedded models, whose tokenizer is used
PROMPT = [5, 17, 900, 3, 41, 41, 7]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=VOCAB_SIZE, **SIZES)),
    "bert": lambda: BertForMaskedLM(BertConfig(vocab_size=VOCAB_SIZE, **SIZES)),
    "mamba": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, state_size=4)
    ),
}


def save(kind, folder, **entries):
    """Saves a random checkpoint with the tokenizer of the embedded models, and returns its module."""
    torch.manual_seed(0)
    module = MODELS[kind]().eval()
    with torch.no_grad():
        for weight in module.parameters():  # far apart, so that no two tokens are equally probable
            weight.mul_(4)
    module.generation_config = GenerationConfig()
    module.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": EOS_ID, **entries}))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(embedded_path("autoregressive") / file, folder)
    return module


def load(folder, **options):
    return refusion_eval.load_model(str(folder), device="cpu", backend="transformers", **options)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "mamba"])
def test_greedy_tokens_are_those_of_generate(kind, tmp_path):
    module = save(kind, tmp_path)
    wanted = module.generate(
        torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=EOS_ID
    )
    model = load(tmp_path)
    out = refusion_eval.generate(model, PROMPT, decoder="autoregressive", gen_length=12)
    assert list(out.tokens) == wanted[0, len(PROMPT) :].tolist()
    assert len(set(out.tokens)) > 3
    assert out.num_forwards == len(out.tokens)
    prompts = [PROMPT, PROMPT[:3], PROMPT[::-1]]
    alone = [refusion_eval.generate(model, prompt, decoder="autoregressive", gen_length=6) for prompt in prompts]
    many = refusion_eval.generate_many(model, prompts, decoder="autoregressive", gen_length=6, batch_size=2)
    assert [out.tokens for out in many] == [out.tokens for out in alone]


def test_a_masked_model_fills_masks_as_its_own_class_says(tmp_path):
    module = save("bert", tmp_path, mask_token_id=MASK_ID)
    model = load(tmp_path)
    assert model.decoders[0] == "llada"
    out = refusion_eval.generate(model, PROMPT, decoder="llada", gen_length=6, block_length=6, steps=6, eos_ids=())
    text = torch.tensor([[*PROMPT, *[MASK_ID] * 6]])
    with torch.inference_mode():
        for _ in range(6):
            logits = module(text).logits[0]
            logits[:, MASK_ID] = -torch.inf if out.num_forwards == 0 else logits[:, MASK_ID]
            probabilities, tokens = logits.softmax(-1).max(-1)
            probabilities[text[0] != MASK_ID] = -1
            best = int(probabilities.argmax())
            text[0, best] = tokens[best]
    assert list(out.tokens) == text[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("settings", [{"fuse": False}, {"fuse": True, "free_rows": 64}])
def test_patterns_give_the_tokens_of_the_cache(settings, tmp_path):
    tiny.save_checkpoint(tmp_path, family="qwen3")
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"mask_token_id": tiny.MASK_ID, "eos_token_id": tiny.EOS_ID})
    )
    own = refusion_eval.load_model(str(tmp_path), device="cpu", dtype="float32")
    options = {"decoder": "refusion", "gen_length": 32, "slot_size": 4, "block_size": 16, "tau_slot": 0.02, **settings}
    for prompt in ([3, 5, 9], [7, 7, 1, 30, 22]):
        ours, theirs = (refusion_eval.generate(model, prompt, **options) for model in (own, load(tmp_path)))
        assert theirs.tokens == ours.tokens
        assert list(theirs.trace.of(ForwardDone)) == list(ours.trace.of(ForwardDone))


def test_an_architecture_without_patterns_is_refused_with_what_suits_it(tmp_path):
    save("mamba", tmp_path, mask_token_id=MASK_ID)
    with pytest.raises(ConfigError, match=r"mamba of transformers takes no .* it runs decoder=autoregressive only"):
        refusion_eval.generate(load(tmp_path), PROMPT, decoder="llada", gen_length=16, block_length=8)


def test_a_decoder_with_an_approximate_cache_is_refused(tmp_path):
    save("bert", tmp_path, mask_token_id=MASK_ID)
    with pytest.raises(ConfigError, match="backend=transformers take a decoder without such a cache"):
        refusion_eval.generate(load(tmp_path), PROMPT, decoder="fast_dllm_llada", gen_length=16, block_length=8)


def test_a_run_says_what_it_costs_and_is_recorded_as_what_it_is(tmp_path, caplog):
    save("gpt2", tmp_path / "model")
    text = {"pretrained": str(tmp_path / "model"), "decoder": "autoregressive", "backend": "transformers"}
    args = parse_model_args({**text, "gen_length": 4, "run_dir": str(tmp_path / "run")})
    with caplog.at_level(logging.WARNING):
        assert evaluate(args, ["mini_gsm8k"], limit=1).is_complete
    assert "computes the whole text in every forward" in caplog.text
    assert evaluate(args, ["mini_gsm8k"], limit=2).is_complete
    figures = {figure.metric: figure for figure in run_measurements([tmp_path / "run"])}
    assert figures["tpf"].value == 1
    assert figures["tps"].attention == "transformers"
    assert NO_CACHE in figures["tps"].slowed_by.split("|")
    assert "mbu" not in figures


def test_what_transformers_does_not_have_is_refused(tmp_path):
    save("gpt2", tmp_path)
    with pytest.raises(CheckpointError, match=r"model_type is 'gpt2'.*with backend=transformers"):
        refusion_eval.load_model(str(tmp_path), device="cpu")
    with pytest.raises(ConfigError, match="attention=flash is for backend=own only"):
        load(tmp_path, attention="flash")
    with pytest.raises(ConfigError, match="backend='jax'; choose one of own, transformers"):
        refusion_eval.load_model(str(tmp_path), backend="jax")
    with pytest.raises(ConfigError, match="log-likelihoods are not computed with backend=transformers"):
        refusion_eval.api.score_tokens(load(tmp_path), [1], [2])
