"""Triton kernels of attention on CUDA: rotation of queries and keys, their store, and the softmax over the KV buffer.

Types and shapes of the functions are those of the operations of the same names in `refusion_eval.models.fused`.
"""

import torch
import triton
import triton.language as tl

from refusion_eval.models.fused import LONG
from refusion_eval.models.kernels import await_kernel_before, launch_options

KEYS_A_STEP = {2: 64, 4: 32}  # by bytes of a number: keys that one step of attention reads into shared memory
WIDE_HEAD = 128  # entries of a head above which a step reads half as many
# By bytes of a number and rows of a block of attention. With 4 warps the sums of a block of 64 rows do not all fit in
# the registers: in bfloat16 up to 48 bytes of a thread lie in memory on an H100, and 264 on a B200. On an H200, 8 warps
# still took 1.4 to 1.6 times as long, for 40 and 64 rows after 300 and after 1,200 keys. Float32 was not timed there.
NUM_WARPS = {2: {16: 4, 32: 4, 64: 4}, 4: {16: 4, 32: 4, 64: 8}}
MAX_FOLDED = 64  # query rows times query heads of a group that one program of attention holds
MAX_SPLITS = 16  # programs that share the keys of a query row, and twice as many in a long buffer
ROWS_AT_ONCE = tl.constexpr(16)  # of a forward, whose keys a program rotates
ENOUGH_PROGRAMS = 256  # about two for each multiprocessor: with more, splitting gains nothing


def keys_a_step(item_size: int, block_d: int) -> int:
    # Blocks of more keys would need more shared memory than the 99 KiB of some GPUs.
    return KEYS_A_STEP[item_size] // (2 if block_d > WIDE_HEAD else 1)


def num_stages(item_size: int, block_d: int, capacity: int) -> int:
    # Blocks of keys in shared memory at once.
    if item_size == 4:
        return 1
    return 3 if capacity > LONG and block_d <= WIDE_HEAD else 2


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
    EARLY: tl.constexpr,
):
    """One program for each row and head: norm and rotation of queries and keys; keys and values go to the KV buffer."""
    await_kernel_before(EARLY)
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
def rotated(source, table, scales, entries, inside, HEAD: tl.constexpr, HAS_NORM: tl.constexpr, eps):
    # Rows of raw queries or keys, normed and rotated in float32 as `rotate_and_store_kernel` does, in their own dtype.
    # Places are columns of a block, entries are a row, and scales are one of both or the same for all rows.
    partners = (entries + HEAD // 2) % HEAD
    x = tl.load(source + entries, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(source + partners, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD + eps)[:, None]
        x *= scale * tl.load(scales + entries, mask=entries < HEAD, other=0.0).to(tl.float32)
        partner *= scale * tl.load(scales + partners, mask=entries < HEAD, other=0.0).to(tl.float32)
    cos = tl.load(table + entries, mask=inside, other=0.0)
    sin = tl.load(table + HEAD + entries, mask=inside, other=0.0)
    return (x * cos + partner * sin).to(source.dtype.element_ty)


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


@triton.jit
def steps_of(is_own, lengths, added, split, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr):
    # Committed rows of a sequence, its rows in the forward, steps of the former, and the steps of a split. The rows of
    # the forward begin a step of their own, so that a step needs one word of the pattern a row.
    num_committed = tl.max(tl.where(is_own, lengths, 0), axis=0)
    num_added = tl.max(tl.where(is_own, added, 0), axis=0)
    committed_steps = tl.cdiv(num_committed, BLOCK_N)
    num_steps = committed_steps + tl.cdiv(num_added, BLOCK_N)
    share = tl.cdiv(num_steps, SPLITS)
    return num_committed, num_added, committed_steps, split * share, tl.minimum((split + 1) * share, num_steps)


@triton.jit
def join(parts, log_sums, places, log_places, inside, is_row, part_stride, log_stride, SPLITS: tl.constexpr):
    # The mean of the splits in their order, each weighted by its share of the softmax. What other programs have stored
    # is read from the cache that all multiprocessors share.
    largest = tl.full(log_places.shape, float("-inf"), tl.float32)
    for split in tl.range(0, SPLITS, num_stages=1):
        log_sum = tl.load(log_sums + split * log_stride + log_places, mask=is_row, other=0.0, cache_modifier=".cg")
        largest = tl.maximum(largest, log_sum)
    largest = tl.where(largest == float("-inf"), 0.0, largest)  # a padding row sees nothing
    total = tl.zeros(log_places.shape, tl.float32)
    joined = tl.zeros(places.shape, tl.float32)
    for split in tl.range(0, SPLITS, num_stages=1):
        log_sum = tl.load(log_sums + split * log_stride + log_places, mask=is_row, other=0.0, cache_modifier=".cg")
        weight = tl.exp(log_sum - largest)
        is_part = inside & (log_sum > float("-inf"))[:, None]
        part = tl.load(parts + split * part_stride + places, mask=is_part, other=0.0, cache_modifier=".cg")
        total += weight
        joined += part * weight[:, None]
    return joined / tl.where(total == 0.0, 1.0, total)[:, None]


# Rows and words differ from width to width: one kernel serves them all.
@triton.jit(do_not_specialize=["num_rows", "num_words"])
def attend_kernel(
    queries,
    norm,
    tables,
    positions,
    keys,
    values,
    places,
    bits,
    out,
    parts,
    log_sums,
    counters,
    num_rows,
    num_words,
    sequence_stride,
    group_stride,
    scale,
    eps,
    NUM_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    ROTATES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    JOINS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program for each key-value head, block of query rows, and share of the keys of each sequence in the block."""
    # The query heads of a group are folded into the rows: row m of a block is query row m // SHARED of head m % SHARED.
    # A block may hold rows of several sequences: it reads the keys of one after the other, and only the rows of that
    # sequence count them. Products of float32 run on the tensor cores in three parts each, which together have the
    # precision of float32.
    # With ROTATES, `queries` are raw queries, keys and values of the rows: each program rotates and stores what it will
    # read, and all that store a row store the same. Without, that was done before.
    await_kernel_before(EARLY)
    group, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    NUM_GROUPS: tl.constexpr = NUM_HEADS // SHARED
    ROW: tl.constexpr = (NUM_HEADS + 2 * NUM_GROUPS) * HEAD  # entries of a row of raw queries, keys and values
    folded = block * BLOCK_M + tl.arange(0, BLOCK_M)
    rows, heads = folded // SHARED, group * SHARED + folded % SHARED
    entries = tl.arange(0, BLOCK_D)
    is_row = rows < num_rows
    out_places = (rows * NUM_HEADS + heads)[:, None] * HEAD + entries[None, :]
    inside = is_row[:, None] & (entries < HEAD)[None, :]
    if ROTATES:
        source = queries + rows[:, None] * ROW + heads[:, None] * HEAD
        table = tables + tl.load(positions + rows, mask=is_row, other=0)[:, None] * (2 * HEAD)
        scales = norm + heads[:, None] * HEAD
        q = rotated(source, table, scales, entries[None, :], inside, HEAD, HAS_NORM, eps)
    else:
        q = tl.load(queries + out_places, mask=inside, other=0.0)
    sequences = tl.load(places + rows, mask=is_row, other=-1)  # 64 bits: buffers of a batch are large
    lengths = tl.load(places + num_rows + rows, mask=is_row, other=0).to(tl.int32)
    added = tl.load(places + 2 * num_rows + rows, mask=is_row, other=0).to(tl.int32)
    first_sequence = tl.maximum(tl.load(places + block * BLOCK_M // SHARED), 0)
    end_sequence = tl.max(sequences, axis=0) + 1
    if ROTATES:
        numbers = tl.load(places + 3 * num_rows + rows, mask=is_row, other=0).to(tl.int32)
        for sequence in range(first_sequence, end_sequence):
            is_own = sequences == sequence
            num_committed, num_added, committed_steps, first_step, end_step = steps_of(
                is_own, lengths, added, split, BLOCK_N, SPLITS
            )
            base = sequence * sequence_stride + group * group_stride + num_committed * HEAD
            first_row = tl.max(tl.where(is_own, rows - numbers, 0), axis=0)  # the rows of a sequence are neighbours
            end = tl.minimum((end_step - committed_steps) * BLOCK_N, num_added)
            for start in tl.range(
                tl.maximum(first_step - committed_steps, 0) * BLOCK_N, end, ROWS_AT_ONCE, num_stages=1
            ):
                new = start + tl.arange(0, ROWS_AT_ONCE)
                is_new = (new < end)[:, None] & (entries < HEAD)[None, :]
                raw = queries + (first_row + new)[:, None] * ROW + (NUM_HEADS + group) * HEAD
                new_table = tables + tl.load(positions + first_row + new, mask=new < end, other=0)[:, None] * (2 * HEAD)
                new_scales = norm + (NUM_HEADS + group) * HEAD
                k = rotated(raw, new_table, new_scales, entries[None, :], is_new, HEAD, HAS_NORM, eps)
                v = tl.load(raw + NUM_GROUPS * HEAD + entries[None, :], mask=is_new, other=0.0)
                new_places = base + new[:, None] * HEAD + entries[None, :]
                tl.store(keys + new_places, k, mask=is_new)
                tl.store(values + new_places, v, mask=is_new)
        tl.debug_barrier()  # all of this program's threads have stored

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    attended = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    columns = tl.arange(0, BLOCK_N)
    places_in_step = columns[:, None] * HEAD + entries[None, :]
    for sequence in range(first_sequence, end_sequence):
        is_own = sequences == sequence
        base = sequence * sequence_stride + group * group_stride
        num_committed, num_added, committed_steps, first_step, end_step = steps_of(
            is_own, lengths, added, split, BLOCK_N, SPLITS
        )
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
            words = tl.load(bits + rows * num_words + tail // 64, mask=is_row, other=0) >> (tail % 64)
            seen = ((words[:, None] >> columns[None, :]) & 1) == 1
            bias = tl.where(seen & is_column[None, :], 0.0, float("-inf"))
            largest, total, attended = attend_step(
                q, keys, values, key_places, is_key, is_own, bias, scale, largest, total, attended
            )

    attended = attended / tl.where(total == 0.0, 1.0, total)[:, None]
    if SPLITS == 1:
        tl.store(out + out_places, attended.to(out.dtype.element_ty), mask=inside)
    else:
        # A split without keys has no part. That of a padding row, which sees none, is never stored.
        part_stride, log_stride = num_rows * NUM_HEADS * HEAD, num_rows * NUM_HEADS
        log_places = rows * NUM_HEADS + heads
        tl.store(parts + split * part_stride + out_places, attended, mask=inside & (total > 0.0)[:, None])
        log_sum = tl.where(total == 0.0, float("-inf"), largest + tl.log(total))
        tl.store(log_sums + split * log_stride + log_places, log_sum, mask=is_row)
        if JOINS:
            tl.debug_barrier()  # all of this program's threads have stored
            counter = counters + group * tl.num_programs(1) + block
            if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
                joined = join(parts, log_sums, out_places, log_places, inside, is_row, part_stride, log_stride, SPLITS)
                tl.store(out + out_places, joined.to(out.dtype.element_ty), mask=inside)
                tl.store(counter, 0)  # for the next layer


@triton.jit(do_not_specialize=["num_places"])
def join_splits_kernel(
    parts,
    log_sums,
    out,
    num_places,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program for each row and head: the mean of the splits, each weighted by its share of the softmax."""
    await_kernel_before(EARLY)
    place = tl.program_id(0)
    splits, entries = tl.arange(0, SPLITS), tl.arange(0, BLOCK)
    log_sum = tl.load(log_sums + splits * num_places + place)
    largest = tl.max(log_sum, axis=0)
    weights = tl.exp(log_sum - tl.where(largest == float("-inf"), 0.0, largest))  # a padding row sees nothing
    total = tl.sum(weights, axis=0)
    weights = weights / tl.where(total == 0.0, 1.0, total)
    places = (splits[:, None] * num_places + place) * HEAD + entries[None, :]
    is_part = (log_sum > float("-inf"))[:, None] & (entries < HEAD)[None, :]  # a split without keys has none
    part = tl.load(parts + places, mask=is_part, other=0.0)
    joined = tl.sum(part * weights[:, None], axis=0).to(out.dtype.element_ty)
    tl.store(out + place * HEAD + entries, joined, mask=entries < HEAD)


def rotate_and_store(qkv_WO, norm_PD, tables, positions_W, places_4W, keys_SGKD, values_SGKD, eps, early=False):
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
        **launch_options(early),
    )
    return queries


def num_splits(num_rows: int, num_heads: int, num_groups: int, capacity: int) -> int:
    """Programs that share the keys of a query row: a power of two, and 1 where there are programs enough without."""
    blocks = -(-num_rows * (num_heads // num_groups) // MAX_FOLDED)
    most = MAX_SPLITS if capacity <= LONG else 2 * MAX_SPLITS
    splits = max(1, min(most, ENOUGH_PROGRAMS // (blocks * num_groups)))
    return 1 << (splits.bit_length() - 1)


def attend_rows(
    queries_WHD, keys_SGKD, values_SGKD, places_4W, bits_WB, padded_to=0, counters=None, early=False, rotation=None
):
    _, num_groups, capacity, head = keys_SGKD.shape
    num_rows, num_heads = len(queries_WHD), queries_WHD[0].numel() // head
    if rotation is not None:  # then there are raw queries, keys and values
        num_heads -= 2 * num_groups
    norm_PD, tables, positions_W, eps = rotation or (None, queries_WHD, places_4W, 0.0)
    shared, splits = num_heads // num_groups, num_splits(num_rows, num_heads, num_groups, capacity)
    out = queries_WHD.new_empty(max(num_rows, padded_to), num_heads, head)
    parts = out.new_empty(splits, num_rows, num_heads, head, dtype=torch.float32) if splits > 1 else out
    log_sums = out.new_empty(splits, num_rows, num_heads, dtype=torch.float32)
    block_rows = max(16, min(MAX_FOLDED, triton.next_power_of_2(num_rows * shared)))
    grid = (num_groups, triton.cdiv(num_rows * shared, block_rows), splits)
    block_d, item_size = max(16, triton.next_power_of_2(head)), keys_SGKD.itemsize  # the least that a product takes
    joins = counters is not None and splits > 1
    assert not joins or len(counters) >= grid[0] * grid[1]
    inputs = (queries_WHD, queries_WHD if norm_PD is None else norm_PD, tables, positions_W)
    outputs = (out, parts, log_sums, counters if joins else log_sums)
    numbers = (num_rows, bits_WB.shape[1], *keys_SGKD.stride()[:2], head**-0.5, eps)
    attend_kernel[grid](
        *(*inputs, keys_SGKD, values_SGKD, places_4W, bits_WB, *outputs, *numbers),
        NUM_HEADS=num_heads,
        SHARED=shared,
        HEAD=head,
        SPLITS=splits,
        BLOCK_M=block_rows,
        BLOCK_N=keys_a_step(item_size, block_d),
        BLOCK_D=block_d,
        ROTATES=rotation is not None,
        HAS_NORM=norm_PD is not None,
        JOINS=joins,
        num_warps=NUM_WARPS[item_size][block_rows],
        num_stages=num_stages(item_size, block_d, capacity),
        **launch_options(early),
    )
    if splits > 1 and not joins:
        sizes = {"HEAD": head, "BLOCK": triton.next_power_of_2(head), "SPLITS": splits}
        num_places = num_rows * num_heads
        join_splits_kernel[(num_places,)](
            parts, log_sums, out, num_places, **sizes, num_warps=1, **launch_options(early)
        )
    return out


def rotate_and_attend(
    qkv_WO,
    norm_PD,
    tables,
    positions_W,
    places_4W,
    keys_SGKD,
    values_SGKD,
    bits_WB,
    eps,
    padded_to=0,
    counters=None,
    early=False,
):
    rotation = (norm_PD, tables, positions_W, eps)
    cached = (keys_SGKD, values_SGKD, places_4W, bits_WB)
    return attend_rows(qkv_WO, *cached, padded_to, counters, early, rotation)
