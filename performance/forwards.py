"""Times the compiled forward of a CPU beside torch's own operations, in turns, and prints their ratios.

    python performance/forwards.py [checkpoint] [--threads 1] [--context 100] [--rounds 30]
    python performance/forwards.py 0.6B --widths 1,16 --rounds 5     # random bfloat16 weights of this shape

A forward runs from token ids to the likeliest token of every row; its weights are float32 for torch's operations, and
as the checkpoint has them for the compiled one. For a ReFusion checkpoint whole decodings follow: at batch 1 beside a
loop in the manner of the public release, which is checked to give the same tokens, and at batch 16 beside torch's
operations. A time is the median over the rounds. With one thread it is that of the processor, so that other work on the
machine counts less.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from refusion_eval import api
from refusion_eval.bench.batches import decode_batch, requests_of
from refusion_eval.bench.bench import mini_prompts
from refusion_eval.bench.checkpoints import SHAPES, random_checkpoint
from refusion_eval.bench.plain import PlainEngine
from refusion_eval.decoders import DECODERS
from refusion_eval.engine.readout import ReadPlan, hidden_of, read_native, read_out
from refusion_eval.models.cache import KVCache
from refusion_eval.models.device import weight_bytes
from refusion_eval.types import Forward, Read, causal

WIDTHS = (1, 8, 16, 40, 100)
SETTINGS = {"gen_length": 128, "slot_size": 8, "block_size": 32, "fuse": False}
BATCH = 16

# Way of computing -> what is timed.
Ways = Mapping[str, Callable[[], object]]


def medians(ways: Ways, num_rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median seconds of each way; the ways take turns in every round, of which the first is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds + 1):
        for name, way in ways.items():
            started = clock()
            way()
            times[name].append(clock() - started)
    return {name: statistics.median(measured[1:]) for name, measured in times.items()}


@torch.inference_mode()
def one_forward(model: api.LoadedModel, cache: KVCache, forward: Forward) -> None:
    """One forward after the committed rows of the cache, and the answers to its reads."""
    plan = ReadPlan([(read, 0) for read in forward.reads])
    hidden_TC = hidden_of(model.transformer, cache, [forward], model.attention)
    if model.attention == "native":
        read_native(plan, hidden_TC, model.transformer)
    else:
        read_out(plan, hidden_TC, model.transformer.logits, model.config.vocab_size)


def compare_forwards(
    models: Mapping[str, api.LoadedModel], widths: list[int], context: int, num_rounds: int, clock: Callable[[], float]
) -> None:
    """Prints one line a width, then the mean ratio."""
    config = models["compiled"].config
    cache = KVCache(config, 1, context + max(widths), torch.float32, torch.device("cpu"))
    cache.lengths[0] = context
    ratios = []
    for width in widths:
        tokens = [row * 7919 % config.vocab_size for row in range(width)]
        forward = Forward(tokens, range(context, context + width), causal(width), (Read(rows=range(width)),))
        ways = {name: partial(one_forward, model, cache, forward) for name, model in models.items()}
        seconds = medians(ways, num_rounds, clock)
        ratios.append(seconds["torch"] / seconds["compiled"])
        read = " and ".join(
            f"{weight_bytes(config, model.dtype) / seconds[name] / 1e9:.1f}" for name, model in models.items()
        )
        print(
            f"{width:4} rows: torch {1e3 * seconds['torch']:8.2f} ms, compiled {1e3 * seconds['compiled']:8.2f} ms, "
            f"ratio {ratios[-1]:.2f}; weights read at {read} GB/s"
        )
    print(f"mean ratio {statistics.fmean(ratios):.2f}")


def compare_decodings(
    models: Mapping[str, api.LoadedModel], directory: Path, num_rounds: int, clock: Callable[[], float]
) -> None:
    """Prints the speed of ReFusion at batch 1 beside the release's manner, and at batch 16 beside torch's forwards."""
    prompts = mini_prompts(models["compiled"], BATCH)
    settings = api.decoder_settings(models["compiled"], "refusion", **SETTINGS)
    plain = PlainEngine(Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval())
    engines: dict[str, Any] = {"release's manner": plain, **{name: model.engine for name, model in models.items()}}
    found: dict[str, list[tuple[int, ...]]] = {}

    def decode(name: str) -> None:
        decoded = [engines[name].run(DECODERS["refusion"].decode, prompt, settings) for prompt in prompts[:4]]
        found[name] = [each.tokens for each in decoded]

    alone = medians({name: partial(decode, name) for name in engines}, num_rounds, clock)
    same = "same tokens" if len(set(map(tuple, found.values()))) == 1 else "DIFFERENT tokens"
    ratio = alone["release's manner"] / alone["compiled"]
    print(f"ReFusion, batch 1: compiled forwards are {ratio:.2f} times as fast as the release's manner ({same})")
    batches: Ways = {
        name: partial(decode_batch, model.engine, requests_of("refusion", settings, prompts), BATCH)
        for name, model in models.items()
    }
    together = medians(batches, num_rounds, clock)
    print(f"ReFusion, batch {BATCH}: {together['torch'] / together['compiled']:.2f} times as fast as torch's forwards")


def main() -> None:
    """Parses the arguments and prints the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="embedded", help="as --model, or a shape: 0.6B")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=100, help="committed rows")
    parser.add_argument("--rounds", type=int, default=30, help="of forwards; a tenth of them for decodings")
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)), help="rows of the forwards")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        name = args.checkpoint
        if name in SHAPES:
            name = folder
            random_checkpoint(SHAPES[args.checkpoint], Path(folder), torch.bfloat16)
        models = {
            way: api.load_model(name, dtype="float32", device="cpu", attention=attention)
            for way, attention in (("torch", "sdpa"), ("compiled", "native"))
        }
        compiled = models["compiled"]
        config = compiled.config
        print(f"{args.checkpoint}: {config.num_layers} layers of width {config.hidden_size}")
        print(f"{args.threads} thread(s), load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
        compare_forwards(models, list(map(int, args.widths.split(","))), args.context, args.rounds, clock)
        if args.checkpoint not in SHAPES and "refusion" in compiled.decoders:
            compare_decodings(models, compiled.directory, max(1, args.rounds // 10), clock)


if __name__ == "__main__":
    main()
