"""Compiles every kernel for the GPUs of a list of compute capabilities, without a GPU; prints what each needs.

For each: its registers, the bytes of a thread's variables that did not fit in them and lie in memory, and those
instructions that only some kernels have, by what they do.

python compile_kernels.py 80 90 100 86 89 120
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

from refusion_eval.models import attention_kernels, kernels, product_kernels

HEADS = {"NUM_HEADS": 32, "NUM_GROUPS": 8, "HEAD": 128, "EARLY": False}
ATTENTION = {"NUM_HEADS": 32, "SHARED": 4, "ROTATES": False, "HAS_NORM": True, "JOINS": False, "EARLY": False}
ATTENTION |= {"HEAD": 128, "BLOCK_D": 128, "BLOCK_N": attention_kernels.keys_a_step(2, 128)}
EXPERTS = {"BLOCK_N": kernels.EXPERT_COLUMNS, "BLOCK_K": kernels.EXPERT_ENTRIES[2], "BLOCK_E": 128}
SPLITS = {16: 16, 32: 16, 64: 8}  # of attention, by rows of a block


def norm(parts, early):
    return kernels.add_rms_norm_kernel, {"BLOCK": 4096, "PARTS": parts, "EARLY": early}, 8, 2


def attention(rows, capacity=4096, head=128, **more):
    sizes = {"HEAD": head, "BLOCK_D": head, "BLOCK_N": attention_kernels.keys_a_step(2, head)}
    constants = {**ATTENTION, "BLOCK_M": rows, "SPLITS": SPLITS[rows], **sizes, **more}
    stages = attention_kernels.num_stages(2, head, capacity)
    return attention_kernels.attend_kernel, constants, attention_kernels.NUM_WARPS[2][rows], stages


def product(kernel, rows, block_n, block_k, splits, warps, stages, gated=False, early=False):
    constants = {"KERNEL": kernel, "ROWS": rows, "BLOCK_N": block_n, "BLOCK_K": block_k, "SPLITS": splits}
    constants |= {"GATED": gated, "STEPS": product_kernels.PREFETCHED, "EARLY": early}
    return product_kernels.product_kernel, constants, warps, stages


# Own products: kernel, rows, columns and entries of a block, splits, warps, stages, and whether it is gated.
PRODUCTS = [
    ("row", 1, 8, 512, 2, 4, 4),
    ("row", 1, 4, 1024, 2, 4, 4),
    ("dot", 16, 32, 128, 2, 4, 6),
    ("dot", 16, 32, 256, 2, 4, 5),
    ("swapped", 16, 64, 128, 1, 4, 5),
    ("swapped", 64, 64, 128, 1, 4, 4),
    ("dot", 16, 32, 128, 1, 4, 4, True),
    ("row", 1, 8, 512, 1, 4, 3, True),
    ("swapped", 64, 64, 64, 1, 4, 5, True),
]
# Kernel, its constants at the shape of an 8B model, warps and stages.
VARIANTS = [
    *(norm(parts, early) for parts in (0, 2, 4) for early in (False, True)),
    *(
        (attention_kernels.rotate_and_store_kernel, {**HEADS, "BLOCK": 128, "HAS_NORM": has_norm}, 1, 2)
        for has_norm in (True, False)
    ),
    (kernels.swiglu_kernel, {"BLOCK": 1024, "EARLY": False}, 4, 2),
    *(attention(rows) for rows in (16, 32, 64)),
    attention(64, SPLITS=1),
    *(attention(rows, JOINS=True, ROTATES=rotates) for rows in (16, 32, 64) for rotates in (False, True)),
    attention(64, SPLITS=1, ROTATES=True),
    attention(16, JOINS=True, ROTATES=True, EARLY=True),
    *(attention(rows, capacity=32768, SPLITS=2 * SPLITS[rows]) for rows in (16, 32, 64)),
    *(attention(rows, head=head) for head in (64, 256) for rows in (16, 64)),
    *((kernels.expert_up_kernel, {**EXPERTS, "NUM_CHOSEN": 8, "BLOCK_M": rows}, 4, 2) for rows in (16, 64)),
    *((kernels.expert_down_kernel, {**EXPERTS, "BLOCK_M": rows}, 4, 2) for rows in (16, 64)),
    (attention_kernels.join_splits_kernel, {"HEAD": 128, "BLOCK": 128, "SPLITS": 16, "EARLY": False}, 1, 2),
    (kernels.read_part_kernel, {"BLOCK": 8192}, 8, 2),
    (kernels.read_whole_kernel, {"SPLITS": kernels.VOCABULARY_SPLITS}, 1, 2),
    *(product(*tiles) for tiles in PRODUCTS),
    *(product(*tiles, early=True) for tiles in PRODUCTS),
]
SMALL_SHARED = ("86", "89", "120")  # of which only the shared memory that attention needs is of interest
# What an instruction of the machine code does.
INSTRUCTIONS = {
    "loads 16 bytes": r"LDG\.E\.(EF\.)?128|LDGSTS\.E\.(EF\.)?BYPASS\.128",
    "loads 2 bytes": r"LDG\.E\.U16",
    "mma": r"\bHMMA|UTC\w*MMA",
    "wgmma": r"HGMMA",
    "copies asynchronously": r"LDGSTS|UTMALDG",
    "waits": r"ACQBULK",
    "launches": r"PREEXIT",
    "prefetches": r"CCTL\.E\.PF",
}
COUNTERS = ("counters",)
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
    of_parts = kernel is product_kernels.product_kernel and constants["SPLITS"] > 1
    of_norm = kernel is kernels.add_rms_norm_kernel and constants["PARTS"] > 0
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in COUNTERS:
            types[name] = "*i32"
        elif name in INTEGERS:
            types[name] = "*i64"
        elif name in FLOATS or (name == "out" and (of_readout or of_parts)) or (name == "added" and of_norm):
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
        if types[name][0] == "*" or name.endswith(("stride", "share", "width", "num_columns"))
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
    before, wait, _ = code.partition("ACQBULK")  # for the kernel before
    if wait:
        deeds.append(f"{len(re.findall(r'LDG|STG', before))} accesses before it waits")
    return *re.search(r"REG:(\d+) STACK:(\d+)", usage).groups(), deeds


def main(capabilities):
    """Compiles; a kernel that does not compile ends the program with its error."""
    for capability in capabilities:
        for kernel, constants, num_warps, num_stages in VARIANTS:
            early = constants.get("EARLY", False)
            if early and int(capability) < 90:  # which launches no kernel early
                continue
            if capability in SMALL_SHARED and kernel is not attention_kernels.attend_kernel:
                continue
            types = signature(kernel, constants)
            source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned(kernel, types))
            options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": early}
            target = GPUTarget("cuda", int(capability), 32)
            compiled = compile_kernel(source, target=target, options=options)
            registers, spilled, deeds = inspect(compiled.asm["cubin"])
            shared = f"{compiled.metadata.shared} bytes shared"
            needs = f"{registers} registers, {spilled} spilled, {shared}: {', '.join(deeds)}"
            rows = constants.get("BLOCK_M", constants.get("ROWS", 1))
            print(capability, kernel.fn.__name__, f"{rows} rows", needs, f"({described(constants)})", flush=True)


def described(constants):
    """What tells variants of a kernel apart."""
    names = ("KERNEL", "BLOCK_N", "BLOCK_K", "SPLITS", "HEAD", "PARTS")
    flags = ("GATED", "ROTATES", "JOINS", "EARLY")
    sizes = [f"{name.lower()} {constants[name]}" for name in names if name in constants]
    return " ".join(sizes + [name.lower() for name in flags if constants.get(name)])


if __name__ == "__main__":
    main(sys.argv[1:])
