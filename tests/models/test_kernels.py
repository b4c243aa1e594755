"""The Triton kernels against the plain functions that define them (`refusion_eval.models.kernels`).

Where there is a CUDA device the kernels run on it, else under Triton's interpreter.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from refusion_eval.models import experts, fused
from refusion_eval.models.attention import num_words, pattern_bits
from refusion_eval.models.transformer import RotaryTable
from refusion_eval.types import Segment, bidirectional, block_causal, causal, groups

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
kernels = pytest.importorskip("refusion_eval.models.kernels", reason="Triton is not installed")
attention_kernels = pytest.importorskip("refusion_eval.models.attention_kernels", reason="Triton is not installed")

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
dtypes = st.sampled_from(DTYPES)
# The interpreter multiplies the bits of bfloat16 matrices as integers.
SHORT = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
product_dtypes = st.sampled_from([torch.float32, SHORT])
seeds = st.integers(0, 1000)
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # the interpreter is too slow to look for a smaller example


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def plain(operation: object, *arguments: object) -> object:
    """The definition of an operation in torch, computed on the CPU."""
    on_cpu = [argument.cpu() if isinstance(argument, torch.Tensor) else argument for argument in arguments]
    return operation._init_fn(*on_cpu)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.cpu().float(), expected.float(), atol=tolerance, rtol=tolerance)


@settings(max_examples=10, phases=PHASES)
@given(st.integers(1, 5), st.integers(1, 300), dtypes, seeds)
def test_sum_and_norm(num_rows, width, dtype, seed):
    x, added = random(seed, 2, num_rows, width, dtype=dtype)
    weight = random(seed + 1, width, dtype=dtype)
    found = kernels.add_rms_norm(x, added, weight, EPS)
    for mine, theirs in zip(found, plain(fused.add_rms_norm, x, added, weight, EPS), strict=True):
        assert_close(mine, theirs)


@settings(max_examples=10, phases=PHASES)
@given(st.integers(1, 3), st.integers(1, 1100), dtypes, seeds)
def test_swiglu(num_rows, width, dtype, seed):
    gate_up = random(seed, num_rows, 2 * width, dtype=dtype)
    assert_close(kernels.swiglu(gate_up), plain(fused.swiglu, gate_up))


@settings(max_examples=8, phases=PHASES)
@given(
    st.integers(1, 20),
    st.integers(1, 3),
    st.integers(3, 9),
    st.integers(3, 70),
    st.integers(3, 140),
    product_dtypes,
    seeds,
)
def test_experts(num_rows, num_chosen, num_experts, inner, width, dtype, seed):
    """Rows of padding choose none; experts that no row chose are not numbers."""
    chooser = torch.Generator().manual_seed(seed)
    draws = [torch.randperm(num_experts, generator=chooser)[:num_chosen] for _ in range(num_rows)]
    ids = torch.stack(draws).to(DEVICE)
    ids[num_rows // 2] = num_experts
    x, shares = random(seed, num_rows, width, dtype=dtype), random(seed + 1, num_rows, num_chosen, dtype=dtype)
    gate_up = random(seed + 2, num_experts, 2 * inner, width, dtype=dtype) / width**0.5
    down = random(seed + 3, num_experts, width, inner, dtype=dtype) / inner**0.5
    unread = [expert for expert in range(num_experts) if expert not in ids]
    gate_up[unread] = down[unread] = float("nan")
    num_read, expected_read = torch.zeros((), dtype=torch.int64, device=DEVICE), torch.zeros((), dtype=torch.int64)
    found = kernels.mix_experts(x, ids, shares, gate_up, down, num_read)
    wide = (part.double() for part in (shares, gate_up, down))
    expected = plain(experts.mix_experts, x.double(), ids, *wide, expected_read)
    assert num_read == expected_read == num_experts - len(unread)
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("dtype", "of_shares"), [(torch.float32, torch.float32), (SHORT, SHORT), (SHORT, torch.float32)]
)
def test_experts_of_many_rows(dtype, of_shares):
    """More pairs than 16 for each expert, so that blocks of an expert have 64 of them, and several of them."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 2, (150, 1), generator=generator).to(DEVICE)
    x, gate_up, down = (
        random(1, 150, 40, dtype=dtype),
        random(2, 2, 24, 40, dtype=dtype),
        random(3, 2, 40, 12, dtype=dtype),
    )
    gate_up, shares = gate_up / 6, random(4, 150, 1, dtype=of_shares)
    num_read = torch.zeros((), dtype=torch.int64, device=DEVICE)
    found = kernels.mix_experts(x, ids, shares, gate_up, down / 4, num_read)
    wide = (part.double() for part in (shares, gate_up, down / 4))
    assert_close(found, plain(experts.mix_experts, x.double(), ids, *wide, torch.zeros((), dtype=torch.int64)))
    assert num_read == 2


def places_of(sizes, lengths, padding):
    """Where the rows of a forward belong: its sequences have these numbers of rows and of committed rows."""
    rows = [
        (sequence, length, size, number)
        for sequence, (size, length) in enumerate(zip(sizes, lengths, strict=True))
        for number in range(size)
    ]
    return torch.tensor(rows + [(-1, 0, 0, 0)] * padding).T.contiguous().to(DEVICE)


@pytest.mark.parametrize("scale", [0.0, 1e-18, 1e4])
def test_norm_and_swiglu_of_extreme_numbers(scale):
    for dtype in DTYPES:
        x, added = scale * random(0, 2, 2, 64, dtype=dtype)
        weight = random(1, 64, dtype=dtype)
        for mine, theirs in zip(
            kernels.add_rms_norm(x, added, weight, EPS), plain(fused.add_rms_norm, x, added, weight, EPS), strict=True
        ):
            assert_close(mine, theirs)
        assert_close(kernels.swiglu(torch.cat((x, added), dim=1)), plain(fused.swiglu, torch.cat((x, added), dim=1)))


@settings(max_examples=10, phases=PHASES)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(0, 2),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([4, 6, 8]),
    st.booleans(),
    dtypes,
    seeds,
)
def test_rotation_and_store(sizes, padding, num_groups, shared, head, has_norm, dtype, seed):
    num_heads, capacity, num_rows = num_groups * shared, 16, sum(sizes) + padding
    qkv = random(seed, num_rows, (num_heads + 2 * num_groups) * head, dtype=dtype)
    norm = random(seed + 1, num_heads + num_groups, head, dtype=dtype) if has_norm else None
    table = RotaryTable(head, 1e4, DEVICE)
    positions = (torch.arange(num_rows) * (seed + 1) % 1000).to(DEVICE)
    buffers = [random(seed + 2, len(sizes), num_groups, capacity, head, dtype=dtype) for _ in range(2)]
    expected_buffers = [buffer.cpu().clone() for buffer in buffers]
    places = places_of(sizes, [seed * (sequence + 1) % 11 for sequence in range(len(sizes))], padding)
    rest = (table.tables, positions, places)
    found = attention_kernels.rotate_and_store(qkv, norm, *rest, *buffers, EPS)
    assert_close(found, plain(fused.rotate_and_store, qkv, norm, *rest, *expected_buffers, EPS))
    for mine, theirs in zip(buffers, expected_buffers, strict=True):
        assert_close(mine, theirs)


@st.composite
def patterns(draw, max_size=30):
    sizes = draw(st.lists(st.integers(1, max_size), min_size=1, max_size=4))
    if draw(st.booleans()):
        return draw(st.sampled_from([causal, bidirectional]))(sum(sizes))
    return draw(st.sampled_from([groups, block_causal]))(sizes)


def check_attention(attentions, lengths, padding, num_groups, shared, dtype, seed, sharpness=1.0, counters=None):
    """Compares the kernel with its definition for a batch of sequences; rows of no sequence are not numbers."""
    queries, buffers, places, bits = batch(attentions, lengths, padding, num_groups, shared, dtype, seed)
    rest = (sharpness * queries, *buffers, places, bits)
    assert_close(attention_kernels.attend_rows(*rest, 0, counters), plain(fused.attend_rows, *rest))
    assert counters is None or not counters.any()


def batch(attentions, lengths, padding, num_groups, shared, dtype, seed, head=8, heads=0):
    """Random queries, [W, H + heads, D], keys and values, and where their rows belong."""
    sizes = [sum(segment.size for segment in attention) for attention in attentions]
    num_rows = sum(sizes) + padding
    words = num_words(num_rows)
    capacity = max(length + size for length, size in zip(lengths, sizes, strict=True)) + 5
    queries = random(seed, num_rows, num_groups * shared + heads, head, dtype=dtype)
    keys, values = random(seed + 1, 2, len(sizes), num_groups, capacity, head, dtype=dtype)
    for sequence, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        keys[sequence, :, length + size :] = values[sequence, :, length + size :] = float("nan")
    patterns = [pattern_bits(attention, words) for attention in attentions]
    bits = np.concatenate([*patterns, np.zeros((padding, words), np.int64)])
    return queries, (keys, values), places_of(sizes, lengths, padding), torch.from_numpy(bits).to(DEVICE)


def zeros():
    return torch.zeros(fused.NUM_COUNTERS, dtype=torch.int32, device=DEVICE)


def test_attention_of_places_with_gaps():
    """Of five places of a buffer the first, third and last have rows; the others hold no numbers."""
    sizes, lengths, attentions = [3, 20, 1], [40, 7, 0], [causal(3), groups([15, 5]), causal(1)]
    places = places_of(sizes, lengths, 2)
    places[0] *= 1 + (places[0] > 0).long()
    queries = random(0, 26, 4, 8)
    keys, values = random(1, 2, 5, 2, 60, 8)
    for buffer in (keys, values):
        buffer[[1, 3]] = float("nan")
    bits = np.concatenate([*(pattern_bits(one, 1) for one in attentions), np.zeros((2, 1), np.int64)])
    rest = (queries, keys, values, places, torch.from_numpy(bits).to(DEVICE))
    assert places[0].unique().tolist() == [-1, 0, 2, 4]
    assert_close(attention_kernels.attend_rows(*rest), plain(fused.attend_rows, *rest))


@settings(max_examples=6, phases=PHASES)
@given(patterns(), st.integers(0, 7), st.integers(0, 150), st.integers(1, 2), st.integers(1, 4), product_dtypes, seeds)
def test_attention(attention, padding, length, num_groups, shared, dtype, seed):
    check_attention([attention], [length], padding, num_groups, shared, dtype, seed)


@settings(max_examples=10, phases=PHASES)
@given(
    st.lists(st.tuples(patterns(max_size=8), st.integers(0, 90)), min_size=2, max_size=6),
    st.integers(0, 7),
    st.integers(1, 4),
    product_dtypes,
    seeds,
)
def test_attention_of_a_batch(sequences, padding, shared, dtype, seed):
    attentions, lengths = zip(*sequences, strict=True)
    check_attention(attentions, lengths, padding, 1, shared, dtype, seed)


def test_many_sequences_of_one_row_share_a_block():
    check_attention([causal(1)] * 9, range(9), 0, 1, 2, torch.float32, 0)


@pytest.mark.parametrize("dtype", [torch.float32, SHORT])
def test_attention_whose_softmax_is_all_on_one_key(dtype):
    check_attention([causal(3), groups([2, 2])], [70, 0], 1, 1, 4, dtype, 3, sharpness=300.0)


def test_a_pattern_of_several_words_that_sees_nothing_of_some_steps():
    """Its last rows see the first row and themselves, with blocks of keys between that they do not see."""
    attention = (Segment(66), Segment(1, sees=((0, 1),)), Segment(1, sees=((0, 1), (63, 65))))
    check_attention([attention, causal(1)], [65, 0], 3, 1, 1, torch.float32, 1)


def test_a_forward_of_padding_alone_writes_nothing():
    queries, buffers = random(0, 3, 4, 8), random(1, 2, 1, 2, 16, 8)
    places, before = places_of([], [], 3), buffers.clone()
    table, positions = RotaryTable(8, 1e4, DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    attention_kernels.rotate_and_store(random(2, 3, 8 * 8), None, table.tables, positions, places, *buffers, EPS)
    assert torch.equal(buffers, before)
    attended = attention_kernels.attend_rows(
        queries, *buffers, places, torch.zeros(3, 1, dtype=torch.int64, device=DEVICE)
    )
    assert attended.isfinite().all()


SPLIT_ATTENTION = [
    ([causal(1)], [300], 0, 1, 4),  # one row
    ([causal(3)], [290], 2, 3, 2),  # three groups, padding
    ([groups([20, 20])], [230], 0, 1, 4),
    ([causal(5), groups([3, 4]), causal(1)], [310, 150, 0], 1, 1, 7),  # a batch
]


@pytest.fixture
def short_steps(monkeypatch):
    """Steps of few keys, so that each program has several of them for a context that the interpreter can compute."""
    monkeypatch.setattr(attention_kernels, "KEYS_A_STEP", {2: 16, 4: 16})
    monkeypatch.setattr(attention_kernels, "MAX_SPLITS", 4)


@pytest.mark.parametrize("dtype", [torch.float32, SHORT])
@pytest.mark.parametrize("case", SPLIT_ATTENTION)
@pytest.mark.parametrize("joins", [False, True])
def test_splits_of_several_steps(short_steps, joins, case, dtype):
    check_attention(*case, dtype, 2, counters=zeros() if joins else None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        ([causal(1)], [1200], 0, 1, 4),
        ([causal(1)], [2500], 0, 1, 4),
        ([causal(2)], [1100], 0, 3, 2),
        ([causal(40)], [900], 0, 1, 4),
        ([causal(4), groups([3, 3])], [1500, 700], 1, 1, 7),
    ],
)
def test_long_contexts(case):
    """Every split has several steps of the size that a GPU takes."""
    for dtype in (torch.float32, SHORT):
        check_attention(*case, dtype, 4)
        check_attention(*case, dtype, 4, counters=zeros())


def test_the_counters_of_one_kernel_serve_the_next(short_steps):
    counters = zeros()
    for seed in range(3):
        check_attention(*SPLIT_ATTENTION[1], torch.float32, seed, counters=counters)


@pytest.mark.parametrize("joins", [False, True])
def test_splits_without_keys_store_no_part_and_none_is_read(monkeypatch, joins):
    allocated, new_empty = [], torch.Tensor.new_empty

    def poisoned(self, *sizes, **kwargs):
        made = new_empty(self, *sizes, **kwargs)
        if made.is_floating_point():
            allocated.append(made.fill_(float("nan")))
        return made

    queries, buffers, places, bits = batch([causal(2)], [70], 1, 1, 4, torch.float32, 0)
    expected = plain(fused.attend_rows, queries, *buffers, places, bits)
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    found = attention_kernels.attend_rows(queries, *buffers, places, bits, 0, zeros() if joins else None)
    assert_close(found, expected)
    _, parts, log_sums, *_of_the_interpreter = allocated
    is_empty = log_sums == float("-inf")
    assert is_empty.any()
    assert torch.equal(parts.isnan().all(-1), is_empty)


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("case", [*SPLIT_ATTENTION, ([causal(40)] * 3, [0, 7, 50], 5, 2, 2)])
def test_attention_that_rotates(short_steps, case, has_norm, joins):
    """Its keys and values are stored once, and those of padding not at all."""
    *_, num_groups, shared = case
    num_heads = num_groups * shared
    heads, buffers, places, bits = batch(*case, torch.float32, 5, heads=2 * num_groups)
    buffers = [buffer.nan_to_num(7.0) for buffer in buffers]
    qkv = heads.flatten(1)
    norm = random(6, num_heads + num_groups, 8) if has_norm else None
    positions = (torch.arange(len(qkv)) * 37 % 1000).to(DEVICE)
    rest = (norm, RotaryTable(8, 1e4, DEVICE).tables, positions, places)
    expected_buffers = [buffer.cpu().clone() for buffer in buffers]
    counters = zeros() if joins else None
    found = attention_kernels.rotate_and_attend(qkv, *rest, *buffers, bits, EPS, 0, counters)
    assert_close(found, plain(fused.rotate_and_attend, qkv, *rest, *expected_buffers, bits, EPS))
    for mine, theirs in zip(buffers, expected_buffers, strict=True):
        assert_close(mine, theirs)


@pytest.mark.parametrize("case", SPLIT_ATTENTION[:2])
def test_heads_of_256_entries(short_steps, case):
    queries, buffers, places, bits = batch(*case, torch.float32, 5, head=256)
    found = attention_kernels.attend_rows(queries, *buffers, places, bits)
    assert_close(found, plain(fused.attend_rows, queries, *buffers, places, bits))


@pytest.mark.parametrize("length", [0, 63, 64, 65, 200])
@pytest.mark.parametrize("num_rows", [1, 17])
def test_attention_at_the_edges_of_its_blocks(length, num_rows):
    check_attention([causal(num_rows)], [length], 0, 1, 4, torch.float32, 0)


@settings(max_examples=12, phases=PHASES)
@given(st.integers(1, 4), st.integers(5, 300), st.sampled_from([0, 1, 128]), st.integers(1, 6), dtypes, seeds)
def test_readout(num_rows, vocab_size, padding, num_reads, dtype, seed):
    """Rows may have padding after the vocabulary, which would win if it counted."""
    generator = np.random.default_rng(seed)
    logits = (2 * random(seed, num_rows, vocab_size + padding)).round().to(dtype)  # with many ties
    logits[:, vocab_size:] = 1000
    logits = logits[:, :vocab_size]
    rows = torch.from_numpy(generator.integers(0, num_rows, num_reads)).to(DEVICE)
    chosen = torch.from_numpy(generator.integers(0, vocab_size, num_reads)).to(DEVICE)
    suppressed = torch.from_numpy(generator.integers(-1, vocab_size, num_reads)).to(DEVICE)
    found, expected = torch.empty(3, num_reads, device=DEVICE), torch.empty(3, num_reads)
    kernels.read_rows(logits, rows, chosen, suppressed, found)
    plain(fused.read_rows, logits, rows, chosen, suppressed, expected)
    (tokens, *probs), (expected_tokens, *expected_probs) = found, expected
    assert torch.equal(tokens.cpu(), expected_tokens)
    for mine, theirs in zip(probs, expected_probs, strict=True):
        assert_close(mine, theirs)


@pytest.mark.parametrize("vocab_size", [1, 16, 511, 513, 151671])
@pytest.mark.parametrize("kind", ["equal", "two maxima", "certain", "minus infinity"])
def test_readout_of_logits_that_are_hard_to_reduce(vocab_size, kind):
    """With maxima in the first and last share of the vocabulary, of which the first but one may not be chosen."""
    logits = torch.zeros(2, vocab_size, device=DEVICE)
    if kind != "equal":
        logits += -1e4 if kind == "certain" else float("-inf") if kind == "minus infinity" else -3.0
        logits[:, [0, vocab_size // 2, vocab_size - 1]] = 2.0
    rows, ids = (torch.tensor(numbers, device=DEVICE) for numbers in ([1, 0, 1], [0, vocab_size - 1, vocab_size // 2]))
    suppressed = torch.tensor(
        [0 if vocab_size > 1 else -1, -1, vocab_size - 1 if vocab_size > 1 else -1], device=DEVICE
    )
    found, expected = torch.empty(3, 3, device=DEVICE), torch.empty(3, 3)
    kernels.read_rows(logits, rows, ids, suppressed, found)
    plain(fused.read_rows, logits, rows, ids, suppressed, expected)
    torch.testing.assert_close(found.cpu(), expected, atol=2e-5, rtol=2e-5)


def test_readout_of_logits_that_are_not_finite_is_not_finite():
    logits = torch.zeros(1, 40, device=DEVICE)
    logits[0, 3] = float("nan")
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    found = torch.empty(3, 1, device=DEVICE)
    kernels.read_rows(logits, zero, zero, zero - 1, found)
    assert found[1].isnan()


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90", "100", "86", "89", "120"])
def test_every_kernel_compiles_for_the_gpus_that_it_is_for_and_spills_little(capability):
    """A100, H100 and B200, and attention for RTX 30, 40 and 50; in a process of its own, which interprets nothing."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), capability]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {"attend_kernel"} <= {line.split()[1] for line in lines}
    for line in lines:
        _, kernel, num_rows, *_ = line.split()
        spilled, shared = (int(re.search(rf"(\d+) {what}", line)[1]) for what in ("spilled", "bytes shared"))
        if capability in ("86", "89", "120"):
            assert shared <= 101_376, line  # bytes that a block may have there
            continue
        most = 24 if num_rows != "64" else {"80": 128, "90": 64, "100": 320}[capability]
        if "head 256" in line:
            most *= 2
        assert spilled <= (most if kernel == "attend_kernel" else 8), line
        # Of one number, the given token's logit, alone, and of halves of heads that are rotated.
        assert ("loads 2 bytes" in line) == (kernel == "read_whole_kernel" or "rotates" in line), line
        assert ("early)" in line) == ("waits, launches" in line), line
        # Only scales and, by prefetches, weights: no kernel writes them.
        allowed = "2 accesses" if kernel == "add_rms_norm_kernel" else "0 accesses"
        assert "early)" not in line or f"{allowed} before it waits" in line, line
        if kernel == "product_kernel" and "row" not in line.partition("(")[2]:
            assert ("wgmma" in line) == (capability == "90" and "swapped" in line), line
