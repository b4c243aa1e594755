"""Products of float32 rows with the weights of a model on a CPU, in float32 whatever the weights are stored in.

A forward of few rows reads every weight once and is as fast as the memory, so 16-bit weights are widened on the way: in
registers for a few rows, and else some rows of the matrix at a time, which stay in the caches for the BLAS in torch's
own library (MKL's). The threads of torch's OpenMP share the rows of a matrix.

Shapes: T rows, I entries of a row, O rows of the matrix, which are entries of a row of the result.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numba
import numpy as np
import torch
from llvmlite import binding, ir
from numba import carray, types
from numba.extending import intrinsic
from torch import Tensor

_F32 = np.float32
SET, ADD = np.float32(0), np.float32(1)  # what a product does to the matrix that it is written to
# `cblas_sgemm_compute` takes layout, how to read each factor, three sizes, then address and step of each matrix.
# TRANSPOSED is a matrix of weights whose last axis is dense, AS_IS a matrix whose first axis is; the others are as
# TRANSPOSED, with 16 bits an entry.
BY_ROWS, AS_IS, TRANSPOSED, BFLOAT16, FLOAT16 = 101, 111, 112, 0, 1
LAYOUTS = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
# On one core of an EPYC (Milan), with matrices beyond its caches: up to 7 rows one by one took 0.3 to 0.95 of the time
# of a product of blocks, and blocks of 64 to 128 rows of the matrix 0.45 to 0.95 of that of the whole, in float32 too.
FEW_ROWS, BLOCK = 7, 128
WORTH_SHARING = 1 << 16  # products of two numbers; below, a thread is done before another has begun

_NAMES = ("cblas_sgemm_compute", "GOMP_parallel", "omp_get_max_threads", "omp_get_thread_num", "omp_get_num_threads")
_SHARE = "refusion_eval_share"
_MATRIX = (types.uintp, types.int32)


def _function(name, *kinds, returns=types.int32):
    return types.ExternalFunction(f"refusion_eval_{name}", returns(*kinds))


_sgemm = _function(_NAMES[0], *[types.int32] * 6, *_MATRIX, *_MATRIX, types.float32, *_MATRIX, returns=types.void)
_parallel = _function(_NAMES[1], *[types.uintp] * 2, *[types.uint32] * 2, returns=types.void)
_most_threads, _thread, _num_threads = (_function(name) for name in _NAMES[2:])

# NaN and infinity keep their meaning: a forward that is not finite is an error.
compiled = numba.njit(
    cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "nsz", "contract", "arcp"}, boundscheck=False
)


@cache
def obstacle() -> str | None:
    """Why compiled forwards are impossible here; None if they are possible. Makes the library known to the compiler."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        for name in _NAMES:  # those of OpenMP are in a library that this one has loaded
            address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
            binding.add_symbol(f"refusion_eval_{name}", address)
    except (OSError, AttributeError) as error:
        return f"this build of torch lacks a function: {error}"
    return None


@intrinsic
def _address_of_share(context):
    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        found = builder.module.globals.get(_SHARE) or ir.Function(builder.module, kind, _SHARE)
        return builder.ptrtoint(found, ir.IntType(64))

    return types.uintp(), generate


def _pointer(kind):
    @intrinsic
    def pointer(context, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(kind)))

        return types.CPointer(kind)(types.uintp), generate

    return pointer


_floats, _halves, _numbers = (_pointer(kind) for kind in (types.float32, types.uint16, types.int64))


@intrinsic
def _from_bfloat16(context, bits):
    """The number that 16 bits are in bfloat16: the upper half of those of a float32."""

    def generate(context, builder, signature, arguments):
        i32 = ir.IntType(32)
        wide = builder.shl(builder.zext(arguments[0], i32), ir.Constant(i32, 16))
        return builder.bitcast(wide, ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def _from_float16(context, bits):
    """The finite number that 16 bits are in float16."""

    def generate(context, builder, signature, arguments):
        if "+f16c" in context.codegen()._tm_features:
            return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())
        # Other processors have no instruction for it: sign, exponent and fraction are moved to their places in a
        # float32, whose exponents count from another number.
        i32, single = ir.IntType(32), ir.FloatType()
        moved = builder.shl(builder.sext(arguments[0], i32), ir.Constant(i32, 13))
        kept = builder.and_(moved, ir.Constant(i32, ~0x70001FFF))
        return builder.fmul(builder.bitcast(kept, single), ir.Constant(single, 2.0**112))

    return types.float32(types.uint16), generate


@compiled
def product(left, num_rows, left_step, matrix, layout, num_columns, inner, add, out, out_step):
    """`out = left @ matrix.T + add * out`, all three float32 given by address; steps are entries a row."""
    step = inner if layout == TRANSPOSED else num_columns
    _sgemm(BY_ROWS, AS_IS, layout, num_rows, num_columns, inner, left, left_step, matrix, step, add, out, out_step)


@compiled
def dot(x, y):
    total = _F32(0)
    for i in range(len(x)):
        total += x[i] * y[i]
    return total


@compiled
def _dot_of_row(x, matrix, layout, row):
    """The product of a vector with a row of a matrix of weights."""
    size, total = len(x), _F32(0)
    if layout == TRANSPOSED:
        return dot(x, carray(_floats(matrix + 4 * size * row), (size,)))
    weights = carray(_halves(matrix + 2 * size * row), (size,))
    if layout == BFLOAT16:
        for i in range(size):
            total += x[i] * _from_bfloat16(weights[i])
    else:
        for i in range(size):
            total += x[i] * _from_float16(weights[i])
    return total


@compiled
def _widen(matrix, layout, first, wide):
    """Entries of a 16-bit matrix from `first` on, in float32."""
    weights = carray(_halves(matrix + 2 * first), (len(wide),))
    if layout == BFLOAT16:
        for i in range(len(wide)):
            wide[i] = _from_bfloat16(weights[i])
    else:
        for i in range(len(wide)):
            wide[i] = _from_float16(weights[i])


@compiled
def _multiply_part(job, thread, num_threads):
    """What falls to one thread: some rows of the matrix. `job` is that of `multiply`."""
    left, num_rows, inner, matrix, layout, size, add, out = job
    first, end = thread * size // num_threads, (thread + 1) * size // num_threads
    if num_rows <= FEW_ROWS:
        left_TI = carray(_floats(left), (num_rows, inner))
        out_TO = carray(_floats(out), (num_rows, size))
        for row in range(first, end):
            for index in range(num_rows):
                value = _dot_of_row(left_TI[index], matrix, layout, row)
                out_TO[index, row] = out_TO[index, row] + value if add else value
        return
    wide = np.empty(0 if layout == TRANSPOSED else BLOCK * inner, dtype=_F32)
    for row in range(first, end, BLOCK):
        count, block = min(BLOCK, end - row), matrix + 4 * inner * row
        if layout != TRANSPOSED:
            _widen(matrix, layout, inner * row, wide[: count * inner])
            block = np.int64(wide.ctypes.data)
        product(left, num_rows, inner, block, TRANSPOSED, count, inner, _F32(add), out + 4 * row, size)


def _share(address):
    numbers = carray(_numbers(address), (8,))
    _multiply_part(_job(numbers), _thread(), _num_threads())


@compiled
def _job(numbers):
    return numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6], numbers[7]


@compiled
def multiply(left_TI, place, add, out_TO):
    """`out = left @ matrix.T + add * out` for a matrix of weights, given by its address and layout; `add` is 0 or 1."""
    (num_rows, inner), size, (matrix, layout) = left_TI.shape, out_TO.shape[1], place
    if layout == AS_IS:
        left, out = left_TI.ctypes.data, out_TO.ctypes.data
        product(left, num_rows, inner, matrix, layout, size, inner, add, out, size)
        return
    numbers, num_threads = np.empty(8, dtype=np.int64), _most_threads()
    numbers[0], numbers[1], numbers[2] = left_TI.ctypes.data, num_rows, inner
    numbers[3], numbers[4], numbers[5] = matrix, layout, size
    numbers[6], numbers[7] = add, out_TO.ctypes.data
    if num_threads == 1 or num_rows * inner * size < WORTH_SHARING:
        _multiply_part(_job(numbers), 0, 1)
    else:
        _parallel(_address_of_share(), numbers.ctypes.data, num_threads, 0)


def multiply_tensors(left_TI: Tensor, matrix_OI: Tensor) -> Tensor:
    """`multiply` for tensors, [T, O]."""
    compile_products()  # once; a model with experts has no compiled forward that does it
    out_TO = torch.empty(len(left_TI), len(matrix_OI))
    multiply(left_TI.contiguous().numpy(), np.array(place_of(matrix_OI), dtype=np.intp), SET, out_TO.numpy())
    return out_TO


def place_of(matrix: Tensor) -> tuple[int, int]:
    """The address and the layout of a matrix; the model keeps the matrix."""
    if matrix.dtype in LAYOUTS:
        assert matrix.is_contiguous()
        return matrix.data_ptr(), LAYOUTS[matrix.dtype]
    layout = AS_IS if matrix.stride(0) == 1 and matrix.shape[0] > 1 else TRANSPOSED
    assert (matrix.t() if layout == AS_IS else matrix).is_contiguous()
    return matrix.data_ptr(), layout


@cache
def compile_products() -> Callable[..., None]:
    """Compiles `multiply`, or loads the code that a former process compiled; returns what each thread calls."""
    assert obstacle() is None  # which makes the library known, too
    part = numba.cfunc(types.void(types.uintp), cache=True)(_share)
    binding.add_symbol(_SHARE, part.address)
    rows, place = types.Array(types.float32, 2, "C"), types.Array(types.int64, 1, "C")
    multiply.compile((rows, place, types.float32, rows))
    return part  # whose code lives as long as it does
