"""The compiled forward of a CPU computes what torch's forward does, for every family, pattern, batch and storage."""

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
from refusion_eval.bench.bench import decode_batch
from refusion_eval.decoders import DECODERS
from refusion_eval.engine.engine import Engine
from refusion_eval.engine.readout import PackedRead, ReadPlan, hidden_of, read_native, read_out
from refusion_eval.errors import DecodeError
from refusion_eval.models import tiles
from refusion_eval.models.cache import KVCache
from refusion_eval.models.native import MAX_QUERIES, MAX_READ, obstacle
from refusion_eval.models.transformer import Transformer, Weights, linear
from refusion_eval.paths import embedded_path
from refusion_eval.types import Forward, Read, Segment, bidirectional, block_causal, causal, groups
from tests.engine.random_model import CPU, random_transformer

if obstacle() is not None:
    pytest.skip(f"compiled forwards are impossible here: {obstacle()}", allow_module_level=True)

CAPACITY = 2 * MAX_QUERIES + 100
WIDE = (64, 16, 96, 83)  # sizes of which every matrix can stay in bfloat16
needs_unit = pytest.mark.skipif(not tiles.HAS_UNIT, reason="this processor has no unit for matrices in bfloat16 (AMX)")
STORAGES = ["float32", "bfloat16"] if tiles.HAS_UNIT else ["float32"]


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


def in_storage(model: Transformer, storage: str) -> tuple[Transformer, Transformer]:
    """The model in float32 for torch's forward, and with the same numbers in a storage for the compiled one."""
    if storage == "float32":
        return model, model
    kept, copied = (
        Transformer(model.config, with_matrices(model.weights, change))
        for change in (lambda matrix: matrix.bfloat16().contiguous(), lambda matrix: matrix.bfloat16().float())
    )
    return copied, kept


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
    storage=st.sampled_from(STORAGES),
    family=st.sampled_from(["qwen3", "qwen2", "llama"]),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    sequences=SEQUENCES,
    suppressed=st.sampled_from([(), (3,)]),
    seed=st.integers(0, 5),
)
def test_a_compiled_forward_is_that_of_torch(storage, family, num_kv_heads, sequences, suppressed, seed):
    sizes = {} if storage == "float32" else {"sizes": WIDE}
    model, compiled = in_storage(
        as_family(random_transformer(seed, num_kv_heads=num_kv_heads, **sizes), family), storage
    )
    assert compiled.dtype == torch.float32
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
        reads.append(PackedRead(read, first))
        first += num_rows
    plan = ReadPlan(reads)
    with torch.inference_mode():
        expected_TC, found_TC = (
            hidden_of(each, cache, forwards, backend)
            for each, cache, backend in zip((model, compiled), caches, ("sdpa", "native"), strict=True)
        )
        allowed = 1e-5 * max(10.0, expected_TC.abs().max().item())
        torch.testing.assert_close(found_TC, expected_TC, rtol=1e-4, atol=allowed)
        torch.testing.assert_close(caches[1].keys, caches[0].keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(caches[1].values, caches[0].values, rtol=1e-4, atol=1e-4)
        expected = read_out(plan, expected_TC, model.logits, vocab_size)
        found = read_native(plan, expected_TC, compiled)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_allclose(ours.probs, theirs.probs, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(ours.given, theirs.given, rtol=1e-5, atol=1e-7)


def test_reads_of_many_rows_are_those_of_each_row():
    model = random_transformer()
    rows = [row % 5 for row in range(2 * MAX_READ + 3)]
    plan = ReadPlan([PackedRead(Read(rows=rows), 0)])
    hidden_TC = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    (many,), (few,) = (
        read_native(each, hidden_TC, model) for each in (plan, ReadPlan([PackedRead(Read(rows=range(5)), 0)]))
    )
    np.testing.assert_array_equal(many.tokens, few.tokens[rows])
    np.testing.assert_allclose(many.probs, few.probs[rows], rtol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_the_request(value):
    model = random_transformer()
    model.weights.head[7, 3] = value
    decoder = DECODERS["autoregressive"]
    with pytest.raises(DecodeError, match="logits are not finite"):
        Engine(model, "native").run(decoder.decode, [1, 2, 3], decoder.Settings(eos_ids=(0,), gen_length=4))


@needs_unit
@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 40),
    num_columns=st.integers(tiles.COLUMNS, 3 * tiles.COLUMNS + 5),
    inner=st.integers(1, 6).map(lambda number: number * tiles.ENTRIES),
    scale=st.sampled_from([1e-12, 1.0, 1e12]),
    biased=st.booleans(),
    seed=st.integers(0, 5),
)
def test_products_with_bfloat16_matrices_have_the_precision_of_float32(
    num_rows, num_columns, inner, scale, biased, seed
):
    generator = torch.Generator().manual_seed(seed)
    left_TI = torch.randn(num_rows, inner, generator=generator) * scale
    matrix_OI = torch.randn(num_columns, inner, generator=generator).bfloat16()
    bias_O = torch.randn(num_columns, generator=generator) * scale if biased else None
    exact_TO = left_TI.double() @ matrix_OI.double().t() + (0 if bias_O is None else bias_O.double())
    magnitudes_TO = left_TI.double().abs() @ matrix_OI.double().abs().t()
    error_TO = (linear(left_TI, matrix_OI, bias_O).double() - exact_TO).abs()
    assert bool((error_TO <= 1e-6 * (magnitudes_TO + scale)).all())


@pytest.mark.slow
@pytest.mark.process
def test_a_processor_without_the_unit_computes_with_a_float32_copy(tmp_path):
    """The compiler is told of a processor that has hardly any instructions."""
    script = (
        "import torch; torch.set_num_threads(1); "
        "from refusion_eval import api; from refusion_eval.models import tiles; "
        "model = api.load_model('embedded', device='cpu'); "
        "print(model.attention, model.weight_dtype, tiles.HAS_UNIT, "
        "api.generate(model, [1, 2, 3], decoder='refusion', gen_length=16).tokens)"
    )
    processor = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | processor, capture_output=True, text=True)
    model = api.load_model("embedded", device="cpu", attention="sdpa")
    tokens = api.generate(model, [1, 2, 3], decoder="refusion", gen_length=16).tokens
    assert done.stdout.strip() == f"native torch.float32 False {tokens}", done.stderr


@needs_unit
@pytest.mark.parametrize("name", ["refusion", "autoregressive", "llada", "bd3lm"])
def test_matrices_kept_in_bfloat16_give_the_tokens_of_a_float32_copy(name):
    """Every decoder of the embedded checkpoints, alone and in a batch; some read more than is compiled."""
    copied, kept = (
        api.load_model(str(embedded_path(name)), dtype="float32", device="cpu", attention=attention)
        for attention in ("sdpa", "native")
    )
    assert [each.transformer.weights.head.dtype for each in (copied, kept)] == [torch.float32, torch.bfloat16]
    assert [each.weight_dtype for each in (copied, kept)] == [torch.float32, torch.bfloat16]
    prompts = [copied.tokenizer.encode(text) for text in ("Tom has 3 apples and buys 4.", "def add(a, b):", "A")]
    for decoder in kept.decoders:
        resolved = api.decoder_settings(kept, decoder, gen_length=32)
        expected, alone = (
            [model.engine.run(DECODERS[decoder].decode, prompt, resolved).tokens for prompt in prompts]
            for model in (copied, kept)
        )
        assert alone == expected, decoder
        assert decode_batch(kept, decoder, resolved, prompts, 3) == expected, decoder
