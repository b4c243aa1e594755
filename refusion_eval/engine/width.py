"""The width curve: how the time of a forward grows with its rows on this device, and the two numbers decoders need."""

import math
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from refusion_eval.engine.device import synchronize
from refusion_eval.engine.masks import attend_over
from refusion_eval.models.attention import Backend
from refusion_eval.models.cache import KVCache
from refusion_eval.models.transformer import Transformer
from refusion_eval.types import causal

FloatArray = npt.NDArray[np.float64]

WIDTHS = (1, 8, 16, 32, 64, 128, 256)
CONTEXT = 128
NUM_ROUNDS = 5
MAX_SECONDS = 10.0  # a wider forward is not timed once this is spent
ATTENTION_WIDTHS = (1, 32, 256)
ATTENTION_CONTEXT = 1024
WORTH_KEEPING = 1.1  # a forward that takes at most this multiple of one of a single row counts as free


class WidthCost(NamedTuple):
    """The width curve as a hinge: flat up to `free_rows`, then `row_cost` times the flat part for each further row."""

    free_rows: int
    row_cost: float


@torch.inference_mode()
def time_forwards(
    model: Transformer,
    attention: Backend,
    widths: Sequence[int] = WIDTHS,
    context: int = CONTEXT,
    num_rounds: int = NUM_ROUNDS,
    max_seconds: float = MAX_SECONDS,
) -> dict[int, list[float]]:
    """Times causal forwards after some committed rows, output head included, with the widths interleaved in rounds.

    Args:
        model: the transformer.
        attention: the backend.
        widths: rows of the forwards, ascending.
        context: committed rows.
        num_rounds: timed forwards of each width, after one that is not timed.
        max_seconds: once spent, rounds stop and wider forwards are left out; the first two widths are always timed.

    Returns:
        Width -> seconds of each timed forward.
    """
    started = time.perf_counter()
    cache = KVCache(model.config, 1, context + max(widths), model.dtype, model.device)
    cache.lengths[0] = context
    seconds: dict[int, list[float]] = {}
    for width in widths:
        if len(seconds) >= 2 and time.perf_counter() - started > max_seconds:
            break
        _time_forward(model, cache, attention, width, context)  # untimed: it includes one-off costs
        seconds[width] = []
    for _ in range(num_rounds):
        for width, times in seconds.items():
            times.append(_time_forward(model, cache, attention, width, context))
        if time.perf_counter() - started > max_seconds:
            break
    return seconds


def _time_forward(model: Transformer, cache: KVCache, attention: Backend, width: int, context: int) -> float:
    tokens_T = torch.arange(width, device=model.device) % model.config.vocab_size
    positions_T = torch.arange(context, context + width, device=model.device)
    cache.stage(0, width)
    synchronize(model.device)
    started = time.perf_counter()
    hidden_TC = model.hidden(tokens_T, positions_T, context + width - 1, attend_over(cache, [causal(width)], attention))
    model.logits(hidden_TC)
    synchronize(model.device)
    return time.perf_counter() - started


def fit(curve: dict[int, float]) -> WidthCost:
    """Fits a hinge to a curve; its numbers are rounded so that noise does not change them.

    Args:
        curve: width -> seconds; at least two widths.
    """
    widths = np.array(sorted(curve), dtype=float)
    seconds = np.array([curve[int(width)] for width in widths])
    free_rows = _last_free(widths, seconds)
    flat = seconds[widths <= max(free_rows, widths[0])].mean()
    extra = np.maximum(widths - free_rows, 0)
    slope = float((extra * (seconds / flat - 1)).sum() / (extra**2).sum()) if extra.any() else 0.0
    return WidthCost(int(free_rows), float(f"{max(slope, 0.0):.1g}"))


def _last_free(widths: FloatArray, seconds: FloatArray) -> float:
    """The widest forward that still takes about as long as one of a single row; 0 if only that one does."""
    free = widths[np.cumprod(seconds <= WORTH_KEEPING * seconds[0]).astype(bool)]
    return float(free[-1]) if len(free) > 1 else 0.0


def measure(model: Transformer, attention: Backend) -> WidthCost:
    """Times a few forwards and fits them; takes a second on a small model, some seconds on a large one."""
    times = time_forwards(model, attention)
    return fit({width: statistics.median(seconds) for width, seconds in times.items()})


def fastest_backend(model: Transformer, backends: Sequence[Backend]) -> Backend:
    """The backend whose forwards of different widths take the least time on this device.

    Args:
        model: the transformer.
        backends: backends that work here; the first one wins among equally fast ones.
    """
    costs: list[float] = []
    for backend in backends:
        times = time_forwards(model, backend, ATTENTION_WIDTHS, min(ATTENTION_CONTEXT, model.config.max_positions // 2))
        costs.append(math.fsum(math.log(statistics.median(seconds)) for seconds in times.values()))
    return backends[costs.index(min(costs))]
