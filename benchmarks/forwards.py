"""Times forwards of a CPU compiled and by torch's own operations, in turns, and prints their ratio by width.

    python benchmarks/forwards.py [checkpoint] [--threads 1] [--context 100] [--rounds 30]

A forward runs from token ids to the likeliest token of every row. The time of a width is the median over the rounds.
"""

import argparse
import statistics
import time

import torch

from refusion_eval import load_model
from refusion_eval.engine.readout import PackedRead, ReadPlan, hidden_of, read_native, read_out
from refusion_eval.models.attention import Backend
from refusion_eval.models.cache import KVCache
from refusion_eval.models.transformer import Transformer
from refusion_eval.types import Forward, Read, causal

WIDTHS = (1, 8, 16, 40, 100)


@torch.inference_mode()
def seconds(model: Transformer, cache: KVCache, forward: Forward, backend: Backend) -> float:
    """Time of one forward after the committed rows of the cache."""
    plan = ReadPlan([PackedRead(read, 0) for read in forward.reads])
    started = time.perf_counter()
    hidden_TC = hidden_of(model, cache, [forward], backend)
    if backend == "native":
        read_native(plan, hidden_TC, model)
    else:
        read_out(plan, hidden_TC, model.logits, model.config.vocab_size)
    return time.perf_counter() - started


def main() -> None:
    """Parses the arguments and prints one line a width, then the mean ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="embedded")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=100, help="committed rows")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load_model(args.checkpoint, dtype="float32", device="cpu", attention="native").transformer
    config = model.config
    cache = KVCache(config, 1, args.context + max(WIDTHS), torch.float32, model.device)
    cache.lengths[0] = args.context
    ratios = []
    print(f"{args.checkpoint}: {config.num_layers} layers of width {config.hidden_size}, {args.threads} thread(s)")
    for width in WIDTHS:
        tokens = [row * 7919 % config.vocab_size for row in range(width)]
        positions = range(args.context, args.context + width)
        forward = Forward(tokens, positions, causal(width), (Read(rows=range(width)),))
        times: dict[Backend, list[float]] = {"sdpa": [], "native": []}
        for _ in range(args.rounds + 1):
            for backend, measured in times.items():
                measured.append(seconds(model, cache, forward, backend))
        torch_ms, native_ms = (1e3 * statistics.median(measured[1:]) for measured in times.values())
        ratios.append(torch_ms / native_ms)
        print(f"{width:4} rows: torch {torch_ms:8.2f} ms, compiled {native_ms:8.2f} ms, ratio {ratios[-1]:.2f}")
    print(f"mean ratio {statistics.fmean(ratios):.2f}")


if __name__ == "__main__":
    main()
