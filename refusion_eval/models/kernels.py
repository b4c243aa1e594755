"""Triton kernels of the forward on CUDA, and in `attention_kernels` and `product_kernels` those of these parts.

What each computes is written in `refusion_eval.models.fused`, in plain torch.

Matrix products of a forward of few rows read the weights at the speed of the memory. Everything between two products is
small, so the number of kernels counts: each costs one to two microseconds, whatever it computes. All sums are float32,
and results are rounded once, to the dtype of the model.

Types and shapes of the functions are those of the operations of the same names in `fused`.
"""

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # of Triton before 3.4, which launches no kernel early
    gdc_launch_dependents = gdc_wait = None

VOCABULARY_SPLITS = 32  # programs that share the logits of a row
NUM_PARTS = 4  # numbers that each of them finds
MANY_PAIRS = 16  # rows that an expert has on average, above which its blocks have 64 rows instead of 16
EXPERT_COLUMNS = 32  # of a matrix of an expert in a program
EXPERT_ENTRIES = {2: 128, 4: 32}  # by bytes of a number: those of a row that one step of a product of experts reads


@triton.jit
def await_kernel_before(EARLY: tl.constexpr):
    # A kernel that was launched early waits here until the one before has finished and its results can be read, and
    # the one after may be launched, which then waits itself. Before this call only weights may be read.
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def add_rms_norm_kernel(
    x,
    added,
    weight,
    total,
    normed,
    width,
    part_stride,
    eps,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    # One program a row. What is added is a tensor like x, or the float32 parts of a sum, in the order of the parts.
    first = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    scales = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    await_kernel_before(EARLY)
    summed = tl.load(x + first + columns, mask=inside, other=0.0).to(tl.float32)
    addition = tl.load(added + first + columns, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        for part in tl.static_range(1, PARTS):
            addition += tl.load(added + part * part_stride + first + columns, mask=inside, other=0.0)
        addition = addition.to(total.dtype.element_ty).to(tl.float32)  # as the result of a product is rounded
    summed += addition
    rounded = summed.to(total.dtype.element_ty)
    tl.store(total + first + columns, rounded, mask=inside)
    summed = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(summed * summed, axis=0) / width + eps)
    tl.store(normed + first + columns, (summed * scale * scales).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_kernel(gate_up, out, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    # One program for each row and block of columns.
    await_kernel_before(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def read_part_kernel(logits, rows, suppressed, parts, vocab_size, stride, share, BLOCK: tl.constexpr):
    # One program for each row and share of the vocabulary. It stores the largest logit, the sum of exp(logit - largest)
    # and, among the ids that are not suppressed, the largest logit and the lowest id of it.
    read, split = tl.program_id(0), tl.program_id(1)
    offsets = tl.arange(0, BLOCK)
    ids = split * share + offsets
    inside = (offsets < share) & (ids < vocab_size)
    # The padding of a row is loaded too: the multiple of 16 at which it ends lets the loads be 16 bytes wide.
    is_stored = (offsets < share) & (ids < stride)
    values = tl.load(logits + tl.load(rows + read) * stride + ids, mask=is_stored, other=0.0).to(tl.float32)
    values = tl.where(inside, values, float("-inf"))
    largest = tl.max(values, axis=0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(values - base), axis=0)
    values = tl.where(ids == tl.load(suppressed + read), float("-inf"), values)
    chosen = tl.max(values, axis=0)
    token = tl.min(tl.where(inside & (values == chosen), ids, vocab_size), axis=0)
    place = parts + (read * tl.num_programs(1) + split) * 4
    tl.store(place, largest)
    tl.store(place + 1, total)
    tl.store(place + 2, chosen)
    tl.store(place + 3, token.to(tl.float32))


@triton.jit(do_not_specialize=["num_reads"])
def read_whole_kernel(logits, rows, given, parts, out, vocab_size, stride, num_reads, SPLITS: tl.constexpr):
    # One program a row: the chosen token, its probability, and the probability of the given token.
    read = tl.program_id(0)
    places = parts + (read * SPLITS + tl.arange(0, SPLITS)) * 4
    largest = tl.load(places)
    overall = tl.max(largest, axis=0)
    log_sum = overall + tl.log(tl.sum(tl.load(places + 1) * tl.exp(largest - overall), axis=0))
    chosen = tl.load(places + 2)
    best = tl.max(chosen, axis=0)
    token = tl.min(tl.where(chosen == best, tl.load(places + 3), vocab_size * 1.0), axis=0)
    given_place = tl.load(rows + read) * stride + tl.load(given + read)
    given_logit = tl.load(logits + given_place).to(tl.float32)
    tl.store(out + read, token)
    tl.store(out + num_reads + read, tl.minimum(tl.exp(best - log_sum), 1.0, propagate_nan=tl.PropagateNan.ALL))
    given_prob = tl.minimum(tl.exp(given_logit - log_sum), 1.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + 2 * num_reads + read, given_prob)


@triton.jit
def rows_of_block(order, ends, block_ends, num_experts, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    # The expert of a block of pairs, the places of its pairs among the sorted ones, the pairs, and which there are.
    block, experts = tl.program_id(0), tl.arange(0, BLOCK_E)
    last = tl.load(block_ends + experts, mask=experts < num_experts, other=2**31 - 1)
    expert = tl.sum((last <= block).to(tl.int32), axis=0)  # num_experts after the last block
    exists = expert < num_experts
    end = tl.load(ends + expert, mask=exists, other=0)
    is_later = exists & (expert > 0)
    first_block = tl.load(block_ends + expert - 1, mask=is_later, other=0)
    start = tl.load(ends + expert - 1, mask=is_later, other=0) + (block - first_block) * BLOCK_M
    places = start + tl.arange(0, BLOCK_M)
    is_pair = places < end
    pairs = tl.load(order + places, mask=is_pair, other=0)
    return expert.to(tl.int64), places, pairs, is_pair, exists


@triton.jit(do_not_specialize=["num_experts"])
def expert_up_kernel(
    x,
    gate_up,
    order,
    ends,
    block_ends,
    out,
    num_experts,
    width,
    inner_width,
    NUM_CHOSEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program for each block of pairs of an expert, and block of columns: both projections and SwiGLU."""
    expert, places, pairs, is_pair, exists = rows_of_block(order, ends, block_ends, num_experts, BLOCK_M, BLOCK_E)
    if exists:
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < inner_width
        rows = pairs // NUM_CHOSEN
        matrix = gate_up + expert * 2 * inner_width * width + columns[None, :] * width
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, width, BLOCK_K):
            entries = start + tl.arange(0, BLOCK_K)
            is_entry = entries < width
            left = tl.load(
                x + rows[:, None] * width + entries[None, :], mask=is_pair[:, None] & is_entry[None, :], other=0.0
            )
            mask = is_entry[:, None] & inside[None, :]
            of_gate = tl.load(matrix + entries[:, None], mask=mask, other=0.0)
            of_up = tl.load(matrix + inner_width * width + entries[:, None], mask=mask, other=0.0)
            gate += tl.dot(left, of_gate, input_precision="tf32x3")
            up += tl.dot(left, of_up, input_precision="tf32x3")
        value = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
        mask = is_pair[:, None] & inside[None, :]
        tl.store(out + places[:, None] * inner_width + columns[None, :], value, mask=mask)


@triton.jit(do_not_specialize=["num_experts"])
def expert_down_kernel(
    inner,
    down,
    shares,
    order,
    ends,
    block_ends,
    out,
    num_experts,
    width,
    inner_width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """As `expert_up_kernel`: the last projection, times the share of the expert, to the place of the pair."""
    expert, places, pairs, is_pair, exists = rows_of_block(order, ends, block_ends, num_experts, BLOCK_M, BLOCK_E)
    if exists:
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < width
        matrix = down + expert * width * inner_width + columns[None, :] * inner_width
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, inner_width, BLOCK_K):
            entries = start + tl.arange(0, BLOCK_K)
            is_entry = entries < inner_width
            mask = is_pair[:, None] & is_entry[None, :]
            left = tl.load(inner + places[:, None] * inner_width + entries[None, :], mask=mask, other=0.0)
            mask = is_entry[:, None] & inside[None, :]
            total += tl.dot(left, tl.load(matrix + entries[:, None], mask=mask, other=0.0), input_precision="tf32x3")
        total *= tl.load(shares + pairs, mask=is_pair, other=0.0)[:, None]
        mask = is_pair[:, None] & inside[None, :]
        tl.store(out + pairs[:, None] * width + columns[None, :], total.to(out.dtype.element_ty), mask=mask)


def mix_experts(x_TC, ids_TJ, shares_TJ, gate_up_EIC, down_ECI, num_read):
    (num_rows, width), num_chosen = x_TC.shape, ids_TJ.shape[1]
    num_experts, inner_width, num_pairs = len(gate_up_EIC), down_ECI.shape[2], num_rows * num_chosen
    # Nothing is copied to the host: the grid has as many blocks as there can be, of which those without pairs end.
    block = 16 if num_pairs <= MANY_PAIRS * num_experts else 64
    sorted_P, order_P = ids_TJ.flatten().sort(stable=True)
    ends_E = torch.searchsorted(sorted_P, torch.arange(num_experts, device=x_TC.device), right=True)
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    block_ends_E = ((counts_E + block - 1) // block).cumsum(0)
    num_read += (counts_E > 0).sum()
    num_blocks = min(num_pairs, min(num_pairs, num_experts) + num_pairs // block)
    inner_PI, out_PC = x_TC.new_empty(num_pairs, inner_width), shares_TJ.new_zeros(num_pairs, width)
    plan, sizes = (order_P, ends_E, block_ends_E), (num_experts, width, inner_width)
    constants = {
        "BLOCK_M": block,
        "BLOCK_N": EXPERT_COLUMNS,
        "BLOCK_K": EXPERT_ENTRIES[x_TC.itemsize],
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "num_warps": 4,
        "num_stages": 2,
    }
    grid = (num_blocks, triton.cdiv(inner_width, EXPERT_COLUMNS))
    expert_up_kernel[grid](x_TC, gate_up_EIC, *plan, inner_PI, *sizes, NUM_CHOSEN=num_chosen, **constants)
    grid = (num_blocks, triton.cdiv(width, EXPERT_COLUMNS))
    expert_down_kernel[grid](inner_PI, down_ECI, shares_TJ.float(), *plan, out_PC, *sizes, **constants)
    return out_PC.view(num_rows, num_chosen, width).sum(dim=1).to(x_TC.dtype)


def launch_options(early: bool) -> dict[str, bool]:
    """Constants and options of a kernel that may begin while the one before still runs, or may not."""
    # Triton refuses an option that it does not know (`choices.launches_early`).
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


def add_rms_norm(x_WC, added, weight_C, eps, padded_to=0, early=False):
    num_rows, width = x_WC.shape
    total, normed = torch.empty_like(x_WC), x_WC.new_empty(max(num_rows, padded_to), width)
    block = triton.next_power_of_2(width)
    tensors, num_warps = (x_WC, added, weight_C, total, normed), max(1, min(16, block // 512))
    parts = len(added) if added.ndim == 3 else 0
    add_rms_norm_kernel[(num_rows,)](
        *(*tensors, width, num_rows * width, eps),
        BLOCK=block,
        PARTS=parts,
        num_warps=num_warps,
        **launch_options(early),
    )
    return total, normed


def swiglu(gate_up_WI, padded_to=0, early=False):
    num_rows, width = gate_up_WI.shape[0], gate_up_WI.shape[1] // 2
    out = gate_up_WI.new_empty(max(num_rows, padded_to), width)
    grid = (num_rows, triton.cdiv(width, 1024))
    swiglu_kernel[grid](gate_up_WI, out, width, BLOCK=1024, **launch_options(early))
    return out


def read_rows(logits_WV, rows_N, given_N, suppressed_N, out_3N):
    num_reads, vocab_size, stride = len(rows_N), logits_WV.shape[1], logits_WV.stride(0)
    share = triton.cdiv(vocab_size, 16 * VOCABULARY_SPLITS) * 16
    parts = logits_WV.new_empty(num_reads, VOCABULARY_SPLITS, NUM_PARTS, dtype=torch.float32)
    read_part_kernel[(num_reads, VOCABULARY_SPLITS)](
        *(logits_WV, rows_N, suppressed_N, parts, vocab_size, stride, share),
        BLOCK=triton.next_power_of_2(share),
        num_warps=8,
    )
    read_whole_kernel[(num_reads,)](
        *(logits_WV, rows_N, given_N, parts, out_3N, vocab_size, stride, num_reads),
        SPLITS=VOCABULARY_SPLITS,
        num_warps=1,
    )
