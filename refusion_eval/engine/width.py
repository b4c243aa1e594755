"""The cost of forwards on this device: their time by width, the bytes that they read, and memory for their cache."""

import math
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from refusion_eval.engine.readout import PackedRead, ReadPlan, hidden_of
from refusion_eval.engine.recorded import RecordedForwards
from refusion_eval.models.attention import Backend
from refusion_eval.models.cache import KVCache
from refusion_eval.models.config import ModelConfig
from refusion_eval.models.transformer import Transformer
from refusion_eval.types import Forward, Read, causal

FloatArray = npt.NDArray[np.float64]

WIDTHS = (1, 8, 16, 32, 64, 128, 256)
RECORDED_WIDTHS = (*WIDTHS, 384, 512)  # where rows cost less, decoders ask for more of them
CONTEXT = 128
NUM_ROUNDS = 5
MAX_SECONDS = 10.0  # a wider forward is not timed once this is spent
WORTH_KEEPING = 1.1  # a forward that takes at most this multiple of one of a single row counts as free

NUM_COPIES = 5
COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}

# While a buffer grows, half of the old one is held next to the new one, which is at least as large.
USABLE_SHARE = 0.8
CPU_SHARE = 0.25  # of the memory that is free when a batch begins
CUDA_RESERVE = 2 * 2**30  # for the intermediate tensors of a forward


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class WidthCost(NamedTuple):
    """The width curve as a hinge: flat up to `free_rows`, then `row_cost` times the flat part for each further row."""

    free_rows: int
    row_cost: float


# By kind of device, so that equal settings make equal forwards on every machine. The CPU's is that of the embedded
# family, measured with one thread; CUDA's is an estimate for an 8B model in bfloat16 on an H100.
SHIPPED_COSTS = {"cpu": WidthCost(0, 0.08), "cuda": WidthCost(0, 0.002)}


@torch.inference_mode()
def time_forwards(
    model: Transformer,
    attention: Backend,
    widths: Sequence[int] = WIDTHS,
    context: int = CONTEXT,
    num_rounds: int = NUM_ROUNDS,
    max_seconds: float = MAX_SECONDS,
    recorded: RecordedForwards | None = None,
) -> dict[int, list[float]]:
    """Times causal forwards after some committed rows, output head included; returns width -> seconds of each forward.

    Args:
        context: committed rows in the first round, one more in each further one: in a decoding no length comes twice.
        max_seconds: once spent, rounds stop and wider forwards are left out; the first two widths are always timed.
    """
    # Widths are interleaved in rounds, so that a change of the clock rate touches all of them.
    if recorded is not None:
        recorded.reserve(context + num_rounds + max(widths))
        recorded.prepare()
    started = time.perf_counter()
    cache = KVCache(model.config, 1, context + num_rounds + max(widths), model.dtype, model.device)
    seconds: dict[int, list[float]] = {}
    for width in widths:
        if len(seconds) >= 2 and time.perf_counter() - started > max_seconds:
            break
        _time_forward(model, cache, attention, width, context, recorded)  # untimed: it includes one-off costs
        seconds[width] = []
    for number in range(1, num_rounds + 1):
        for width, times in seconds.items():
            times.append(_time_forward(model, cache, attention, width, context + number, recorded))
        if time.perf_counter() - started > max_seconds:
            break
    return seconds


def _time_forward(
    model: Transformer, cache: KVCache, attention: Backend, width: int, context: int, recorded: RecordedForwards | None
) -> float:
    positions = range(context, context + width)
    tokens = [row % model.config.vocab_size for row in range(width)]
    forward = Forward(tokens, positions, causal(width), (Read(range(width)),))
    plan = ReadPlan([PackedRead(read, 0) for read in forward.reads])
    if recorded is not None and recorded.serves([forward], plan):
        started = time.perf_counter()
        recorded.read([forward], plan, [context])
        return time.perf_counter() - started
    cache.lengths[0] = context
    cache.stage(0, width)
    synchronize(model.device)
    started = time.perf_counter()
    model.logits(hidden_of(model, cache, [forward], attention))
    synchronize(model.device)
    return time.perf_counter() - started


def fit(curve: dict[int, float]) -> WidthCost:
    """Fits a hinge to a curve, width -> seconds, of at least two widths."""
    widths = np.array(sorted(curve), dtype=float)
    seconds = np.array([curve[int(width)] for width in widths])
    free_rows = _last_free(widths, seconds)
    flat = seconds[widths <= max(free_rows, widths[0])].mean()
    extra = np.maximum(widths - free_rows, 0)
    # Least squares through the end of the flat part, rounded to one digit so that noise does not change it.
    slope = float((extra * (seconds / flat - 1)).sum() / (extra**2).sum()) if extra.any() else 0.0
    return WidthCost(int(free_rows), float(f"{max(slope, 0.0):.1g}"))


def _last_free(widths: FloatArray, seconds: FloatArray) -> float:
    """The widest forward that still takes about as long as one of a single row; 0 if only that one does."""
    free = widths[np.cumprod(seconds <= WORTH_KEEPING * seconds[0]).astype(bool)]
    return float(free[-1]) if len(free) > 1 else 0.0


def measure(model: Transformer, attention: Backend, recorded: RecordedForwards | None = None) -> WidthCost:
    """Times a few forwards and fits them; takes a second on a small model, some seconds on a large one."""
    widths = WIDTHS if recorded is None else RECORDED_WIDTHS
    times = time_forwards(model, attention, widths, recorded=recorded)
    return fit({width: statistics.median(seconds) for width, seconds in times.items()})


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the weights that every forward reads: all layers and the output head."""
    # Of the embedding only the rows of the tokens are read.
    hidden = config.hidden_size
    attention = 2 * hidden * (config.num_heads + config.num_kv_heads) * config.head_dim
    if config.qkv_bias:
        attention += (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    if config.qk_norm:
        attention += 2 * config.head_dim
    per_layer = attention + 3 * hidden * config.intermediate_size + 2 * hidden
    return (config.num_layers * per_layer + hidden + config.vocab_size * hidden) * dtype.itemsize


def cache_bytes_per_row(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one position over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def copy_bandwidth(device: torch.device) -> float:
    """Measured bytes per second of a large copy on this device, bytes read plus bytes written; the best of a few."""
    # Far more bytes than any cache holds.
    num_bytes = COPY_BYTES[device.type]
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(NUM_COPIES + 1):  # the first copy allocates the pages of the target
        synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * num_bytes / min(seconds[1:])


def default_budget(device: torch.device, config: ModelConfig, dtype: torch.dtype) -> int:
    """Default budget in bytes: the free memory, less a reserve for everything else."""
    if device.type != "cuda":
        return int(CPU_SHARE * _available_bytes())
    free, _ = torch.cuda.mem_get_info(device)
    # What torch's allocator keeps of freed tensors is in use for the driver, but free for the next tensors.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    # One sequence of the longest text may take of the reserve, as far as the memory goes: slow is better than refused.
    one_sequence = math.ceil((config.max_positions + 1) * cache_bytes_per_row(config, dtype) / USABLE_SHARE)
    return max(free - CUDA_RESERVE, min(one_sequence, free))


def _available_bytes() -> int:
    try:
        with open("/proc/meminfo") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux
        return 4 * 2**30


def rows_within(budget: int, config: ModelConfig, dtype: torch.dtype) -> int:
    """Cache rows, over all sequences of a batch, that fit a budget of bytes."""
    return int(USABLE_SHARE * budget) // cache_bytes_per_row(config, dtype)
