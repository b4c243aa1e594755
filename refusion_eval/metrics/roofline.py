"""Model bandwidth utilisation (MBU): the share of the memory bandwidth that reading weights and cache takes.

One request at a time is bound by memory: every forward reads all weights once, and the keys and values of the rows in
the cache. MBU near 1 leaves nothing to gain but fewer forwards or smaller weights.
"""

from __future__ import annotations

from refusion_eval.errors import DataError
from refusion_eval.trace import ForwardDone, Trace


def bytes_read(trace: Trace, *, weight_bytes: float, cache_bytes_per_row: float) -> float:
    """Bytes one request has to read: for each forward the weights and the committed cache rows before it.

    Args:
        trace: of the request.
        weight_bytes: bytes of the weights one forward reads (an embedding table that is only looked up does not count).
        cache_bytes_per_row: bytes of the keys and values of one position over all layers.
    """
    return sum(weight_bytes + event.cached * cache_bytes_per_row for event in trace.of(ForwardDone))


def mbu(total_bytes: float, seconds: float, copy_bytes_per_second: float) -> float:
    """Bytes that had to be read / bytes the device could have moved in that time.

    Args:
        total_bytes: sum of `bytes_read` over requests.
        seconds: sum of their decoding times, each decoded alone.
        copy_bytes_per_second: measured on this device with a large copy, bytes read plus bytes written.

    Raises:
        DataError: no time or no bandwidth.
    """
    if seconds <= 0 or copy_bytes_per_second <= 0:
        raise DataError(
            f"MBU needs positive seconds and bandwidth; got {seconds} s, {copy_bytes_per_second} bytes/s; measure both"
        )
    return total_bytes / seconds / copy_bytes_per_second
