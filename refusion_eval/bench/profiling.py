"""Where the time of forwards goes: the kernels of a GPU, or the operations of torch on a CPU."""

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from refusion_eval.engine.engine import Engine, Request
from refusion_eval.engine.recorded import RecordedForwards, recorder
from refusion_eval.engine.width import NUM_REPLAYS, replayed, time_replays
from refusion_eval.models.device import synchronize
from refusion_eval.models.transformer import Transformer

HOST = "decoder and engine (host)"  # what remains of a profile's time beside the operations
NUM_SHOWN = 20  # operations of a profile in the table


@dataclass(frozen=True, slots=True)
class Profile:
    """Operations of a decoding: kernels of a GPU, or operations of torch on a CPU."""

    seconds: Mapping[str, float]  # of each operation without those that it calls, longest first
    counts: Mapping[str, int]
    num_forwards: int
    watched: float  # seconds of the decodings under the profiler
    unwatched: float  # seconds of the same decodings without it


class Watched(NamedTuple):
    """What a call did under the profiler."""

    seconds: Mapping[str, float]  # of each operation without those that it calls, longest first
    counts: Mapping[str, int]
    wall: float  # seconds of the call
    value: Any  # of the call


def watch(call: Callable[[], Any], device: torch.device) -> Watched:
    """Makes a call under torch's profiler."""
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
    with torch.profiler.profile(activities=activities) as profiled:
        started = time.perf_counter()
        value = call()
        synchronize(device)
        wall = time.perf_counter() - started
    events = [event for event in profiled.key_averages() if (event.device_type.name == "CUDA") == on_gpu]
    time_of = operator.attrgetter("self_device_time_total" if on_gpu else "self_cpu_time_total")
    events.sort(key=time_of, reverse=True)
    seconds = {event.key: time_of(event) / 1e6 for event in events}
    return Watched(seconds, {event.key: event.count for event in events}, wall, value)


@torch.inference_mode()
def kernels_by_width(
    model: Transformer, recorded: RecordedForwards, widths: Sequence[int], context: int, num_rounds: int
) -> dict[int, dict[str, Any]]:
    """Of recorded forwards: kernels by name with calls and microseconds, their sum, and the time that a forward took.

    What the time of a forward on the device is above the sum of its kernels lies between the kernels.
    """
    found = {}
    num_replays, alone = NUM_REPLAYS[model.device.type], time_replays(model, recorded, widths, context, num_rounds)
    for width in widths:
        watched = watch(partial(_repeat, replayed(model, recorded, width, context), num_replays), model.device)
        found[width] = {
            "calls": {name: count / num_replays for name, count in watched.counts.items()},
            "microseconds": microseconds_of(watched.seconds, watched.counts),
            "sum_ms": 1e3 * sum(watched.seconds.values()) / num_replays,
            "device_ms": 1e3 * alone[width],
        }
    return found


def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def replay_of(matrices: Sequence[Tensor], compute: Callable[[Tensor], Any]) -> Callable[[], None]:
    """Records a computation with each of the tensors; the caller keeps the tensors that it reads and writes."""

    def of_all() -> None:
        for matrix in matrices:
            compute(matrix)

    return recorder(matrices[0].device)(of_all)


def multiply(x: Tensor, out: Tensor, matrix: Tensor) -> None:
    torch.mm(x, matrix.t(), out=out)


def microseconds_of(seconds: Mapping[str, float], counts: Mapping[str, int]) -> dict[str, float]:
    """Microseconds of one call of each operation."""
    return {name: 1e6 * taken / counts[name] for name, taken in seconds.items()}


def profile(engine: Engine, requests: Sequence[Request]) -> Profile:
    """Decodes requests one at a time, first without the profiler and then with it."""
    engine.run(*requests[0])
    unwatched = sum(engine.run(*request).seconds for request in requests)
    watched = watch(lambda: sum(engine.run(*request).num_forwards for request in requests), engine.model.device)
    return Profile(watched.seconds, watched.counts, watched.value, watched.wall, unwatched)


def profile_table(measured: Profile) -> str:
    shown = dict(list(measured.seconds.items())[:NUM_SHOWN])
    shown[HOST] = max(0.0, measured.watched - sum(measured.seconds.values()))
    lines = [f"{'Operation of a batch-1 decode':<50} {'share':>7} {'ms a forward':>13}"]
    lines += [
        f"  {name[:48]:<48} {seconds / measured.watched:7.1%} {1e3 * seconds / measured.num_forwards:13.3f}"
        for name, seconds in shown.items()
    ]
    lines.append(
        f"{measured.num_forwards} forwards, {1e3 * measured.watched / measured.num_forwards:.3f} ms each under the "
        f"profiler, {1e3 * measured.unwatched / measured.num_forwards:.3f} ms without"
    )
    return "\n".join(lines)
