"""Prompts and settings of `refusion-eval bench` for embedded, real and random checkpoints."""

import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from refusion_eval import api
from refusion_eval.bench.bench import Report, measure, table
from refusion_eval.bench.checkpoints import SHAPES, inflate, random_checkpoint
from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.benchmarks.rows import read_rows
from refusion_eval.paths import embedded_path, tasks_path

PROMPTED = ("gsm8k", "math", "humaneval", "mbpp", "mmlu_pro", "arc_challenge")
RANDOM_PROMPT_LENGTH = 64


class Extent(NamedTuple):
    """How much is measured: prompts of a round, rounds, tokens of a response, and whether the plain baseline runs."""

    num_prompts: int = 14
    num_rounds: int = 3
    gen_length: int = 128
    with_baseline: bool = True


# A forward of a large shape takes a tenth of a second and more on a CPU; this takes minutes.
LARGE_ON_CPU = Extent(num_prompts=2, num_rounds=2, gen_length=32, with_baseline=False)


def run_bench(
    name: str,
    *,
    extent: Mapping[str, Any],
    settings: Mapping[str, Any],
    threads: int | None,
    dtype: str,
    device: str,
    with_profile: bool,
    progress: Callable[[str], None],
) -> tuple[Report, str]:
    """Measures one checkpoint or shape and returns the report and its text.

    Args:
        name: checkpoint folder, hub id, "embedded", a key of `SHAPES` for random weights, or such a key followed by
            "-inflated" for the embedded checkpoint at the cost of that shape.
        extent: the fields of `Extent` that are given; the others have a default, which is smaller for a shape on a CPU.
    """
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # so that it counts as chosen
        torch.set_num_threads(threads)
    size = name.removesuffix("-inflated")
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    num_prompts, num_rounds, gen_length, with_baseline = (
        LARGE_ON_CPU if on_cpu and size in SHAPES else Extent()
    )._replace(**extent)
    settings = {**settings, "gen_length": gen_length}
    measure_with = partial(
        measure,
        dtype=dtype,
        device=device,
        num_rounds=num_rounds,
        with_baseline=with_baseline,
        with_profile=with_profile,
        progress=progress,
    )
    weight_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / name
        if name in SHAPES:
            progress(f"random weights of shape {name}")
            random_checkpoint(SHAPES[name], checkpoint, weight_dtype)
            # A threshold of 0 accepts the drafts of random weights, so that slots are decoded in parallel.
            accepting = {**settings, "tau_token": 0.0, "eos_ids": ()}
            chooser = random.Random(0)
            prompts = [[chooser.randrange(1000) for _ in range(RANDOM_PROMPT_LENGTH)] for _ in range(num_prompts)]
            report = measure_with(checkpoint, prompts, accepting)
            return report, f"{name}: random weights, random prompts, tau_token 0\n{table(report)}"
        if size in SHAPES:
            progress(f"the embedded checkpoint in shape {size}")
            inflate(embedded_path("refusion"), checkpoint, SHAPES[size], weight_dtype)
        else:
            checkpoint = embedded_path("refusion") if name == "embedded" else Path(name)
        model = api.LoadedModel.open(str(checkpoint), dtype=dtype, device=device)
        report = measure_with(checkpoint, mini_prompts(model, num_prompts), settings)
        return report, f"{name}: prompts of the mini tasks (synthetic)\n{table(report)}"


def mini_prompts(model: api.LoadedModel, count: int) -> Sequence[Sequence[int]]:
    """Token ids of the first prompts of the mini tasks; the tasks of `PROMPTED` take turns."""
    rows = {name: read_rows(tasks_path() / "mini" / name / "test.jsonl") for name in PROMPTED}
    texts = [
        BENCHMARKS[name].prompts.user(rows[name][number])
        for number in range(-(-count // len(PROMPTED)))
        for name in PROMPTED
    ]
    return [
        model.tokenizer.encode(model.tokenizer.render_chat([{"role": "user", "content": text}]))
        for text in texts[:count]
    ]
