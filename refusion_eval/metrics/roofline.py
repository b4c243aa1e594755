"""Model bandwidth utilisation (MBU): the share of the memory bandwidth that reading weights and cache takes.

One request at a time is bound by memory: every forward reads all weights once, and the keys and values of the rows in
the cache. MBU near 1 leaves nothing to gain but fewer forwards or smaller weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from refusion_eval.errors import DataError
from refusion_eval.metrics.bootstrap import Bootstrap, bootstrap, check_denominators, ratio_statistic
from refusion_eval.metrics.speed import Timing, total_tps
from refusion_eval.trace import ForwardDone, Trace


def bytes_read(trace: Trace, *, weight_bytes: float, cache_bytes_per_row: float) -> float:
    """Bytes one request has to read: for each forward the weights and the committed cache rows before it.

    Args:
        trace: events of the request.
        weight_bytes: bytes of the weights one forward reads (an embedding table that is only looked up does not count).
        cache_bytes_per_row: bytes of the keys and values of one position over all layers.
    """
    return sum(weight_bytes + event.cached * cache_bytes_per_row for event in trace.of(ForwardDone))


def one_token_share(
    timings: Sequence[Timing], weight_bytes: float, copy_bytes_per_second: float, *, seed: int = 0
) -> Bootstrap:
    """TPS / the TPS of one token a forward where a forward takes no longer than reading the weights once.

    No engine can exceed 1 with one token a forward on this device. Reading the cache, which would only lower the limit,
    is left out.

    Args:
        timings: samples; those not measured alone and warm are left out.
        weight_bytes: bytes of the weights one forward reads.
        copy_bytes_per_second: as for `mbu`.
        seed: seed of the resampling.

    Raises:
        DataError: no measured sample or time, or no bandwidth.
    """
    _check_bandwidth(copy_bytes_per_second)
    return total_tps(timings, seed=seed).scaled(weight_bytes / copy_bytes_per_second)


def mbu(bytes_read: ArrayLike, seconds: ArrayLike, copy_bytes_per_second: float, *, seed: int = 0) -> Bootstrap:
    """Bytes that had to be read / bytes the device could have moved in that time, resampled by item.

    Args:
        bytes_read: [items], bytes each item's decoding had to read.
        seconds: [items], its decoding time, alone on the device.
        copy_bytes_per_second: measured on this device with a large copy, bytes read plus bytes written.
        seed: seed of the resampling.

    Raises:
        DataError: no items, no time, or no bandwidth.
    """
    _check_bandwidth(copy_bytes_per_second)
    possible = np.asarray(seconds, dtype=np.float64) * copy_bytes_per_second
    check_denominators(possible)
    return bootstrap([bytes_read, possible], ratio_statistic, seed=seed)


def _check_bandwidth(copy_bytes_per_second: float) -> None:
    if copy_bytes_per_second <= 0:
        raise DataError(f"copy bandwidth is {copy_bytes_per_second} bytes/s; measure it on this device")
