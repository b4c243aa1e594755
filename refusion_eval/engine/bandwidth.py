"""Bytes that a forward reads, and the measured memory bandwidth of the device; their ratio is its utilisation."""

import time

import torch

from refusion_eval.engine.device import synchronize
from refusion_eval.models.config import ModelConfig

NUM_COPIES = 5
COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the weights that every forward reads: all layers and the output head; the embedding is only looked up.

    Args:
        config: shapes of the checkpoint.
        dtype: dtype of the weights.
    """
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
    """Measured bytes per second of a large copy on this device, bytes read plus bytes written; the best of a few.

    The buffers are far larger than any cache, and are freed afterwards. Takes a fraction of a second.
    """
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
