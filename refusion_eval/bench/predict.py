"""An estimate of the time of a recorded forward in bfloat16 on a GPU, by part, from data sheets and others' figures."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from refusion_eval import api
from refusion_eval.bench import bench
from refusion_eval.engine.engine import Engine
from refusion_eval.engine.width import time_forwards
from refusion_eval.models.checkpoint import ModelConfig
from refusion_eval.models.device import cache_bytes_per_row, cpu_threads, weight_bytes
from refusion_eval.paths import embedded_path
from refusion_eval.types import Decoded


class Card(NamedTuple):
    memory: float  # bytes per second, by the data sheet
    copy: float  # bytes per second of a large copy, read and written; expected, about 89% of it
    launches_early: bool = True  # whether a kernel can begin while the one before still runs


# NVIDIA's data sheets "A100 80GB" (SXM), "H100" (SXM) and "H200".
CARDS = {"A100": Card(2.039e12, 1.78e12, False), "H100": Card(3.35e12, 3.0e12), "H200": Card(4.8e12, 4.3e12)}
# The names that the driver gives to these cards. Others that contain A100, H100 or H200 have another memory: A100 of
# 40 GB, A100 and H100 for PCIe, H100 NVL, and GH200.
DRIVER_NAMES = {
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200",
}
WIDTHS = (1, 8, 40)
ITEM_SIZE = torch.bfloat16.itemsize
CONTEXT = 500
# The products by cuBLAS: a line through torch's times in bfloat16 at 1 to 64 rows that pull requests #17126 (50 MB of
# weights) and #49363 (132 MB) of vLLM give for an H100; the slope is 3.15 TB/s, here as a share of the data sheet's.
PRODUCT_START, STREAMED = 4e-6, 3.15 / 3.35
# Estimates: a small kernel inside a graph, attention of few keys, and embedding, readout and two copies.
KERNEL, ATTENTION, ENDS = 2.3e-6, 6e-6, 30e-6
ROUTING_KERNELS = 12  # of a layer with experts: choosing them, sorting rows by expert, and their sum
NUM_KERNELS = 5  # of a layer beside products and attention: two norms, rotation, the join of attention, SwiGLU
# The other estimate, of one row: the time of a copy, and a boundary for each kernel, as on an H200 (results/gpu/h200:
# 208.4 forwards/s, where a copy of the weights gives 282.2, in 438 kernels). Public kernels reach 2.16 us there where
# they are launched early (msaroufim/megakernels-vs-cuda-graphs, Llama 1B).
BOUNDARY, EARLY_BOUNDARY = (1 / 208.4 - 1 / 282.2) / 438, 2.16e-6
KERNELS_OF_ENDS = 6  # embedding, first norm, head, readout, and a copy
A_LAYER = {"12 kernels a layer, as without a table": 12, "7 kernels a layer, with all switches": 7}


def expected(card: Card, config: ModelConfig, width: int, context: int = CONTEXT) -> dict[str, float]:
    """Seconds of a causal forward of up to 64 rows on the device, by part; rows choose experts at random."""
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.experts
    queries = config.num_heads * config.head_dim
    projected = queries + 2 * config.num_kv_heads * config.head_dim

    def product(num_weights: float) -> float:
        return PRODUCT_START + num_weights * ITEM_SIZE / (STREAMED * card.memory)

    num_sparse = 0 if experts is None else len(experts.layers)
    products = config.num_layers * (product(hidden * projected) + product(hidden * queries))
    products += (config.num_layers - num_sparse) * (product(hidden * 2 * inner) + product(hidden * inner))
    mixtures = 0.0
    if experts is not None:
        read = hidden * experts.width * experts.num_read(width)
        mixtures = product(hidden * experts.num_experts) + product(2 * read) + product(read)
        if experts.shared_width:
            mixtures += product(2 * hidden * experts.shared_width) + product(hidden * experts.shared_width)
        mixtures = num_sparse * (mixtures + ROUTING_KERNELS * KERNEL)
    # What the small kernels read and write of each row, and the committed keys and values.
    moved = width * ITEM_SIZE * (10 * hidden + 3 * projected + 3 * inner)
    moved += context * cache_bytes_per_row(config, torch.bfloat16) // config.num_layers
    return {
        f"products of {config.num_layers} layers": products,
        **({} if experts is None else {f"experts of {num_sparse} layers": mixtures}),
        "output head": product(hidden * config.vocab_size),
        "small kernels": config.num_layers * (NUM_KERNELS * KERNEL + ATTENTION + moved / card.copy),
        "embedding, readout, copies": ENDS,
    }


@cpu_threads(1)  # on a busy machine, the replays would take minutes with more
def host_seconds(num_prompts: int = 2, num_rounds: int = 50) -> dict[str, float]:
    """Seconds of the processor a forward beside what a graph computes: without a decoder, and with each."""
    in_replays: list[float] = []

    def record(compute: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            started = time.thread_time()
            compute()
            in_replays.append(time.thread_time() - started)

        return replay

    def outside(work: Callable[[], Any]) -> tuple[float, Any]:
        work()  # untimed: it records forwards
        in_replays.clear()
        started = time.thread_time()
        result = work()
        return time.thread_time() - started - sum(in_replays), result

    model = api.load_model(str(embedded_path("refusion")), dtype="float32", device="cpu", attention="sdpa")
    engine = Engine(model.transformer, "sdpa", record=record)
    bare = partial(time_forwards, engine.model, "sdpa", (1,), CONTEXT, num_rounds, recorded=engine.recorded)
    seconds = {"no decoder": outside(bare)[0] / (num_rounds + 1)}
    prompts = bench.mini_prompts(model, num_prompts)
    for name, settings in {"autoregressive": {}, "refusion": {"slot_size": 8, "block_size": 32, "fuse": True}}.items():
        run = bench.system_of(engine, name, bench.resolved(model, name, settings | {"gen_length": 128})).run
        spent, decoded = outside(partial(_each, run, prompts))
        seconds[name] = spent / sum(result.num_forwards for result in decoded)
    return seconds


def _each(run: Callable[[Sequence[int]], Decoded], prompts: Sequence[Sequence[int]]) -> list[Decoded]:
    return [run(prompt) for prompt in prompts]


def by_kernels(card: Card, config: ModelConfig) -> dict[str, float]:
    """Seconds of a forward of one row by the number of kernels of a layer; of models without experts."""
    weights = weight_bytes(config, torch.bfloat16) / card.copy
    found = {
        name: weights + (config.num_layers * a_layer + KERNELS_OF_ENDS) * BOUNDARY for name, a_layer in A_LAYER.items()
    }
    if card.launches_early:
        number = config.num_layers * min(A_LAYER.values()) + KERNELS_OF_ENDS
        found["the same, launched early"] = weights + number * EARLY_BOUNDARY
    return found


class Measured(NamedTuple):
    seconds: Mapping[int, float]  # of a forward, by width
    copy: float  # bytes per second


def prediction(name: str, config: ModelConfig, model: str, measured: Mapping[str, Measured]) -> str:
    """The expected forward as a table, and below it the forwards that were measured on such a card, by where."""
    card, host, experts = CARDS[name], host_seconds(), config.experts
    sizes = {width: weight_bytes(config, torch.bfloat16, width) for width in WIDTHS}
    parts = {width: expected(card, config, width) | {"host, measured here": host["no decoder"]} for width in WIDTHS}
    totals = {"expected": Measured({width: sum(parts[width].values()) for width in WIDTHS}, card.copy), **measured}
    rows = [("", *(f"width {width}" for width in WIDTHS))]
    rows += [(part, *(f"{1e3 * parts[width][part]:.2f}" for width in WIDTHS)) for part in parts[WIDTHS[0]]]
    if experts is not None:
        title = f"experts read of {experts.num_experts}, expected"
        rows.append((title, *(f"{experts.num_read(width):.1f}" for width in WIDTHS)))
    for title, (seconds, copy) in totals.items():
        rates = [sizes[width] / seconds[width] for width in WIDTHS]
        rows += [
            (title, *(f"{1e3 * seconds[width]:.2f}" for width in WIDTHS)),
            ("  forwards/s", *(f"{1 / seconds[width]:.0f}" for width in WIDTHS)),
            (f"  of a copy's {copy / 1e12:.2f} TB/s", *(f"{rate / copy:.0%}" for rate in rates)),
            ("  of the data sheet", *(f"{rate / card.memory:.0%}" for rate in rates)),
        ]
    first, last = (f"{sizes[width] / 1e9:.2f} GB of weights" for width in (WIDTHS[0], WIDTHS[-1]))
    read = first if experts is None else f"{first} at width {WIDTHS[0]}, {last} at width {WIDTHS[-1]}"
    decoders = (f"{1e3 * (host[of] - host['no decoder']):.2f} ms for {of}" for of in list(host)[1:])
    law: list[str] = []
    if experts is None:
        law = [f"One row by a copy of the weights and {1e6 * BOUNDARY:.1f} µs for each kernel, as measured on an H200:"]
        for title, spent in by_kernels(card, config).items():
            share = f"{sizes[WIDTHS[0]] / spent / card.copy:.0%} of a copy"
            law.append(f"  {title:<38}{1e3 * spent:>10.2f} ms, {1 / spent:.0f} forwards/s, {share}")
    return "\n".join(
        (
            f"A forward of {model} in bfloat16 on an {name} after {CONTEXT} rows, in ms (an estimate)",
            *(f"  {title:<38}" + "".join(f"{cell:>10}" for cell in cells) for title, *cells in rows),
            *law,
            f"{read}. A decoder adds its own time to each forward, here {', '.join(decoders)}.",
        )
    )
