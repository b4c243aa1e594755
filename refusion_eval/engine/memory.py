"""Memory budget for the keys and values of a batch."""

import torch

from refusion_eval.engine.bandwidth import cache_bytes_per_row
from refusion_eval.models.config import ModelConfig

# While a buffer grows, half of the old one is held next to the new one, which is at least as large.
USABLE_SHARE = 0.8
CPU_SHARE = 0.25  # of the memory that is free when a batch begins
CUDA_RESERVE = 2 * 2**30  # for the intermediate tensors of a forward


def default_budget(device: torch.device) -> int:
    """Default budget in bytes: the free memory, less a reserve for everything else."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(free - CUDA_RESERVE, 0)
    return int(CPU_SHARE * _available_bytes())


def _available_bytes() -> int:
    try:
        with open("/proc/meminfo") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux
        return 4 * 2**30


def rows_within(budget: int, config: ModelConfig, dtype: torch.dtype) -> int:
    """Cache rows, over all sequences of a batch, that fit a budget of bytes."""
    return int(USABLE_SHARE * budget) // cache_bytes_per_row(config, dtype)
