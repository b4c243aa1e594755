"""Triton kernels of products of a few rows with a matrix of a layer, in place of torch's where a card gains by them.

Such a product reads the matrix at the speed of the memory. What it gains is at its ends: the parts of a sum that
several programs share are summed by the norm after it (`kernels.add_rms_norm`), and SwiGLU is computed from the sums in
the registers, so that neither needs a kernel of its own. A sum has one order, which its tiles decide: no part is added
when it happens to be ready.

Three ways of multiplying: "row" without matrix instructions, one program for each row; "dot" on blocks of rows; and
"swapped", in which the matrix is the left operand, whose instructions need 64 of its rows.

Types and shapes of the functions are those of the operations of the same names in `refusion_eval.models.fused`.
"""

import torch
import triton
import triton.language as tl

from refusion_eval.models.kernels import await_kernel_before, launch_options

PREFETCHED = 2  # steps of a program whose weights are fetched to the cache while the kernel before still runs
LINE = tl.constexpr(128)  # bytes that one prefetch fetches


@triton.jit
def prefetch(weight, columns, width, first, BLOCK_K: tl.constexpr, STEPS: tl.constexpr):
    # The first steps of a tile of the matrix, which no kernel writes.
    ENTRIES: tl.constexpr = LINE // (weight.dtype.element_ty.primitive_bitwidth // 8)
    starts = tl.arange(0, STEPS * BLOCK_K // ENTRIES) * ENTRIES
    addresses = (weight + columns[:, None] * width + first + starts[None, :]).to(tl.int64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [addresses], tl.int32, is_pure=False, pack=1)


@triton.jit
def no_sum(KERNEL: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    if KERNEL == "row":
        total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    elif KERNEL == "swapped":
        total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    else:
        total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    return total


@triton.jit
def add_step(total, x, w, KERNEL: tl.constexpr):
    # Products of float32 run on the tensor cores in three parts each, as in attention.
    if KERNEL == "row":
        total += w.to(tl.float32) * x.to(tl.float32)
    elif KERNEL == "swapped":
        total = tl.dot(w, tl.trans(x), total, input_precision="tf32x3")
    else:
        total = tl.dot(x, tl.trans(w), total, input_precision="tf32x3")
    return total


@triton.jit
def by_rows(total, KERNEL: tl.constexpr):
    # The finished sums as [ROWS, BLOCK_N].
    if KERNEL == "row":
        total = tl.sum(total, axis=1)[None, :]
    elif KERNEL == "swapped":
        total = tl.trans(total)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x,
    weight,
    out,
    num_rows,
    num_columns,
    width,
    KERNEL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    STEPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program for each block of columns, share of the width, and block of rows; `out` has a part for each share."""
    tile, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, columns = block * ROWS + tl.arange(0, ROWS), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    entries, share = tl.arange(0, BLOCK_K), width // SPLITS
    if EARLY:
        prefetch(weight, columns, width, split * share, BLOCK_K, STEPS)
        if GATED:
            prefetch(weight + num_columns * width, columns, width, split * share, BLOCK_K, STEPS)
    await_kernel_before(EARLY)
    left = x + rows[:, None] * width + split * share + entries[None, :]
    right = weight + columns[:, None] * width + split * share + entries[None, :]
    is_row = (rows < num_rows)[:, None]
    total = no_sum(KERNEL, ROWS, BLOCK_N, BLOCK_K)
    up = no_sum(KERNEL, ROWS, BLOCK_N, BLOCK_K)
    for step in range(0, share, BLOCK_K):
        w = tl.load(right + step, eviction_policy="evict_first")
        a = tl.load(left + step, mask=is_row, other=0.0)
        total = add_step(total, a, w, KERNEL)
        if GATED:
            w = tl.load(right + num_columns * width + step, eviction_policy="evict_first")
            up = add_step(up, a, w, KERNEL)
    total = by_rows(total, KERNEL)
    places = (split * num_rows + rows)[:, None] * num_columns + columns[None, :]
    if GATED:  # both are rounded first, as the result of a product is
        gate = total.to(out.dtype.element_ty).to(tl.float32)
        total = gate * tl.sigmoid(gate) * by_rows(up, KERNEL).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=is_row)


def _launch(x_RI, weight_OI, out, num_rows, num_columns, kernel, tiles, early, gated=False):
    block_n, block_k, splits, num_warps, num_stages = tiles
    width = weight_OI.shape[1]
    assert num_columns % block_n == 0, "a table of choices is checked against the sizes of its model"
    assert width % (block_k * splits) == 0, "a table of choices is checked against the sizes of its model"
    block_rows = 1 if kernel == "row" else max(16, triton.next_power_of_2(num_rows))
    grid = (num_columns // block_n, splits, triton.cdiv(num_rows, block_rows))
    sizes = {"KERNEL": kernel, "ROWS": block_rows, "BLOCK_N": block_n, "BLOCK_K": block_k, "SPLITS": splits}
    product_kernel[grid](
        *(x_RI, weight_OI, out, num_rows, num_columns, width),
        **sizes,
        GATED=gated,
        STEPS=min(PREFETCHED, width // splits // block_k),
        num_warps=num_warps,
        num_stages=num_stages,
        **launch_options(early),
    )
    return out


def product(x_RI, weight_OI, num_rows, kernel, tiles, early=False):
    out_WO = x_RI.new_empty(num_rows, len(weight_OI))
    return _launch(x_RI, weight_OI, out_WO, num_rows, len(weight_OI), kernel, tiles, early)


def product_parts(x_RI, weight_OI, num_rows, kernel, tiles, early=False):
    parts_SWO = x_RI.new_empty(tiles[2], num_rows, len(weight_OI), dtype=torch.float32)
    return _launch(x_RI, weight_OI, parts_SWO, num_rows, len(weight_OI), kernel, tiles, early)


def gated_product(x_RI, gate_up_QI, num_rows, kernel, tiles, padded_to=0, early=False):
    num_columns = len(gate_up_QI) // 2
    out_RO = x_RI.new_empty(max(num_rows, padded_to), num_columns)
    return _launch(x_RI, gate_up_QI, out_RO, num_rows, num_columns, kernel, tiles, early, gated=True)
