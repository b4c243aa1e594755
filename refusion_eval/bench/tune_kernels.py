"""The search for the fastest own kernels of a card (`refusion_eval.bench.tune`): products, and attention."""

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from refusion_eval.bench.profiling import replay_of
from refusion_eval.bench.tune_choices import OF_ORDER, WHOLE_WIDTHS, group_of
from refusion_eval.bench.tune_steps import (
    COLD_BYTES,
    LEFT_OUT,
    Tuning,
    matrix_shapes,
    random_matrices,
    ready,
    seconds_in_turns,
)
from refusion_eval.models import fused
from refusion_eval.models.attention import num_words, pattern_bits
from refusion_eval.models.choices import SPLIT, Matrix, Product
from refusion_eval.models.device import seconds_of_calls
from refusion_eval.types import causal

COMPILING_SHARE = 0.5  # of the time of the search, at most
MOST_COLUMNS = 128  # of a block
OWN_MATRICES: tuple[Matrix, ...] = ("out", "down", "gate_up", "qkv")  # what gains most comes first
# Variants that compile without spilled registers for compute capability 9.0, by the most rows that they are for.
FIRST: Mapping[int, Sequence[Product]] = {
    16: (
        Product(kernel="dot", block_n=32, block_k=128, splits=2, num_warps=4, num_stages=6),
        Product(kernel="dot", block_n=32, block_k=256, splits=2, num_warps=4, num_stages=5),
        Product(kernel="swapped", block_n=64, block_k=128, splits=2, num_warps=4, num_stages=5),
        Product(kernel="row", block_n=8, block_k=512, splits=2, num_warps=4, num_stages=4),
        Product(kernel="row", block_n=4, block_k=1024, splits=2, num_warps=4, num_stages=4),
    ),
    40: (
        Product(kernel="swapped", block_n=64, block_k=128, splits=2, num_warps=4, num_stages=4),
        Product(kernel="swapped", block_n=64, block_k=64, splits=2, num_warps=4, num_stages=5),
        Product(kernel="dot", block_n=32, block_k=128, splits=2, num_warps=4, num_stages=4),
    ),
}
# Of the fastest so far, one of these is changed at a time.
VALUES: Mapping[str, Sequence[Any]] = {
    "block_n": (8, 16, 32, 64, 128),
    "block_k": (64, 128, 256, 512, 1024),
    "splits": (1, 2, 3, 4),
    "num_stages": (2, 3, 4, 5, 6),
    "num_warps": (4, 8),
}
# The largest difference from float64 as a share of the largest result.
TOLERANCES = {torch.bfloat16: 0.01, torch.float32: 1e-4}
ATTENTION_ROWS, ATTENTION_KEYS = (1, 8, 40, 64), (300, 1200, 4000, 16_000, 32_000)
PATCHES: Sequence[Mapping[str, Any]] = (  # of constants of the kernels
    {},
    {"NUM_WARPS": 8},
    {"MAX_SPLITS": 8},
    {"MAX_SPLITS": 32},
    {"MAX_SPLITS": 64, "ENOUGH_PROGRAMS": 512},
)


def name_of(product: Product) -> str:
    sizes = f"{product.block_n} x {product.block_k}, {product.splits} splits"
    return f"{product.kernel}, {sizes}, {product.num_warps} warps, {product.num_stages} stages"


def candidates(best: Product | None, rows: int, matrix: Matrix, columns: int, width: int) -> list[Product]:
    """Products to try for a matrix: the first ones, or those that differ from the fastest so far in one number."""
    if best is None:
        tried = list(FIRST[16 if rows <= OF_ORDER[-1] else 40])
    else:
        tried = [replace(best, **{name: value}) for name, values in VALUES.items() for value in values]
    if matrix not in SPLIT:
        tried = [replace(product, splits=1) for product in tried]
    fitting = (of for of in tried if columns % of.block_n == 0 and width % (of.block_k * of.splits) == 0)
    return [product for product in dict.fromkeys(fitting) if product != best]


def own_product(matrix: Matrix, product: Product) -> Callable[[Tensor, Tensor], Tensor]:
    """The operation of `fused` that a forward would call, on rows and a matrix."""
    operation = fused.gated_product if matrix == "gate_up" else fused.product
    if matrix in SPLIT:
        operation = fused.product_parts
    return lambda x, weight: operation(x, weight, len(x), product.kernel, product.tiles)


def exact(matrix: Matrix, x: Tensor, weight: Tensor) -> Tensor:
    """What an own product computes, in float64; what SwiGLU reads is rounded first."""
    result = x.double() @ weight.double().t()
    if matrix != "gate_up":
        return result
    gate, up = (half.to(x.dtype).double() for half in result.chunk(2, dim=-1))
    return silu(gate) * up


def difference(matrix: Matrix, product: Product, x: Tensor, weight: Tensor) -> float:
    """How far an own product is from float64, as a share of the largest result."""
    expected = exact(matrix, x, weight)
    found = own_product(matrix, product)(x, weight).double()
    if found.ndim == 3:  # parts
        found = found.sum(dim=0)
    return float((found[: len(x)] - expected).abs().max() / expected.abs().max())


def compile_ahead(tuning: Tuning) -> int:
    """Fills Triton's cache on all processors with what a search may try first; how many processes ended in time.

    A kernel is compiled for a dtype and for tiles, not for the sizes of a matrix, so that small matrices suffice.
    """
    number = max(1, (os.cpu_count() or 1) - 1) if tuning.on_gpu else 1
    end = time.monotonic() + COMPILING_SHARE * (tuning.until - time.monotonic())
    call = "from refusion_eval.bench.tune_kernels import compile_part; compile_part({!r}, {}, {})"
    commands = [[sys.executable, "-c", call.format(tuning.device, part, number)] for part in range(number)]
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    num_ended = 0
    for process in processes:
        try:
            num_ended += process.wait(max(0.0, end - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return num_ended


@torch.inference_mode()
def compile_part(device: str, part: int, number: int) -> None:
    """Multiplies once by every one of some own products; those that a card refuses are refused again in the search."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    found = dict.fromkeys(first_and_near() if device != "cpu" else first_and_near()[:1])
    for matrix, product, rows in list(found)[part::number]:
        width = 2 * product.block_k * product.splits
        x, weight = (torch.zeros(size, width, dtype=dtype, device=device) for size in (rows, 2 * MOST_COLUMNS))
        with suppress(Exception):
            own_product(matrix, product)(x, weight)


def first_and_near() -> list[tuple[Matrix, Product, int]]:
    """The first products of a search, then those that differ from one of them in one number, with rows to compile for.

    The two matrices whose sums are split have the same kernel.
    """
    sizes = (MOST_COLUMNS, math.lcm(*(k * splits for k in VALUES["block_k"] for splits in VALUES["splits"])))
    groups: list[tuple[Matrix, int]] = [(matrix, rows) for rows in FIRST for matrix in OWN_MATRICES if matrix != "down"]
    first = [(matrix, of, rows) for matrix, rows in groups for of in candidates(None, rows, matrix, *sizes)]
    near = [(matrix, of, rows) for matrix, best, rows in first for of in candidates(best, rows, matrix, *sizes)]
    return first + near


@torch.inference_mode()
def sweep_products(tuning: Tuning) -> dict[str, Any]:
    """Searches the fastest own product by matrix and rows. Each is compared with float64 before it is timed."""
    compiled = compile_ahead(tuning)
    device, shapes = ready(tuning), matrix_shapes(tuning)
    figures: dict[str, Any] = {"compiled_by": compiled, "best": {}, "tried": {}, "refused": {}}
    groups = list(dict.fromkeys(group_of(width) for width in WHOLE_WIDTHS))
    for place, matrix in enumerate(OWN_MATRICES):
        matrices = random_matrices(tuning, device, *shapes[matrix])
        for number, rows in enumerate(groups):
            remaining = (len(OWN_MATRICES) - place) * len(groups) - number
            end = time.monotonic() + max(0.0, tuning.until - time.monotonic()) / remaining
            widths = tuning.few([width for width in WHOLE_WIDTHS if group_of(width) == rows])
            search = Search(tuning, matrix, matrices, widths)
            best = search.run(rows, end, *tuning.of_layers.of_product(matrix))
            label = f"{matrix}, to {rows} rows"
            figures["tried"][label], figures["refused"][label] = search.seconds, search.refused
            figures["best"].setdefault(matrix, {})
            if best is not None:
                found = {"product": asdict(best), "name": name_of(best), "gain": search.gains[best]}
                figures["best"][matrix][str(rows)] = found
    return figures


class Search:
    """The search for one matrix and one group of rows."""

    def __init__(self, tuning: Tuning, matrix: Matrix, matrices: Sequence[Tensor], widths: Sequence[int]) -> None:
        self._tuning, self._matrix, self._matrices = tuning, matrix, matrices
        first = matrices[0]
        self._rows = [torch.randn(width, first.shape[1], device=first.device, dtype=first.dtype) for width in widths]
        self._base = [replay_of(matrices, partial(_as_usual, matrix, x)) for x in self._rows]
        self.gains: dict[Product, float] = {}
        self.seconds: dict[str, list[list[float]]] = {}  # by rows, of torch's product and of this one
        self.refused: dict[str, str] = {}

    def run(self, rows: int, end: float, columns: int, width: int) -> Product | None:
        """The fastest product, or None if none was right; stops at `end`, once a first one has been timed."""
        best: Product | None = None
        while True:
            before = best
            for product in candidates(best, rows, self._matrix, columns, width):
                if self.gains and time.monotonic() > end:
                    return best
                if name_of(product) not in self.seconds.keys() | self.refused.keys():
                    self._try(product)
                if product in self.gains and (best is None or self.gains[product] > self.gains[best]):
                    best = product
            if best == before or not self._tuning.on_gpu:
                return best

    def _try(self, product: Product) -> None:
        name = name_of(product)
        try:
            worst = max(difference(self._matrix, product, x, self._matrices[0]) for x in self._rows)
        except Exception as error:  # noqa: BLE001 - Triton has errors of its own, where a card has too little memory
            self.refused[name] = f"{type(error).__name__}: {error}"[:200]
            return
        if not worst <= TOLERANCES[self._tuning.dtype]:
            self.refused[name] = f"differs from float64 by {worst:.2g} of the largest result"
            return
        compute = own_product(self._matrix, product)
        replays = [replay_of(self._matrices, partial(compute, x)) for x in self._rows]
        device = self._matrices[0].device
        pairs = [seconds_in_turns(self._tuning, device, pair) for pair in zip(self._base, replays, strict=True)]
        self.seconds[name] = [[seconds / len(self._matrices) for seconds in pair] for pair in pairs]
        self.gains[product] = statistics.geometric_mean(usual / own for usual, own in pairs)


def _as_usual(matrix: Matrix, x: Tensor, weight: Tensor) -> Tensor:
    result = torch.mm(x, weight.t())
    return fused.swiglu(result) if matrix == "gate_up" else result


@torch.inference_mode()
def attention_by_case(tuning: Tuning) -> dict[str, Any]:
    """Microseconds of the attention of a layer by rows and keys, with other constants of its kernel."""
    device, shape = ready(tuning), tuning.sizes
    found: dict[str, Any] = {}
    left_out: list[str] = []
    for keys in ATTENTION_KEYS if tuning.on_gpu else (30,):
        # Keys and values, of one sequence.
        size = torch.Size((2, 1, shape.num_key_value_heads, keys + ATTENTION_ROWS[-1], shape.head_dim))
        number = max(2, round(COLD_BYTES / (size.numel() * tuning.dtype.itemsize))) if tuning.on_gpu else 1
        caches = [torch.randn(size, device=device, dtype=tuning.dtype) for _ in range(min(number, 36))]
        for rows in tuning.few(ATTENTION_ROWS):
            if found and tuning.is_over:
                left_out.append(f"{rows}/{keys}")
                continue
            queries = torch.randn(rows, shape.num_attention_heads, shape.head_dim, device=device, dtype=tuning.dtype)
            numbers = [[0] * rows, [keys] * rows, [rows] * rows, list(range(rows))]
            places = torch.tensor(numbers, device=device)
            bits = torch.from_numpy(pattern_bits(causal(rows), num_words(rows))).to(device)
            compute, times = partial(_attend, queries, places, bits), {}
            for name, patch in attention_kernels_of(tuning, rows, size[3]).items():
                with patched(patch):
                    taken = seconds_of_calls(replay_of(caches, compute), device, *((7, 2) if tuning.on_gpu else (1, 1)))
                times[name] = 1e6 * statistics.median(taken) / len(caches)
            usual, best = next(iter(times)), min(times, key=times.__getitem__)
            found[f"{rows}/{keys}"] = {"us": times, "usual": usual, "best": best, "gain": times[usual] / times[best]}
    return found | {LEFT_OUT: left_out}


def _attend(queries: Tensor, places: Tensor, bits: Tensor, keys_and_values: Tensor) -> None:
    fused.attend_rows(queries, *keys_and_values, places, bits)


def attention_kernels_of(tuning: Tuning, rows: int, capacity: int) -> dict[str, Mapping[str, Any]]:
    """Constants of the attention of some rows over a buffer, by what they make of it; those of today come first."""
    if not tuning.on_gpu:
        return {"as it is": {}}
    from refusion_eval.models.attention_kernels import num_splits

    found: dict[str, Mapping[str, Any]] = {}
    for patch in PATCHES:
        with patched(patch):
            splits = num_splits(rows, tuning.sizes.num_attention_heads, tuning.sizes.num_key_value_heads, capacity)
        # Many rows have programs enough: then another limit is the same kernel.
        found.setdefault(f"{splits} splits" + (", 8 warps" if "NUM_WARPS" in patch else ""), patch)
    return found


@contextmanager
def patched(constants: Mapping[str, Any]) -> Iterator[None]:
    """Gives other values to constants of the attention kernels of this process, which has no other use for them."""
    if not constants:
        yield
        return
    from refusion_eval.models import attention_kernels

    before = {name: getattr(attention_kernels, name) for name in constants}
    for name, value in constants.items():
        if isinstance(before[name], Mapping):  # by bytes of a number and rows of a block
            value = {size: dict.fromkeys(by_rows, value) for size, by_rows in before[name].items()}
        setattr(attention_kernels, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(attention_kernels, name, value)
