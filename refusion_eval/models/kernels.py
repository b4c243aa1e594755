"""Triton kernels of the forward on CUDA. What each computes is written in `refusion_eval.models.fused`, in plain torch.

Matrix products of a forward of few rows read the weights at the speed of the memory. Everything between two products is
small, so the number of kernels counts: each costs one to two microseconds, whatever it computes. All sums are float32,
and results are rounded once, to the dtype of the model.

Types and shapes of the functions are those of the operations of the same names in `fused`.
"""

import torch
import triton
import triton.language as tl

KEYS_A_STEP = {2: 64, 4: 32}  # by bytes of a number: keys that one step of attention reads into shared memory
# By bytes of a number and rows of a block of attention. With 4 warps the sums of a block of 64 rows do not all fit in
# the registers: in bfloat16 up to 48 bytes of a thread lie in memory on an H100, and 264 on a B200. On an H200, 8 warps
# still took 1.4 to 1.6 times as long, for 40 and 64 rows after 300 and after 1,200 keys. Float32 was not timed there.
NUM_WARPS = {2: {16: 4, 32: 4, 64: 4}, 4: {16: 4, 32: 4, 64: 8}}
VOCABULARY_SPLITS = 32  # programs that share the logits of a row
NUM_PARTS = 4  # numbers that each of them finds
MAX_FOLDED = 64  # query rows times query heads of a group that one program of attention holds
MAX_SPLITS = 16  # programs that share the keys of a query row
MANY_PAIRS = 16  # rows that an expert has on average, above which its blocks have 64 rows instead of 16
EXPERT_COLUMNS = 32  # of a matrix of an expert in a program
EXPERT_ENTRIES = {2: 128, 4: 32}  # by bytes of a number: those of a row that one step of a product of experts reads
ENOUGH_PROGRAMS = 256  # about two for each multiprocessor: with more, splitting gains nothing


@triton.jit
def add_rms_norm_kernel(x, added, weight, total, normed, width, eps, BLOCK: tl.constexpr):
    # One program a row.
    first = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    scales = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    summed = tl.load(x + first + columns, mask=inside, other=0.0).to(tl.float32)
    summed += tl.load(added + first + columns, mask=inside, other=0.0).to(tl.float32)
    rounded = summed.to(total.dtype.element_ty)
    tl.store(total + first + columns, rounded, mask=inside)
    summed = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(summed * summed, axis=0) / width + eps)
    tl.store(normed + first + columns, (summed * scale * scales).to(normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def rotate_and_store_kernel(
    qkv,
    norm,
    tables,
    positions,
    places,
    keys,
    values,
    queries,
    num_rows,
    sequence_stride,
    group_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """One program for each row and head: norm and rotation of queries and keys; keys and values go to the KV buffer."""
    row, head = tl.program_id(0), tl.program_id(1)
    entries = tl.arange(0, BLOCK)
    inside = entries < HEAD
    partners = (entries + HEAD // 2) % HEAD
    source = qkv + (row * (NUM_HEADS + 2 * NUM_GROUPS) + head) * HEAD
    x = tl.load(source + entries, mask=inside, other=0.0).to(tl.float32)
    sequence = tl.load(places + row)
    cache_row = tl.load(places + num_rows + row) + tl.load(places + 3 * num_rows + row)
    place = sequence * sequence_stride + cache_row * HEAD + entries
    is_stored = entries < tl.where(sequence >= 0, HEAD, 0)
    if head >= NUM_HEADS + NUM_GROUPS:
        place += (head - NUM_HEADS - NUM_GROUPS) * group_stride
        tl.store(values + place, x.to(values.dtype.element_ty), mask=is_stored)
    else:
        partner = tl.load(source + partners, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(x * x, axis=0) / HEAD + eps)
            x *= scale * tl.load(norm + head * HEAD + entries, mask=inside, other=0.0).to(tl.float32)
            partner *= scale * tl.load(norm + head * HEAD + partners, mask=inside, other=0.0).to(tl.float32)
        table = tables + tl.load(positions + row) * (2 * HEAD)
        cos = tl.load(table + entries, mask=inside, other=0.0)
        sin = tl.load(table + HEAD + entries, mask=inside, other=0.0)
        rotated = (x * cos + partner * sin).to(queries.dtype.element_ty)
        if head < NUM_HEADS:
            tl.store(queries + (row * NUM_HEADS + head) * HEAD + entries, rotated, mask=inside)
        else:
            tl.store(keys + place + (head - NUM_HEADS) * group_stride, rotated, mask=is_stored)


@triton.jit
def swiglu_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    # One program for each row and block of columns.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def attend_step(q, keys, values, places, is_key, is_own, bias, scale, largest, total, attended):
    # One block of keys for the rows of their sequence: the softmax over the keys so far, rescaled where its maximum
    # grows. The bias is 0 for keys that are seen, and else -inf.
    k = tl.load(keys + places, mask=is_key, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale + bias
    now_largest = tl.maximum(largest, tl.where(is_own, tl.max(scores, axis=1), float("-inf")))
    reference = tl.where(now_largest == float("-inf"), 0.0, now_largest)  # nothing is seen yet
    weights = tl.exp(scores - tl.where(is_own, reference, float("inf"))[:, None])
    shrink = tl.exp(largest - reference)
    v = tl.load(values + places, mask=is_key, other=0.0)
    products = tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
    return now_largest, total * shrink + tl.sum(weights, axis=1), attended * shrink[:, None] + products


# Rows and words differ from width to width: one kernel serves them all.
@triton.jit(do_not_specialize=["num_rows", "num_words"])
def attend_kernel(
    queries,
    keys,
    values,
    places,
    bits,
    out,
    log_sums,
    num_rows,
    num_words,
    sequence_stride,
    group_stride,
    scale,
    NUM_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program for each key-value head, block of query rows, and share of the keys of each sequence in the block."""
    # The query heads of a group are folded into the rows: row m of a block is query row m // SHARED of head m % SHARED.
    # A block may hold rows of several sequences: it reads the keys of one after the other, and only the rows of that
    # sequence count them. Products of float32 run on the tensor cores in three parts each, which together have the
    # precision of float32.
    group, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    folded = block * BLOCK_M + tl.arange(0, BLOCK_M)
    rows, heads = folded // SHARED, group * SHARED + folded % SHARED
    entries = tl.arange(0, BLOCK_D)
    out_places = (rows * NUM_HEADS + heads)[:, None] * HEAD + entries[None, :]
    inside = (rows < num_rows)[:, None] & (entries < HEAD)[None, :]
    q = tl.load(queries + out_places, mask=inside, other=0.0)
    sequences = tl.load(places + rows, mask=rows < num_rows, other=-1)  # 64 bits: buffers of a batch are large
    lengths = tl.load(places + num_rows + rows, mask=rows < num_rows, other=0).to(tl.int32)
    added = tl.load(places + 2 * num_rows + rows, mask=rows < num_rows, other=0).to(tl.int32)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    attended = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    columns = tl.arange(0, BLOCK_N)
    places_in_step = columns[:, None] * HEAD + entries[None, :]
    first_sequence = tl.maximum(tl.load(places + block * BLOCK_M // SHARED), 0)
    for sequence in range(first_sequence, tl.max(sequences, axis=0) + 1):
        is_own = sequences == sequence
        num_committed = tl.max(tl.where(is_own, lengths, 0), axis=0)
        num_added = tl.max(tl.where(is_own, added, 0), axis=0)
        base = sequence * sequence_stride + group * group_stride
        # The rows of the forward begin a step of their own, so that a step needs one word of the pattern a row.
        committed_steps = tl.cdiv(num_committed, BLOCK_N)
        num_steps = committed_steps + tl.cdiv(num_added, BLOCK_N)
        share = tl.cdiv(num_steps, SPLITS)
        first_step, end_step = split * share, tl.minimum((split + 1) * share, num_steps)
        for step in range(first_step, tl.minimum(end_step, committed_steps)):  # every row sees every committed key
            start = step * BLOCK_N
            is_column = columns < num_committed - start
            key_places = base + start * HEAD + places_in_step
            is_key = is_column[:, None] & (entries < HEAD)[None, :]
            bias = tl.where(is_column, 0.0, float("-inf"))[None, :]
            largest, total, attended = attend_step(
                q, keys, values, key_places, is_key, is_own, bias, scale, largest, total, attended
            )
        for step in range(tl.maximum(first_step, committed_steps), end_step):
            tail = (step - committed_steps) * BLOCK_N
            is_column = columns < num_added - tail
            key_places = base + (num_committed + tail) * HEAD + places_in_step
            is_key = is_column[:, None] & (entries < HEAD)[None, :]
            words = tl.load(bits + rows * num_words + tail // 64, mask=rows < num_rows, other=0) >> (tail % 64)
            seen = ((words[:, None] >> columns[None, :]) & 1) == 1
            bias = tl.where(seen & is_column[None, :], 0.0, float("-inf"))
            largest, total, attended = attend_step(
                q, keys, values, key_places, is_key, is_own, bias, scale, largest, total, attended
            )

    attended = attended / tl.where(total == 0.0, 1.0, total)[:, None]
    if SPLITS == 1:
        tl.store(out + out_places, attended.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + split * num_rows * NUM_HEADS * HEAD + out_places, attended, mask=inside)
        log_sum = tl.where(total == 0.0, float("-inf"), largest + tl.log(total))
        tl.store(log_sums + (split * num_rows + rows) * NUM_HEADS + heads, log_sum, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_places"])
def join_splits_kernel(
    parts,
    log_sums,
    out,
    num_places,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program for each row and head: the mean of the splits, each weighted by its share of the softmax."""
    place = tl.program_id(0)
    splits, entries = tl.arange(0, SPLITS), tl.arange(0, BLOCK)
    log_sum = tl.load(log_sums + splits * num_places + place)
    largest = tl.max(log_sum, axis=0)
    weights = tl.exp(log_sum - tl.where(largest == float("-inf"), 0.0, largest))  # a padding row sees nothing
    total = tl.sum(weights, axis=0)
    weights = weights / tl.where(total == 0.0, 1.0, total)
    places = (splits[:, None] * num_places + place) * HEAD + entries[None, :]
    part = tl.load(parts + places, mask=(entries < HEAD)[None, :], other=0.0)
    joined = tl.sum(part * weights[:, None], axis=0).to(out.dtype.element_ty)
    tl.store(out + place * HEAD + entries, joined, mask=entries < HEAD)


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


def add_rms_norm(x_WC, added_WC, weight_C, eps, padded_to=0):
    num_rows, width = x_WC.shape
    total, normed = torch.empty_like(x_WC), x_WC.new_empty(max(num_rows, padded_to), width)
    block = triton.next_power_of_2(width)
    tensors, num_warps = (x_WC, added_WC, weight_C, total, normed), max(1, min(16, block // 512))
    add_rms_norm_kernel[(num_rows,)](*tensors, width, eps, BLOCK=block, num_warps=num_warps)
    return total, normed


def rotate_and_store(qkv_WO, norm_PD, tables, positions_W, places_4W, keys_SGKD, values_SGKD, eps):
    _, num_groups, _, head = keys_SGKD.shape
    num_rows = qkv_WO.shape[0]
    num_heads = qkv_WO.shape[1] // head - 2 * num_groups
    queries = qkv_WO.new_empty(num_rows, num_heads, head)
    inputs = (qkv_WO, qkv_WO if norm_PD is None else norm_PD, tables, positions_W, places_4W)
    sizes = {"NUM_HEADS": num_heads, "NUM_GROUPS": num_groups, "HEAD": head, "BLOCK": triton.next_power_of_2(head)}
    rotate_and_store_kernel[(num_rows, num_heads + 2 * num_groups)](
        *(*inputs, keys_SGKD, values_SGKD, queries, num_rows, *keys_SGKD.stride()[:2], eps),
        **sizes,
        HAS_NORM=norm_PD is not None,
        num_warps=1,
    )
    return queries


def swiglu(gate_up_WI, padded_to=0):
    num_rows, width = gate_up_WI.shape[0], gate_up_WI.shape[1] // 2
    out = gate_up_WI.new_empty(max(num_rows, padded_to), width)
    swiglu_kernel[(num_rows, triton.cdiv(width, 1024))](gate_up_WI, out, width, BLOCK=1024)
    return out


def num_splits(num_rows: int, num_heads: int, num_groups: int) -> int:
    """Programs that share the keys of a query row: a power of two, and 1 where there are programs enough without."""
    blocks = -(-num_rows * (num_heads // num_groups) // MAX_FOLDED)
    splits = max(1, min(MAX_SPLITS, ENOUGH_PROGRAMS // (blocks * num_groups)))
    return 1 << (splits.bit_length() - 1)


def attend_rows(queries_WHD, keys_SGKD, values_SGKD, places_4W, bits_WB, padded_to=0):
    num_rows, num_heads, head = queries_WHD.shape
    num_groups = keys_SGKD.shape[1]
    shared = num_heads // num_groups
    splits = num_splits(num_rows, num_heads, num_groups)
    out = queries_WHD.new_empty(max(num_rows, padded_to), num_heads, head)
    parts = out.new_empty(splits, num_rows, num_heads, head, dtype=torch.float32) if splits > 1 else out
    log_sums = out.new_empty(splits, num_rows, num_heads, dtype=torch.float32)
    block_rows = max(16, min(MAX_FOLDED, triton.next_power_of_2(num_rows * shared)))
    grid = (num_groups, triton.cdiv(num_rows * shared, block_rows), splits)
    inputs = (queries_WHD, keys_SGKD, values_SGKD, places_4W, bits_WB)
    sizes = {"NUM_HEADS": num_heads, "SHARED": shared, "HEAD": head, "SPLITS": splits}
    attend_kernel[grid](
        *(*inputs, parts, log_sums, num_rows, bits_WB.shape[1], *keys_SGKD.stride()[:2], head**-0.5),
        **sizes,
        BLOCK_M=block_rows,
        BLOCK_N=KEYS_A_STEP[keys_SGKD.itemsize],
        BLOCK_D=max(16, triton.next_power_of_2(head)),  # the least that a product of blocks takes
        num_warps=NUM_WARPS[keys_SGKD.itemsize][block_rows],
        num_stages=2 if keys_SGKD.itemsize == 2 else 1,  # blocks in shared memory at once, of which GPUs have 99 KiB
    )
    if splits > 1:
        sizes = {"HEAD": head, "BLOCK": triton.next_power_of_2(head), "SPLITS": splits}
        num_places = num_rows * num_heads
        join_splits_kernel[(num_places,)](parts, log_sums, out, num_places, **sizes, num_warps=1)
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
