"""Products of float32 rows with a bfloat16 matrix on the matrix unit of a CPU (AMX), in the precision of float32.

A float32 number is the sum of three bfloat16 numbers, and the unit adds up products of bfloat16 numbers in float32,
where each product is exact. So the sum of three products is that of float32 but for the order of its terms. The unit
multiplies sixteen times as many numbers at a time as the vector unit does in float32, and it reads half the bytes.

The unit has eight tiles of 16 rows of 64 bytes. Here a tile holds 16 rows by 32 columns of the matrix, or 32 entries of
16 rows in pairs, or 16 by 16 sums.

Shapes: T rows, I columns of the matrix, O rows of the matrix and entries of a result.
"""

import ctypes
import platform

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from torch import Tensor

ROWS, ENTRIES = 16, 32  # of a tile
PARTS, TILES = 3, 4  # bfloat16 numbers of a float32 number; tiles of sums that are computed at once
COLUMNS = TILES * ROWS  # entries of a result that are computed at once
_LINE, _TILE_BYTES = 64, 1024  # bytes of a row of a tile, which is a line of the caches, and of a tile
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux on x86-64: arch/x86/include/uapi/asm/prctl.h

_F32, _U32 = np.float32, np.uint32
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_POINTER = _I8.as_pointer()
_ARRAY = types.float32[:, ::1]
_OPTIONS = {"cache": True, "nogil": True, "error_model": "numpy", "boundscheck": False}
_compile = numba.njit(**_OPTIONS)


# Whether the compiler writes code for the unit: it knows the processor, and keeps compiled code for each kind of it.
_IS_COMPILED = "+amx-bf16" in cpu_target.target_context.codegen().magic_tuple()[2]


def _may_use_unit() -> bool:
    """Asks the kernel to let this process use the unit."""
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


HAS_UNIT = _IS_COMPILED and platform.system() == "Linux" and _may_use_unit()


def _instruction(builder, name, *arguments):
    if not _IS_COMPILED:  # no product is called there
        return
    kinds = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kinds, f"llvm.x86.{name}"), arguments)


@intrinsic
def _configure(context, shapes):
    """Gives the tiles their shapes, from 64 bytes at an address."""

    def generate(context, builder, signature, arguments):
        _instruction(builder, "ldtilecfg", builder.inttoptr(arguments[0], _POINTER))
        return context.get_dummy_value()

    return types.void(types.uintp), generate


@intrinsic
def _release(context):
    """Ends the use of the tiles."""

    def generate(context, builder, signature, arguments):
        _instruction(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _multiply_tiles(context, matrix, step, parts, count, sums, is_first):
    """Sums of COLUMNS rows of a matrix times ROWS rows in PARTS parts each, [COLUMNS, ROWS].

    `step` is the number of bytes from one row of the matrix to the next, and `count` the number of tiles in a row. If
    `is_first` is true, the COLUMNS rows after these are fetched to the second cache, those of each tile in the order of
    their addresses: a few such streams are read faster from memory than the tiles would be.
    """

    def generate(context, builder, signature, arguments):
        matrix, step, parts, count, sums, is_first = arguments
        wide = ir.Constant(_I64, _LINE)
        kinds = ir.FunctionType(ir.VoidType(), [_POINTER, _I32, _I32, _I32])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [_POINTER], kinds)
        to_second_cache = [ir.Constant(_I32, number) for number in (0, 2, 1)]

        def tile(number):
            return ir.Constant(_I8, number)

        def at(base, *offsets):
            for offset in offsets:
                base = builder.add(base, offset if isinstance(offset, ir.Value) else ir.Constant(_I64, offset))
            return builder.inttoptr(base, _POINTER)

        for number in range(TILES):
            _instruction(builder, "tilezero", tile(number))
        with cgutils.for_range(builder, count) as loop:
            along = builder.mul(loop.index, wide)
            packed = builder.mul(loop.index, ir.Constant(_I64, PARTS * _TILE_BYTES))
            for part in range(PARTS):
                place = at(parts, packed, part * _TILE_BYTES)
                _instruction(builder, "tileloadd64", tile(TILES + 1 + part), place, wide)
            for number in range(TILES):
                first_row = builder.mul(step, ir.Constant(_I64, ROWS * number))
                _instruction(builder, "tileloadd64", tile(TILES), at(matrix, along, first_row), step)
                for part in range(PARTS):
                    _instruction(builder, "tdpbf16ps", tile(number), tile(TILES), tile(TILES + 1 + part))
                with builder.if_then(is_first):
                    next_row = builder.mul(step, ir.Constant(_I64, COLUMNS + ROWS * number))
                    share = builder.mul(along, ir.Constant(_I64, ROWS))
                    for line in range(ROWS):
                        builder.call(fetch, [at(matrix, next_row, share, line * _LINE), *to_second_cache])
        for number in range(TILES):
            _instruction(builder, "tilestored64", tile(number), at(sums, number * _TILE_BYTES), wide)
        return context.get_dummy_value()

    return types.void(*[types.uintp] * 5, types.boolean), generate


@intrinsic
def _transpose(context, source, source_step, target, target_step):
    """Transposes 16 by 16 numbers of 32 bits; a step is the number of bytes from one row to the next."""

    def generate(context, builder, signature, arguments):
        source, source_step, target, target_step = arguments
        size, vector = ROWS, ir.VectorType(_I32, ROWS)

        def place(base, step, row):
            address = builder.add(base, builder.mul(step, ir.Constant(_I64, row)))
            return builder.inttoptr(address, vector.as_pointer())

        rows = [builder.load(place(source, source_step, row), align=4) for row in range(size)]
        for distance in (8, 4, 2, 1):  # exchanges one bit of the row's number with one of the column's
            swapped = list(rows)
            for low in range(size):
                if low & distance:
                    continue
                high = low + distance
                kept = [column if not column & distance else size + column - distance for column in range(size)]
                moved = [column + distance if not column & distance else size + column for column in range(size)]
                for row, lanes in ((low, kept), (high, moved)):
                    mask = ir.Constant(ir.VectorType(_I32, size), lanes)
                    swapped[row] = builder.shuffle_vector(rows[low], rows[high], mask)
            rows = swapped
        for row in range(size):
            builder.store(rows[row], place(target, target_step, row), align=4)
        return context.get_dummy_value()

    return types.void(*[types.uintp] * 4), generate


@intrinsic
def _bits(context, value):
    """The bits of a float32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _I32)

    return types.uint32(types.float32), generate


@intrinsic
def _number(context, bits):
    """The float32 that has some bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@_compile
def _split(x, parts):
    """Splits each number into bfloat16 numbers that add up to it, the largest first."""
    for i in range(len(x)):
        rest = x[i]
        for part in range(PARTS):
            bits = _bits(rest)
            rounded = bits + _U32(0x7FFF) + ((bits >> _U32(16)) & _U32(1))
            parts[part, i] = rounded >> _U32(16)
            rest -= _number(rounded & _U32(0xFFFF0000))


@_compile
def _pack(left_TI, packed):
    """Splits rows and arranges them as tiles, [blocks of ROWS rows, tiles in a row, PARTS, ENTRIES / 2, ROWS]."""
    num_rows, inner = left_TI.shape
    split = np.zeros((ROWS, PARTS, inner), dtype=np.uint16)
    for block in range(len(packed)):
        for index in range(ROWS):
            if block * ROWS + index < num_rows:
                _split(left_TI[block * ROWS + index], split[index])
            else:
                split[index] = 0
        for tile in range(inner // ENTRIES):
            for part in range(PARTS):
                source = split.ctypes.data + 2 * (part * inner + tile * ENTRIES)
                _transpose(source, 2 * PARTS * inner, packed[block, tile, part].ctypes.data, 4 * ROWS)


@numba.njit(types.void(_ARRAY, types.intp, types.boolean, _ARRAY), **_OPTIONS)
def multiply(left_TI, matrix, add, out_TO):
    """`out = left @ matrix.T`, added to what is there where `add` is true; the rows of `left` and `out` are dense.

    The bfloat16 matrix [O, I] without gaps is given by its address; O is at least COLUMNS, and ENTRIES divides I.
    """
    num_rows, inner = left_TI.shape
    num_columns = out_TO.shape[1]
    packed = np.empty((-(-num_rows // ROWS), inner // ENTRIES, PARTS, ENTRIES // 2, ROWS), dtype=np.uint32)
    _pack(left_TI, packed)
    shapes = np.zeros(64, dtype=np.uint8)
    shapes[0] = 1  # the only palette; then bytes a row, in 16 bits each, and rows of each tile
    shapes[16:32:2] = 64
    shapes[48:56] = ROWS
    sums = np.empty((TILES, ROWS, ROWS), dtype=np.float32)
    turned = np.empty((ROWS, COLUMNS), dtype=np.float32)
    _configure(shapes.ctypes.data)
    for column in range(0, num_columns, COLUMNS):
        first = min(column, num_columns - COLUMNS)  # the last ones overlap those before
        for block in range(len(packed)):
            start = matrix + 2 * inner * first
            count, is_first = inner // ENTRIES, block == 0
            _multiply_tiles(start, 2 * inner, packed[block].ctypes.data, count, sums.ctypes.data, is_first)
            for tile in range(TILES):
                _transpose(sums[tile].ctypes.data, 4 * ROWS, turned[:, tile * ROWS :].ctypes.data, 4 * COLUMNS)
            for index in range(min(ROWS, num_rows - block * ROWS)):
                new, row = turned[index][column - first :], out_TO[block * ROWS + index][column:]
                for i in range(len(new)):
                    row[i] = row[i] + new[i] if add else new[i]
    _release()


def multiply_tensors(left_TI: Tensor, matrix_OI: Tensor) -> Tensor:
    """`multiply` for tensors, [T, O]."""
    out_TO = torch.empty(len(left_TI), len(matrix_OI))
    multiply(left_TI.contiguous().numpy(), matrix_OI.data_ptr(), False, out_TO.numpy())
    return out_TO
