"""Compiles every kernel for the GPUs of a list of compute capabilities, without a GPU; prints what each needs.

For each: its registers, the bytes of a thread's variables that did not fit in them and lie in memory, and those
instructions that only some kernels have, by what they do.

python compile_kernels.py 80 90 100
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from refusion_eval.models import kernels

HEADS = {"NUM_HEADS": 32, "NUM_GROUPS": 8, "HEAD": 128}
ATTENTION = {"NUM_HEADS": 32, "SHARED": 4, "HEAD": 128, "BLOCK_N": kernels.KEYS_A_STEP[2], "BLOCK_D": 128}
EXPERTS = {"BLOCK_N": kernels.EXPERT_COLUMNS, "BLOCK_K": kernels.EXPERT_ENTRIES[2], "BLOCK_E": 128}
# Kernel, its constants at the shape of an 8B model, and warps.
VARIANTS = [
    (kernels.add_rms_norm_kernel, {"BLOCK": 4096}, 8),
    (kernels.rotate_and_store_kernel, {**HEADS, "BLOCK": 128, "HAS_NORM": True}, 1),
    (kernels.rotate_and_store_kernel, {**HEADS, "BLOCK": 128, "HAS_NORM": False}, 1),
    (kernels.swiglu_kernel, {"BLOCK": 1024}, 4),
    (kernels.attend_kernel, {**ATTENTION, "BLOCK_M": 16, "SPLITS": 16}, kernels.NUM_WARPS[2][16]),
    (kernels.attend_kernel, {**ATTENTION, "BLOCK_M": 32, "SPLITS": 16}, kernels.NUM_WARPS[2][32]),
    (kernels.attend_kernel, {**ATTENTION, "BLOCK_M": 64, "SPLITS": 8}, kernels.NUM_WARPS[2][64]),
    (kernels.attend_kernel, {**ATTENTION, "BLOCK_M": 64, "SPLITS": 1}, kernels.NUM_WARPS[2][64]),
    *((kernels.expert_up_kernel, {**EXPERTS, "NUM_CHOSEN": 8, "BLOCK_M": rows}, 4) for rows in (16, 64)),
    *((kernels.expert_down_kernel, {**EXPERTS, "BLOCK_M": rows}, 4) for rows in (16, 64)),
    (kernels.join_splits_kernel, {"HEAD": 128, "BLOCK": 128, "SPLITS": 16}, 1),
    (kernels.read_part_kernel, {"BLOCK": 8192}, 8),
    (kernels.read_whole_kernel, {"SPLITS": kernels.VOCABULARY_SPLITS}, 1),
]
# What an instruction of the machine code does.
INSTRUCTIONS = {
    "loads 16 bytes": r"LDG\.E\.128|LDGSTS\.E\.BYPASS\.128",
    "loads 2 bytes": r"LDG\.E\.U16",
}
INTEGERS = ("positions", "places", "bits", "rows", "given", "suppressed", "order", "ends", "block_ends")
FLOATS = ("tables", "parts", "log_sums", "shares")
NUMBERS = {"eps": "fp32", "scale": "fp32"}
POINTERS = (
    "x",
    "added",
    "weight",
    "total",
    "normed",
    "qkv",
    "norm",
    "keys",
    "values",
    "queries",
    "gate_up",
    "down",
    "inner",
    "logits",
)


def signature(kernel, constants):
    """Types of the arguments of a kernel in a bfloat16 model."""
    of_readout = kernel is kernels.read_whole_kernel
    of_parts = kernel is kernels.attend_kernel and constants["SPLITS"] > 1
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in INTEGERS:
            types[name] = "*i64"
        elif name in FLOATS or (name == "out" and (of_readout or of_parts)):
            types[name] = "*fp32"
        elif name in POINTERS or name == "out":
            types[name] = "*bf16"
        else:
            types[name] = NUMBERS.get(name, "i32")
    return types


def aligned(kernel, types):
    """Tells the compiler what holds of every tensor: addresses, strides and widths are multiples of 16."""
    whole = [
        index
        for index, name in enumerate(kernel.arg_names)
        if types[name][0] == "*" or name.endswith(("stride", "share", "width"))
    ]
    return {(index,): [["tt.divisibility", 16]] for index in whole}


def inspect(cubin):
    """Registers of a thread, its bytes in memory, and what its instructions do, as NVIDIA's tools report them."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([tools / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    deeds = [deed for deed, instruction in INSTRUCTIONS.items() if re.search(instruction, code)]
    return *re.search(r"REG:(\d+) STACK:(\d+)", usage).groups(), deeds


def main(capabilities):
    """Compiles; a kernel that does not compile ends the program with its error."""
    for capability in capabilities:
        for kernel, constants, num_warps in VARIANTS:
            types = signature(kernel, constants)
            source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned(kernel, types))
            target = GPUTarget("cuda", int(capability), 32)
            compiled = compile_kernel(source, target=target, options={"num_warps": num_warps, "num_stages": 2})
            registers, spilled, deeds = inspect(compiled.asm["cubin"])
            shared = f"{compiled.metadata.shared} bytes shared"
            needs = f"{registers} registers, {spilled} spilled, {shared}: {', '.join(deeds)}"
            rows = constants.get("BLOCK_M", 1)
            print(capability, kernel.fn.__name__, f"{rows} rows", needs, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
