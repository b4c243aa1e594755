"""The measurements of a tuning (`refusion_eval.bench.tune`), each for a process of its own.

Every one takes a `Tuning` and returns figures of plain JSON types. The models have the shape of an 8B model and are
made on the device: random weights with a tiny model inside, whose tokens they decode. In a rehearsal on a CPU
everything is small and computed by the definitions of the operations.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from refusion_eval import api
from refusion_eval.bench import bench
from refusion_eval.bench.batches import requests_of, speeds_by_way
from refusion_eval.bench.checkpoints import SHAPES, Shape, config_of, inflated_transformer
from refusion_eval.bench.gpu_check import PROFILED_WIDTHS, REFUSION_SETTINGS, REHEARSAL, REHEARSED_DTYPE
from refusion_eval.bench.profiling import kernels_by_width, multiply, replay_of
from refusion_eval.bench.tune_choices import (
    BASE,
    DECIDED,
    EARLY,
    LEAST_GAIN,
    WHOLE_WIDTHS,
    Changes,
    confirmed,
    decide,
    gains_of,
    skipped_of,
    table_with,
    variants,
    with_early,
)
from refusion_eval.engine.engine import Engine
from refusion_eval.engine.recorded import CHECKED_CONTEXT, WIDTHS, RecordedForwards, recorder
from refusion_eval.engine.width import replayed, time_forwards
from refusion_eval.errors import ConfigError
from refusion_eval.models import fused
from refusion_eval.models.cache import KVCache
from refusion_eval.models.choices import MATRICES, NO_CHOICES, Choices, Matrix, Sizes, launches_early
from refusion_eval.models.device import choose_device, copy_bandwidth, read_bandwidth, seconds_of_calls, synchronize
from refusion_eval.models.transformer import Transformer
from refusion_eval.models.weights import padded_rows
from refusion_eval.paths import embedded_path
from refusion_eval.runs.hardware import collect_hardware

CONTEXT = 300  # committed rows of the forwards that are timed
LONG_CONTEXT = 3000  # of a decoding whose attention takes several steps of keys in each of its splits
PRODUCT_ROWS = (1, 2, 4, *range(8, 65, 8))
COLD_BYTES = 400e6  # of matrices that are read in turns: far more than a GPU's cache holds
NUM_ROUNDS = 10
MARGIN = 8.0  # seconds before the end of a step at which no round begins
LEAST_ROUNDS = 3  # of which a median decides something
TRIED_SHARE, TIMED_SHARE = 0.6, 0.8  # of the time of a step: until when variants are recorded, and timed
BATCH, BATCH_PROMPTS = 32, 64
LEFT_OUT = "left_out"  # names what a step had no time for; without it, the step is complete


class Tuning(NamedTuple):
    """What a step gets.

    Attributes:
        shape: name of the shape of the timed models; None for that of a rehearsal.
        until: when it has to end, by `time.monotonic`.
        done: figures of the steps before it.
    """

    device: str
    shape: str | None
    until: float
    done: Mapping[str, Mapping[str, Any]]

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def sizes(self) -> Shape:
        return REHEARSAL if self.shape is None else SHAPES[self.shape]

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else getattr(torch, REHEARSED_DTYPE)

    @property
    def of_layers(self) -> Sizes:
        return Sizes.of(config_of(self.sizes), self.dtype)

    def few(self, numbers: Sequence[int]) -> Sequence[int]:
        """The numbers, or the first two of them in a rehearsal."""
        return numbers if self.on_gpu else numbers[:2]

    def part(self, share: float) -> "Tuning":
        """The same with a part of the time that is left."""
        now = time.monotonic()
        return self._replace(until=now + share * (self.until - now))

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.until - (MARGIN if self.on_gpu else 0.0)


def ready(tuning: Tuning) -> torch.device:
    device = choose_device(tuning.device)
    if tuning.on_gpu:
        torch.cuda.set_device(device.index or 0)  # graphs are recorded on the current device
    return device


def made(tuning: Tuning, device: torch.device) -> Transformer:
    return inflated_transformer(embedded_path("refusion"), tuning.sizes, tuning.dtype, device)


def loaded(tuning: Tuning) -> api.LoadedModel:
    """The embedded checkpoint with the model of the timed shape in the place of its own."""
    model = api.LoadedModel.open(
        str(embedded_path("refusion")),
        device=tuning.device,
        dtype=str(tuning.dtype).removeprefix("torch."),
        attention="sdpa",
    )
    model.transformer = made(tuning, ready(tuning))
    return model


def recorded_forwards(
    model: Transformer, choices: Choices = NO_CHOICES, widths: Sequence[int] = WIDTHS
) -> RecordedForwards:
    """Recorded forwards of some widths alone, with a table, whatever table was shipped for the device."""
    cache = KVCache(model.config, 1, CHECKED_CONTEXT + WIDTHS[-1], model.dtype, model.device)
    return RecordedForwards(model, cache, recorder(model.device), widths, choices)


def card(tuning: Tuning) -> dict[str, Any]:
    """Bandwidths, clocks under load, and the time of an empty kernel in a graph."""
    device = ready(tuning)
    figures: dict[str, Any] = {
        "copy_bytes_per_second": copy_bandwidth(device),
        "read_bytes_per_second": read_bandwidth(device),
        "boundary_seconds": boundaries(tuning, device),
    }
    if tuning.on_gpu:
        matrix = torch.ones(8192, 8192, dtype=torch.bfloat16, device=device)
        for _ in range(500):  # some tenths of a second, during which the clocks are read
            matrix @ matrix
        figures["under_load"] = asdict(collect_hardware(torch.get_num_threads(), device))["gpu_detail"]
        synchronize(device)
    return figures


def boundaries(tuning: Tuning, device: torch.device) -> dict[str, float]:
    """Seconds from one small kernel of a graph to the next."""
    rows, num_kernels = torch.zeros(1, 128, device=device, dtype=tuning.dtype), 500 if tuning.on_gpu else 5

    def compute(early: bool) -> None:
        for _ in range(num_kernels):
            fused.add_rms_norm(rows, rows, rows[0], 1e-6, early=early)

    ways = {"as usual": False, **({"launched early": True} if launches_early(device) else {})}
    replays = {name: recorder(device)(partial(compute, early)) for name, early in ways.items()}
    return {name: statistics.median(seconds_of_calls(replay, device)) / num_kernels for name, replay in replays.items()}


@torch.inference_mode()
def forward(tuning: Tuning) -> dict[str, Any]:
    """Kernels of a recorded forward without any choice, its time on the device, and its time with the host."""
    model, widths = made(tuning, ready(tuning)), tuning.few(PROFILED_WIDTHS)
    recorded = recorded_forwards(model, widths=widths)
    found = kernels_by_width(model, recorded, widths, CONTEXT, 7 if tuning.on_gpu else 1)
    rounds = 30 if tuning.on_gpu else 1
    timed = time_forwards(model, "sdpa", widths, CONTEXT, rounds, recorded=recorded)
    return {str(width): of | {"wall_ms": 1e3 * statistics.median(timed[width])} for width, of in found.items()}


def matrix_shapes(tuning: Tuning) -> dict[Matrix, tuple[int, int]]:
    """Rows and columns of the matrices of a layer, and of the output head."""
    shapes: dict[Matrix, tuple[int, int]] = {of: tuning.of_layers.of_product(of) for of in MATRICES if of != "head"}
    num_gated, hidden_size = shapes["gate_up"]
    num_head = padded_rows(tuning.sizes.vocab_size, torch.device(tuning.device))
    return shapes | {"gate_up": (2 * num_gated, hidden_size), "head": (num_head, hidden_size)}


def random_matrices(tuning: Tuning, device: torch.device, rows: int, columns: int) -> list[Tensor]:
    """As many equal matrices as no cache holds, of weights with a result of about 1."""
    num_bytes = rows * columns * tuning.dtype.itemsize
    number = max(2, round(COLD_BYTES / num_bytes)) if tuning.on_gpu else 1
    drawn = (torch.randn(rows, columns, device=device, dtype=tuning.dtype) for _ in range(number))
    return [matrix.mul_(columns**-0.5) for matrix in drawn]


def seconds_in_turns(tuning: Tuning, device: torch.device, replays: Sequence[Callable[[], None]]) -> list[float]:
    """Median seconds of each of several recordings."""
    rounds, in_a_row = (5, 5) if tuning.on_gpu else (1, 1)
    # Of two times in a row the second counts: before the first, a GPU waits for the host.
    times = [[seconds_of_calls(replay, device, 2, in_a_row)[1] for replay in replays] for _ in range(rounds)]
    return [statistics.median(of) for of in zip(*times, strict=True)]


@torch.inference_mode()
def products(tuning: Tuning, way: str = "default") -> dict[str, dict[str, float]]:
    """Seconds of torch's products by matrix and rows, in one of the ways in which cuBLAS can be told to multiply."""
    if tuning.on_gpu:
        if way == "no workspace":
            os.environ |= {"CUBLASLT_WORKSPACE_SIZE": "0", "CUBLAS_WORKSPACE_CONFIG": ":0:0"}
        elif way == "cublaslt":
            torch.backends.cuda.preferred_blas_library("cublaslt")
        elif way == "unsplit":
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (True, False)
    device, found = ready(tuning), dict[str, dict[str, float]]()
    for name, shape in matrix_shapes(tuning).items():
        matrices, found[name] = random_matrices(tuning, device, *shape), {}
        for rows in tuning.few(PRODUCT_ROWS):
            x = torch.randn(rows, shape[1], device=device, dtype=tuning.dtype)
            out = x.new_empty(rows, shape[0])
            (seconds,) = seconds_in_turns(tuning, device, [replay_of(matrices, partial(multiply, x, out))])
            found[name][str(rows)] = seconds / len(matrices)
    return found


@torch.inference_mode()
def whole(tuning: Tuning) -> dict[str, Any]:
    """Whole forwards with each change of the table and with all, in turns, and what is decided, measured again.

    Raises:
        ConfigError: the time ended before `LEAST_ROUNDS` rounds.
    """
    recording, timing = tuning.part(TRIED_SHARE), tuning.part(TIMED_SHARE)
    left_out: list[str] = []
    model, refused = made(tuning, ready(tuning)), dict[str, str]()
    forwards: dict[str, RecordedForwards] = {}

    def add(name: str, changes: Changes) -> None:
        try:
            found = recorded_forwards(model, table_with(changes, tuning.done), tuning.few(WHOLE_WIDTHS))
            found.reserve(CONTEXT + WHOLE_WIDTHS[-1])
            found.prepare()  # which compares them with forwards that are launched one by one
            forwards[name] = found
        except ConfigError as error:
            if name == BASE:
                raise
            refused[name] = str(error)

    for name, changes in variants(tuning.done).items():
        if name == BASE or not recording.is_over:
            add(name, changes)
        else:
            left_out.append(name)
    times = in_turns(timing, model, forwards, left_out)
    changes = decide(tuning.done, times)
    forwards = {BASE: forwards[BASE]}
    add(DECIDED, changes)
    add(EARLY, with_early(changes))
    again = in_turns(tuning, model, forwards, left_out)
    # Early launches count on top of what was decided, of which they may make some useless.
    early = gains_of(again, EARLY, DECIDED) if DECIDED in again else {}
    named = {width: EARLY if early.get(width, 0.0) >= LEAST_GAIN else DECIDED for width in again[BASE]}
    together = {width: gains_of(again, name)[width] for width, name in named.items() if name in again}
    kept = confirmed(with_early(changes, [width for width in named if named[width] == EARLY]), together)
    best = {width: again[named[width] if kept[width] else BASE][width] for width in again[BASE]}
    return {
        "seconds": times | {name: again.get(name, {}) for name in (DECIDED, EARLY)},
        "gains": {name: gains_of(times, name) for name in times} | {"early": early, DECIDED: together},
        "refused": refused,
        "changes": {str(width): sorted(names) for width, names in kept.items()},
        "skipped": skipped_of({width: statistics.median(times) for width, times in best.items()}),
        "sizes": asdict(tuning.of_layers),
        LEFT_OUT: left_out,
    }


def in_turns(
    tuning: Tuning, model: Transformer, forwards: Mapping[str, RecordedForwards], left_out: list[str]
) -> dict[str, dict[int, list[float]]]:
    """Seconds of forwards on the device by name, width and round; in a round each comes once, after the others.

    Raises:
        ConfigError: the time ended before `LEAST_ROUNDS` rounds. Fewer than all are added to what was left out.
    """
    widths = tuning.few(WHOLE_WIDTHS)
    times: dict[str, dict[int, list[float]]] = {name: {width: [] for width in widths} for name in forwards}
    for number in range(NUM_ROUNDS if tuning.on_gpu else 1):
        if number and tuning.is_over:
            if number < LEAST_ROUNDS:
                skipped = f"; left out were {', '.join(left_out)}" if left_out else ""
                few = f"its time ended after {number} of at least {LEAST_ROUNDS} rounds of {', '.join(forwards)}"
                raise ConfigError(f"{few}{skipped}; run the same command again, or with more --seconds")
            left_out.append(f"{NUM_ROUNDS - number} of {NUM_ROUNDS} rounds of {', '.join(forwards)}")
            break
        for width in widths:
            for name, recorded in forwards.items():
                replay = replayed(model, recorded, width, CONTEXT)
                times[name][width] += seconds_of_calls(replay, model.device, 1, 10 if tuning.on_gpu else 1)
    return times


def decided(tuning: Tuning) -> Choices:
    """The table that whole forwards decided; one without any change before."""
    changes = tuning.done.get("whole", {}).get("changes", {})
    return table_with({width: frozenset(changes.get(str(width), ())) for width in WHOLE_WIDTHS}, tuning.done)


def tokens(tuning: Tuning) -> dict[str, Any]:
    """Decodes with the table twice, and once with forwards that are launched one by one."""
    model = loaded(tuning)
    device, transformer = ready(tuning), model.transformer
    eager, with_table = (Engine(transformer, "sdpa", record=record) for record in (None, recorder(device)))
    assert with_table.recorded is not None
    with_table.recorded.choices = decided(tuning)
    prompts = bench.mini_prompts(model, 14 if tuning.on_gpu else 1)
    length = LONG_CONTEXT if tuning.on_gpu else 100
    long = [(prompt * (length // len(prompt) + 1))[:length] for prompt in prompts[:5]]
    cases = {
        "refusion": ("refusion", prompts, REFUSION_SETTINGS | {"fuse": True}),
        "autoregressive": ("autoregressive", prompts, {}),
        "long prompts": ("autoregressive", long, {}),
    }
    same, repeated = dict[str, list[int]](), list[bool]()
    for name, (decoder, given, options) in cases.items():
        settings = bench.resolved(model, decoder, options | {"gen_length": 64 if tuning.on_gpu else 8})
        requests = requests_of(decoder, settings, given)
        first, second, expected = (
            [engine.run(*request) for request in requests] for engine in (with_table, with_table, eager)
        )
        repeated += [a.tokens == b.tokens and a.trace == b.trace for a, b in zip(first, second, strict=True)]
        same[name] = [sum(a.tokens == b.tokens for a, b in zip(first, expected, strict=True)), len(given)]
    return {"same": same, "repeated": sum(repeated) / len(repeated)}


def batches(tuning: Tuning) -> dict[str, Any]:
    """Batches of fused and other forwards, and of the autoregressive decoder, in every way, with what was decided."""
    model = loaded(tuning)
    if model.engine.recorded is not None:
        model.engine.recorded.choices = decided(tuning)
    prompts = bench.mini_prompts(model, BATCH_PROMPTS if tuning.on_gpu else 1)
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "refusion fused": ("refusion", {"fuse": True}),
        "refusion": ("refusion", {"fuse": False}),
        "autoregressive": ("autoregressive", {}),
    }
    found: dict[str, Any] = {}
    left_out: list[str] = []
    for name, (decoder, options) in cases.items():
        if found and tuning.is_over:
            left_out.append(name)
            continue
        given = {**REFUSION_SETTINGS, **options, "gen_length": 128 if tuning.on_gpu else 8}
        settings = bench.resolved(model, decoder, given)
        speeds = speeds_by_way(model, requests_of(decoder, settings, prompts), BATCH if tuning.on_gpu else 2)
        found |= {f"{name}, {way}": speed._asdict() for way, speed in speeds.items()}
    return found | {LEFT_OUT: left_out}
