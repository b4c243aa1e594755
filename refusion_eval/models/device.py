"""The device of a model: how it is chosen, which attention runs on it, its memory and its energy."""

import contextlib
import importlib
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, get_args

import torch

from refusion_eval.errors import ConfigError
from refusion_eval.models import attention
from refusion_eval.models.attention import Backend
from refusion_eval.models.checkpoint import ModelConfig

DEVICE_FILES = Path("/dev")
BACKENDS: tuple[Backend, ...] = get_args(Backend)

COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}

# While a buffer grows, half of the old buffer is held next to the new buffer, which is at least as large.
USABLE_SHARE = 0.8
CPU_SHARE = 0.25  # of the memory that is free when a batch begins
CUDA_RESERVE = 2 * 2**30  # for the intermediate tensors of a forward


def choose_device(name: str) -> torch.device:
    """The device of a name, "auto" being CUDA where there is one; prepares torch for a CUDA device."""
    if name == "auto":
        if not torch.cuda.is_available() and (gpu := unusable_gpu()):
            raise ConfigError(
                f"this machine has a GPU ({gpu}), which torch {torch.__version__} (CUDA {torch.version.cuda}) cannot "
                "use: its driver may be too old for this build, or the build is for CPUs. Set REFUSION_EVAL_TORCH_INDEX"
                " to an index with builds for this driver (`default`: that of pip), remove .venv and run bash eval.sh "
                "--setup. To use the CPU, give device=cpu, or hide the GPU with CUDA_VISIBLE_DEVICES=''"
            )
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"(cpu|cuda)(:\d{1,3})?", name):
        raise ConfigError(f"device={name!r} is unknown; choose auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda":
        if (device.index or 0) >= (number := torch.cuda.device_count()):
            advice = "give device=cpu, a number that `refusion-eval doctor` lists, or PyTorch a build with CUDA"
            raise ConfigError(f"device={name!r}, but torch sees {number} CUDA devices here; {advice}")
        # On compute capability 9 and above torch may prefer cuDNN for bfloat16. It builds a plan for every new pair of
        # query and key lengths, which takes tens of milliseconds and is never freed; here nearly every forward is one.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


@contextlib.contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if number is None or number == before:
        yield
        return
    # The number belongs to the whole process, where other models and the user's own code compute too: it is restored.
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_backend(name: str, dtype: torch.dtype, device: torch.device, *, has_experts: bool = False) -> Backend:
    if name not in ("auto", *BACKENDS):
        raise ConfigError(f"attention={name!r} is unknown; choose auto, {', '.join(BACKENDS)}")
    if name == "auto":
        # The same for every decoder, so that all are timed on the same kernels: flash-attn serves causal forwards
        # alone, which are all of an autoregressive decoder and few of the others.
        return "sdpa" if has_experts or _obstacle("native", dtype, device) else "native"
    backend = cast("Backend", name)
    obstacle = _obstacle(backend, dtype, device)
    if backend == "native" and has_experts:
        # A forward of experts takes most of its time for products, which are the same functions either way.
        obstacle = "compiled forwards have no experts"
    if obstacle:
        raise ConfigError(f"attention={name!r} is not possible: {obstacle}; use attention='sdpa'")
    return backend


def _obstacle(backend: Backend, dtype: torch.dtype, device: torch.device) -> str | None:
    if backend == "native":
        if device.type != "cpu":
            return f"compiled forwards are for a CPU, not for {device.type}"
        from refusion_eval.models.products import obstacle  # numba takes most of a second to import

        return obstacle()
    if backend == "sdpa":
        return None
    if attention.flash_attn_func is None:
        return "flash-attn is not installed (in a checkout: pip install -e '.[flash]')"
    if device.type != "cuda":
        return f"flash-attn needs a CUDA device, not {device.type}"
    return None if dtype in (torch.bfloat16, torch.float16) else f"flash-attn needs bfloat16 or float16, not {dtype}"


def unusable_gpu() -> str | None:
    """Name of an NVIDIA GPU that this process may use by its environment; asked where torch finds none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "none", "NoDevFiles"):
        return None
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "-L"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return next((line.partition(" (")[0] for line in answer.stdout.splitlines() if line.startswith("GPU ")), None)
    return next((str(path) for path in sorted(DEVICE_FILES.glob("nvidia[0-9]*"))), None)


def energy_counter(device: torch.device) -> Callable[[], float] | None:
    """A function that reads the GPU's energy counter (J), or None."""
    # The counter is the device's own (NVML, by UUID; GPUs have it since Volta) and needs the package nvidia-ml-py. It
    # counts the whole GPU, whoever uses it, and advances in steps of some tens of milliseconds: the energy of a short
    # response is rough, the mean of many is not.
    if device.type != "cuda":
        return None
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError:  # an older GPU, a part of one (MIG), or no rights
        return None
    return lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000  # of millijoules


def process_memory(*, peak: bool = False) -> int | None:
    """Bytes of memory that this process has, or the most that it had; None where the system does not tell."""
    with contextlib.suppress(OSError), open("/proc/self/status") as lines:
        name = "VmHWM:" if peak else "VmRSS:"
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith(name)), None)
    return None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def weight_bytes(config: ModelConfig, dtype: torch.dtype, num_rows: int = 1) -> int:
    """Bytes of the weights that a forward reads: all layers and the output head.

    Of experts those of one row, or an estimate for more: as many as rows choose that choose at random.
    """
    hidden, heads, groups = config.hidden_size, config.num_heads, config.num_kv_heads
    attention = 2 * hidden * (heads + groups) * config.head_dim
    layout, experts = config.family_layout, config.experts
    attention += layout.qkv_bias * (heads + 2 * groups) * config.head_dim + layout.qk_norm * 2 * config.head_dim
    num_dense = config.num_layers * (attention + 2 * hidden)
    num_sparse = 0 if experts is None else len(experts.layers)
    num_dense += (config.num_layers - num_sparse) * 3 * hidden * config.intermediate_size
    of_experts = 0.0  # in bytes
    if experts is not None:
        num_dense += num_sparse * 3 * hidden * experts.shared_width
        # A router of sigmoids is float32, and so is its bias.
        router = (hidden + 1) * 4 if experts.score == "sigmoid" else hidden * dtype.itemsize
        of_experts = num_sparse * (
            experts.num_experts * router + experts.num_read(num_rows) * expert_bytes(config, dtype)
        )
    # Of the embedding only the rows of the tokens are read.
    return (num_dense + hidden + config.vocab_size * hidden) * dtype.itemsize + round(of_experts)


def expert_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one expert of one layer; 0 without experts."""
    return 0 if config.experts is None else 3 * config.hidden_size * config.experts.width * dtype.itemsize


def cache_bytes_per_row(config: ModelConfig, dtype: torch.dtype) -> int:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def seconds_of_calls(
    call: Callable[[], Any], device: torch.device, num_times: int = 7, calls_a_time: int = 1
) -> list[float]:
    """Seconds of a call, as often as asked for; each is the mean of so many calls in a row."""
    # A GPU takes the times itself: for the host, starting and awaiting a copy takes 2% of its time.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_times + 1)] if device.type == "cuda" else []
    times = []
    for number in range(num_times + 1):
        if marks:
            marks[number].record(torch.cuda.current_stream(device))
        times.append(time.perf_counter())
        for _ in range(calls_a_time if number < num_times else 0):
            call()
    synchronize(device)
    seconds = [a.elapsed_time(b) / 1000 for a, b in pairwise(marks)] or [b - a for a, b in pairwise(times)]
    return [taken / calls_a_time for taken in seconds]


def copy_bandwidth(device: torch.device) -> float:
    """Measured bytes per second of a large copy on this device, bytes read plus bytes written; the best of a few."""
    # Far more bytes than any cache holds.
    num_bytes = COPY_BYTES[device.type]
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # The first copy allocates the pages of the target.
    return 2 * num_bytes / min(seconds_of_calls(lambda: target.copy_(source), device)[1:])


def read_bandwidth(device: torch.device) -> float:
    """Measured bytes per second of reading alone: of a sum, or of a matrix times a vector if that reads faster."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    matrix = torch.ones(COPY_BYTES[device.type] // (4096 * dtype.itemsize), 4096, dtype=dtype, device=device)
    vector, numbers = matrix[0].clone(), matrix.view(torch.float32)
    best = (min(seconds_of_calls(call, device)[1:]) for call in (numbers.sum, lambda: torch.mv(matrix, vector)))
    return matrix.nbytes / min(best)


def default_budget(device: torch.device, config: ModelConfig, dtype: torch.dtype) -> int:
    """Default budget in bytes: the free memory, less a reserve for everything else."""
    if device.type != "cuda":
        try:
            with open("/proc/meminfo") as lines:
                kibibytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        except (OSError, StopIteration):  # not Linux
            kibibytes = 4 * 2**20
        return int(CPU_SHARE * 1024 * kibibytes)
    free, _ = torch.cuda.mem_get_info(device)
    # What torch's allocator keeps of freed tensors is in use for the driver, but free for the next tensors.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    # One sequence of the longest text may take of the reserve, as far as the memory goes: slow is better than refused.
    one_sequence = math.ceil((config.max_positions + 1) * cache_bytes_per_row(config, dtype) / USABLE_SHARE)
    return max(free - CUDA_RESERVE, min(one_sequence, free))


def rows_within(budget: int, config: ModelConfig, dtype: torch.dtype) -> int:
    return int(USABLE_SHARE * budget) // cache_bytes_per_row(config, dtype)
