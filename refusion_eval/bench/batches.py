"""Speed of continuous batching, and how it comes about: model calls, their requests and rows, and the host's share."""

import operator
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from refusion_eval import api
from refusion_eval.decoders import DECODERS
from refusion_eval.engine.engine import Engine, Request
from refusion_eval.engine.recorded import recorder
from refusion_eval.engine.width import LoadCurve, time_forwards
from refusion_eval.errors import DecodeError
from refusion_eval.models.device import energy_counter, synchronize

LOAD_WIDTHS = (1, 16, 64, 128, 256, 512, 1024, 2048)  # rows of the calls by which rows of a batch are priced

K = TypeVar("K", int, str)


class BatchSpeed(NamedTuple):
    tokens_per_second: float  # of wall time, over all prompts
    same: float  # share of the requests with the tokens of the smallest batch size: 1, except where rounding differs
    joules_per_token: float | None = None
    steps: int = 0  # model calls
    requests_a_step: float = 0.0
    rows_a_step: float = 0.0
    host_share: float = 0.0  # of the time, in which the host did not wait for a device; 1 on a CPU


def requests_of(decoder: str, settings: Any, prompts: Sequence[Sequence[int]]) -> list[Request]:
    return [Request(DECODERS[decoder].decode, prompt, settings) for prompt in prompts]


def decode_batch(
    engine: Engine, requests: Sequence[Request], size: int, begin: Callable[[], None] = lambda: None
) -> list[tuple[int, ...]]:
    """The tokens of each request, in batches of at most `size` requests; waits until the device has finished."""

    def begun() -> Iterator[Request]:
        begin()  # the engine has made the buffer of the batch and recorded its forwards
        yield from requests

    tokens: dict[int, tuple[int, ...]] = {}
    for index, result in engine.run_many(begun(), size):
        if isinstance(result, DecodeError):
            raise result
        tokens[index] = result.tokens
    synchronize(engine.model.device)
    return [tokens[index] for index in range(len(requests))]


def batch_speeds(engine: Engine, requests: Sequence[Request], batch_sizes: Sequence[int]) -> dict[int, BatchSpeed]:
    """Measures continuous batching at each batch size, and compares the tokens with the first size."""
    return _measure({size: (engine, size) for size in batch_sizes}, requests, expected=[])


def speeds_by_way(model: api.LoadedModel, requests: Sequence[Request], size: int) -> dict[str, BatchSpeed]:
    """Measures single requests, batches, and batches with what may make them faster, by name.

    That is the overlap of host and device, where forwards are recorded, and rows priced by load, for fused forwards.
    """
    engine = model.engine
    ways = {"batch 1": (engine, 1), f"batch {size}": (engine, size)}
    overlapped: list[Engine] = []
    if model.cuda_graphs:
        overlapped = [Engine(engine.model, model.attention, record=recorder(model.device), overlap=True)]
        if engine.recorded is not None and overlapped[0].recorded is not None:
            overlapped[0].recorded.choices = engine.recorded.choices  # of one table, as a tuning sets it
        ways[f"batch {size}, overlap"] = (overlapped[0], size)
    expected: list[tuple[int, ...]] = []
    speeds = _measure(ways, requests, expected)
    if any(getattr(request.settings, "fused", False) for request in requests):
        timed = time_forwards(engine.model, model.attention, LOAD_WIDTHS, recorded=engine.recorded)
        curve = LoadCurve({width: statistics.median(seconds) for width, seconds in timed.items()})
        priced = {f"batch {size}": (engine, size)} | {f"batch {size}, overlap": (one, size) for one in overlapped}
        for one in (engine, *overlapped):
            one.load_curve = curve
        try:
            found = _measure(priced, requests, expected)
        finally:
            engine.load_curve = None
        speeds |= {f"{name}, rows priced by load": speed for name, speed in found.items()}
    return speeds


def _measure(
    ways: Mapping[K, tuple[Engine, int]],
    requests: Sequence[Request],
    expected: list[tuple[int, ...]],  # the right tokens; an empty list gets those of the first way
) -> dict[K, BatchSpeed]:
    speeds: dict[K, BatchSpeed] = {}
    for name, (engine, size) in ways.items():
        tokens, seconds, joules = _timed(engine, requests, size)
        if not expected:
            expected += tokens
        num_tokens, counts = sum(map(len, tokens)), engine.batch_counts
        speeds[name] = BatchSpeed(
            num_tokens / seconds,
            sum(map(operator.eq, tokens, expected)) / len(tokens),
            None if joules is None else joules / num_tokens,
            counts.steps,
            counts.requests / max(1, counts.steps),
            counts.rows / max(1, counts.steps),
            1 - counts.waited_seconds / seconds,
        )
    return speeds


def _timed(engine: Engine, requests: Sequence[Request], size: int) -> tuple[list[tuple[int, ...]], float, float | None]:
    """The tokens of each request, and the seconds and joules of them all."""
    device = engine.model.device
    read_joules = energy_counter(device)
    begun: list[float] = []

    def now() -> list[float]:
        synchronize(device)
        return [time.perf_counter(), read_joules() if read_joules else 0.0]

    tokens = decode_batch(engine, requests, size, lambda: begun.extend(now()))
    seconds, joules = map(operator.sub, now(), begun)
    return tokens, seconds, joules if read_joules else None
