"""How the time of a forward on this device grows with its rows."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from refusion_eval.engine.readout import ReadPlan, hidden_of
from refusion_eval.engine.recorded import RecordedForwards
from refusion_eval.errors import ConfigError
from refusion_eval.models.attention import Backend
from refusion_eval.models.cache import KVCache
from refusion_eval.models.device import seconds_of_calls, synchronize
from refusion_eval.models.transformer import Transformer
from refusion_eval.types import Forward, Read, causal

WIDTHS = (1, 8, 16, 32, 64, 128, 256)
RECORDED_WIDTHS = (*WIDTHS, 384, 512)  # where rows cost less, decoders ask for more of them
NUM_REPLAYS = {"cpu": 1, "cuda": 20}  # in a row: starting and awaiting them is a small part of their time
WORTH_KEEPING = 1.1  # a forward that takes at most this multiple of the time of one row counts as free


class WidthCost(NamedTuple):
    """The width curve as a hinge: flat up to `free_rows`, then `row_cost` times the flat part for each further row."""

    free_rows: int
    row_cost: float


class LoadCurve:
    """Seconds of a model call by its rows, from which rows of a batch are priced by the load of the whole call."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        rows = sorted(seconds)
        if len(rows) < 2 or rows[0] != 1:
            raise ConfigError(f"a curve of {rows} rows; it needs the seconds of 1 row and of more")
        self._rows = np.array(rows, dtype=float)
        # A wider call never counts as faster, so that no row has a price below zero.
        self._seconds = np.maximum.accumulate([seconds[number] for number in rows])

    def row_cost(self, num_rows: int, num_requests: int) -> float:
        """What a further row adds to a call, in units of what one more forward of one of its requests costs at least.

        A forward that one of n requests saves makes its batch 1 / n of a call of one row shorter, not a whole call.
        """
        # Beyond the curve, as its last two points go on.
        place = min(int(np.searchsorted(self._rows, num_rows, side="right")), len(self._rows) - 1) - 1
        (left, right), (first, last) = self._rows[place : place + 2], self._seconds[place : place + 2]
        return num_requests * float((last - first) / (right - left)) / float(self._seconds[0])


# By kind of device, so that equal settings make equal forwards on every machine. The CPU's is that of the embedded
# family, measured with one thread. CUDA's is that of an 8B model in bfloat16: on an H200, 64 rows took 14 % longer than
# one, and 128 rows 27 % (results/gpu/h200).
SHIPPED_COSTS = {"cpu": WidthCost(0, 0.08), "cuda": WidthCost(0, 0.002)}


@torch.inference_mode()
def time_forwards(
    model: Transformer,
    attention: Backend,
    widths: Sequence[int] = WIDTHS,
    context: int = 128,
    num_rounds: int = 5,
    max_seconds: float = 10.0,  # a wider forward is not timed once they are spent
    recorded: RecordedForwards | None = None,
) -> dict[int, list[float]]:
    """Times causal forwards after `context` committed rows, output head included: width -> seconds of each forward."""
    # Widths are interleaved in rounds, so that a change of the clock rate touches all of them. Each round has one
    # committed row more: in a decoding no length comes twice. Once the time is spent, only two widths are sure.
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


@torch.inference_mode()
def time_replays(
    model: Transformer, recorded: RecordedForwards, widths: Sequence[int], context: int, num_rounds: int = 7
) -> dict[int, float]:
    """Median seconds of recorded forwards on the device alone, by width; it repeats them without the host between."""
    seconds = {}
    for width in widths:
        replay = replayed(model, recorded, width, context)
        seconds[width] = statistics.median(
            seconds_of_calls(replay, model.device, num_rounds, NUM_REPLAYS[model.device.type])
        )
    return seconds


def replayed(model: Transformer, recorded: RecordedForwards, width: int, context: int) -> Callable[[], None]:
    """Makes a recorded forward after `context` rows; returns what repeats it, until another forward is made."""
    recorded.reserve(context + width)
    recorded.prepare()
    forward = _forward(model, width, context)
    if width > RECORDED_WIDTHS[-1] or recorded.read([forward], ReadPlan.of([forward]), [context]) is None:
        raise ConfigError(f"a forward of {width} rows is not recorded; those of up to {RECORDED_WIDTHS[-1]} are")
    return recorded.replay


def _forward(model: Transformer, width: int, context: int) -> Forward:
    tokens, positions = [row % model.config.vocab_size for row in range(width)], range(context, context + width)
    return Forward(tokens, positions, causal(width), (Read(range(width)),))


def _time_forward(
    model: Transformer, cache: KVCache, attention: Backend, width: int, context: int, recorded: RecordedForwards | None
) -> float:
    forward = _forward(model, width, context)
    plan = ReadPlan.of([forward])
    started = time.perf_counter()
    if recorded is not None and recorded.read([forward], plan, [context]) is not None:
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
    # The widest forward that still takes about as long as a forward of a single row; 0 if no other does.
    free = widths[np.cumprod(seconds <= WORTH_KEEPING * seconds[0]).astype(bool)]
    free_rows = free[-1] if len(free) > 1 else 0.0
    flat = seconds[widths <= max(free_rows, widths[0])].mean()
    extra = np.maximum(widths - free_rows, 0)
    # Least squares through the end of the flat part, rounded to one digit so that noise does not change it.
    slope = float((extra * (seconds / flat - 1)).sum() / (extra**2).sum()) if extra.any() else 0.0
    return WidthCost(int(free_rows), float(f"{max(slope, 0.0):.1g}"))


def measure(model: Transformer, attention: Backend, recorded: RecordedForwards | None = None) -> WidthCost:
    # Takes a second on a small model, some seconds on a large model.
    times = time_forwards(model, attention, WIDTHS if recorded is None else RECORDED_WIDTHS, recorded=recorded)
    return fit({width: statistics.median(seconds) for width, seconds in times.items()})
