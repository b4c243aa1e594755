"""The compiled forward of a CPU computes what torch's forward does, for every family, pattern and batch."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_eval import api
from refusion_eval.bench.batches import decode_batch, requests_of
from refusion_eval.decoders import DECODERS
from refusion_eval.engine.engine import Engine
from refusion_eval.engine.readout import ReadPlan, hidden_of, read_native, read_out
from refusion_eval.errors import DecodeError
from refusion_eval.models import native
from refusion_eval.models.cache import KVCache
from refusion_eval.models.device import cpu_threads
from refusion_eval.models.native import MAX_QUERIES, MAX_READ, obstacle
from refusion_eval.models.transformer import Transformer
from refusion_eval.models.weights import Weights
from refusion_eval.paths import embedded_path
from refusion_eval.types import Forward, Read, Segment, bidirectional, block_causal, causal, groups
from tests.engine.random_model import CPU, random_transformer

if obstacle() is not None:
    pytest.skip(f"compiled forwards are impossible here: {obstacle()}", allow_module_level=True)

CAPACITY = 2 * MAX_QUERIES + 100


def as_family(model: Transformer, family: str) -> Transformer:
    """The model with the parts of another family: biases, no norm of heads, matrices with their first axis dense."""
    layers = model.weights.layers
    if family != "qwen3":
        layers = tuple(replace(layer, qk_norm=None) for layer in layers)
    if family == "qwen2":
        biases = torch.linspace(-1, 1, len(layers[0].qkv))
        layers = tuple(replace(layer, qkv_bias=biases) for layer in layers)
    weights = replace(model.weights, layers=layers)
    return Transformer(model.config, by_column(weights) if family == "llama" else weights)


def with_matrices(weights: Weights, change: Callable[[torch.Tensor], torch.Tensor]) -> Weights:
    names = ("qkv", "out", "gate_up", "down")
    changed = [{name: change(getattr(layer, name)) for name in names} for layer in weights.layers]
    layers = tuple(replace(layer, **parts) for layer, parts in zip(weights.layers, changed, strict=True))
    return replace(weights, layers=layers, head=change(weights.head), embedding=change(weights.embedding))


def by_column(weights: Weights) -> Weights:
    turned = with_matrices(weights, lambda matrix: matrix.t().contiguous().t())
    return replace(turned, embedding=weights.embedding)


def hypotheses(num_rows: int) -> tuple[Segment, ...]:
    first = num_rows // 2
    return (Segment(first), Segment(num_rows - first, sees=((0, first // 2),)))


ATTENTIONS = {
    "causal": causal,
    "bidirectional": bidirectional,
    "groups": lambda n: groups([n // 2, n - n // 2]) if n > 1 else causal(n),
    "block causal": lambda n: block_causal([n // 2, n - n // 2]) if n > 1 else causal(n),
    "hypotheses": lambda n: hypotheses(n) if n > 1 else causal(n),
}
SEQUENCES = st.lists(
    st.tuples(
        st.integers(0, 90),  # committed rows
        st.one_of(st.integers(1, 20), st.sampled_from([MAX_QUERIES, MAX_QUERIES + 1, 2 * MAX_QUERIES + 7])),
        st.sampled_from(sorted(ATTENTIONS)),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(
    family=st.sampled_from(["qwen3", "qwen2", "llama"]),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    sequences=SEQUENCES,
    suppressed=st.sampled_from([(), (3,)]),
    seed=st.integers(0, 5),
    kept=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    num_threads=st.sampled_from([1, 2]),
)
def test_a_compiled_forward_is_that_of_torch(family, num_kv_heads, sequences, suppressed, seed, kept, num_threads):
    model = as_family(random_transformer(seed, num_kv_heads=num_kv_heads), family)
    compiled = model
    if kept != torch.float32:
        compiled = Transformer(model.config, with_matrices(model.weights, lambda matrix: matrix.to(kept).contiguous()))
        model = Transformer(model.config, with_matrices(compiled.weights, torch.Tensor.float))
    vocab_size, head_dim = model.config.vocab_size, model.config.head_dim
    chooser = np.random.default_rng(seed)
    caches = [KVCache(model.config, len(sequences), CAPACITY, torch.float32, CPU) for _ in range(2)]
    forwards, reads, first = [], [], 0
    for index, (length, num_rows, attention) in enumerate(sequences):
        for cache in caches:
            cache.lengths[index] = length
            keys = np.sin(np.arange(length * float(head_dim))).reshape(length, head_dim)
            cache.keys[:, index, :, :length] = torch.from_numpy(keys)
            cache.values[:, index, :, :length] = cache.keys[:, index, :, :length].cos()
        tokens = chooser.integers(0, vocab_size, num_rows).tolist()
        read = Read(rows=range(0, num_rows, 2), given=tokens[::2], suppress=suppressed)
        positions = range(length, length + num_rows)
        forwards.append(Forward(tokens, positions, ATTENTIONS[attention](num_rows), (read,)))
        reads.append((read, first))
        first += num_rows
    plan = ReadPlan(reads)
    with torch.inference_mode(), cpu_threads(num_threads):
        expected_TC, found_TC = (
            hidden_of(computed, cache, forwards, backend)
            for computed, cache, backend in zip((model, compiled), caches, ("sdpa", "native"), strict=True)
        )
        allowed = 1e-5 * max(10.0, expected_TC.abs().max().item())
        torch.testing.assert_close(found_TC, expected_TC, rtol=1e-4, atol=allowed)
        torch.testing.assert_close(caches[1].keys, caches[0].keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(caches[1].values, caches[0].values, rtol=1e-4, atol=1e-4)
        expected = read_out(plan, expected_TC, model.logits, vocab_size)
        found = read_native(plan, expected_TC, compiled)
        torch.testing.assert_close(compiled.logits(expected_TC), model.logits(expected_TC), rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_allclose(ours.probs, theirs.probs, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(ours.given, theirs.given, rtol=1e-5, atol=1e-7)


def test_reads_of_many_rows_are_those_of_each_row():
    model = random_transformer()
    rows = [row % 5 for row in range(2 * MAX_READ + 3)]
    plan = ReadPlan([(Read(rows=rows), 0)])
    hidden_TC = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    (many,), (few,) = (read_native(each, hidden_TC, model) for each in (plan, ReadPlan([(Read(rows=range(5)), 0)])))
    np.testing.assert_array_equal(many.tokens, few.tokens[rows])
    np.testing.assert_allclose(many.probs, few.probs[rows], rtol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_the_request(value):
    model = random_transformer()
    model.weights.head[7, 3] = value
    decoder = DECODERS["autoregressive"]
    with pytest.raises(DecodeError, match="logits are not finite"):
        Engine(model, "native").run(decoder.decode, [1, 2, 3], decoder.Settings(eos_ids=(0,), gen_length=4))


@pytest.mark.slow
@pytest.mark.process
def test_compiling_is_announced_and_happens_once_on_a_processor(tmp_path):
    """The compiler is told of a processor that has hardly any instructions, and has no code for it yet."""
    script = (
        "import logging; logging.basicConfig(level=logging.INFO); from refusion_eval import api; "
        "model = api.load_model('embedded', device='cpu'); "
        "print(model.attention, api.generate(model, [1, 2, 3], decoder='refusion', gen_length=16).tokens)"
    )
    processor = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    model = api.load_model("embedded", device="cpu", attention="sdpa")
    tokens = api.generate(model, [1, 2, 3], decoder="refusion", gen_length=16).tokens
    for times_said in (1, 0):
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=os.environ | processor, capture_output=True, text=True)
        assert done.stdout.strip() == f"native {tokens}", done.stderr
        assert done.stderr.count("compiling the forward for this processor") == times_said


@pytest.mark.parametrize("name", ["refusion", "autoregressive", "llada", "bd3lm"])
def test_compiled_forwards_give_the_tokens_of_torch_with_code_for_one_list_of_types(name):
    """Every decoder of the embedded checkpoints, alone and in a batch; some read more than is compiled."""
    place = str(embedded_path(name))
    stock = api.load_model(place, dtype="float32", device="cpu", attention="sdpa")
    whole, halves = (api.load_model(place, dtype=dtype, device="cpu") for dtype in ("auto", "bfloat16"))
    assert halves.transformer.weights.head.dtype == torch.bfloat16
    prompts = [stock.tokenizer.encode(text) for text in ("Tom has 3 apples and buys 4.", "def add(a, b):", "A")]
    for decoder in stock.decoders:
        resolved = api.decoder_settings(stock, decoder, gen_length=32)
        expected, *others = (
            [model.engine.run(DECODERS[decoder].decode, prompt, resolved).tokens for prompt in prompts]
            for model in (stock, whole, halves)
        )
        assert others == [expected, expected], decoder
        for model in (whole, halves):
            assert decode_batch(model.engine, requests_of(decoder, resolved, prompts), 3) == expected, decoder
    assert [len(function.signatures) for function in (native._hidden, native._read)] == [1, 1]
